"""Thinking stays in its conversation: whoever says the same words, earlier, later or elsewhere, never gets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_history import (
    CALL,
    MODES,
    TEMPLATES,
    TINY_TEMPLATE,
    TOKENIZER,
    TOOLS,
    Store,
    Talk,
    cut_small,
    finished,
)
from test_chat_support import QWEN_LIKE, build_prompt

from deltic.cache.offload.disk import DiskRecords
from deltic.chat.processor import ChatProcessor, PreparedRequest
from deltic.chat.template import ChatTemplate
from deltic.params import SamplingParams

SECRETS = ("alpha", "bravo", "carol")


def pair(processor: ChatProcessor, mode: str | None = "preserve", returns: bool = False) -> tuple[Talk, Talk]:
    one, two = (Talk(processor, mode, True, returns, size=5) for _ in range(2))
    return one, two


def exchange(*talks: tuple[Talk, str], question: str = "Hi", answer: str = "Hello.") -> None:
    """Everyone asks the same, then everyone gets the same answer, with thoughts of their own."""
    jobs = [(client, client.say(question), thought) for client, thought in talks]
    for client, job, thought in jobs:
        client.hear(job, answer, thought=thought)


def asked(client: Talk, text: str = "And?") -> str:
    return TOKENIZER.decode(client.say(text).request.prompt, skip_special=False)


def plain(client: Talk, template: str = TINY_TEMPLATE) -> tuple[int, ...]:
    return build_prompt(ChatTemplate(template), TOKENIZER, client.messages, client.tools, {"enable_thinking": True}).ids


@MODES
@TEMPLATES
@pytest.mark.parametrize("returns", [True, False], ids=["returns", "drops"])
def test_ambiguous_conversations_use_no_reasoning(mode: str, template: str, returns: bool) -> None:
    one, two = pair(ChatProcessor(TOKENIZER, template), mode, returns)
    exchange((one, "alpha"), (two, "bravo"))
    for client, own, other in ((one, "alpha", "bravo"), (two, "bravo", "alpha")):
        text = asked(client)
        assert other not in text
        assert (own in text) == (mode == "preserve" and returns)
        if not returns:
            assert client.ask().request.prompt == plain(client, template), "nobody can tell whose it is"


def test_sent_reasoning_selects_record() -> None:
    one, two = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE), returns=True)
    exchange((one, "alpha"), (two, "bravo"))
    one.messages[1]["reasoning_content"], two.messages[1]["reasoning_content"] = "bravo ", "carol"
    assert "bravo" in asked(one) and "alpha" not in asked(one)
    assert not any(secret in asked(two) for secret in ("alpha", "bravo"))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_edited_reasoning_is_rendered(name: str) -> None:
    """Within a tool loop; the thinking that was generated is nowhere."""
    client = Talk(ChatProcessor(TOKENIZER, TINY_TEMPLATE), "preserve", True, True, TOOLS)
    client.hear(client.say("Go"), CALL.format(line=1), thought="alpha")
    client.messages[-1].pop("reasoning_content")
    client.messages[-1][name] = "carol"
    text = TOKENIZER.decode(client.result("done").request.prompt)
    assert "carol" in text and "alpha" not in text


def test_edited_reasoning_affects_later_turns() -> None:
    client = Talk(ChatProcessor(TOKENIZER, TINY_TEMPLATE), "preserve", True, True)
    for secret in ("alpha", "bravo"):
        exchange((client, secret))
    client.messages[1]["reasoning_content"] = "carol"
    assert not any(secret in asked(client) for secret in SECRETS), "the second answer was given after the first thought"


def test_blank_reasoning_counts_as_missing() -> None:
    client, _ = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    exchange((client, "alpha"))
    client.messages[-1]["reasoning_content"] = " \n"
    assert "alpha" in asked(client)


def test_following_messages_resolve_ambiguity() -> None:
    one, two = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    exchange((one, "alpha"), (two, "bravo"))
    job = one.say("And?")
    one.hear(job, "Only one of them heard this.", thought="carol")
    text = asked(one)
    assert "carol" in text and "alpha" not in text and "bravo" not in text


def test_unique_conversation_keeps_reasoning_after_ambiguity() -> None:
    one, two = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    exchange((one, "alpha"))
    job = one.say("And?")
    one.hear(job, "Only one of them heard this.", thought="carol")
    exchange((two, "bravo"))
    text = asked(one)
    assert "alpha" in text and "carol" in text and "bravo" not in text
    assert "bravo" not in asked(two) and "alpha" not in asked(two)


@pytest.mark.parametrize("finish", ["abort", "length", "error"])
@pytest.mark.parametrize("first", [True, False])
def test_unusable_answers_make_key_ambiguous(finish: Any, first: bool) -> None:
    one, two = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    talks = [(one, "alpha", "stop"), (two, "bravo", finish)]
    jobs = [client.say("Hi") for client, _, _ in talks]
    heard = list(zip(talks, jobs, strict=True))
    for (client, thought, end), job in heard if first else reversed(heard):
        client.hear(job, "Hello.", end, thought)
    assert not any(secret in asked(client) for client in (one, two) for secret in SECRETS)


def test_answers_cut_by_stop_string_make_key_ambiguous() -> None:
    one, two = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    exchange((one, "alpha"))
    two.messages = [{"role": "user", "content": "Hi"}]
    two.hear(two.ask(SamplingParams(stop="!!")), "Hello.!!", "stop", "bravo")
    assert two.messages[-1]["content"] == one.messages[-1]["content"]
    assert "alpha" not in asked(two) and "alpha" not in asked(one)


def test_equal_answers_share_a_record() -> None:
    """Nothing hides in them: who asks again at temperature 0 loses nothing."""
    one, two = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    exchange((one, "alpha"), (two, "alpha"))
    assert "alpha" in asked(one) and "alpha" in asked(two)


@pytest.mark.parametrize("again", [False, True], ids=["at once", "restarted"])
def test_two_processes_over_one_directory(again: bool, tmp_path: Path) -> None:
    fronts = [ChatProcessor(TOKENIZER, TINY_TEMPLATE, notes=DiskRecords(tmp_path, "model")) for _ in range(2)]
    talks = [Talk(processor, "preserve", True, False, size=5) for processor in fronts]
    exchange(*zip(talks, SECRETS, strict=False))
    for processor in fronts:
        processor.flush()
    if again:
        fronts = [ChatProcessor(TOKENIZER, TINY_TEMPLATE, notes=DiskRecords(tmp_path, "model")) for _ in range(2)]
    for client, processor in zip(talks, reversed(fronts), strict=True):
        client.chat_processor = processor
        assert not any(secret in asked(client) for secret in SECRETS)


def test_owner_never_gets_reasoning_of_others() -> None:
    """Alone with its words, so that nothing is ambiguous; the visible words, the thinking itself, or none of it."""
    processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE)
    one = Talk(processor.of("ann"), "preserve", True, False, size=5)
    exchange((one, "alpha"))
    assert "alpha" in asked(one)
    for owner in ("", "bob", "an", "ann ", "ann\n"):
        for sent in ({}, {"reasoning_content": "bravo"}, {"reasoning_content": ""}):
            two = Talk(processor.of(owner), "preserve", True, size=5)
            two.messages = [one.messages[0], one.messages[1] | sent]
            assert "alpha" not in asked(two)
    assert "alpha" in asked(Talk(processor.of("ann"), "preserve", True, messages=one.messages[:2]))


@pytest.mark.parametrize("again", [False, True], ids=["at once", "restarted"])
def test_owners_over_one_directory(again: bool, tmp_path: Path) -> None:
    def front() -> ChatProcessor:
        return ChatProcessor(TOKENIZER, TINY_TEMPLATE, notes=DiskRecords(tmp_path, "model"))

    processor = front()
    talks = {owner: Talk(processor.of(owner), "preserve", True, False, size=5) for owner in ("ann", "bob")}
    exchange(*zip(talks.values(), SECRETS, strict=False))
    processor.flush()
    processor = front() if again else processor
    for owner, own in (("ann", {"alpha"}), ("bob", {"bravo"}), ("carol", set()), ("", set())):
        text = asked(Talk(processor.of(owner), "preserve", True, messages=talks["ann"].messages[:2]))
        assert {secret for secret in SECRETS if secret in text} == own


def test_records_of_earlier_version_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no owner, and who asks has none either: what they are of cannot be known."""
    monkeypatch.setattr("deltic.chat.history._KEY_VERSION", 3)
    processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE, notes=DiskRecords(tmp_path, "model"))
    client = Talk(processor, "preserve", True, False, size=5)
    exchange((client, "alpha"))
    processor.flush()
    monkeypatch.undo()
    client.chat_processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE, notes=DiskRecords(tmp_path, "model"))
    assert "alpha" not in asked(client)


moves = st.lists(st.tuples(st.sampled_from(["ask", "answer", "turn", "turn", "turn", "undo", "restart", "move"]),
                           st.integers(0, 2), st.integers(0, 1)), max_size=24)


@settings(deadline=None, max_examples=examples(80))
@given(moves, st.tuples(*[st.lists(st.booleans(), min_size=1, max_size=3)] * 3),
       st.sampled_from([TINY_TEMPLATE, QWEN_LIKE]), st.sampled_from(["preserve", "preserve", "template"]))
def test_random_conversations(moves: list[tuple[str, int, int]], returns: Any, template: str, mode: str) -> None:
    """Three clients of few words, two processes over one store: what one has thought stands in no other's prompt."""
    store = Store()
    fronts = [ChatProcessor(TOKENIZER, template, notes=store) for _ in range(2)]
    talks = [Talk(fronts[0], mode, True, size=9) for _ in SECRETS]
    jobs: dict[int, PreparedRequest] = {}
    for move, who, what in moves:
        client = talks[who]
        if move in ("ask", "turn") and who not in jobs:
            jobs[who] = client.say("Go on")
            text = TOKENIZER.decode(jobs[who].request.prompt)
            assert not any(secret in text for secret in SECRETS if secret != SECRETS[who])
        if move in ("answer", "turn") and who in jobs:
            client.returns = returns[who][len(client.messages) // 2 % len(returns[who])]
            client.hear(jobs.pop(who), f"{what}", thought=SECRETS[who])
            client.chat_processor.flush()
        elif move == "undo" and who not in jobs:
            del client.messages[-2:]
        elif move == "restart":
            fronts[what] = client.chat_processor = ChatProcessor(TOKENIZER, template, notes=store)
        elif move == "move":
            client.chat_processor = fronts[what]


def test_concurrent_ambiguous_conversations() -> None:
    """More than are kept apart."""
    processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE)
    talks = [Talk(processor, "preserve", True, False) for _ in range(9)]
    exchange(*((client, f"secret{number}") for number, client in enumerate(talks)))
    assert not any("secret" in asked(client) for client in talks)


def test_whole_answer_is_recorded_with_end() -> None:
    client, _ = pair(ChatProcessor(TOKENIZER, TINY_TEMPLATE))
    job = client.say("Hi")
    answer = cut_small("alpha\n</think>\n\nHello.", 5)
    finished(job, answer)
    client.messages.append({"role": "assistant", "content": "Hello."})
    assert client.say("And?").request.prompt[:len(job.request.prompt) + len(answer)] == (*job.request.prompt, *answer)
