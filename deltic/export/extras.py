"""The libraries that compiled models need, which are installed as extras."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final, Literal

from deltic.errors import ModelError

_PACKAGES: Final = {"executorch": ("executorch", "torchao"), "tvm": ("tvm", "tvm_ffi")}


def need(extra: Literal["executorch", "tvm"], *packages: str) -> None:
    """ModelError saying what to install, if a package of this extra is not there; packages: those that are needed,
    by default all."""
    missing = [name for name in packages or _PACKAGES[extra] if find_spec(name) is None]
    if missing:
        raise ModelError(f"this needs the package {missing[0]}, which is not installed: pip install 'deltic[{extra}]'")
