"""A replica: one engine behind the application of `deltic serve`, called through Ray Serve instead of a socket.

    front (any process)                                    replica
    head, body, boundaries   -- a streaming call -->       the same ASGI application as on one machine
    ASGI messages            <-- batches -----------
    cancel                   -- the client is gone -->     http.disconnect: the engine aborts within a step

The front's router gets a report of the states that are reachable here, and of the queue, every second.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from starlette.applications import Starlette
from starlette.types import Message, Scope

from deltic.cache.offload.types import StoredItem
from deltic.cluster.boundaries import Boundaries, response_key
from deltic.cluster.identity import NOT_SHARED
from deltic.cluster.prefill import PrefillClient, PrefillOrder, directory_of, disk_tier, prefilled
from deltic.cluster.reachable import LoadReport, ReachableReport, ReachableStates
from deltic.engine.engine import Engine
from deltic.engine.worker import Worker
from deltic.errors import UnavailableError
from deltic.server.async_engine import AsyncEngine
from deltic.server.records import RequestRecord

log = logging.getLogger("deltic")

STORED_PATHS: Final = "/v1/responses", "/v1/chat/completions"
"""Paths with responses that can be continued by id."""
_RESPONSE_ID: Final = re.compile(rb'"id": ?"((?:resp_|chatcmpl-)[^"]{1,200})"')
_RECENT: Final = 0.2
"""Weight of the newest value in a smoothed figure."""
_TRIES, _PAUSE = 20, 0.02
"""A conversation's first request here waits for a scan of the disk: number of checks, and seconds between them."""
_LEAST: Final = 0.1
"""Minimum share of the time in steps that counts for answers. Prompt tokens are charged with their whole steps."""
_RUNNING: Final = 0.25
"""Fraction of a running answer that counts as queue: half of it is over, and prompts run between its tokens."""


@dataclass(frozen=True, slots=True)
class OpenedReplica:
    """The parts of a loaded replica. app: from `create_app`. worker: the engine's worker; None for encoders alone.
    identity: equal for replicas with equal weights. close: frees the model."""

    app: Starlette
    worker: Worker | None
    identity: str
    close: Callable[[], None]


@dataclass(slots=True)
class LoadMeter:
    """Measures the speed and load of an engine, from its own figures.

    token: seconds per prompt token. tokens: prompt tokens per character of a request. answer: seconds per answer.
    """

    engine: Engine
    token: float = 0.0
    tokens: float = 0.0
    answer: float = 0.0
    _before: tuple[float, int, int] = (0.0, 0, 0)

    def add(self, prompt: int, boundaries: Boundaries) -> None:
        """Records the length of a request in tokens and characters."""
        if boundaries.size:
            self.tokens = _smooth(self.tokens, prompt / boundaries.size)

    def read(self, requests: AsyncEngine) -> LoadReport:
        """Returns the current load. For the event loop's thread."""
        stats, times = self.engine.stats, self.engine.scheduler.times
        now = stats.busy_seconds, stats.prompt_tokens, stats.finished
        busy, prompts, answers = (new - old for new, old in zip(now, self._before, strict=True))
        if times and times.by_token:
            self.token = median(tuple(times.by_token))
        elif prompts:
            self.token = _smooth(self.token, busy / prompts)
        if answers:
            self.answer = _smooth(self.answer, max(busy - prompts * self.token, busy * _LEAST) / answers)
            self._before = now
        return LoadReport(self.queue(requests), self.token * self.tokens, self.answer)

    def queue(self, requests: AsyncEngine) -> float:
        """Returns the seconds of waiting work. For the event loop's thread."""
        waiting, answers = 0, 0.0
        for handle in requests.handles:
            begun = handle.first_token is not None
            answers += handle.answers * (_RUNNING if begun else 1.0)
            if not begun and not handle.remote:
                waiting += handle.prompt_tokens - sum(part.read for part in requests.progress(handle))
        return max(waiting, 0) * self.token + answers * self.answer


def _smooth(known: float, new: float) -> float:
    return known + _RECENT * (new - known) if known else new


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way through the application."""

    messages: asyncio.Queue[Message | None] = field(default_factory=asyncio.Queue)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    body: bytes | None = None
    response: bytes = b""
    """The beginning of the response's body."""

    async def receive(self) -> Message:
        body, self.body = self.body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self.response:
            self.response = message.get("body", b"")[:4096]
        self.messages.put_nowait(message)

    async def batches(self) -> AsyncIterator[list[Message]]:
        """Yields lists of the messages that have arrived since the last one."""
        ended = False
        while not ended:
            found = [await self.messages.get()]
            while not self.messages.empty():
                found.append(self.messages.get_nowait())
            ended = found[-1] is None
            yield [message for message in found if message is not None]


class Replica:
    """The class that Serve deploys: one replica."""

    async def __init__(self, opener: Callable[[Any], OpenedReplica], options: Any,  # type: ignore[misc]
                       prefill: Any = None) -> None:
        """opener: loads the model that the options name. prefill: handle of the replicas that compute long prompts for
        this one. Serve awaits this method."""
        self._opened = await asyncio.to_thread(opener, options)
        app, worker = self._opened.app, self._opened.worker
        self._states: ReachableStates | None = None
        if worker:
            cache = worker.engine.runtime.cache
            self._states = ReachableStates(cache.tree, cache.tiers)
            self._meter = LoadMeter(worker.engine)
            app.state.records.observe = self._observe
            tier = disk_tier(cache)
            if prefill and tier:
                calls = prefill.options(stream=True, method_name="prefill")
                app.state.engine.remote = PrefillClient(calls, worker, tier)
            elif prefill:
                log.warning("%s", NOT_SHARED)
        lifespan = app.router.lifespan_context(app)
        await lifespan.__aenter__()
        self._lifespan: AbstractAsyncContextManager[Any] | None = lifespan

    async def request(self, head: Mapping[str, Any], body: bytes, boundaries: Boundaries
                      ) -> AsyncIterator[list[Message]]:
        """Yields the ASGI messages of the response. head: fields of the ASGI scope."""
        await self._refresh(boundaries)
        call = _Call(body=body)
        state = {"boundaries": (boundaries, call)}
        scope: Scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": "",
                        **head, "state": state, "extensions": {}}
        task = asyncio.create_task(self._run(scope, call))
        try:
            async for messages in call.batches():
                yield messages
            await task
        finally:
            call.gone.set()
            with suppress(Exception):
                await asyncio.shield(task)

    async def _refresh(self, boundaries: Boundaries) -> None:
        """Scans a shared disk for states if a conversation comes from another replica, which may be gone."""
        worker, states = self._opened.worker, self._states
        if worker is None or states is None or states.knows(boundaries):
            return
        for _ in range(_TRIES):
            if not await asyncio.to_thread(worker.call, lambda _: states.refresh()):
                return
            await asyncio.sleep(_PAUSE)

    async def _run(self, scope: Scope, call: _Call) -> None:
        try:
            await self._opened.app(scope, call.receive, call.send)
        finally:
            call.messages.put_nowait(None)

    def _observe(self, record: RequestRecord) -> None:
        """Records at the end of a request the states from which others can resume."""
        run, sent, worker, states = record.run, record.boundaries, self._opened.worker, self._states
        if run is None or sent is None or worker is None or states is None:
            return
        boundaries, call = sent
        request, answer = next(run.sequences())
        prompt = len(request.prompt)
        self._meter.add(prompt, boundaries)
        found = _RESPONSE_ID.search(call.response) if record.path in STORED_PATHS else None

        def learn() -> None:
            tokens = worker.engine.keys_of(request)
            tokens.extend(answer)
            states.learn(boundaries, tokens, prompt, min(request.stable_prefixes, default=0))
            if found:
                states.learn_end(response_key(found[1].decode("latin-1")), boundaries)

        worker.ask(learn)

    async def prefill(self, order: PrefillOrder, boundaries: Boundaries) -> AsyncIterator[Sequence[StoredItem]]:
        """Computes a prompt for a decode replica. Yields the results of `prefilled`."""
        requests, worker, states = self._opened.app.state.engine, self._opened.worker, self._states
        assert worker and states

        def learn(keys: array[int]) -> None:
            states.learn(boundaries, keys, len(keys))

        self._meter.add(len(order.prompt), boundaries)
        async for items in prefilled(order, requests, worker, self._meter.queue(requests), learn):
            yield items

    async def whole(self, head: Mapping[str, Any]) -> tuple[str, int, bytes]:
        """Handles a request without a body. Returns this replica's name, and the status and body of the response."""
        from ray import serve

        messages = [each async for batch in self.request(head, b"", Boundaries()) for each in batch]
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return serve.get_replica_context().replica_id.unique_id, messages[0]["status"], body

    # methods that Serve calls

    async def record_routing_stats(self) -> dict[str, Any]:
        """Returns the report for routers, in plain types: Serve's controller, which forwards it, may lack deltic."""
        if self._states is None:
            return {}
        load = self._meter.read(self._opened.app.state.engine)
        return packed(await asyncio.to_thread(self._states.report, load, self._meter.token))

    async def check_health(self) -> None:
        """Raises an exception if the engine makes no progress. Serve then replaces the replica."""
        engine = self._opened.app.state.engine if self._opened.worker else None
        if engine and (fault := engine.health().fault):
            raise UnavailableError(fault)

    def identity(self) -> dict[str, str]:
        """Returns the values that must be equal for all replicas, and this one's node. directory: the cache directory,
        through which replicas may hand over prompts."""
        worker = self._opened.worker
        directory = directory_of(disk_tier(worker.engine.runtime.cache)) if worker else 0
        return {"identity": self._opened.identity, "node": _node(), "directory": str(directory or "")}

    def __del__(self) -> Awaitable[None] | None:
        """Serve awaits the result after all requests have ended. Python's own later call does nothing."""
        lifespan, self._lifespan = getattr(self, "_lifespan", None), None
        return self._end(lifespan) if lifespan else None

    async def _end(self, lifespan: AbstractAsyncContextManager[Any]) -> None:
        await lifespan.__aexit__(None, None, None)
        await asyncio.to_thread(self._opened.close)


def packed(report: ReachableReport) -> dict[str, Any]:
    load = report.load
    return {"load": (load.queue, load.character, load.answer), "begun": report.begun, "changes": report.changes,
            "keys": report.keys.tobytes(), "seconds": report.seconds.tobytes(), "time": time.time()}


def unpacked(stats: Mapping[str, Any]) -> ReachableReport:
    """Returns the report from the result of `packed`."""
    keys, seconds = array("Q"), array("f")
    keys.frombytes(stats["keys"])
    seconds.frombytes(stats["seconds"])
    return ReachableReport(LoadReport(*stats["load"]), stats["begun"], stats["changes"], keys, seconds)


def _node() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


