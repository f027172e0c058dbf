"""The models of a server by their names: which are loaded, and which are when they are asked for.

    asked for -> loaded (in a thread of its own, once for all who ask) -> idle -> unloaded

A model that is asked for counts as running from before it is loaded until its last answer has been sent, and is not
unloaded meanwhile. Everything here happens in the event loop, but for loading and closing.
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
from typing import TypeVar

from starlette.requests import Request

from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import BusyError, ConfigError, DelticError, RequestError, UnavailableError, show
from deltic.llm import LLM
from deltic.server.async_engine import Health
from deltic.server.body import Body, BodyReader, Prepared
from deltic.server.content import documents_in
from deltic.server.http import Problem, ProblemError
from deltic.server.pictures import PictureDecoder
from deltic.server.records import ActiveRequests, RequestRecord, record_of
from deltic.server.served_model import ServedModel
from deltic.vision.documents import reader_process
from deltic.vision.prompt import Shown, UnreadImages

log = logging.getLogger("deltic")

_FORGIVEN = 30.0
"""Seconds after which a model that could not be loaded is tried again."""
_READ_AT_ONCE = 2
"""Requests whose documents are read at the same time, of one client one."""
_LOOKS = 4
"""So many times in the time that a model may be idle it is looked at."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded.

    name: what clients call it. load: loads it, in a thread. size: bytes of memory that it then takes. aliases: other
    names that clients may use.
    """

    name: str
    load: Callable[[], LLM]
    size: int = 0
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSet:
    """Several models for one server, the first of which is meant where a request names none.

    limits: what one client may ask for, of whichever of them. memory: bytes that those which are loaded may take
    together; None: there is no bound. idle_unload: seconds without a request after which one is unloaded, if at all.
    ConfigError names what cannot be.
    """

    sources: tuple[ModelSource, ...]
    limits: Limits = field(default_factory=Limits)
    memory: int | None = None
    idle_unload: float | None = None

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
    """A model: what is known of it, and who uses it. used: when it last was, by time.monotonic. failed: when it could
    not be loaded, and why. context: tokens that it holds, sees: whether it reads pictures, once that is known."""

    source: ModelSource
    served: ServedModel | None = None
    loading: asyncio.Task[ServedModel] | None = None
    users: int = 0
    used: float = 0.0
    failed: tuple[float, str] | None = None
    context: int | None = None
    sees: bool | None = None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """What clients are told of a model. context: tokens that it holds, sees: whether it reads pictures; None if it was
    never loaded."""

    name: str
    created: int
    context: int | None
    sees: bool | None
    loaded: bool


class ModelRegistry:
    """The models of one server. `drain`, `stop` and `health` are those of all their bridges."""

    def __init__(self, models: ModelSet, serve: Callable[[LLM, str], ServedModel], intake: BodyReader,
                 records: ActiveRequests) -> None:
        """serve: what makes a loaded model one that is served, under a name."""
        self.models, self._serve, self._intake, self._records = models, serve, intake, records
        self._entries = {source.name: _RegisteredModel(source) for source in models.sources}
        self._thread = ThreadPoolExecutor(1, "deltic-models")
        self.pictures = PictureDecoder(models.limits)
        # its threads wait for the processes that read documents
        self._readers = FairExecutor(_READ_AT_ONCE, "deltic-documents", processor=time.monotonic)
        self._closing: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None
        self._draining = self._kept = False

    @property
    def limits(self) -> Limits:
        """What one client may ask for."""
        return self.models.limits

    @property
    def loaded(self) -> list[ServedModel]:
        """Those that are loaded now."""
        return [entry.served for entry in self._entries.values() if entry.served]

    def keep(self, llm: LLM) -> ServedModel:
        """Serve the only model from the beginning to the end, as it belongs to the process."""
        entry, = self._entries.values()
        entry.served, self._kept = self._serve(llm, entry.source.name), True
        entry.context, entry.sees = llm.engine.max_context, llm.runtime.vision is not None
        return entry.served

    def entries(self) -> list[ModelEntry]:
        """All models."""
        return [ModelEntry(entry.source.name, entry.created, entry.context, entry.sees, entry.served is not None)
                for entry in self._entries.values()]

    def entry(self, model: str) -> ModelEntry:
        """One of them; a problem with status 404 if there is none of this name."""
        name = self._named(model).source.name
        return next(entry for entry in self.entries() if entry.name == name)

    async def read(self, request: Request, schema: type[Body], prepare: Callable[[ServedModel, Body], Prepared],
                   answers: bool = True) -> tuple[ServedModel, Body, Prepared]:
        """The body, the model that it asks for, and what `prepare` makes of both, in a thread. BusyError at once if no
        answer may wait any more; otherwise as `BodyReader.read`. The model is there until the request is over.

        answers: whether there will be some; who counts tokens takes nobody's place, waits for none, and may have
        prompts of any length.
        """
        record = record_of(request)
        if answers:
            self._records.take(record, 1)
            if len(self._entries) == 1:
                for served in self.loaded:
                    served.bridge.check_room(record.client_id)
        return await self._intake.read(request, schema, partial(self._chosen, record, answers), prepare,
                                       partial(self._seeing, record))

    async def served(self, request: Request, model: str | None) -> ServedModel:
        """The model of this name, for a request without a body. It is there until the request is over."""
        return await self._chosen(record_of(request), False, SimpleNamespace(model=model))

    async def _seeing(self, record: RequestRecord, served: ServedModel, missing: UnreadImages) -> ServedModel:
        """The model with the pictures of a request."""
        try:
            found: Shown | RequestError = await self.pictures.read(record.client_id, missing.reading)
        except RequestError as error:
            found = error  # raised where it can be named as the client's wire names it
        return replace(served, pictures=found)

    async def _chosen(self, record: RequestRecord, answers: bool, body: object) -> ServedModel:
        entry = self._named(getattr(body, "model", None))
        record.model, record.stream = entry.source.name, bool(getattr(body, "stream", False))
        entry.users += 1
        record.release = partial(self._release, entry)
        served = entry.served or await self._load(entry)
        if record.answers and len(self._entries) > 1:
            served.bridge.check_room(record.client_id)
        known = partial(served.documents.known, record.owner)
        served = replace(served, owner=record.owner, bounded=answers, text_of=known)
        return await self._with_documents(record, served, body) if getattr(body, "may_have_files", False) else served

    async def _with_documents(self, record: RequestRecord, served: ServedModel, body: object) -> ServedModel:
        """The model with the texts of the documents of a request. They are read in threads of their own, in turns by
        client: a request with documents waits for others with documents at most, and they end when its client leaves.
        """
        contents = [getattr(body, name, None) for name in ("messages", "input")]
        found = await record.work(lambda: list(documents_in(contents)))
        if not found:
            return served
        process = reader_process()
        read = partial(served.documents.read, record.owner, found, served.limits, process)
        try:
            texts = await self._readers.run(record.client_id, read)
        except asyncio.CancelledError:
            process.stop()
            raise
        return replace(served, text_of=lambda name: texts.get(name) or served.text_of(name))

    def start(self) -> None:
        """Take requests."""
        for served in self.loaded:
            served.bridge.start()
        if self.models.idle_unload is not None:
            self._watching = asyncio.create_task(self._watch(self.models.idle_unload))

    def health(self) -> Health:
        """How the engines that are loaded are now; cheap."""
        found = [(served.name, served.bridge.health()) for served in self.loaded]
        faults = [now.fault if len(self._entries) == 1 else f"{name}: {now.fault}" for name, now in found if now.fault]
        return Health("; ".join(faults) or None, self._draining, sum(now.requests for _, now in found))

    async def drain(self, grace: float) -> None:
        """Take no more requests, give the running ones `grace` seconds, then end them."""
        self._draining = True
        await asyncio.gather(*(served.bridge.drain(grace) for served in self.loaded))

    async def stop(self) -> None:
        """End what runs and what is being loaded, and close all models but one that is kept."""
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
        self._readers.shutdown(False)
        self._thread.shutdown()

    def _named(self, model: str | None) -> _RegisteredModel:
        entries = [*self._entries.values()]
        for name in (model, (model or "").removesuffix(":latest")):  # as Ollama's clients write it
            for entry in entries:
                if name == entry.source.name or name in entry.source.aliases:
                    return entry
        if model in (None, "default"):
            return entries[0]
        names = ", ".join(map(repr, self._entries))
        raise ProblemError(Problem(404, f"the model {show(model)} does not exist: this server has {names}", "model",
                                   "model_not_found"))

    def _release(self, entry: _RegisteredModel) -> None:
        entry.users, entry.used = entry.users - 1, time.monotonic()

    async def _load(self, entry: _RegisteredModel) -> ServedModel:
        """Load it, or wait until it is; UnavailableError if it cannot be loaded, BusyError if there is no room yet."""
        if entry.loading is None:
            self._check(entry)
            self._make_room(entry)
            entry.loading = asyncio.create_task(self._bring(entry, tuple(self._closing)))
            entry.loading.add_done_callback(_note)
        return await asyncio.shield(entry.loading)  # whoever else waits for it does so if this client goes

    def _check(self, entry: _RegisteredModel) -> None:
        if self._draining:
            raise BusyError("the server is shutting down: try again later, or elsewhere")
        if entry.failed and time.monotonic() - entry.failed[0] < _FORGIVEN:
            raise UnavailableError(entry.failed[1])

    def _make_room(self, entry: _RegisteredModel) -> None:
        """Unload models that nobody uses, as many as are needed, those that were used last at the end."""
        if self.models.memory is None:
            return
        there = [other for other in self._entries.values() if other.served or other.loading]
        lacking = sum(other.source.size for other in there) + entry.source.size - self.models.memory
        going: list[_RegisteredModel] = []
        for other in sorted(there, key=lambda other: other.used):
            if lacking > 0 and other.served and not other.users:
                lacking -= other.source.size
                going.append(other)
        if lacking > 0:
            raise BusyError(f"the model {show(entry.source.name)} takes about {_mib(entry.source.size)}, for which the "
                            f"models that run leave no room in {_mib(self.models.memory)} (models_memory): try again "
                            "later")
        for other in going:
            self._unload(other)

    async def _bring(self, entry: _RegisteredModel, closing: Sequence[Awaitable[None]]) -> ServedModel:
        name, began = entry.source.name, time.monotonic()
        try:
            await asyncio.gather(*closing)
            llm = await self._threaded(entry.source.load)
            entry.served, entry.failed = self._serve(llm, name), None
            entry.context, entry.sees = llm.engine.max_context, llm.runtime.vision is not None
            entry.served.bridge.start()
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
            await entry.served.bridge.drain(0)
        return entry.served

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
        await self._threaded(gc.collect)  # its weights are in cycles
        log.info("the model %s is unloaded", show(name))

    async def _threaded(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _watch(self, idle: float) -> None:
        """Unload what nobody has used for so long."""
        while True:
            await asyncio.sleep(idle / _LOOKS)
            for entry in self._entries.values():
                if entry.served and not entry.users and time.monotonic() - entry.used > idle:
                    self._unload(entry)


def only(llm: LLM, name: str, aliases: tuple[str, ...]) -> ModelSet:
    """One model that is loaded already."""
    return ModelSet((ModelSource(name, lambda: llm, aliases=aliases),), llm.runtime.options.limits)


def _note(task: asyncio.Task[ServedModel]) -> None:
    """Nobody may be left to hear of the error, which is in the log."""
    if not task.cancelled():
        task.exception()


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


