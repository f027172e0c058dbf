"""What /health says, and what requests get, when the engine hangs or breaks."""

from __future__ import annotations

import threading
import time
from typing import Any

import openai
import pytest
from test_server_harness import USER, Scripted, serving, wait_until

ENDLESS: dict[str, Any] = {"model": "tiny", "messages": USER, "stream": True}


def test_health_fails_while_the_engine_is_stuck() -> None:
    engine, gate = Scripted("one two three"), threading.Event()
    with serving(engine.model(), stuck_after=0.3) as served:
        engine.before_step = gate.wait
        stream = served.client.chat.completions.create(**ENDLESS)
        assert served.health()[0] == 200
        wait_until(lambda: served.health()[0] == 503, 3)
        assert "finished no step" in served.health()[1]["reason"]
        gate.set()
        assert len(list(stream)) > 2
        wait_until(lambda: served.health() == (200, {"status": "ok", "requests": 0}), 3)
        time.sleep(0.5)
        assert served.health()[0] == 200, "idle is healthy"


def test_health_fails_while_steps_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted("one two three")
    with serving(engine.model(), stuck_after=0.3) as served:
        monkeypatch.setattr(engine, "step", list)
        stream = served.client.chat.completions.create(**ENDLESS)
        used = time.process_time()
        wait_until(lambda: served.health()[0] == 503, 3)
        assert time.process_time() - used < 0.25, "a step that does nothing must not spin"
        monkeypatch.undo()
        assert len(list(stream)) > 2


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    engine = Scripted("one two three")

    def fail_once() -> None:
        engine.before_step = lambda: None
        raise RuntimeError("kernel exploded")

    with serving(engine.model()) as served:
        engine.before_step = fail_once
        with pytest.raises(openai.InternalServerError, match="kernel exploded"):
            served.client.chat.completions.create(model="tiny", messages=USER, n=2)
        assert not engine.running
        answer = served.client.chat.completions.create(model="tiny", messages=USER)
        assert answer.choices[0].message.content == "one two three" and served.health()[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_health_reports_a_broken_engine(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    engine = Scripted()

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of everything")

    with serving(engine.model()) as served:
        monkeypatch.setattr(engine, "step", broken)
        monkeypatch.setattr(engine, "abort", broken)
        with pytest.raises(openai.APIError, match="out of everything"):
            list(served.client.chat.completions.create(**ENDLESS | {"stream": stream}))
        wait_until(lambda: served.health()[0] == 503, 3)
        assert "out of everything" in served.health()[1]["reason"]
        again = served.post("/v1/chat/completions", messages=USER)
        assert again.status_code == 503 and again.json()["error"]["type"] == "server_error"


def test_idle_check_finds_wrong_accounts() -> None:
    engine = Scripted("one")

    def leak() -> None:
        raise AssertionError("page 7 has no owner")

    with serving(engine.model()) as served:
        engine.check = leak
        assert served.post("/v1/completions", prompt="x").status_code == 200
        wait_until(lambda: served.health()[0] == 503, 3)
        assert "page 7 has no owner" in served.health()[1]["reason"]


def test_an_idle_server_uses_no_processor_time() -> None:
    with serving(Scripted("one").model()) as served:
        served.post("/v1/completions", prompt="x")
        time.sleep(0.3)
        used = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - used < 0.1
