"""Disaggregated prefill without Ray: a decode and a prefill replica that share a cache directory in one process."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cluster import ask, chat, head, parsed, replica
from test_server_harness import each, wait_until

from deltic import LLM
from deltic.cli.cluster import plan_of
from deltic.cli.parser import UsageError
from deltic.cluster import prefill
from deltic.cluster.application import check_identities
from deltic.cluster.boundaries import boundaries_of
from deltic.cluster.prefill import PrefillClient, directory_of, disk_tier
from deltic.cluster.replica import LoadMeter, OpenedReplica, Replica
from deltic.errors import BusyError, ConfigError, RequestError, UnavailableError
from deltic.params import Embed, EngineRequest, Prompt, SamplingParams
from deltic.server.app import create_app

TEXT = "the quick brown fox jumps over the lazy dog and runs on through the field. "


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the embedded model take no time."""
    monkeypatch.setattr(prefill, "LEAST_SECONDS", 0.0)


class Call:
    """A streaming call, which runs by itself as Ray's do."""

    def __init__(self, parts: AsyncIterator[Any]) -> None:
        self.cancelled = False
        self._parts: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(parts))

    async def _run(self, parts: AsyncIterator[Any]) -> None:
        try:
            async for part in parts:
                self._parts.put_nowait(part)
            self._parts.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._parts.put_nowait(error)

    def cancel(self) -> None:
        self.cancelled = True
        self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            part = await self._parts.get()
            if isinstance(part, StopAsyncIteration):
                return
            if isinstance(part, Exception):
                raise part
            yield pickle.loads(pickle.dumps(part))


class Handle:
    """The handle of prefill replicas. fault: makes what a call yields in place of the replica."""

    def __init__(self, made: Replica | None, fault: Callable[..., AsyncIterator[Any]] | None = None) -> None:
        self.made, self.fault, self.calls = made, fault, list[Call]()

    def options(self, **given: Any) -> Handle:
        assert given == {"stream": True, "method_name": "prefill"}
        return self

    def remote(self, *given: Any) -> Call:
        order, boundaries = pickle.loads(pickle.dumps(given))
        target = self.fault or (self.made.prefill if self.made else None)
        assert target
        self.calls.append(Call(target(order, boundaries)))
        return self.calls[-1]


def opened(directory: Path | None, **options: Any) -> OpenedReplica:
    given = {"max_context": 4096, "memory": "64MiB", "threads": 1, "dtype": "float32", **options}
    llm = LLM(cache_dir=directory, **given)
    return OpenedReplica(create_app(llm), llm.worker, "tiny", llm.close)


def engine(made: Replica) -> Any:
    assert made._opened.worker
    return made._opened.worker.engine


def client_of(made: Replica) -> PrefillClient:
    found = made._opened.app.state.engine.remote
    assert isinstance(found, PrefillClient)
    return found


@asynccontextmanager
async def pair(directory: Path, other: Path | None = None, fault: Any = None, **options: Any
               ) -> AsyncIterator[tuple[Replica, Replica, Handle]]:
    """A decode and a prefill replica. other: the directory of the latter."""
    async with replica(opened(other or directory, **options)) as far:
        handle = Handle(far, fault)
        async with replica(opened(directory, **options), handle) as near:
            yield near, far, handle


def question(number: int, words: int = 30, **more: Any) -> dict[str, Any]:
    return chat("be brief. " * 10, f"{number}: " + TEXT * words + "what runs?", logprobs=True, **more)


def said(raw: bytes) -> list[Any]:
    """Returns the texts and log probabilities of all choices."""
    found = json.loads(raw)
    assert "choices" in found, found
    return [(choice["message"]["content"], choice["logprobs"], choice["finish_reason"]) for choice in found["choices"]]


async def answers(made: Replica, bodies: list[dict[str, Any]], path: str = "/v1/chat/completions") -> list[Any]:
    found = await asyncio.gather(*(ask(made, path, body) for body in bodies))
    return [said(raw) for _, _, raw in found]


def test_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    """Greedy and seeded, several choices, next turns, salts, at once and one after the other; bit by bit."""
    def bodies() -> Iterator[dict[str, Any]]:
        for number in range(6):
            drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
            yield question(number, 25 + number, n=1 + (number == 3), cache_salt="s" * (1 + number % 3), **drawn)

    async def conversations(made: Replica) -> list[Any]:
        given = [*bodies()]
        found = await answers(made, given)
        following = [{**body, "messages": [*body["messages"], {"role": "assistant", "content": answer[0][0]},
                                           {"role": "user", "content": f"and {TEXT * 20}?"}]}
                     for body, answer in zip(given, found, strict=True)]
        for body in following:
            found += await answers(made, [body])
        return found

    async def run() -> None:
        async with replica(opened(None)) as alone:
            expected = await conversations(alone)
            computed = engine(alone).stats.prompt_tokens
        async with pair(tmp_path) as (near, far, handle):
            assert await conversations(near) == expected
            outcomes = client_of(near).outcomes
            assert outcomes["done"] == len(handle.calls) == 12, outcomes
            assert engine(near).stats.prompt_tokens < 12 * 32, "the decode replica computes what lies behind the state"
            assert engine(far).stats.prompt_tokens <= computed + 12 * 16, "what is known is not computed again"
            assert engine(far).stats.generated_tokens == 0
            _, _, page = await ask(near, "/metrics", b"", "GET")
            assert b'deltic_remote_prefills_total{model="tiny",outcome="done"} 12' in page

    asyncio.run(run())


def test_prompts_that_are_short_or_known_stay(tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (near, _, handle):
            await answers(near, [chat("be brief", "hello", logprobs=True)])
            assert not handle.calls
            body = question(1)
            first = await answers(near, [body])
            assert len(handle.calls) == 1
            assert await answers(near, [body]) == first
            messages = [*body["messages"], {"role": "assistant", "content": first[0][0][0]},
                        {"role": "user", "content": "why?"}]
            await answers(near, [{**body, "messages": messages}])
            vectors = await ask(near, "/v1/completions", {"prompt": TEXT * 30, "max_tokens": 2, "echo": True,
                                                          "logprobs": 1})
            assert vectors[0] == 200
            assert len(handle.calls) == 1

    asyncio.run(run())


def test_a_prompt_that_is_computed_soon_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (near, _, handle):
            await answers(near, [chat("be brief", "a question of some words " * 5, logprobs=True)])
            monkeypatch.setattr(prefill, "LEAST_SECONDS", 1000.0)
            await answers(near, [question(1)])
            assert not handle.calls

    asyncio.run(run())


async def lost(*_: Any) -> AsyncIterator[Any]:
    yield ()
    raise RuntimeError("the actor died")


async def full(*_: Any) -> AsyncIterator[Any]:
    raise BusyError("7.0 seconds of work wait")
    yield ()


async def smaller(*_: Any) -> AsyncIterator[Any]:
    yield ()
    raise RequestError("the prompt is too long", "prompt")


async def silent(*_: Any) -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield ()


async def forgetful(*_: Any) -> AsyncIterator[Any]:
    yield ()
    yield ()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The answers of one engine to four questions, one after the other."""
    async def run() -> list[Any]:
        async with replica(opened(None)) as alone:
            return [await answers(alone, [question(number)]) for number in range(4)]

    return asyncio.run(run())


@each(("fault", "outcome", "lines", "calls"), [(lost, "failed", 1, 1), (full, "busy", 0, 3), (smaller, "busy", 0, 3),
                                               (silent, "failed", 1, 1), (forgetful, "failed", 1, 1)])
def test_what_no_prefill_replica_computes_is_computed_here(fault: Any, outcome: str, lines: int, calls: int,
                                                           expected: list[Any], tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, and no further tries for a moment."""
    async def run() -> None:
        async with pair(tmp_path / fault.__name__, fault=fault) as (near, far, handle):
            for number in range(3):
                assert await answers(near, [question(number)]) == expected[number]
            assert len(handle.calls) == calls and client_of(near).outcomes[outcome] == calls
            assert sum("prompts are computed here" in line for line in caplog.messages) == lines
            assert engine(far).stats.prompt_tokens == 0
            assert handle.calls[0].cancelled == (fault is silent)
            handle.fault, client_of(near)._rest_until = None, 0.0
            assert await answers(near, [question(3)]) == expected[3]
            assert client_of(near).outcomes["done"] == 1

    monkeypatch.setattr(prefill, "_ACCEPT_SECONDS", 0.2)
    monkeypatch.setattr(prefill, "_REST_SECONDS", 1000.0)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "deltic"):
        asyncio.run(run())


def test_a_directory_that_is_not_shared_costs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with pair(tmp_path / "one", tmp_path / "two") as (near, far, _):
            for number in range(2):
                await answers(near, [question(number)])
            assert client_of(near).outcomes["failed"] == 1 and engine(far).stats.prompt_tokens == 0
        async with replica(opened(None)) as far, replica(opened(None), Handle(far)) as near:
            assert near._opened.app.state.engine.remote is None
            await answers(near, [question(1)])

    with caplog.at_level(logging.WARNING, "deltic"):
        asyncio.run(run())
    assert sum("not the same usable directory" in line for line in caplog.messages) == 2


def test_a_prefill_replica_with_much_to_do_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (near, far, _):
            await answers(near, [chat("be brief", "a question of some words " * 5, logprobs=True)])
            monkeypatch.setattr(LoadMeter, "queue", lambda meter, requests: 100.0)
            await answers(near, [question(1)])
            assert client_of(near).outcomes["busy"] == 1 and engine(far).stats.prompt_tokens == 0

    asyncio.run(run())


async def eventually(holds: Callable[[], Any]) -> None:
    for _ in range(300):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it does not come to hold")


def test_a_client_that_goes_ends_the_prefill(tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (near, far, handle):
            body = {**question(1, 60), "stream": True}
            held = far._opened.worker
            assert held
            with held.hold():  # the prefill replica does nothing meanwhile
                calls = near.request(head("/v1/chat/completions"), json.dumps(body).encode(), boundaries_of(body))
                await anext(calls)  # the response begins before the prompt is computed
                await eventually(lambda: handle.calls)
                await calls.aclose()  # type: ignore[attr-defined]
            await eventually(lambda: handle.calls[0].cancelled)
            await eventually(lambda: client_of(near).outcomes["cancelled"])
            await eventually(lambda: not engine(near).has_work and not engine(far).has_work)
            await eventually(lambda: not far._opened.app.state.engine.handles)
            await eventually(lambda: not engine(near).scheduler.paused)
            assert not near._opened.app.state.engine.handles
            assert engine(near).stats.generated_tokens == 0
            assert (await answers(near, [question(1, 60)]))[0]

    asyncio.run(run())


def test_a_cancelled_request_does_not_wait_for_its_prefill(tmp_path: Path) -> None:
    """As by DELETE /v1/requests/ID."""
    async def run() -> None:
        async with pair(tmp_path, fault=silent) as (near, _, handle):
            task = asyncio.create_task(ask(near, "/v1/chat/completions", question(1)))
            await eventually(lambda: handle.calls)
            listed = json.loads((await ask(near, "/v1/requests", b"", "GET"))[2])["data"]
            assert listed[0]["status"] == "waiting"
            assert (await ask(near, f"/v1/requests/{listed[0]['id']}", b"", "DELETE"))[0] == 200
            _, _, raw = await task
            assert json.loads(raw)["choices"][0]["finish_reason"] == "length"
            await eventually(lambda: handle.calls[0].cancelled)

    asyncio.run(run())


def test_hostile_requests_among_ordinary_ones(tmp_path: Path, expected: list[Any]) -> None:
    """A prompt as long as the context, many prompts in one body, and clients that leave cost the others nothing."""
    async def run() -> None:
        async with pair(tmp_path) as (near, far, handle):
            async def leaves(number: int) -> None:
                body = {**question(number, 50), "stream": True}
                calls = near.request(head("/v1/chat/completions"), json.dumps(body).encode(), boundaries_of(body))
                await anext(calls)
                await asyncio.sleep(0.01 * (number % 5))
                await calls.aclose()  # type: ignore[attr-defined]

            whole = {"prompt": [7] * 4090, "max_tokens": 6, "temperature": 0}
            many = {"prompt": [[number] * 300 for number in range(3, 23)], "max_tokens": 1, "n": 2}
            too_long = {"prompt": [7] * 5000, "max_tokens": 1}
            hostile = [ask(near, "/v1/completions", whole), ask(near, "/v1/completions", many),
                       ask(near, "/v1/completions", too_long)]
            found = await asyncio.gather(answers(near, [question(number) for number in range(4)]), *hostile,
                                         *(leaves(number) for number in range(100, 110)))
            assert found[0] == [answer for own in expected for answer in own]
            assert [status for status, _, _ in found[1:4]] == [200, 200, 400]
            assert len(json.loads(found[2][2])["choices"]) == 40
            await eventually(lambda: not engine(near).has_work and not engine(far).has_work)
            await eventually(lambda: not near._opened.app.state.engine.handles)
            await eventually(lambda: not engine(near).scheduler.paused)
            assert not client_of(near).outcomes["failed"]
            assert not far._opened.app.state.engine.handles and len(handle.calls) <= 4 + 1 + 20 + 10
            for made in (near, far):
                assert made._opened.worker
                made._opened.worker.call(lambda engine: engine.check())

    asyncio.run(run())


def order_of(made: Replica, prompt: tuple[int, ...] | Prompt, output: Any = SamplingParams()) -> Any:
    """Returns what the replica would hand over for a request."""
    client_of(made)._rest_until = 0.0
    worker, request = made._opened.worker, EngineRequest("a", prompt, output)
    assert worker
    tier = disk_tier(engine(made).runtime.cache)
    wait_until(lambda: tier is None or tier.store.ready)  # before that, nothing is handed over
    return worker.execute(lambda _: client_of(made).order(request))


def test_an_order_for_another_directory_computes_nothing(tmp_path: Path) -> None:
    """The prefill replica looks by itself, whatever the other one believes."""
    async def run() -> None:
        async with pair(tmp_path / "one", tmp_path / "two") as (near, far, _):
            order = await asyncio.to_thread(order_of, near, (5,) * 1000)
            for directory in (0, directory_of(disk_tier(engine(near).runtime.cache))):
                with pytest.raises(ConfigError, match="not the same usable directory"):
                    await anext(far.prefill(replace(order, directory=directory), boundaries_of({"prompt": "x"})))
            assert engine(far).stats.prompt_tokens == 0

    asyncio.run(run())


def test_an_engine_of_other_bits_computes_nothing(tmp_path: Path) -> None:
    """Another dtype, or another kind of processor."""
    async def run() -> None:
        async with replica(opened(tmp_path, dtype="bfloat16")) as far, replica(opened(tmp_path), Handle(far)) as near:
            await answers(near, [question(1)])
            assert client_of(near).outcomes["failed"] == 1 and engine(far).stats.prompt_tokens == 0
            with pytest.raises(ConfigError, match="other bits than the decode replicas"):
                order = replace(await asyncio.to_thread(order_of, near, (5,) * 1000), directory=directory_of(
                    disk_tier(engine(near).runtime.cache)))
                await anext(far.prefill(order, boundaries_of({"prompt": "x"})))

    asyncio.run(run())


def test_what_another_replica_could_not_compute_stays(tmp_path: Path) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (near, _, _):
            ids = (5,) * 1000
            assert (await asyncio.to_thread(order_of, near, ids)).prompt == array("q", ids)
            assert await asyncio.to_thread(order_of, near, Prompt(ids))
            keys = (*ids[:500], -1, -2, *ids[502:])
            for prompt, output in ((Prompt(ids, keys), SamplingParams()), (ids, Embed()),
                                   (ids, SamplingParams(prompt_logprobs=1))):
                assert await asyncio.to_thread(order_of, near, prompt, output) is None

    asyncio.run(run())


# At the start


def test_directories_are_compared_at_the_start(tmp_path: Path) -> None:
    node = {"identity": "a", "node": "10.0.0.1"}
    check_identities([{**node, "directory": "1"}, {**node, "directory": ""}])
    check_identities([{**node, "directory": "1"}, {**node, "directory": "1"}], shared=True)
    for other in ("2", ""):
        with pytest.raises(UnavailableError, match=r"not the same usable directory.*such as one below /dev/shm"):
            check_identities([{**node, "directory": "1"}, {**node, "directory": other}], shared=True)


def test_replicas_and_prefill_replicas_share_the_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deltic.cli.cluster.available_cores", lambda: 8)
    plan = plan_of(parsed("--prefill-replicas", "2", "--cache-dir", str(tmp_path)), {}, ("*",), spread=True)
    assert (plan.replicas, plan.prefill, plan.cpus, plan.options[0].engine_threads) == (2, 2, 2, 2)
    with pytest.raises(UsageError, match=r"directory that all replicas share: give --cache-dir DIR"):
        plan_of(parsed("--prefill-replicas", "2"), {}, ("*",))
