"""Saves prefixes as files in one directory of the server, for a prompt or a stored response, and loads them by id.

Clients cannot name files: an id has 64 hexadecimal digits, and the server's operator configures the directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.cache.offload.state_manifest import MANIFEST_SUFFIX, SavedState, checked_id
from deltic.cache.offload.state_stores import StateDirectory
from deltic.chat.history import PortableAnswer
from deltic.chat.processor import PreparedRequest, bare_job
from deltic.errors import RequestError, show, valid_text
from deltic.params import EngineRequest, SamplingParams
from deltic.server.content import ContentReader
from deltic.server.errors import ProblemError
from deltic.server.generation import ServedModel
from deltic.server.http import json_response
from deltic.server.models import ModelRegistry
from deltic.server.openai_schema import MESSAGES_SCHEMA, ChatRequest
from deltic.server.records import RequestRecord, record_of, salt_of
from deltic.server.response_store import ResponseStore
from deltic.server.responses_schema import ResponsesRequest
from deltic.server.routing import ApiRoute, Check

_SOURCES: Final = ("messages", "prompt", "response_id", "load")
_LONGEST_NAME: Final = 200


class StateRequest(ChatRequest):
    """The body of /v1/states. It contains the prefix to save (messages with the fields of a chat request, a raw prompt
    or a stored response), or the id of a saved state to load."""

    schemas: ClassVar[Mapping[str, Any]] = {
        "messages": MESSAGES_SCHEMA, "prompt": {"type": ["string", "array"], "items": {"type": "integer"}}}

    messages: list[Any] = []  # noqa: RUF012
    prompt: Any = None
    response_id: str | None = None
    load: str | None = None
    name: str | None = None


def routes(models: ModelRegistry, store: ResponseStore, directory: Path | None, check: Check) -> list[Route]:
    """Returns the routes for states. directory: None if clients may not save or load any."""
    return [ApiRoute("/v1/states", _StateEndpoints(models, store, directory).create, check, body=StateRequest)]


@dataclass(frozen=True, slots=True)
class _Reading:
    """The prefix to save: the request that computes it, and the record of the last answer."""

    job: PreparedRequest
    answer: PortableAnswer | None = None


@dataclass(frozen=True, slots=True)
class _StateEndpoints:
    models: ModelRegistry
    store: ResponseStore
    directory: Path | None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock so that only one state at a time is in memory in addition to the cache."""

    async def create(self, request: Request) -> Response:
        if self.directory is None:
            raise ProblemError(404, "this server saves and loads no states: start it with --state-dir DIR",
                               None, "states_are_off")
        record = record_of(request)
        served, body, found = await self.models.read(request, StateRequest, partial(self._prepare, record))
        work = partial(self._load, served, body, record)
        if found is not None:
            asked = replace(found.job.request, cache_salt=salt_of(record.prefix_owner, found.job.request.cache_salt))
            if not await record.work(partial(served.llm.states.keeps, served.llm.worker, asked)):
                await served.gather(request, await served.start(request, [found.job], "prompt", True))
            work = partial(self._save, served, body, asked, found.answer)
        async with self.turn:
            saved = await record.work(work, served.llm.engine.max_context)
        return json_response(_fields(saved))

    def _prepare(self, record: RequestRecord, served: ServedModel, body: StateRequest) -> _Reading | None:
        """Returns the prefix to save, or None if the request loads one."""
        given = [name for name in _SOURCES if getattr(body, name) not in (None, [])]
        if len(given) != 1:
            raise RequestError(f"give one of {', '.join(_SOURCES)}, not {' and '.join(given) or 'none'}", "messages")
        if served.adapter:
            raise RequestError("states of adapters are not saved: name the base model", "model")
        if len(valid_text(body.name or "", "name")) > _LONGEST_NAME:
            raise RequestError(f"name may have at most {_LONGEST_NAME} characters", "name")
        if body.load is not None:
            if self._files.size(checked_id(body.load) + MANIFEST_SUFFIX) is None:
                raise ProblemError(404, f"the state {body.load} is not in the server's directory", "load",
                                   "state_not_found")
            return None
        nothing = SamplingParams(max_tokens=0)
        if body.prompt is not None:
            if not isinstance(body.prompt, str | list) or not all(type(id) is int for id in body.prompt
                                                                  if not isinstance(body.prompt, str)):
                raise RequestError(f"prompt must be text or a list of token ids, not {show(body.prompt)}", "prompt")
            job = served.complete(body.prompt, nothing)
            return _Reading(replace(job, request=replace(job.request, cache_salt=body.salt)))
        chat = body if body.response_id is None else self._conversation(record, served, body)
        processor, tools = served.processor.of(salt_of(served.owner, body.salt)), chat.shown_tools()
        messages = ContentReader(processor.sees, processor.fetches, served.text_of).messages(chat.messages)
        found = processor.saved_prefix(messages, tools=tools, history=chat.history, pictures=served.pictures,
                                       variables=chat.variables(partial(processor.knows, tools=tools)))
        job = bare_job(found.ids, nothing)
        request = replace(job.request, stable_prefixes=found.stable_prefixes, cache_salt=body.salt)
        return _Reading(replace(job, request=request), found.answer)

    @property
    def _files(self) -> StateDirectory:
        assert self.directory is not None
        return StateDirectory(self.directory)

    def _conversation(self, record: RequestRecord, served: ServedModel, body: StateRequest) -> ChatRequest:
        """Returns the conversation up to and including a stored response's output."""
        most = served.limits.max_messages
        stored = self.store.get(str(body.response_id), record.owner)
        items = self.store.items(body.response_id, most, record.owner)
        if stored is None or items is None:
            raise ProblemError(404, f"the response {show(body.response_id)} is not kept", "response_id",
                               "previous_response_not_found")
        if len(items) > most:
            raise RequestError(f"the conversation has more than {most} items (max_messages)", "response_id")
        asked = {name: stored["response"].get(name) for name in ("instructions", "tools")}
        own = {name: getattr(body, name) for name in ("model", "history", "chat_template_kwargs", "enable_thinking")}
        return ResponsesRequest.model_validate({**asked, **own}).chat(items, ())[0]

    def _save(self, served: ServedModel, body: StateRequest, asked: EngineRequest, answer: PortableAnswer | None
              ) -> SavedState:
        most = served.limits.max_states_mib << 20
        try:
            return served.llm.states.save(served.llm.worker, asked, self._files.root, body.name or "", answer, most)
        except OSError as error:
            raise ProblemError(507, f"the state cannot be written now: {error.strerror or error}") from error

    def _load(self, served: ServedModel, body: StateRequest, record: RequestRecord) -> SavedState:
        salt = salt_of(record.prefix_owner, body.salt)
        return served.llm.states.load(served.llm.worker, self._files.root, body.load, salt)


def _fields(saved: SavedState) -> dict[str, Any]:
    return {"id": saved.id, "object": "state", "name": saved.name, "created": saved.created, "tokens": saved.tokens,
            "boundaries": saved.boundaries, "bytes": saved.bytes, "model": saved.model, "about": saved.about,
            "exact": saved.exact}
