"""What reaches a client does not depend on how the text was cut into tokens (L7)."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_support import EOS, MARKERS, Vocabulary, splits

from deltic.chat.markers import Markers, start_mode
from deltic.chat.output_router import Answer, CallOptions, Delta, OutputRouter, Region, chat_router, join, text_router
from deltic.chat.tools import QWEN

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
]
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"


def router(
    vocabulary: Vocabulary, start: Region = "content", tools: object = None, stop: tuple[str, ...] = ()
) -> OutputRouter:
    return OutputRouter(
        vocabulary.visible_bytes,
        markers=Markers.of(vocabulary, QWEN.markers),
        start=start,
        calls=CallOptions(tools, new_id=lambda: "call_x") if tools else None,  # type: ignore[arg-type]
        stop=stop,
    )


def feed(router: OutputRouter, tokens: list[int]) -> list[Delta]:
    return [delta for token in tokens for delta in router.feed(token)] + router.finish()


def answer(
    text: str | bytes,
    start: Region = "content",
    tools: object = None,
    stop: tuple[str, ...] = (),
    markers: bool = True,
    cuts: tuple[int, ...] | None = None,
) -> Answer:
    vocabulary = Vocabulary(markers)
    return join(feed(router(vocabulary, start, tools, stop), vocabulary.encode(text, cuts)))


@pytest.mark.parametrize(
    "data",
    [
        "aé漢🙂".encode(),
        b"\xff\xfea",
        b"\xf0\x9f\x99a\xf0\x9f",
        b"\xe6\xbc\xf0\x9f\x99\x82\xc3",
        b"\xed\xa0\x80z\xc0\x80",
        b"\xf4\x90\x80\x80\xe2\x82\xac",
        b"\xf0\x80\x80\xe0\x80",
        "e\u0301👩".encode(),
        pytest.param("e\u0301👩‍👧".encode(), marks=pytest.mark.slow),
    ],
)
def test_every_split_of_bytes_decodes_as_the_whole(data: bytes) -> None:
    expected = data.decode("utf-8", "replace")
    for cuts in splits(len(data)):
        vocabulary = Vocabulary()
        tokens = vocabulary.encode(data, cuts)
        assert join(feed(text_router(vocabulary), tokens)).content == expected
        assert join(feed(router(vocabulary, "reasoning"), tokens)).reasoning == expected


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=12))
@settings(deadline=None, max_examples=examples(300))
def test_random_bytes_decode_as_the_whole(data: bytes, cuts: list[int]) -> None:
    vocabulary = Vocabulary()
    tokens = vocabulary.encode(data, cuts)
    assert join(feed(text_router(vocabulary), tokens)).content == data.decode("utf-8", "replace")


def test_an_incomplete_character_is_held_back() -> None:
    vocabulary = Vocabulary()
    plain = text_router(vocabulary)
    assert [plain.feed(byte) for byte in "é".encode()] == [[], [Delta("content", "é")]]
    assert plain.feed(0xE6) == []
    assert plain.finish() == [Delta("content", "\ufffd")]


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
        ("hello", "content", Answer("", "hello")),
        ("hello\n", "content", Answer("", "hello\n")),
        ("why\n</think>\n\nyes", "reasoning", Answer("why", "yes")),
        ("\nwhy\n\n</think>\n\n\nyes", "reasoning", Answer("why\n", "yes")),
        ("<think>\nwhy\n</think>\n\nyes", "content", Answer("why", "yes")),
        ("<think>\n\n</think>\n\nyes", "content", Answer("", "yes")),
        ("\n</think>\n\nyes", "reasoning", Answer("", "yes")),
        ("never closed\n", "reasoning", Answer("never closed\n", "")),
        ("a\n</think>\n\nb<think>c</think>d", "reasoning", Answer("ac", "bd")),
        ("<think>again</think>x", "reasoning", Answer("again", "x")),
        ("stray</think>\n\nmark", "content", Answer("", "straymark")),
        ("a < b <thin> </think", "content", Answer("", "a < b <thin> </think")),
    ],
)
@pytest.mark.parametrize("markers", [True, False])
def test_regions(text: str, start: Region, expected: Answer, markers: bool) -> None:
    assert answer(text, start, markers=markers) == expected
    assert answer(text, start, markers=markers, cuts=()) == expected


def test_output_without_a_think_tag_is_content() -> None:
    assert answer("just an answer") == Answer("", "just an answer")


@pytest.mark.parametrize("text", [
    "<</think></t", "é</think>\nb",
    *(pytest.param(text, marks=pytest.mark.slow)
      for text in ("é\n</think>\n\nb", "a </think>\n b\n", "</thin</think>"))])
def test_every_split_of_a_text_with_spelled_markers(text: str) -> None:
    data = text.encode()
    expected = answer(data, "reasoning", markers=False, cuts=())
    for cuts in splits(len(data)):
        assert answer(data, "reasoning", markers=False, cuts=cuts) == expected


WITH_CALL = f"why\n</think>\n\nLet me: é\n\n{CALL}\n{CALL}"


@pytest.mark.parametrize("step", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("markers", [True, False])
def test_any_three_cuts_of_a_text_with_calls(markers: bool, step: int) -> None:
    text = f"w\n</think>\n\né\n\n{CALL}"
    expected = answer(text, "reasoning", TOOLS, markers=markers, cuts=())
    assert (expected.reasoning, expected.content) == ("w", "é")
    assert [(call.name, call.arguments) for call in expected.calls] == [("add", '{"a": 5}')]
    for cuts in combinations(range(1, len(text.encode()), step), 3):
        assert answer(text, "reasoning", TOOLS, markers=markers, cuts=cuts) == expected


FRAGMENTS = st.sampled_from(
    [
        *MARKERS,
        "<function=add>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
        "\n",
        " ",
        "a",
        "5",
        "é",
        "<",
        "</",
        "tool_call>",
        "{",
        "}",
        '{"name": "add", "arguments": {"a": "5"}}',
        "stop",
        "st",
        "op",
        CALL,
    ]
)


@given(
    st.lists(FRAGMENTS, max_size=12).map("".join),
    st.lists(st.integers(0, 120), max_size=30),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["content", "reasoning"]),
    st.sampled_from([(), ("stop",), ("op\n", "stop")]),
)
@settings(deadline=None, max_examples=examples(600))
def test_random_texts_route_alike_however_cut(
    text: str, cuts: list[int], markers: bool, tools: bool, start: Region, stop: tuple[str, ...]
) -> None:
    tools_given = TOOLS if tools else None
    expected = answer(text, start, tools_given, stop, markers, cuts=())
    assert answer(text, start, tools_given, stop, markers) == expected
    assert answer(text, start, tools_given, stop, markers, tuple(cuts)) == expected
    for call in expected.calls:
        assert isinstance(json.loads(call.arguments), dict)


@given(st.lists(FRAGMENTS, max_size=12).map("".join))
@settings(deadline=None, max_examples=examples(300))
def test_nothing_but_whitespace_and_markers_is_lost(text: str) -> None:
    """Without tools, all characters but the think markers and whitespace come out, in order."""
    result = answer(text)
    kept = text.replace("<think>", "").replace("</think>", "")
    assert sorted("".join((result.reasoning + result.content).split())) == sorted("".join(kept.split()))


def test_a_call_between_content_and_another_call() -> None:
    vocabulary = Vocabulary()
    deltas = feed(chat_router(vocabulary, vocabulary.encode("<think>"), TOOLS), vocabulary.encode(WITH_CALL))
    result = join(deltas)
    assert (result.reasoning, result.content) == ("why", "Let me: é")
    calls = [delta.call for delta in deltas if delta.call]
    assert [(call.index, call.name, call.arguments) for call in calls] == [
        (0, "add", ""),
        (0, None, '{"a": 5}'),
        (1, "add", ""),
        (1, None, '{"a": 5}'),
    ]
    ids = [call.id for call in result.calls]
    assert len(set(ids)) == 2 and all(id.startswith("call_") and int(id[5:], 16) >= 0 for id in ids)
    assert all(delta.call is None or delta.kind == "tool" for delta in deltas)


def test_the_name_comes_before_the_arguments_are_complete() -> None:
    vocabulary = Vocabulary()
    live = router(vocabulary, tools=TOOLS)
    first = [
        delta for token in vocabulary.encode("<tool_call>\n<function=add>") for delta in live.feed(token)
    ]
    assert [delta.call.name for delta in first if delta.call] == ["add"]


def test_a_call_closes_thinking() -> None:
    result = answer(f"I should add.\n{CALL}", "reasoning", TOOLS)
    assert (result.reasoning, result.content, len(result.calls)) == ("I should add.", "", 1)


def test_content_after_a_call() -> None:
    assert answer(f"{CALL}\n\nDone.", tools=TOOLS).content == "Done."
    assert answer(f"{CALL}\n", tools=TOOLS).content == ""


@pytest.mark.parametrize("start", ["content", "reasoning"])
def test_without_tools_calls_are_text(start: Region) -> None:
    result = answer(f"see {CALL}", start)
    assert (result.content or result.reasoning) == f"see {CALL}" and not result.calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("a\n<tool_call>nothing</tool_call> b", "a\n<tool_call>nothing</tool_call> b", 0),
        ("a\n<tool_call>nothing", "a\n<tool_call>nothing", 0),
        ("<tool_call>\n{bad json}\n</tool_call>", "<tool_call>\n{bad json}\n</tool_call>", 0),
        (f"<tool_call>{{bad</tool_call>\n{CALL}", "<tool_call>{bad</tool_call>", 1),
        ("<tool_call><function=add>", "", 1),
        ("<tool_call><function=add><parameter=a>5</tool_call> tail", "tail", 1),
        (f"<tool_call><function=add><parameter=a>5</tool_call>\n{CALL}", "", 2),
        (CALL.removesuffix("</tool_call>") + CALL, "", 2),
        ("<tool_call>" + CALL, "<tool_call>", 1),
    ],
)
def test_malformed_calls_lose_nothing(text: str, content: str, calls: int) -> None:
    for markers in (True, False):
        result = answer(text, tools=TOOLS, markers=markers)
        assert (result.content, len(result.calls)) == (content, calls)


def test_markers_inside_an_argument_are_text() -> None:
    value = "write </tool_call> and <think> and <tool_call>"
    text = CALL.replace("parameter=a", "parameter=b").replace("5", value)
    result = answer(f"{text}\n{CALL}", tools=TOOLS)
    assert [json.loads(call.arguments) for call in result.calls] == [{"b": value}, {"a": 5}]


def test_an_argument_may_quote_a_whole_call() -> None:
    text = CALL.replace("parameter=a", "parameter=b", 1).replace("5", CALL)
    result = answer(f"{text}\n{CALL}", tools=TOOLS)
    assert [json.loads(call.arguments) for call in result.calls] == [{"b": CALL}, {"a": 5}]


def test_special_tokens_have_no_text() -> None:
    vocabulary = Vocabulary()
    assert join(feed(text_router(vocabulary), [*b"hi", EOS])).content == "hi"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([], "content"),
        ([1, 2], "content"),
        ([256], "reasoning"),
        ([256, 10], "reasoning"),
        ([256, 257], "content"),
        ([256, 257, 256], "reasoning"),
        ([257], "content"),
        ([256, 10, EOS, 5], "content"),
        ([256, EOS, 256], "reasoning"),
    ],
)
def test_start_mode(prompt: list[int], expected: Region) -> None:
    assert start_mode(prompt, Vocabulary()) == expected


def test_start_mode_without_markers_is_content() -> None:
    assert start_mode([256, 1], Vocabulary(markers=False)) == "content"


def test_a_copy_in_the_middle_of_a_character() -> None:
    first = text_router(Vocabulary())
    first.feed(0xC3)
    second = first.copy()
    assert join(feed(first, [0xA9])).content == "é" and join(feed(second, [0xA8])).content == "è"


def test_a_complete_call_may_lack_its_closing_tag() -> None:
    text = (
        CALL.removesuffix("</tool_call>").replace("parameter=a", "parameter=b").replace("5", "x</tool_call>y")
    )
    assert json.loads(answer(text, tools=TOOLS).calls[0].arguments) == {"b": "x</tool_call>y"}


def test_a_copy_goes_its_own_way() -> None:
    vocabulary = Vocabulary(markers=False)
    first = router(vocabulary, tools=TOOLS)
    for token in vocabulary.encode(b"ab <tool_c"):
        first.feed(token)
    second = first.copy()
    assert join(feed(first, vocabulary.encode("an"))) == Answer("", " <tool_can")
    assert join(feed(second, vocabulary.encode(CALL[7:]))).calls[0].name == "add"
