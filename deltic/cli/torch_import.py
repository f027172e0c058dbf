"""Defers the parts of torch that answering on a CPU does not need: most of the time and memory of `import torch`.

`import torch` runs 770 modules, among them those for compilation, export, training and quantization. This module
registers each module in DEFERRED without running it. The first use of an attribute of any of them runs them all, in the
order of an ordinary import, because torch's modules import each other in circles.

Only `deltic run` does this, because its process is deltic's own and short. It requires a CPU build of torch in a tested
version: C++ code of torch that initializes a static variable from a deferred module would wait for itself.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

__all__ = ["DEFERRED", "quick_imports"]

DEFERRED = ("torchgen.model", "unittest.mock", *(f"torch.{name}" for name in (
    "_decomp", "_higher_order_ops", "_lobpcg", "_meta_registrations", "_native", "_prims", "_refs", "_size_docs",
    "_storage_docs", "_subclasses", "_tensor_docs", "_torch_docs", "ao", "compiler", "distributions", "export", "fft",
    "func", "fx", "hub", "jit", "linalg", "masked", "mps", "mtia", "nested", "nn", "optim", "package", "profiler",
    "quantization", "signal.windows", "special", "testing", "utils.data", "xpu")))
"""Modules that are deferred, with all modules below them."""
_AT_ONCE = ("torch.fx.experimental._sym_dispatch_mode", "torch.fx.experimental.sym_node", "torch.nn.parameter",
            "torch.package._mangling")
"""Modules that torch needs while it is imported, although their package is deferred."""
_REEXPORTED = {"torch._higher_order_ops": ("cond", "while_loop"), "torch.func": ("vmap",), "torch._lobpcg": ("lobpcg",)}
"""Functions that torch copies into its own namespace, by module."""
_TESTED = ("2.13.",)
"""Prefixes of the torch versions with which `tests/test_cli_start.py` passed."""
_PENDING, _FINDER = "_deltic_pending", "_deltic_finder"
"""Attributes of deferred modules: the loader, until a module starts to run; the finder, until it has run."""
_GPU_LIBRARIES = ("*torch_cuda*", "*torch_hip*", "*torch_xpu*")


@contextmanager
def quick_imports() -> Iterator[None]:
    """Defers torch's modules in the imports of a command that answers once. No effect if torch is already imported.

    Garbage collection is off meanwhile, and objects that the imports have made are excluded from later collections.
    """
    if "torch" in sys.modules:
        yield
        return
    _defer_torch()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _defer_torch() -> None:
    torch = find_spec("torch")
    if torch is None or torch.origin is None or not version("torch").startswith(_TESTED):
        return
    libraries = Path(torch.origin).parent / "lib"
    if not any(next(libraries.glob(pattern), None) for pattern in _GPU_LIBRARIES):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds modules of DEFERRED until one of them is used."""

    def __init__(self) -> None:
        self.active = True
        self.lock = RLock()
        self.modules: list[_Deferred] = []
        self.builtins = _JitBuiltins()

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        if not self.active or fullname in _AT_ONCE or not _is_deferred(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader, self)
        return spec

    def run_all(self) -> None:
        """Runs every deferred module, and stops deferring."""
        with self.lock:
            self.active = False
            for module in self.modules:
                _run(module)
            torch: Any = sys.modules["torch"]
            for operator, name in self.builtins.operators:
                torch.jit._builtins._register_builtin(operator, name)
            for module_name, names in _REEXPORTED.items():
                for name in names:
                    if hasattr(torch, name):  # if not, torch is still being imported, and sets it itself
                        setattr(torch, name, getattr(sys.modules[module_name], name))


class _DeferringLoader(Loader):
    """Makes a module without running it."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, _Deferred) and module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        vars(module).update(_placeholders(module, self._finder.builtins))
        vars(module).update({_PENDING: self._loader, _FINDER: self._finder})
        self._finder.modules.append(module)


class _Deferred(ModuleType):
    """A module that runs when a missing attribute is accessed. Other threads wait until it has run."""

    def __getattr__(self, name: str) -> Any:
        # interpreter and libraries look for special names in all modules, and most modules lack them
        finder: _Finder | None = None if name.startswith("__") and name != "__all__" else vars(self).get(_FINDER)
        if finder is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with finder.lock:
            if finder.active:
                finder.run_all()
            else:
                _run(self)  # the module is imported by another deferred module that is running now
        return ModuleType.__getattribute__(self, name)


def _run(module: ModuleType) -> None:
    """Runs a deferred module. Afterwards it is an ordinary module."""
    if loader := vars(module).pop(_PENDING, None):
        loader.exec_module(module)
        del vars(module)[_FINDER]
        module.__class__ = ModuleType


def _is_deferred(name: str) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in DEFERRED)


def _placeholders(module: _Deferred, builtins: _JitBuiltins) -> dict[str, Any]:
    """Returns the attributes that torch reads from a deferred module while torch is imported."""
    name = module.__name__
    placeholders: dict[str, Any] = {function: _calling(module, function) for function in _REEXPORTED.get(name, ())}
    if name == "torch.fx.operator_schemas":
        placeholders["_SCHEMA_TO_SIGNATURE_CACHE"] = {}
    if name == "torch.jit":
        placeholders["_builtins"] = builtins
    return placeholders


def _calling(module: _Deferred, name: str) -> Callable[..., Any]:
    """Returns a function that runs the deferred modules, then calls the module's own function."""
    def call(*args: Any, **kwargs: Any) -> Any:
        vars(module).pop(name, None)
        return getattr(module, name)(*args, **kwargs)
    return call


class _JitBuiltins:
    """Stands in for `torch.jit._builtins`, with which TorchScript recognizes operators."""

    def __init__(self) -> None:
        self.operators: list[tuple[Any, str]] = []

    def _register_builtin(self, function: Any, name: str) -> None:
        self.operators.append((function, name))
