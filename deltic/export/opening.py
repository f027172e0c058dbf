"""From the path of a compiled model to a model that can be stepped."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from deltic.config import EngineConfig
from deltic.errors import ModelError

if TYPE_CHECKING:
    from deltic.export.backend import ProgramModel
    from deltic.export.program import Program

Kind = Literal["executorch", "tvm"]
LIBRARIES: Final = ("rt.so", "rt.dylib", "rt.dll", "lib*.so", "lib*.dylib", "lib*.dll")
"""How the library of a TVM directory may be named; the first that is there is taken."""
OBJECTS: Final = "rt.tar"
"""What stands for the library where nothing could link it: its objects."""


def kind_of(path: str | Path) -> Kind | None:
    """Which kind of compiled model lies at this path, by its name or by what is in the directory; None if none does."""
    path = Path(path)
    try:
        if path.is_file() and path.suffix.lower() == ".pte":
            return "executorch"
        if path.is_dir() and any(next(path.glob(name), None) for name in (*LIBRARIES, OBJECTS)):
            return "tvm"
    except (OSError, ValueError):  # no path at all, such as a long prompt
        pass
    return None


def open_program(path: Path, options: EngineConfig) -> Program:
    """The program at a path of which `kind_of` knows the kind. ModelError if it cannot be used."""
    kind = kind_of(path)
    if kind is None:
        raise ModelError(f"{path} is no compiled model")
    program: Program = import_module(f"deltic.export.{kind}.runtime").open_program(path, options)
    return program


def open_artifact(path: Path, options: EngineConfig) -> ProgramModel:
    """A compiled model, with its cache, for the engine."""
    from deltic.export.backend import model_of

    return model_of(open_program(path, options), str(path), options)
