"""The models of a server: tracks which are loaded, and loads and unloads them on demand.

A model is in use from the arrival of a request for it, before it is loaded, until the last answer is sent. Only models
that are not in use are unloaded. All of this happens in the event loop; loading and closing run in a thread.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Final, TypeVar

from starlette.requests import Request

from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import BusyError, ConfigError, DelticError, RequestError, UnavailableError, show
from deltic.llm import LLM
from deltic.params import LoadedAdapter
from deltic.server.async_engine import STUCK_AFTER, AsyncEngine, Health
from deltic.server.body import BodyReader, Prepared
from deltic.server.content import documents_in
from deltic.server.errors import ProblemError
from deltic.server.fields import Body
from deltic.server.forks import ForkStore
from deltic.server.generation import ServedModel
from deltic.server.pictures import PictureDecoder
from deltic.server.records import ActiveRequests, RequestRecord, record_of
from deltic.vision.decoder_process import reader_process
from deltic.vision.prompt import UnreadImages

log = logging.getLogger("deltic")

_FAILED_SECONDS: Final = 30.0
"""Seconds until a failed load is tried again."""
_READERS: Final = 2
"""Number of requests whose documents are read at the same time, at most one per client."""
_CHECKS: Final = 4
"""Number of checks for idle models per `idle_unload` period."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded."""

    name: str
    """The model's name for clients."""
    load: Callable[[], LLM]
    """Function that loads the model; called in a thread."""
    size: int = 0
    """Bytes of memory that the model takes."""
    aliases: tuple[str, ...] = ()
    """Other names that clients may use."""


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The models of one server. The first one serves requests that name no model."""

    sources: tuple[ModelSource, ...]
    limits: Limits = field(default_factory=Limits)
    memory: int | None = None
    """Limit in bytes for all loaded models together; None: no limit."""
    idle_unload: float | None = None
    """Seconds without a request after which a model is unloaded; None: never."""

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None or not names:
            raise ConfigError(f"two models have the name {show(double)}" if names else "there is no model", "model")
        for source in self.sources:
            if self.memory is not None and source.size > self.memory:
                raise ConfigError(f"the model {show(source.name)} takes about {_mib(source.size)}, and models_memory "
                                  f"is {_mib(self.memory)}: allow more, or give its cache less (memory)",
                                  "models_memory")


@dataclass(slots=True, eq=False)
class _RegisteredModel:
    """A model and its state."""

    source: ModelSource
    served: ServedModel | None = None
    loading: asyncio.Task[ServedModel] | None = None
    users: int = 0
    used: float = 0.0
    """Time of the last use, by time.monotonic."""
    failed: tuple[float, str] | None = None
    """Time and reason of a failed load."""
    context: int | None = None
    """Tokens that its context holds; None if it was never loaded."""
    sees: bool | None = None
    """True if it reads images; None if it was never loaded."""
    created: int = field(default_factory=lambda: int(time.time()))

    def loaded(self, served: ServedModel) -> None:
        self.served, self.failed = served, None
        self.context, self.sees = served.llm.engine.max_context, served.llm.runtime.vision is not None


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model as clients see it. context, sees: None if the model was never loaded."""

    name: str
    created: int
    context: int | None
    sees: bool | None
    loaded: bool
    parent: str | None = None
    """The model to which an adapter belongs."""


class ModelRegistry:
    """Finds, loads and unloads the models of one server."""

    def __init__(self, models: ModelSet, reader: BodyReader, records: ActiveRequests,
                 stuck_after: float = STUCK_AFTER) -> None:
        """Creates the registry. stuck_after: seconds without progress after which an engine counts as stuck."""
        self.models, self.limits = models, models.limits
        self.pictures, self.forks = PictureDecoder(models.limits), ForkStore(models.limits)
        self._reader = reader
        self._records = records
        self._stuck_after = stuck_after
        self._entries = {source.name: _RegisteredModel(source) for source in models.sources}
        self._thread = ThreadPoolExecutor(1, "deltic-models")
        # the threads wait for child processes, so turns go by wall time
        self._document_readers = FairExecutor(_READERS, "deltic-documents", processor=time.monotonic)
        self._closing: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._draining = self._kept = False

    @property
    def loaded(self) -> list[ServedModel]:
        return [entry.served for entry in self._entries.values() if entry.served]

    def keep(self, llm: LLM) -> ServedModel:
        """Serves a single model that belongs to the process and is never closed."""
        entry, = self._entries.values()
        served = self._serve(llm, entry.source.name)
        entry.loaded(served)
        self._kept = True
        return served

    def _serve(self, llm: LLM, name: str) -> ServedModel:
        engine = AsyncEngine(llm.worker, llm.runtime.memory.max_batch, self.limits, self._stuck_after)
        return ServedModel(llm, engine, name, FairExecutor(1, "deltic-memory"), self._records, forks=self.forks)

    def entries(self) -> list[ModelEntry]:
        """Returns all models, each followed by its adapters."""
        found = list[ModelEntry]()
        for entry in self._entries.values():
            own = ModelEntry(entry.source.name, entry.created, entry.context, entry.sees, entry.served is not None)
            adapters = entry.served.llm.adapters.entries() if entry.served else []
            found += [own, *(replace(own, name=name, created=created, parent=own.name) for name, created in adapters)]
        return found

    def entry(self, model: str) -> ModelEntry:
        """Returns a model or an adapter by its name. Raises status 404 if there is none."""
        named, adapter = self._named(model)
        wanted = (adapter.name, named.source.name) if adapter else (named.source.name, None)
        return next(entry for entry in self.entries() if (entry.name, entry.parent) == wanted)

    async def read(self, request: Request, schema: type[Body], prepare: Callable[[ServedModel, Body], Prepared],
                   answers: bool = True) -> tuple[ServedModel, Body, Prepared]:
        """Returns the model that a body asks for, the body, and the result of `prepare` for both; see
        `BodyReader.read`. The model stays loaded until the request ends.

        answers: False if the request only counts tokens. It then takes no place, and its prompts may have any length.
        Raises BusyError before the body is read if there is no room for an answer.
        """
        record = record_of(request)
        if answers:
            self._records.take(record, 1)
            if len(self._entries) == 1:
                for served in self.loaded:
                    served.engine.check_room(record.client_id)
        choose = partial(self._choose, record, answers)
        return await self._reader.read(request, schema, choose, prepare, partial(self._with_images, record))

    async def served(self, request: Request, model: str | None) -> ServedModel:
        """Returns the model of this name, for a request without a body."""
        return await self._choose(record_of(request), False, SimpleNamespace(model=model))

    async def _with_images(self, record: RequestRecord, served: ServedModel, missing: UnreadImages) -> ServedModel:
        try:
            return replace(served, pictures=await self.pictures.read(record.client_id, missing.reading))
        except RequestError as error:
            return replace(served, pictures=error)  # raised later, where the client's name of the field is known

    async def _choose(self, record: RequestRecord, answers: bool, body: object) -> ServedModel:
        entry, adapter = self._named(getattr(body, "model", None))
        record.model = f"{entry.source.name}:{adapter.name}" if adapter else entry.source.name
        record.stream = bool(getattr(body, "stream", False))
        entry.users += 1
        record.release = partial(self._release, entry)
        served = entry.served or await self._load(entry)
        if record.answers and len(self._entries) > 1:
            served.engine.check_room(record.client_id)
        known = partial(served.documents.known, record.owner)
        served = replace(served, owner=record.owner, bounded=answers, text_of=known, name=record.model,
                         adapter=adapter)
        notes = getattr(body, "notes", None)
        return await self._with_documents(record, served, body) if notes and notes.may_have_files else served

    async def _with_documents(self, record: RequestRecord, served: ServedModel, body: object) -> ServedModel:
        """Reads the documents of a request, in separate threads and in the client's turn. Reading ends when the client
        disconnects."""
        contents = [getattr(body, name, None) for name in ("messages", "input")]
        found = await record.work(lambda: list(documents_in(contents)))
        if not found:
            return served
        process = reader_process()
        read = partial(served.documents.read, record.owner, found, served.limits, process)
        try:
            texts = await self._document_readers.run(record.client_id, read)
        except asyncio.CancelledError:
            process.stop()
            raise
        return replace(served, text_of=lambda name: texts.get(name) or served.text_of(name))

    def start(self) -> None:
        """Starts accepting requests."""
        for served in self.loaded:
            served.engine.start()
        if self.models.idle_unload is not None:
            self._watching = asyncio.create_task(self._watch(self.models.idle_unload))

    def health(self) -> Health:
        """Returns the state of all loaded engines."""
        found = [(served.name, served.engine.health()) for served in self.loaded]
        faults = [now.fault if len(self._entries) == 1 else f"{name}: {now.fault}" for name, now in found if now.fault]
        return Health("; ".join(faults) or None, self._draining, sum(now.requests for _, now in found))

    async def drain(self, grace: float) -> None:
        """Stops accepting requests, and ends the running ones after `grace` seconds."""
        self._draining = True
        await asyncio.gather(*(served.engine.drain(grace) for served in self.loaded))

    async def stop(self) -> None:
        """Ends all requests and loads, and closes all models except one that is kept."""
        self._draining = True
        if self._watching:
            self._watching.cancel()
        for entry in self._entries.values():
            if entry.loading:
                with suppress(DelticError):
                    await entry.loading
        for entry in self._entries.values():
            if entry.served and self._kept:
                await entry.served.stop()
            elif entry.served:
                self._unload(entry)
        await asyncio.gather(*self._closing)
        await asyncio.to_thread(self.pictures.close)
        self._document_readers.shutdown(False)
        self._thread.shutdown()

    def _named(self, model: str | None) -> tuple[_RegisteredModel, LoadedAdapter | None]:
        """Returns a model, and the adapter if the name is an adapter's name or has the form model:adapter."""
        if entry := self._model(model):
            return entry, None
        name = (model or "").removesuffix(":latest")
        base, _, last = name.rpartition(":")
        for entry in self._entries.values():
            adapters = entry.served.llm.adapters if entry.served else None
            for wanted in (name, last) if base and self._model(base) is entry else (name,):
                if adapters and wanted in adapters:
                    return entry, adapters.find(wanted)
        names = ", ".join(repr(entry.name) for entry in self.entries())
        raise ProblemError(404, f"the model {show(model)} does not exist: this server has {names}", "model",
                           "model_not_found")

    def _model(self, model: str | None) -> _RegisteredModel | None:
        entries = [*self._entries.values()]
        for name in (model, (model or "").removesuffix(":latest")):  # Ollama's clients append ":latest"
            for entry in entries:
                if name == entry.source.name or name in entry.source.aliases:
                    return entry
        return entries[0] if model in (None, "default") else None

    def _release(self, entry: _RegisteredModel) -> None:
        entry.users -= 1
        entry.used = time.monotonic()

    async def _load(self, entry: _RegisteredModel) -> ServedModel:
        """Loads a model, or waits until it is loaded. Raises UnavailableError if it cannot be loaded, BusyError if
        there is no room at the moment."""
        if entry.loading is None:
            if self._draining:
                raise BusyError("the server is shutting down: try again later, or elsewhere")
            if entry.failed and time.monotonic() - entry.failed[0] < _FAILED_SECONDS:
                raise UnavailableError(entry.failed[1])
            self._make_room(entry)
            entry.loading = asyncio.create_task(self._bring(entry, tuple(self._closing)))
            entry.loading.add_done_callback(_mark_read)
        return await asyncio.shield(entry.loading)  # other clients may wait for the same load

    def _make_room(self, entry: _RegisteredModel) -> None:
        """Unloads as many unused models as needed, the least recently used first."""
        if self.models.memory is None:
            return
        there = [other for other in self._entries.values() if other.served or other.loading]
        lacking = sum(other.source.size for other in there) + entry.source.size - self.models.memory
        unused: list[_RegisteredModel] = []
        for other in sorted(there, key=lambda other: other.used):
            if lacking > 0 and other.served and not other.users:
                lacking -= other.source.size
                unused.append(other)
        if lacking > 0:
            raise BusyError(f"the model {show(entry.source.name)} takes about {_mib(entry.source.size)}, for which the "
                            f"models that run leave no room in {_mib(self.models.memory)} (models_memory): try again "
                            "later")
        for other in unused:
            self._unload(other)

    async def _bring(self, entry: _RegisteredModel, closing: Sequence[Awaitable[None]]) -> ServedModel:
        name, began = entry.source.name, time.monotonic()
        try:
            await asyncio.gather(*closing)
            served = self._serve(await self._threaded(entry.source.load), name)
            entry.loaded(served)
            served.engine.start()
        except Exception as error:
            known = isinstance(error, DelticError | OSError | MemoryError)
            reason = str(error) or type(error).__name__
            log.error("the model %s cannot be loaded: %s", show(name), reason, exc_info=None if known else error)
            message = f"the model {show(name)} cannot be loaded: {reason if known else 'the server log says why'}"
            entry.failed = time.monotonic(), message
            raise UnavailableError(message) from error
        finally:
            entry.loading, entry.used = None, time.monotonic()
        log.info("the model %s is loaded, in %.1f s", show(name), time.monotonic() - began)
        if self._draining:
            await served.engine.drain(0)
        return served

    def _unload(self, entry: _RegisteredModel) -> None:
        served, entry.served = entry.served, None
        assert served
        closing = asyncio.create_task(self._close(served))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close(self, served: ServedModel) -> None:
        name = served.name
        await served.stop()
        await self._threaded(served.llm.close)
        del served
        await self._threaded(gc.collect)  # reference cycles keep the weights alive
        log.info("the model %s is unloaded", show(name))

    async def _threaded(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _watch(self, idle: float) -> None:
        """Unloads models that were unused for `idle` seconds. Runs until cancelled."""
        while True:
            await asyncio.sleep(idle / _CHECKS)
            for entry in self._entries.values():
                if entry.served and not entry.users and time.monotonic() - entry.used > idle:
                    self._unload(entry)


def only(llm: LLM, name: str, aliases: tuple[str, ...]) -> ModelSet:
    """Returns a set of one model that is already loaded."""
    return ModelSet((ModelSource(name, lambda: llm, aliases=aliases),), llm.runtime.options.limits)


def _mark_read(task: asyncio.Task[ServedModel]) -> None:
    """Keeps asyncio from reporting an error that is already in the log if all clients have disconnected."""
    if not task.cancelled():
        task.exception()


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
