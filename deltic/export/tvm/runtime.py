"""Runs compiled directories in TVM's runtime, without its compiler.

`import tvm` would load the compiler (250 MB) and take seconds. A compiled model needs only the package `tvm_ffi` and
the libraries libtvm_runtime and libtvm_runtime_extra of TVM's wheel.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from struct import Struct
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.config.reading import BACKENDS, canonical
from deltic.errors import ConfigError, ModelError
from deltic.export.program import LIBRARIES, OBJECTS, ProgramInfo, kv_size, require_extra, state_size
from deltic.export.tvm.artifact import (
    DESCRIPTORS,
    FLAGS,
    Metadata,
    aligned,
    generation_of,
    load_parameters,
    read_config,
)
from deltic.params import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

LIBRARY_PATH: Final = "DELTIC_TVM_LIBRARY_PATH"
"""Environment variable: the directory of the runtime's libraries, if it is not the package `tvm`'s."""
_RUNTIME_LIBRARIES: Final = ("libtvm_runtime", "libtvm_runtime_extra")
_SUFFIX: Final = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_CONSTRUCTOR: Final = "vm.builtin.paged_attention_kv_cache_create"
_DEVICE_EXISTS: Final = 0
"""TVM's device attribute kExist."""
_POOLED_ALLOCATOR: Final = 2
_BIG_CORES: Final = 1
"""Mode of TVM's thread pool in which the number of threads is given."""
_DEVICE_NEEDS: Final = {
    "cuda": "an NVIDIA GPU with its driver", "rocm": "an AMD GPU with ROCm", "metal": "a GPU of Apple's",
    "opencl": "a GPU with an OpenCL driver", "vulkan": "a GPU with a Vulkan driver"}
_MACHINES: Final = {"arm64": "aarch64", "AMD64": "x86_64"}
"""Alternative names of processors."""
_ELF: Final = Struct("<4s36xQ10xHH")
"""ELF layout: magic, start of the section table, bytes of an entry, number of entries."""


# Loading TVM's runtime


@cache
def tvm_runtime() -> Any:
    """Returns the package `tvm_ffi` with TVM's runtime loaded. Raises ModelError that states what to install.

    Loads nothing if the process already has the runtime, for example from `import tvm`: a second copy would register
    the same names and kill the process.
    """
    require_extra("tvm", "tvm_ffi")
    with _torch_hidden():
        import tvm_ffi
    if tvm_ffi.get_global_func(_CONSTRUCTOR, allow_missing=True) is None:
        for path in runtime_libraries():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # compiled libraries do not list it as a dependency
    constructor = tvm_ffi.get_global_func(_CONSTRUCTOR, allow_missing=True)
    if constructor is None:
        raise ModelError(f"TVM's runtime has no {_CONSTRUCTOR}: it is too old; pip install 'deltic[tvm]'")
    tvm_ffi.register_global_func(_CONSTRUCTOR, accepting_older_names(constructor), override=True)
    return tvm_ffi


@contextmanager
def _torch_hidden() -> Iterator[None]:
    """Prevents tvm_ffi from importing torch, which would take longer than all other imports."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def accepting_older_names(constructor: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the constructor of the paged KV cache so that it takes attention kernels of older TVM versions.

    A kernel is a list that begins with its backend's name. Raises ModelError for unknown backends.
    """
    def current(argument: Any) -> Any:
        if isinstance(argument, str) or not isinstance(argument, Sequence) or not argument:
            return argument
        tag, *kernel = argument
        return [canonical(BACKENDS, tag, "attention backend"), *kernel] if isinstance(tag, str) else argument

    return lambda *arguments: constructor(*map(current, arguments))


def _library_folders() -> list[Path]:
    given = os.environ.get(LIBRARY_PATH)
    if given:
        return [Path(given)]
    package = find_spec("tvm")
    folders = package.submodule_search_locations if package else None
    return [Path(folder) / "lib" for folder in folders or ()]


def _find_library(name: str) -> Path | None:
    paths = (folder / (name + _SUFFIX) for folder in _library_folders())
    return next((path for path in paths if path.is_file()), None)


def runtime_libraries() -> Iterator[Path]:
    folders = _library_folders()
    if not folders:
        raise ModelError("TVM's runtime is not installed: pip install 'deltic[tvm]', or set "
                         f"{LIBRARY_PATH} to the directory with {_RUNTIME_LIBRARIES[0]}{_SUFFIX}")
    for name in _RUNTIME_LIBRARIES:
        found = _find_library(name)
        if found is None:
            raise ModelError(f"{folders[0]} has no {name}{_SUFFIX}: pip install 'deltic[tvm]', or set {LIBRARY_PATH} "
                             "to the directory that has it")
        yield found


# Devices


@dataclass(frozen=True, slots=True)
class Device:
    """A device by TVM's name, such as cpu or cuda."""

    ffi: Any
    kind: str

    @property
    def vm_arguments(self) -> tuple[int, ...]:
        """Returns the arguments that initialise TVM's virtual machine: this device, and the CPU."""
        types = [self.ffi.device(kind, 0).dlpack_device_type() for kind in dict.fromkeys((self.kind, "cpu"))]
        return tuple(number for type in types for number in (type, 0, _POOLED_ALLOCATOR))

    def tensor(self, array: NDArray[Any]) -> Any:
        """Returns a tensor of the array's values; on a CPU it shares their memory."""
        if self.kind == "cpu":
            return self.ffi.from_dlpack(array)
        tensor = self.ffi.get_global_func("runtime.TVMTensorAllocWithScope")(
            self.ffi.Shape(array.shape), self.ffi.dtype(str(array.dtype)), self.ffi.device(self.kind, 0), None)
        copy = self.ffi.get_global_func("runtime.TVMTensorCopyFromBytes")
        copy(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
        return tensor

    def integers(self, numbers: Sequence[int] | NDArray[Any]) -> Any:
        """Returns an int32 tensor."""
        content = np.ascontiguousarray(numbers, np.int32).view(np.uint8)
        return self.tensor(aligned(content).view(np.int32))

    def numpy(self, tensor: Any) -> NDArray[np.float32]:
        """Returns a tensor's values; on a CPU, a view of them."""
        if self.kind == "cpu":
            return np.asarray(np.from_dlpack(tensor), np.float32)
        array = np.empty(tuple(tensor.shape), str(tensor.dtype))
        copy = self.ffi.get_global_func("runtime.TVMTensorCopyToBytes")
        copy(tensor, ctypes.c_void_p(array.ctypes.data), array.nbytes)
        return array.astype(np.float32, copy=False)


def open_device(ffi: Any, kind: str, folder: Path) -> Device:
    """Returns the device that a directory was compiled for. Raises ModelError if it or its runtime is missing."""
    device = Device(ffi, kind)
    if kind == "cpu":
        return device
    needs = f"{folder} was compiled for {kind}, which needs {_DEVICE_NEEDS.get(kind, f'a {kind} device')}"
    remedy = "run it on a machine that has one, or compile the model for this processor with --target llvm"
    _load_device_runtime(ffi, kind, f"{needs}: {remedy}")
    if not ffi.get_global_func("runtime.GetDeviceAttr")(device.vm_arguments[0], 0, _DEVICE_EXISTS):
        raise ModelError(f"{needs}, and there is none here: {remedy}")
    return device


def _load_device_runtime(ffi: Any, kind: str, reason: str) -> None:
    if ffi.get_global_func(f"device_api.{kind}", allow_missing=True) is not None:
        return
    name = f"libtvm_runtime_{kind}"
    found = _find_library(name)
    if found is None:
        raise ModelError(f"{reason}. TVM's runtime here has no {name}{_SUFFIX}, and cannot drive such a device")
    try:
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ModelError(f"{reason}. TVM's runtime for {kind} cannot be loaded: {error}") from error


def check_machine(metadata: Metadata, folder: Path) -> None:
    """Raises ModelError if the code is for another processor, because it could execute illegal instructions here."""
    missing = sorted(set(metadata.needs) - set(_processor_flags()))
    here, there = (_MACHINES.get(name, name) for name in (platform.machine(), metadata.machine))
    if (here, sys.platform) == (there, metadata.system) and not missing:
        return
    compiled_for, machine = f"{metadata.machine} ({metadata.system})", f"{platform.machine()} ({sys.platform})"
    if missing:
        compiled_for, machine = f"{compiled_for} with {', '.join(missing)}", f"{machine} without"
    raise ModelError(f"{folder} was compiled for {compiled_for}, with --target {metadata.target!r}, and this machine "
                     f"is {machine}: compile it here, or with --target llvm -mcpu=...")


def _processor_flags() -> tuple[str, ...]:
    """Returns the instruction sets of `FLAGS` that this processor has; all of them if the system does not list any."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return FLAGS
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(flag for flag in FLAGS if flag in flags.split())
    return ()


# A compiled directory


class CompiledLibrary:
    """The library and the parameters of a directory, in TVM's virtual machine.

    metadata: metadata of the directory's config. Raises ModelError if files are missing, damaged, from different
    models, of another generation, or compiled for another processor or device.
    """

    def __init__(self, folder: Path, metadata: Metadata, vocabulary: int, threads: int) -> None:
        check_machine(metadata, folder)
        generation = generation_of(folder)
        if generation != metadata.generation and metadata.convention == "deltic":
            raise ModelError(f"{folder} is an artifact of generation {metadata.generation}, but its parameters are "
                             f"described by {DESCRIPTORS[generation]}, as in {generation}: compile it again")
        self._ffi, self._threads, self._thread = tvm_runtime(), threads, 0
        self.device = open_device(self._ffi, metadata.device, folder)
        self._vm = self._load(folder)
        self.metadata = self._own_metadata(folder, metadata, vocabulary)
        self.parameters = load_parameters(folder, generation, self.metadata, self._ffi, self.device.tensor)

    def find(self, *names: str) -> Any:
        """Returns the first of these functions that the library has, or None if it has none."""
        for name in names:
            with suppress(AttributeError):
                return self._vm[name]
        return None

    def function(self, *names: str) -> Any:
        """Returns a function like `find`. Raises ModelError if the library has none of them."""
        found = self.find(*names)
        if found is None:
            raise ModelError(f"the library has no function {names[0]}: it was not compiled by deltic or mlc-llm, or "
                             "holds another kind of model")
        return found

    def set_threads(self) -> None:
        """Sets the thread count for calls from this thread: TVM has one pool per calling thread."""
        if self._thread != get_ident():
            self._thread = get_ident()
            self._ffi.get_global_func("runtime.config_threadpool")(_BIG_CORES, self._threads)

    def _load(self, folder: Path) -> Any:
        path = next((path for name in LIBRARIES for path in sorted(folder.glob(name))), None)
        if path is None:
            raise ModelError(f"{folder / OBJECTS} is not linked: link its objects to a library on the machine that "
                             "it was compiled for, or compile the model again with CXX naming a compiler for it")
        _check_complete(path)
        try:
            machine = self._ffi.load_module(str(path))["vm_load_executable"]()
            machine["vm_initialization"](*self.device.vm_arguments)
        except Exception as error:
            raise ModelError(f"{path} cannot be loaded by TVM's runtime, compile the model again: {last_line(error)}"
                             ) from error
        return machine

    def _own_metadata(self, folder: Path, config: Metadata, vocabulary: int) -> Metadata:
        """Returns the library's metadata. Raises ModelError if it differs from the directory's."""
        try:
            found = Metadata.from_mapping(json.loads(self._vm["_metadata"]()), config)
        except ModelError as error:
            raise ModelError(f"{folder}: the library's metadata: {error}") from error
        except Exception as error:
            raise ModelError(f"{folder}: the library has no metadata: {last_line(error)}") from error
        for name in ("generation", "architecture", "quantization", "vocabulary", "device"):
            inside, outside = getattr(found, name), getattr(config, name)
            if inside != outside:
                raise ModelError(f"{folder}: {name} is {inside} in the library and {outside} in its config: they are "
                                 "not of one model")
        if vocabulary != found.vocabulary:
            raise ModelError(f"{folder}: config.json has a vocabulary of {vocabulary}, the library of "
                             f"{found.vocabulary}: they are not of one model")
        return found


def _check_complete(path: Path) -> None:
    """Raises ModelError for a truncated ELF file, which would kill the process: its section table comes last."""
    if not path.is_file():
        raise ModelError(f"{path} is no file: compile the model again")
    with path.open("rb") as file:
        magic, start, size, count = _ELF.unpack(file.read(_ELF.size).ljust(_ELF.size, b"\0"))
    expected, found = start + size * count, path.stat().st_size
    if magic == b"\x7fELF" and found < expected:
        raise ModelError(f"{path} has {found:,} bytes instead of {expected:,}: it is cut off; copy it again")


def last_line(error: Exception) -> str:
    """Returns the last line of TVM's error, which follows a traceback."""
    return str(error).strip().rsplit("\n", 1)[-1]


# Language models


def open_program(path: Path, options: EngineConfig) -> TvmProgram:
    if options.params is not None:
        raise ConfigError("params is for a program (.pte) of ExecuTorch's own exporter: leave it out", "params")
    return TvmProgram(path, options)


class TvmProgram:
    """A compiled language model, a `RewindableProgram`. Copies of a sequence share the full pages of its KV cache."""

    def __init__(self, folder: Path, options: EngineConfig) -> None:
        metadata, config, generation = read_config(folder)
        self._library = CompiledLibrary(folder, metadata, config.vocab_size,
                                        options.threads_for(config.parameter_count))
        self._ffi, self.metadata = self._library.device.ffi, self._library.metadata
        self._positions: dict[int, int] = {}
        self._cache = self._states = None
        self._call = {name: self._ffi.get_global_func(f"vm.builtin.kv_state_{name}") for name in (
            "add_sequence", "remove_sequence", "fork_sequence", "popn", "begin_forward", "end_forward")}
        self.info = _info(folder, config, generation, self.metadata)

    @property
    def slots(self) -> Collection[int]:
        return self._positions.keys()

    def reserve(self, slots: int, tokens: int, history: int = 1) -> None:
        shape = self._ffi.Shape
        pages = -(-tokens // PAGE) + slots  # each copy has its own last page
        create = self._library.function("create_tir_paged_kv_cache", "create_paged_kv_cache")
        sizes = (slots, pages * PAGE, self.metadata.prefill_chunk_size, PAGE, 0)
        self._cache = create(*(shape([size]) for size in sizes))
        if self.info.config.linear_layers:
            self._states = self._library.function("create_rnn_state")(shape([slots]), shape([history]))

    def start(self, slot: int) -> None:
        self.drop(slot)
        self._call_both("add_sequence", slot)
        self._positions[slot] = 0

    def copy(self, source: int, target: int) -> None:
        self.drop(target)
        self._call_both("fork_sequence", source, target, -1)
        self._positions[target] = self._positions[source]

    def drop(self, slot: int) -> None:
        if self._positions.pop(slot, None) is not None:
            self._call_both("remove_sequence", slot)

    def position(self, slot: int) -> int:
        return self._positions[slot]

    def rewind(self, slot: int, count: int) -> bool:
        if self._states is not None:
            try:
                self._call["popn"](self._states, slot, count)
            except Exception:  # the history does not reach back that far
                return False
        self._call["popn"](self._cache, slot, count)
        self._positions[slot] -= count
        return True

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        assert tokens, "no tokens to feed"
        size = self.metadata.prefill_chunk_size
        for start in range(0, len(tokens), size):
            logits = self._feed_chunk(slot, tokens[start:start + size])
        return logits

    def _feed_chunk(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Appends a chunk of tokens. A failure drops the sequence, because its states may hold part of the chunk."""
        shape, count = self._ffi.Shape, len(tokens)
        self._library.set_threads()
        try:
            self._call_both("begin_forward", shape([slot]), shape([count]))
            logits = self._logits(tokens)
            self._call_both("end_forward")
        except BaseException:
            with suppress(Exception):
                self.drop(slot)
            raise
        self._positions[slot] += count
        return logits[:self.metadata.vocabulary]

    def _logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the last token's logits [width].

        deltic's functions take embeddings [n, hidden], and its prefill takes the index of the last token. mlc-llm's
        functions take embeddings [1, n, hidden], and only `batch_prefill` takes that index.
        """
        library, last = self._library, len(tokens) - 1
        embeddings = library.function("embed")(library.device.integers(tokens), library.parameters)
        name = "prefill" if last else "decode"
        takes_index = bool(last)
        batched = None
        if self.metadata.convention == "mlc":
            reshape = self._ffi.get_global_func("vm.builtin.reshape")
            embeddings = reshape(embeddings, self._ffi.Shape([1, *embeddings.shape[-2:]]))
            batched = library.find(f"batch_{name}")
            takes_index = takes_index and batched is not None
        run = batched or library.function(name)
        index = [library.device.integers([last])] if takes_index else []
        logits = library.device.numpy(run(embeddings, *index, *self._caches, library.parameters)[0])
        return logits.reshape(logits.shape[-1])

    @property
    def _caches(self) -> list[Any]:
        return [each for each in (self._cache, self._states) if each is not None]

    def _call_both(self, name: str, *arguments: Any) -> None:
        """Calls a function on both the KV cache and the recurrent states, which always have the same position."""
        for each in self._caches:
            self._call[name](each, *arguments)


def _info(folder: Path, config: ModelConfig, generation: GenerationDefaults, metadata: Metadata) -> ProgramInfo:
    kv_bytes = 2 if "16" in metadata.quantization and metadata.convention == "mlc" else 4
    return ProgramInfo(config, generation, folder, metadata.context_window_size, 4 * state_size(config),
                       kv_bytes * kv_size(config))
