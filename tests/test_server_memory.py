"""Answers are recorded outside the event loop, in order, and before their streams end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from test_server_harness import USER, Scripted, serving, tiny, wait_until

from deltic.chat.history import History


class Slow:
    """Records as slowly as a slow disk."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.running, self.most, self.done = seconds, 0, 0, list[Any]()

    def __call__(self, history: History, turn: Any, hidden: Any, begun: Any, tokens: Any, finish: Any, *_: Any) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(self.seconds)
        self.running -= 1
        self.done.append((threading.current_thread().name, list(tokens), finish))


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_recorded_outside_the_event_loop(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, engine = Slow(0.4), Scripted("one two")
    monkeypatch.setattr(History, "remember", lambda *given: slow(*given))
    with serving(engine.model()) as served, served.lateness() as late:
        text = served.post("/v1/chat/completions", messages=USER, n=2, stream=stream).text
        assert [(tokens, finish) for _, tokens, finish in slow.done] == [(engine.script, "stop")] * 2, "before the end"
        assert text.count("stop") >= 2 and {name for name, *_ in slow.done} == {"deltic-memory_0"}
    assert max(late) < 0.3 and slow.most == 1


def test_a_stream_ends_after_its_answer_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began = threading.Event(), threading.Event()
    monkeypatch.setattr(History, "remember", lambda *_: (began.set(), gate.wait(20)))
    with serving(Scripted("one two").model()) as served:
        stream = served.client.chat.completions.create(model="tiny", messages=USER, stream=True)
        ends: list[Any] = []
        reading = threading.Thread(target=lambda: ends.extend(c for c in stream if c.choices[0].finish_reason))
        reading.start()
        assert began.wait(20)
        assert not ends and served.health()[0] == 200
        gate.set()
        reading.join(20)
        assert len(ends) == 1


def test_disconnect_while_an_answer_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began = threading.Event(), threading.Event()
    monkeypatch.setattr(History, "remember", lambda *_: (began.set(), gate.wait(20)))
    with serving(Scripted("one two").model()) as served:
        raw = served.send("/v1/chat/completions", messages=USER)
        assert began.wait(20)
        raw.close()
        wait_until(lambda: served.health()[1]["requests"] == 0)
        gate.set()
        assert served.post("/v1/chat/completions", messages=USER).status_code == 200


def test_cut_off_answers_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(0.0)
    monkeypatch.setattr(History, "remember", lambda *given: slow(*given))
    with serving(Scripted(pause=0.01).model()) as served:
        stream = served.client.chat.completions.create(model="tiny", messages=USER, stream=True)
        for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        stream.close()
        wait_until(lambda: bool(slow.done))
    (_, tokens, finish), = slow.done
    assert finish == "abort" and tokens


def test_the_next_prompt_resumes_from_the_last_answer() -> None:
    with serving(tiny()) as served:
        messages, cached = list[Any](USER), []
        for question in ("And?", "So?", "Then?"):
            answer = served.post("/v1/chat/completions", messages=messages, max_tokens=40, seed=1).json()
            usage = answer["usage"]
            cached.append((usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]))
            messages += [{"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""},
                         {"role": "user", "content": question}]
    assert all(known > 0 for known, _ in cached[1:])
