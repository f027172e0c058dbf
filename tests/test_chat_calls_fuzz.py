"""For any output of a model: nothing raises, no text outside of calls is lost or repeated, and calls are JSON.

Each word of an output is unique, so that the test can find it in the deltas.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from random import Random

import pytest
from call_cases import TOOLS, Output, atoms, outputs, read, router, tokens
from pydantic_core import from_json

from deltic.chat.messages import normalise_messages
from deltic.chat.output_router import Delta, join
from deltic.chat.tools import PARSERS

FEW, MANY = 640, 1_000_000
SHREDS = ["<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", "<", ">", "</",
          "<invoke name=", "</invoke>", '<parameter name="', "<minimax:tool_call>", "</minimax:tool_call>", "{", "}",
          '"', "\\", "'", "[", "]", ",", ":", "\n", " ", "\\u00c", "\\ud83d", "é", "🙂", "<think>", "</think>", "null"]
OUTPUTS = outputs()
TAG = "|".join(shred for shred in SHREDS if len(shred) > 2 and shred[0] == "<")  # which leave no trace
WORD = re.compile(r"w\d+x")
NAMES = [tool["function"]["name"] for tool in TOOLS]
KEYS = sorted({key for tool in TOOLS for key in tool["function"].get("parameters", {}).get("properties", {})})  # type: ignore[attr-defined]


class Words:
    """Words that no text has twice."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, many: int = 1) -> str:
        start, self._count = self._count, self._count + many
        return " ".join(f"w{index}x" for index in range(start, self._count))


def block(random: Random, form: str, words: Words) -> str:
    """A call, or several where the form allows that."""
    calls = [(random.choice(NAMES), {key: value(random, words) for key in random.sample(KEYS, random.randint(0, 3))})
             for _ in range(1 if form != "minimax" else random.randint(1, 2))]
    if form == "json":
        (name, arguments), = calls
        shown = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=random.random() < 0.5)
        return f"<tool_call>\n{shown}\n</tool_call>"
    shown_calls = [(name, [(key, text if isinstance(text, str) else json.dumps(text)) for key, text in given.items()])
                   for name, given in calls]
    if form == "qwen":
        return "\n".join(f"<tool_call>\n<function={name}>\n"
                         + "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in given)
                         + "</function>\n</tool_call>" for name, given in shown_calls)
    inner = "".join(f'<invoke name="{name}">\n'
                    + "".join(f'<parameter name="{key}">{text}</parameter>\n' for key, text in given)
                    + "</invoke>\n" for name, given in shown_calls)
    return inner.strip() if random.random() < 0.3 else f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def value(random: Random, words: Words) -> object:
    return random.choice([words(2), words(1) + "\n" + words(1), random.randint(0, 99), random.random() < 0.5, None,
                          [words(1), 5], {"k": words(1)}, words(1) + '"' + words(1) + "\\" + words(1),
                          words(1) + random.choice(SHREDS) + words(1), ""])


def mutated(random: Random, text: str) -> str:
    for _ in range(random.choice([0, 0, 1, 1, 2, 4])):
        at, size = random.randrange(len(text) + 1), random.choice([1, 2, 5, 15])
        text = text[:at] + random.choice(["", random.choice(SHREDS)]) + text[at + random.choice([0, size]):]
    return text


def case(random: Random) -> tuple[Output, set[str]]:
    """Returns a possible output of a model, and the words outside of its calls."""
    form = random.choice(["qwen", "json", "minimax"])
    words = Words()
    pieces, outside = [], set[str]()
    for _ in range(random.randint(1, 3)):
        plain = words(random.randint(1, 3))
        outside |= set(plain.split())
        pieces += [plain, random.choice(["\n\n", "\n", " "]), mutated(random, block(random, form, words)), "\n\n"]
    tail = words(2)
    start = random.choice(["content", "reasoning"])
    text = "".join([*pieces, *([tail] if random.random() < 0.7 else [])])
    if start == "reasoning" and random.random() < 0.7:
        text = words(3) + "\n</think>\n\n" + text
    if text.endswith(tail):
        outside |= set(tail.split())
    return Output("", form, start, text, "", "", []), outside  # type: ignore[arg-type]


def random_sizes(random: Random) -> Iterator[int]:
    most = random.choice([1, 3, 8, 40, 400])
    while True:
        yield random.randint(1, most)


def check(seed: int) -> None:
    random = Random(seed)
    output, outside = case(random)
    if random.random() < 0.1:  # no words that could be found again
        output, outside = replace(random.choice(OUTPUTS)), set()
        output = replace(output, text=mutated(random, output.text))
    form = PARSERS[output.form]
    assert form
    text, ids = output.text.encode("utf-8", "replace"), random.random() < 0.5
    single = atoms(text, form, ids)
    said = read(output, tokens(single, random_sizes(random)), ids)
    answer = join(said)
    assert join(read(output, tokens(single, repeat(1 << 20)), ids)) == answer, "cut otherwise"
    check_calls(said)
    heard = Counter(WORD.findall(spoken(said)))
    written = Counter[str]()
    for invisible in ("(?!)", TAG, "<[^<>\n]*>"):
        written |= Counter(WORD.findall(re.sub(invisible, "", output.text)))
    assert not heard - written, "said twice"
    assert outside <= heard.keys(), "lost"
    normalise_messages([{"role": "assistant", "content": answer.content, "tool_calls": [
        {"function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls]}])


def spoken(said: list[Delta]) -> str:
    """All that is said, with spaces where something else begins."""
    found, before = [], None
    for delta in said:
        what = delta.call.index if delta.call else delta.kind
        text = (delta.call.name or "") + delta.call.arguments if delta.call else delta.text
        found += [" " * (what != before), text]
        before = what
    return "".join(found)


def check_calls(said: list[Delta]) -> None:
    """Name first, one call after the other, arguments that are objects with each key once."""
    calls = [delta.call for delta in said if delta.call]
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    for index in {call.index for call in calls}:
        first, *others = [call for call in calls if call.index == index]
        assert first.name and all(call.name is None for call in others)
        for text in ("".join(call.arguments for call in calls if call.index == index),
                     "".join(call.written for call in calls if call.index == index)):
            pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
            assert isinstance(pairs, list)


def test_cut_answer_is_prefix_of_whole_answer() -> None:
    """No delta before the cut is taken back, and the arguments of an open call are the beginning of an object."""
    for seed in range(160):
        random = Random(seed)
        output = case(random)[0]
        form = PARSERS[output.form]
        assert form
        pieces = atoms(output.text.encode("utf-8", "replace"), form, False)
        reader, said = router(output), list[Delta]()
        for piece in pieces[:random.randrange(len(pieces))]:
            said += reader.feed(piece)  # type: ignore[arg-type]
        before, answer = join(said), join([*said, *reader.finish(cut=True)])
        assert answer.content.startswith(before.content) and answer.reasoning.startswith(before.reasoning)
        for call, begun in zip(answer.calls, before.calls, strict=False):
            assert call.arguments.startswith(begun.arguments)
        for call in answer.calls:
            assert isinstance(from_json(call.arguments or "{}", allow_partial="trailing-strings"), dict)
        for call in answer.calls[:-1]:
            assert json.loads(call.arguments) is not None, "another call came after it"


def test_random_outputs() -> None:
    for seed in range(FEW):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case(Random(seed))[0].text!r}") from error


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_outputs(part: int) -> None:
    for seed in range(FEW + part * MANY // 20, FEW + (part + 1) * MANY // 20):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case(Random(seed))[0].text!r}") from error
