"""Stable boundaries are what the next turn's prompt really repeats, as numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_support import MARKERS, QWEN_LIKE, build_prompt, stable_boundaries
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from deltic.chat import conversation
from deltic.chat.messages import normalise_messages
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import Tokenizer
from deltic.errors import RequestError
from deltic.params import common_length

TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[1] / "deltic" / "models" / "tiny")
TINY = ChatTemplate(TOKENIZER.chat_template or "", TOKENIZER.special_tokens)
QWEN = ChatTemplate(QWEN_LIKE)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi there"}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "Because.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "ok"}


def ends(
    template: ChatTemplate, messages: list[Any], tools: Any = None, **variables: Any
) -> list[tuple[int, str]]:
    """Each boundary as its distance from the end of the prompt, and the text just before it."""
    prompt = build_prompt(template, TOKENIZER, messages, tools, variables)
    return [
        (at - len(prompt.ids), TOKENIZER.decode(prompt.ids[:at], skip_special=False)[-18:])
        for at in prompt.stable_prefixes
    ]


def byte_tokenizer() -> Tokenizer:
    """One token per byte and per marker, so that positions can be counted by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: id for id, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("tools", "variables", "numbers", "length"),
    [
        (None, {"enable_thinking": False}, (25, 46), 52),
        (None, {"enable_thinking": True}, (25, 46), 48),
        (TOOLS, {"enable_thinking": True}, (152, 173, 175), 175),
    ],
)
def test_stable_prefix_lengths(tools: Any, variables: dict[str, Any], numbers: tuple[int, ...], length: int) -> None:
    """System 1 + 7 + 9 + 1 + 1 and user 1 + 5; 8 + 1 + 1 of user and 1 + 10 to answer; tools 127 more."""
    prompt = build_prompt(QWEN, byte_tokenizer(), [SYSTEM, USER], tools, variables)
    assert (prompt.stable_prefixes, len(prompt.ids)) == (numbers, length)


def test_stable_prefixes_are_lengths_of_shared_text() -> None:
    prompt = build_prompt(TINY, TOKENIZER, [SYSTEM, USER])
    system = TOKENIZER.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    turn = TOKENIZER.encode("Hi there<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.stable_prefixes == (len(system), len(system) + len(turn))


@pytest.mark.parametrize("template", [TINY, QWEN], ids=["tiny", "qwen"])
def test_turn_is_stable_up_to_think_block(template: ChatTemplate) -> None:
    assert ends(template, [USER], enable_thinking=True) == [(-2, "_start|>assistant\n")]
    assert ends(template, [USER], enable_thinking=False) == [(-4, "_start|>assistant\n")]


@pytest.mark.parametrize("template", [TINY, QWEN], ids=["tiny", "qwen"])
@pytest.mark.parametrize(("thinking", "turns"), [(True, [-2, -1, 0]), (False, [-4, 0])])
def test_with_tools_the_whole_prompt_is_stable_too(template: ChatTemplate, thinking: bool, turns: list[int]) -> None:
    """All of it, if the client sends the thinking back; else the empty think block merges with its last line end."""
    found = ends(template, [SYSTEM, USER], TOOLS, enable_thinking=thinking)
    assert [distance for distance, _ in found[1:]] == turns
    assert found[0][1].endswith("<|im_start|>user\n")


def test_preserved_thinking_makes_the_whole_prompt_stable() -> None:
    assert [distance for distance, _ in ends(QWEN, [USER], preserve_thinking=True)] == [0]


def test_tool_loop_is_stable_up_to_first_answer() -> None:
    first = build_prompt(TINY, TOKENIZER, [SYSTEM, USER], TOOLS, {"enable_thinking": True})
    loop = build_prompt(
        TINY, TOKENIZER, [SYSTEM, USER, CALL, RESULT, CALL, RESULT], TOOLS, {"enable_thinking": True}
    )
    assert loop.stable_prefixes == (*first.stable_prefixes[:2], len(loop.ids) - 1, len(loop.ids))


@pytest.mark.parametrize("template", [TINY, QWEN], ids=["tiny", "qwen"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    ("answer", "following"),
    [
        (
            {"role": "assistant", "content": "Fine.", "reasoning_content": "Hm"},
            {"role": "user", "content": "And?"},
        ),
        (CALL, RESULT),
    ],
)
def test_the_next_prompt_repeats_a_boundary(
    template: ChatTemplate, thinking: bool, answer: dict[str, Any], following: dict[str, Any]
) -> None:
    answer = answer if thinking else answer | {"reasoning_content": ""}
    before = build_prompt(template, TOKENIZER, [SYSTEM, USER], TOOLS, {"enable_thinking": thinking})
    after = build_prompt(
        template, TOKENIZER, [SYSTEM, USER, answer, following], TOOLS, {"enable_thinking": thinking}
    )
    shared = next(
        (i for i, (a, b) in enumerate(zip(before.ids, after.ids, strict=False)) if a != b), len(before.ids)
    )
    assert shared in before.stable_prefixes


def test_other_conversation_shares_system_prefix() -> None:
    one = build_prompt(TINY, TOKENIZER, [SYSTEM, {"role": "user", "content": "Hello, 0"}])
    other = build_prompt(TINY, TOKENIZER, [SYSTEM, {"role": "user", "content": "0, Hello"}])
    opening = TOKENIZER.encode("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert one.stable_prefixes[0] == other.stable_prefixes[0] == len(opening)
    assert list(one.ids[: len(opening)]) == list(other.ids[: len(opening)]) == opening


def test_no_system_prefix_without_system_and_tools() -> None:
    assert len(build_prompt(TINY, TOKENIZER, [USER]).stable_prefixes) == 1


def test_long_conversation_prefixes_equal_whole_encoding() -> None:
    """Only tails are encoded; the numbers are those of whole encodings."""
    messages: list[Any] = [{"role": "system", "content": "word " * 3000}]
    for index in range(20):
        messages += [
            {"role": "user", "content": f"frage {index} " * 50},
            {"role": "assistant", "content": "é" * 300},
        ]
    prompt = build_prompt(TINY, TOKENIZER, [*messages, USER], TOOLS)
    probe = [*messages, USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    text = TINY.render(normalise_messages(probe), TOOLS)
    theirs = TOKENIZER.encode(text)
    shared = next(i for i, (a, b) in enumerate(zip(prompt.ids, theirs, strict=False)) if a != b)
    edited = build_prompt(TINY, TOKENIZER, [*messages, {"role": "user", "content": "0"}], TOOLS)
    start = common_length(prompt.ids, edited.ids)
    assert start < shared and prompt.stable_prefixes[1:] == (start, shared, len(prompt.ids))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}{{ raise_exception('one only') if loop.index > 1 }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls[0].x.y if m.role == 'assistant' }}{% endfor %}",
    ],
)
def test_template_may_refuse_continuations(source: str) -> None:
    prompt = build_prompt(ChatTemplate(source), TOKENIZER, [USER], TOOLS)
    assert prompt.ids and all(0 < at <= len(prompt.ids) for at in prompt.stable_prefixes)


@given(st.text("abcdef .\n", max_size=30), st.booleans())
@settings(deadline=None, max_examples=examples(200))
def test_encoding_tails_equals_encoding_whole_text(content: str, separated: bool) -> None:
    separator = "<|im_end|>" if separated else ""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}" + separator + "{% endfor %}")
    messages = normalise_messages([{"role": "user", "content": content}])
    ids = TOKENIZER.encode(content + separator)
    theirs = TOKENIZER.encode(content + separator + "Answer" + separator + "Question" + separator)
    shared = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), len(ids))
    assert stable_boundaries(template, TOKENIZER, messages) == ((shared,) if shared else ())


@pytest.mark.parametrize("template", [TINY, QWEN], ids=["tiny", "qwen"])
@pytest.mark.parametrize("thinking", [True, False])
def test_edit_of_last_message_shares_a_stable_prefix(template: ChatTemplate, thinking: bool) -> None:
    """Also the first one, of a conversation that came in one piece."""
    messages = [SYSTEM, USER, {"role": "assistant", "content": "Fine. " * 50, "reasoning_content": "Hm"}]
    for question in ("And?", "Hello", "0"):
        before, after = (build_prompt(template, TOKENIZER, [*messages, {"role": "user", "content": text}], None,
                                      {"enable_thinking": thinking}) for text in (question, "Why?"))
        shared = common_length(before.ids, after.ids)
        assert shared in before.stable_prefixes and shared > 50


class Counted(ChatTemplate):
    """Says how many messages it has rendered."""

    messages = 0

    def render(self, messages: Any, *others: Any, **variables: Any) -> str:
        self.messages += len(messages)
        return super().render(messages, *others, **variables)


def long_talk(turns: int, steps: int, filled: str = "word ") -> list[Any]:
    """Turns with several calls, the last of them still open."""
    talk: list[Any] = [SYSTEM]
    for turn in range(turns):
        talk.append({"role": "user", "content": f"Question {turn} {filled}"})
        for step in range(steps):
            talk += [CALL | {"content": f"Step {step}"}, RESULT | {"content": f"{step} {filled}"}]
        talk.append({"role": "assistant", "content": f"Answer {turn}", "reasoning_content": f"Thus {turn}"})
    return talk


LONG = [long_talk(60, 0)[:-1], [*long_talk(40, 1), USER], long_talk(1, 70)[:-1], long_talk(20, 20)[:-1],
        [*long_talk(3, 3), *long_talk(1, 60)[1:-1]], [*long_talk(1, 60), *long_talk(2, 2)[1:-1]]]


@pytest.mark.parametrize("messages", LONG, ids=range(len(LONG)))
@pytest.mark.parametrize("source", [TINY.source, QWEN.source], ids=["tiny", "qwen"])
@pytest.mark.covering
def test_long_conversations_are_rendered_once(
        messages: list[Any], source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked about their end is asked of shorter ones, and the answer is the same."""
    for variables in ({"enable_thinking": True}, {"enable_thinking": False}, {"preserve_thinking": True}):
        found, counts = [], []
        for long in (64, 1 << 30):
            monkeypatch.setattr(conversation, "_LONG", long)
            template = Counted(source)
            found.append(build_prompt(template, TOKENIZER, messages, TOOLS, variables))
            counts.append(template.messages)
        assert found[0] == found[1] and len(found[0].stable_prefixes) >= 2
        assert counts[0] <= 2 * len(messages) and counts[1] > 3 * len(messages)


COUNTING = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ messages | length }}{% endfor %}"
LATEST = ("{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content if loop.revindex <= 9 }}{% endfor %}"
          "<|im_start|>assistant")


@pytest.mark.parametrize("source", [COUNTING, LATEST])
def test_template_that_reads_all_messages_is_rendered_whole(
        source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = long_talk(60, 0)[:-1]
    quick = build_prompt(ChatTemplate(source), TOKENIZER, messages)
    monkeypatch.setattr(conversation, "_LONG", 1 << 30)
    assert quick == build_prompt(ChatTemplate(source), TOKENIZER, messages)


def test_the_prompt_itself_may_be_refused() -> None:
    with pytest.raises(RequestError):
        stable_boundaries(TINY, TOKENIZER, [])


def test_a_template_that_ignores_everything() -> None:
    assert build_prompt(ChatTemplate(""), TOKENIZER, [USER]).stable_prefixes == ()
    assert stable_boundaries(ChatTemplate("fixed"), TOKENIZER, normalise_messages([USER])) == (
        len(TOKENIZER.encode("fixed")),
    )
