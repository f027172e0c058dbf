"""deltic: inference for models that mix recurrent and attention layers. This module exports the public names and
imports their modules on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["LLM", "DelticError", "Encoder", "Prompt", "RandomModel", "SamplingParams", "Session", "__version__"]

if TYPE_CHECKING:
    from deltic.embeddings.encoder import Encoder
    from deltic.engine.loading import RandomModel
    from deltic.errors import DelticError
    from deltic.llm import LLM
    from deltic.params import Prompt, SamplingParams
    from deltic.session import Session

_HOMES = {"LLM": "deltic.llm", "RandomModel": "deltic.engine.loading", "Session": "deltic.session",
          "DelticError": "deltic.errors", "Encoder": "deltic.embeddings.encoder", "Prompt": "deltic.params",
          "SamplingParams": "deltic.params"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'deltic' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
