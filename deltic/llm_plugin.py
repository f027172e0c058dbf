"""Plugin for the `llm` command: offers the models of a running `deltic serve`. llm loads it by its entry point.

DELTIC_URL: the server's address. DELTIC_API_KEY: its key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any
from urllib.request import Request, urlopen

from llm import hookimpl
from llm.default_plugins.openai_models import AsyncChat, Chat

_URL = "http://127.0.0.1:8000"
_PATIENCE = 1.0  # timeout in seconds; each start of llm may wait this long


@hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Registers `deltic`, the server's first model, and `deltic/NAME` for each model of a running server."""
    base = os.environ.get("DELTIC_URL", _URL).rstrip("/") + "/v1"
    key = os.environ.get("DELTIC_API_KEY", "none")
    names = {"deltic": "default"} | {f"deltic/{name}": name for name in _names(base, key)}
    for id, name in names.items():
        register(*(_model(kind, id, name, base, key) for kind in (Chat, AsyncChat)))


def _model(kind: Callable[..., Any], id: str, name: str, base: str, key: str) -> Any:
    model = kind(id, key=key, model_name=name, api_base=base, reasoning=True, supports_schema=True, supports_tools=True)
    model.needs_key = "deltic"
    return model


def _names(base: str, key: str) -> list[str]:
    """Returns the names of the server's models, or [] if the server does not answer."""
    try:
        with urlopen(Request(base + "/models", headers={"authorization": f"Bearer {key}"}), timeout=_PATIENCE) as found:
            return [str(model["id"]) for model in json.load(found)["data"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
