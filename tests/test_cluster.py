"""Replicas without Ray: the application behind a streaming call, what a replica learns and reports, and errors at the
start."""

from __future__ import annotations

import argparse
import asyncio
import builtins
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_server_harness import each, tiny

from deltic import LLM
from deltic.cli import command_parser, main
from deltic.cli.cluster import plan_of
from deltic.cluster.application import check_identities, check_ray
from deltic.cluster.boundaries import Boundaries, boundaries_of, response_key
from deltic.cluster.gather import first_found, merged_lists, merged_metrics
from deltic.cluster.identity import files_identity
from deltic.cluster.replica import OpenedReplica, Replica, packed, unpacked
from deltic.cluster.router import StateRouter
from deltic.errors import ConfigError, UnavailableError
from deltic.server.app import create_app

Answer = tuple[int, dict[str, str], bytes]


@asynccontextmanager
async def replica(opened: OpenedReplica | None = None, prefill: Any = None) -> AsyncIterator[Replica]:
    """A replica of the embedded model, made and ended as Serve does."""
    made = object.__new__(Replica)
    opened = opened or OpenedReplica(create_app(tiny()), tiny().worker, "tiny", lambda: None)
    await made.__init__(lambda options: opened, None, prefill)  # type: ignore[misc]
    try:
        yield made
    finally:
        ending = made.__del__()
        assert ending
        await ending


def head(path: str, method: str = "POST") -> dict[str, Any]:
    return {"method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "client": ("10.0.0.9", 7)}


async def ask(made: Replica, path: str, body: Any, method: str = "POST") -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    boundaries = Boundaries() if isinstance(body, bytes) else boundaries_of(body)
    messages = [message async for batch in made.request(head(path, method), raw, boundaries) for message in batch]
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    assert not messages[-1].get("more_body")
    return messages[0]["status"], headers, b"".join(message.get("body", b"") for message in messages[1:])


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system", *("user", "assistant") * len(contents))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents)], "max_tokens": 6,
            "temperature": 0, **more}


async def reported(made: Replica, router: StateRouter) -> Mapping[str, Any]:
    """Lets a router have the replica's report, as Serve's controller passes it on."""
    await asyncio.to_thread(tiny().worker.call, lambda engine: None)  # what was to be learned is learned
    stats = await made.record_routing_stats()
    router.report("a", unpacked(stats))
    return stats


def test_a_replica_answers_as_on_one_machine_and_reports_what_can_be_resumed() -> None:
    async def run() -> None:
        router = StateRouter()
        router.set_replicas(["a", "b"])
        async with replica() as made:
            system, question = "be brief, be kind. " * 20, "hello there, who are you? " * 20
            first = chat(system, question)
            status, headers, raw = await ask(made, "/v1/chat/completions", first)
            assert status == 200 and "x-request-id" in headers
            answer = json.loads(raw)["choices"][0]["message"]["content"]
            stats = await reported(made, router)
            assert {type(value) for value in stats.values()} <= {tuple, int, float, bytes}
            found = unpacked(stats)
            assert found.load.character > 0 and packed(found)["keys"] == stats["keys"]
            second = chat(system, question, answer, "and now?")
            chosen = router.choose(boundaries_of(second))
            assert chosen and chosen.replica.name == "a" and chosen.saved > 0
            usage = json.loads((await ask(made, "/v1/chat/completions", second))[2])["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0
            other = router.choose(boundaries_of(chat(system, "something else")))
            assert other and 0 < other.saved < 0.8 * chosen.saved

    asyncio.run(run())


def test_a_stored_response_leads_to_the_replica_that_has_it() -> None:
    async def run() -> None:
        router = StateRouter()
        router.set_replicas(["b", "a"])
        async with replica() as made:
            body = {"input": "hello my good friend", "max_output_tokens": 5, "temperature": 0}
            _, _, raw = await ask(made, "/v1/responses", body)
            id = json.loads(raw)["id"]
            await reported(made, router)
            assert router.index.get(response_key(id))
            chosen = router.choose(boundaries_of({"input": "more", "previous_response_id": id}))
            assert chosen and chosen.replica.name == "a" and chosen.saved > 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_to_fork_leads_to_the_replica_that_gave_it(stream: bool) -> None:
    async def run() -> None:
        router = StateRouter()
        router.set_replicas(["b", "a"])
        async with replica() as made:
            _, _, raw = await ask(made, "/v1/chat/completions", chat("s", "hello my good friend", stream=stream))
            id = json.loads(raw.split(b"\n")[0].removeprefix(b"data: "))["id"]
            await reported(made, router)
            for fork in (id, {"id": id}):
                body = {**chat("s", "more"), "fork_from": fork}
                chosen = router.choose(boundaries_of(body))
                assert chosen and chosen.replica.name == "a" and chosen.saved > 0
                status, _, raw = await ask(made, "/v1/chat/completions", {**body, "messages": body["messages"][1:]})
                assert status == 200 and json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert not router.choose(boundaries_of({**chat("s", "more"), "fork_from": "chatcmpl-x"})).saved

    asyncio.run(run())


def test_a_cancelled_call_ends_its_answer() -> None:
    async def run() -> None:
        async with replica() as made:
            body = chat("s", "count", max_tokens=1500, stream=True, ignore_eos=True)
            calls = made.request(head("/v1/chat/completions"), json.dumps(body).encode(), boundaries_of(body))
            async for batch in calls:
                if any(b"content" in message.get("body", b"") for message in batch):
                    break
            assert tiny().engine.scheduler.running
            await calls.aclose()  # type: ignore[attr-defined]
            for _ in range(200):
                if not tiny().engine.scheduler.running:
                    break
                await asyncio.sleep(0.02)
            assert not tiny().engine.scheduler.running
            assert not made._opened.app.state.engine.handles

    asyncio.run(run())


def test_hostile_requests_among_ordinary_ones() -> None:
    """Each gets its own answer or error, at once, and teaches the replica nothing wrong."""
    async def run() -> None:
        async with replica() as made:
            ordinary = [ask(made, "/v1/chat/completions", chat("s", f"hello {number}")) for number in range(6)]
            hostile = [ask(made, "/v1/chat/completions", b"[" * 100_000),
                       ask(made, "/v1/chat/completions", b"\xff\xfe"),
                       ask(made, "/v1/chat/completions", chat("s", *["again"] * 3000)),
                       ask(made, "/v1/chat/completions", {"messages": 3}),
                       ask(made, "/v1/messages", b"{"), ask(made, "/v1/nothing", b""),
                       ask(made, "/v1/responses", {"input": "x", "previous_response_id": "resp_unknown"})]
            found = await asyncio.gather(*ordinary, *hostile)
            assert [status for status, _, _ in found] == [200] * 6 + [400, 400, 400, 400, 400, 404, 400]
            assert json.loads(found[10][2])["type"] == "error"
            name, status, body = await whole(made, "/metrics")
            assert status == 200 and b"deltic_requests_running" in body and name == "r1"

    async def whole(made: Replica, path: str) -> tuple[str, int, bytes]:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
        ray, serve = ModuleType("ray"), ModuleType("ray.serve")
        serve.get_replica_context = lambda: context  # type: ignore[attr-defined]
        ray.serve = serve  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ray", ray)
            patch.setitem(sys.modules, "ray.serve", serve)
            return await made.whole(head(path, "GET"))

    asyncio.run(run())


def test_the_load_is_measured() -> None:
    async def run() -> None:
        async with replica() as made:
            await ask(made, "/v1/chat/completions", chat("s", "a rather long question " * 20))
            before = made._meter.read(made._opened.app.state.engine)
            assert before.queue == 0 and before.answer > 0
            body = chat("s", "count", max_tokens=1500, stream=True, ignore_eos=True)
            calls = made.request(head("/v1/chat/completions"), json.dumps(body).encode(), boundaries_of(body))
            await anext(calls)
            assert made._meter.read(made._opened.app.state.engine).queue > 0
            await made.check_health()
            await calls.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


# What concerns all replicas


def test_metrics_of_replicas_become_one_page() -> None:
    page = (b"# HELP deltic_steps_total Steps.\n# TYPE deltic_steps_total counter\n"
            b'deltic_steps_total{model="a b}"} 3\n'
            b"# HELP deltic_up Up.\n# TYPE deltic_up gauge\ndeltic_up 1\n")
    found = merged_metrics({"r1": page, "r2": page}).decode().splitlines()
    assert found == ["# HELP deltic_steps_total Steps.", "# TYPE deltic_steps_total counter",
                     'deltic_steps_total{replica="r1",model="a b}"} 3',
                     'deltic_steps_total{replica="r2",model="a b}"} 3',
                     "# HELP deltic_up Up.", "# TYPE deltic_up gauge", 'deltic_up{replica="r1"} 1',
                     'deltic_up{replica="r2"} 1']
    lists = {"r1": b'{"object":"list","data":[{"id":"1"}]}', "r2": b'{"object":"list","data":[]}'}
    assert json.loads(merged_lists(lists)) == {"object": "list", "data": [{"id": "1"}]}
    assert first_found({"r2": b"x"}) == b"x"


# Errors at the start


def test_replicas_with_different_weights_are_refused() -> None:
    check_identities([{"identity": "a", "node": "10.0.0.1"}, {"identity": "a", "node": "10.0.0.2"}])
    with pytest.raises(UnavailableError, match=r"different weights.*a: 10\.0\.0\.1; b: 10\.0\.0\.2.*copy the same"):
        check_identities([{"identity": "a", "node": "10.0.0.1"}, {"identity": "b", "node": "10.0.0.2"}])


def test_other_files_have_another_identity(tmp_path: Path) -> None:
    model = tmp_path / "one" / "model.safetensors"
    model.parent.mkdir()
    model.write_bytes(bytes(range(256)) * 4096)
    (model.parent / "config.json").write_text("{}")
    known = files_identity(model.parent)
    assert files_identity(model.parent) == known
    model.write_bytes(bytes(range(256)) * 4095)
    assert files_identity(model.parent) != known, "a file that was not copied whole"
    model.write_bytes(bytes(reversed(range(256))) * 4096)
    assert files_identity(model.parent) != known
    model.write_bytes(bytes(range(256)) * 4096)
    (model.parent / "config.json").write_text("[]")
    assert files_identity(model.parent) != known
    assert files_identity(model) != known


def test_ray_that_is_missing_or_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return real(name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        with pytest.raises(ConfigError, match=r"needs Ray Serve.*pip install 'deltic\[cluster\]'"):
            check_ray()
    old, serve = ModuleType("ray"), ModuleType("ray.serve")
    old.__version__, old.serve = "2.40.1", serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", old)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    with pytest.raises(ConfigError, match=r"needs Ray 2\.60, and 2\.40\.1 is installed"):
        check_ray()


@each(("words", "message"), [
    (("--ray-address", "auto"), "--ray-address needs --replicas"),
    (("--replicas", "0"), "--replicas"),
    (("--replicas", "many"), "--replicas"),
    (("--replicas", "2", "--model", "a=tiny"), "--replicas serves one MODEL"),
    (("--prefill-replicas", "1"), "--prefill-replicas needs --replicas"),
    (("--replicas", "1", "--prefill-replicas", "0"), "--prefill-replicas"),
    (("--replicas", "1", "--prefill-replicas", "auto"), "--prefill-replicas"),
])
def test_options_that_do_not_fit_are_refused(words: tuple[str, ...], message: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["serve", "tiny", *words]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err


def parsed(*words: str) -> argparse.Namespace:
    return command_parser("serve").parse_mixed(["tiny", "--replicas", "2", *words])


def test_replicas_on_this_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.cli.cluster.available_cores", lambda: 8)
    shared = plan_of(parsed(), {}, ("*",), spread=True)
    assert (shared.cpus, shared.options[0].engine_threads, shared.gpus) == (4, 4, 0)
    assert plan_of(parsed("--threads", "3"), {}, ("*",), spread=True).cpus == 3
    assert plan_of(parsed(), {}, ("*",)).cpus == 1


def test_one_machine_never_imports_ray() -> None:
    code = ("import sys\nfrom deltic.cli import command_parser\nimport deltic.cli.serve, deltic.server.app\n"
            "command_parser('serve')\nnames = 'ray', 'deltic.cluster'\n"
            "print([name for name in sys.modules if name.startswith(names)])")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_conversation_goes_on_where_its_replica_has_left_it_on_disk(tmp_path: Path) -> None:
    """Two engines share a directory; the second looks there when a conversation of the first comes."""
    def opened() -> OpenedReplica:
        llm = LLM(max_context=2048, memory="64MiB", threads=1, dtype="float32", cache_dir=tmp_path)
        return OpenedReplica(create_app(llm), llm.worker, "tiny", llm.close)

    async def run() -> None:
        async with replica(opened()) as one, replica(opened()) as two:
            system = "be brief, be kind. " * 20
            answered = json.loads((await ask(one, "/v1/chat/completions", chat(system, "hello")))[2])
            worker = one._opened.worker
            assert worker
            tier, = worker.engine.runtime.cache.tiers
            for _ in range(200):
                await asyncio.to_thread(worker.call, lambda engine: tier._settle())
                if tier.prefixes and not tier._pending:
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)  # an earlier scan of the other one is too new
            answer = answered["choices"][0]["message"]["content"]
            second = json.loads((await ask(two, "/v1/chat/completions", chat(system, "hello", answer, "and?")))[2])
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.9 * answered["usage"]["prompt_tokens"]

    asyncio.run(run())
