"""Stop strings end the answer at the same place for engine and client, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_support import EOS, Vocabulary, splits

from deltic.chat.markers import StopAutomaton, StopScanner, open_suffix
from deltic.chat.output_router import AnswerText, AnswerTexts, Region, chat_router, join, text_router

CASES = [
    ("abSTOPcd", ("STOP",), "ab"),
    ("aSTSTOP", ("STOP",), "aST"),
    ("ababac", ("abac",), "ab"),
    ("xé漢y", ("漢",), "xé"),
    ("a STO", ("STOP",), "a STO"),
    ("one two", ("two", "one tw"), ""),
    ("abc", ("c", "bc"), "a"),
    ("a\n\nb", ("\n\n",), "a"),
    ("STOP", ("STOP",), ""),
    ("é", ("Ã",), "é"),
    ("aaab", ("aab",), "a"),
    ("end ", ("d X",), "end "),
]


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, int | None]:
    """What is kept, and after how many characters it is certain."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], end
    return text, None


@pytest.mark.parametrize(("text", "stops", "kept"), CASES)
def test_every_split(text: str, stops: tuple[str, ...], kept: str) -> None:
    data = text.encode()
    expected, end = reference(text, stops)
    assert expected == kept
    for cuts in splits(len(data)):
        vocabulary = Vocabulary()
        tokens = vocabulary.encode(data, cuts)
        router, matcher = text_router(vocabulary, stops), AnswerText(text_router(vocabulary, stops))
        out, ended, seen = [], [], 0
        for token in tokens:
            out += router.feed(token)
            ended.append(matcher.push(token))
            seen += len(vocabulary.visible_bytes(token))
            assert ended[-1] == (end is not None and seen >= len(text[:end].encode())) == router.stopped
        assert join(out + router.finish()).content == kept


@given(
    st.text("ab", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(0, 14)),
)
@settings(deadline=None, max_examples=examples(500))
def test_random_texts_against_the_reference(text: str, stops: list[str], cuts: list[int]) -> None:
    vocabulary = Vocabulary()
    router = text_router(vocabulary, stops)
    out = [delta for token in vocabulary.encode(text, cuts) for delta in router.feed(token)]
    assert join(out + router.finish()).content == reference(text, tuple(stops))[0]


@given(
    st.lists(st.text("ab", max_size=6), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(0, 12),
)
@settings(deadline=None, max_examples=examples(500))
def test_scanner_holds_back_only_possible_stop(
    pieces: list[str], stops: list[str], flushed: int
) -> None:
    scanner, seen, passed = StopScanner.of(stops), "", ""
    for place, piece in enumerate(pieces):
        if place == flushed:
            passed += scanner.flush()
            seen, passed = "", ""
        seen += piece
        passed += scanner.push(piece)
        kept, end = reference(seen, tuple(stops))
        if end is not None:
            assert scanner.stopped and passed == kept and seen[len(kept) : end] == scanner.found
            return
        open_ends = [length for stop in stops for length in range(1, len(stop)) if seen.endswith(stop[:length])]
        assert scanner.held == seen[len(seen) - max(open_ends, default=0) :]
        assert passed + scanner.held == seen and not scanner.stopped


@pytest.mark.parametrize(
    "stops",
    [
        ["a" * 127 + chr(0x4E00 + number) for number in range(64)],
        [letter + "a" * 126 + "z" for letter in "abcdefghijklmnopqrstuvwxyz"],
        ["ab" * 60 + "a" * number + "z" for number in range(1, 60)],
        ["a" * 8191 + "b"],
    ],
    ids=["one beginning", "many beginnings", "periods", "one long"],
)
def test_near_misses_take_few_lookups_per_character(stops: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    scanner, lookups = StopScanner.of(stops), 0
    child = StopAutomaton.child

    def counted(self: StopAutomaton, node: int, char: str) -> int:
        nonlocal lookups
        lookups += 1
        return child(self, node, char)

    monkeypatch.setattr(StopAutomaton, "child", counted)
    text = ("a" * 500 + "ab" * 250 + "c") * 10
    passed = "".join(scanner.push(text[at : at + 3]) for at in range(0, len(text), 3))
    assert passed + scanner.held == text and lookups <= 3 * len(text)


def test_automaton_construction_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups, child = 0, StopAutomaton.child

    def counted(self: StopAutomaton, node: int, char: str) -> int:
        nonlocal lookups
        lookups += 1
        return child(self, node, char)

    monkeypatch.setattr(StopAutomaton, "child", counted)
    stops = [("ab" * number + "a" * 128)[:128] for number in range(64)]
    StopAutomaton(stops)
    assert lookups <= 4 * sum(map(len, stops))


def test_choices_share_an_automaton() -> None:
    router = text_router(Vocabulary(), ["STOP"])
    assert router.copy().stops.automaton is router.stops.automaton


def test_special_tokens_contribute_nothing() -> None:
    matcher = AnswerText(text_router(Vocabulary(), ["ab"]))
    assert [matcher.push(token) for token in (ord("a"), EOS, ord("b"))] == [False, False, True]


def test_possible_stop_string_is_held_back() -> None:
    router = text_router(Vocabulary(), ["STOP"])
    assert [[delta.text for delta in router.feed(byte)] for byte in b"aSTx"] == [["a"], [], [], ["STx"]]


def test_choices_have_separate_texts() -> None:
    texts = AnswerTexts(text_router(Vocabulary(), ["ab"]))
    following = texts.followers()
    first, second = following(), following()
    assert (first, second) == (texts.of(0), texts.of(1)) and first is not second
    first.push(ord("a"))
    assert not second.push(ord("c")) and first.push(ord("b")) and not second.push(ord("b"))


def test_pushed_tokens_are_routed_once() -> None:
    text = AnswerText(text_router(Vocabulary(), ["ab"]), frozenset([ord("!")]))
    ended = [text.push(ord(letter)) for letter in "xaab!"]
    said = [text.take(ord(letter)) for letter in "xaab!"]
    assert ended == [False, False, False, True, True]
    assert [offset for offset, _, _ in said] == [0, 1, 2, 3, 4] and text.stop == "ab"
    assert [join(deltas).content for _, deltas, _ in said] == ["x", "", "a", "", ""]
    assert text.finish() == []


@pytest.mark.parametrize(
    ("text", "start", "stop", "reasoning", "content"),
    [
        ("think END more\n</think>\n\nanswer END tail", "reasoning", "END", "think END more", "answer "),
        ("a\n</think>\n\nb\n\nc", "reasoning", "\n\n", "a", "b"),
        ("EN</think>D", "content", "END", "", ""),
        ("EN<think>x</think>D", "content", "END", "x", "END"),
    ],
)
def test_stop_strings_end_the_content_only(
    text: str, start: Region, stop: str, reasoning: str, content: str
) -> None:
    vocabulary = Vocabulary()
    prompt = vocabulary.encode("<think>") if start == "reasoning" else []
    router = chat_router(vocabulary, prompt, stop=[stop])
    matcher = AnswerText(router.copy())
    out = []
    for token in vocabulary.encode(text):
        out += router.feed(token)
        assert matcher.push(token) == router.stopped
    result = join(out + router.finish())
    assert (result.reasoning, result.content) == (reasoning, content)


def test_open_suffix() -> None:
    assert [open_suffix(text, ["abc", "bd"]) for text in ("", "ab", "xb", "abc", "ca", "ba")] == [
        0,
        2,
        1,
        0,
        1,
        1,
    ]
