"""LoRA adapters that clients load and unload while the server runs, with vLLM's request formats.

Clients name directories below a directory that the server's operator configures.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from deltic.engine.adapters import AdapterError
from deltic.errors import RequestError, show, valid_text
from deltic.server.errors import ProblemError
from deltic.server.fields import Fields
from deltic.server.generation import ServedModel
from deltic.server.models import ModelRegistry
from deltic.server.routing import ApiRoute, Check


class LoadAdapterRequest(Fields):
    """The body of /v1/load_lora_adapter. load_inplace: replace an adapter of this name if there is one."""

    model: str | None = None
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(Fields):
    """The body of /v1/unload_lora_adapter. lora_int_id: vLLM's number of the adapter; it has no effect."""

    model: str | None = None
    lora_name: str
    lora_int_id: int | None = None


def routes(models: ModelRegistry, directory: Path | None, check: Check) -> list[Route]:
    """Returns the routes for adapters. directory: None if clients may not load or unload any."""
    endpoints = _AdapterEndpoints(models, directory)
    return [ApiRoute("/v1/load_lora_adapter", endpoints.load, check, body=LoadAdapterRequest),
            ApiRoute("/v1/unload_lora_adapter", endpoints.unload, check, body=UnloadAdapterRequest)]


@dataclass(frozen=True, slots=True)
class _AdapterEndpoints:
    models: ModelRegistry
    directory: Path | None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock so that only one adapter is read at a time."""

    async def load(self, request: Request) -> Response:
        directory = self._allowed()
        served, body, path = await self.models.read(request, LoadAdapterRequest, partial(_path, directory),
                                                    answers=False)
        async with self.turn:
            await asyncio.to_thread(served.llm.adapters.load, body.lora_name, path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        self._allowed()
        served, body, _ = await self.models.read(request, UnloadAdapterRequest, _nothing, answers=False)
        try:
            served.llm.adapters.unload(body.lora_name)
        except AdapterError as error:
            raise ProblemError(404, str(error), "lora_name", "adapter_not_found") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _allowed(self) -> Path:
        if self.directory is None:
            raise ProblemError(404, "this server loads and unloads no adapters: start it with --lora-dir DIR",
                               None, "adapters_are_off")
        return self.directory


def _path(directory: Path, served: ServedModel, body: LoadAdapterRequest) -> Path:
    """Returns the adapter directory that a body names. It must lie below the server's adapter directory."""
    given = valid_text(body.lora_path, "lora_path")
    try:
        found = (directory / given).resolve()
    except (OSError, ValueError) as error:
        raise RequestError(f"lora_path {show(given)} is no path", "lora_path") from error
    if not found.is_relative_to(directory):
        raise RequestError(f"lora_path {show(given)} is not below the server's directory of adapters (--lora-dir)",
                           "lora_path")
    if not found.is_dir():
        raise ProblemError(404, f"lora_path {show(given)} is no directory", "lora_path", "adapter_not_found")
    return found


def _nothing(served: ServedModel, body: UnloadAdapterRequest) -> None:
    return None
