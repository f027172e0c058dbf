"""Outputs of models are read the same however they are split into tokens, and arguments stream.

`tool_outputs.jsonl` has the outputs.
"""

from __future__ import annotations

from itertools import repeat

import pytest
from call_cases import Output, atoms, meaning, outputs, read, router, state, tokens
from support import every

from deltic.chat.output_router import Delta, join
from deltic.chat.tools import PARSERS

OUTPUTS = outputs()
IDS = pytest.mark.parametrize("ids", [False, True], ids=["texts", "ids"])
LONGEST = 5  # bytes of a token; those of any length take a few minutes


def small(output: Output, ids: bool) -> list[bytes]:
    form = PARSERS[output.form]
    assert form
    return atoms(output.text.encode(), form, ids)


def check_every_split(output: Output, ids: bool, longest: int) -> None:
    """Into tokens of at most so many bytes. After each of them the reader is as if each byte had come alone; so it is
    after any number of them."""
    pieces = small(output, ids)
    reader, said = router(output, ids), list[Delta]()
    readers = [(reader.copy(), list(said))]
    for piece in pieces:
        said += reader.feed(piece)  # type: ignore[arg-type]
        readers.append((reader.copy(), list(said)))
    states = [state(*known) for known in readers]
    for start in range(len(pieces)):
        for end in range(start + 2, min(len(pieces), start + longest) + 1):
            if len(pieces[end - 1]) > 1 or len(pieces[start]) > 1:
                break
            before, known = readers[start]
            after = before.copy()
            more = after.feed(b"".join(pieces[start:end]))  # type: ignore[arg-type]
            assert state(after, [*known, *more]) == states[end], output.text[:end]


def test_outputs_are_many_and_distinct() -> None:
    assert len(OUTPUTS) >= 200 and len({str(output) for output in OUTPUTS}) == len(OUTPUTS)
    assert {output.form for output in OUTPUTS} == {"qwen", "json", "minimax"}


@IDS
@pytest.mark.parametrize("form", ["qwen", "json", "minimax"])
def test_outputs_are_read_as_expected(form: str, ids: bool) -> None:
    for output in (output for output in OUTPUTS if output.form == form):
        for pieces in (small(output, ids), tokens(small(output, ids), repeat(1 << 20))):
            found = meaning(join(read(output, pieces, ids)))
            assert found == (output.reasoning, output.content, output.calls), output.name


@pytest.mark.slow
@IDS
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_every_split(output: Output, ids: bool) -> None:
    check_every_split(output, ids, len(output.text.encode()))


@IDS
@pytest.mark.parametrize("output", every(12, OUTPUTS), ids=str)
def test_every_split_into_tokens(output: Output, ids: bool) -> None:
    check_every_split(output, ids, LONGEST)


def test_string_arguments_stream() -> None:
    """Strings are emitted at once, values of other types when they are complete."""
    output = Output("", "qwen", "content", "", "", "", [])
    written = ["<tool_call>", "\n<function=bash>", "\n<parameter=command>\nec", "ho \"", "hi\"", "\n", "</parameter>\n",
               "<parameter=timeout>\n1", "2\n</parameter>", "\n</function>", "\n</tool_call>"]
    reader = router(output)
    said = [[delta.call.name or delta.call.arguments for delta in reader.feed(piece.encode()) if delta.call]  # type: ignore[arg-type]
            for piece in written]
    assert said == [[], ["bash"], ['{"command": "ec'], ['ho \\"'], ['hi\\"'], [], [], ['"'], [],
                    [', "timeout": 12}'], []]


def test_minimax_calls_are_emitted_at_block_end() -> None:
    output = next(output for output in OUTPUTS if output.form == "minimax" and len(output.calls) > 1)
    reader = router(output)
    *before, last = [reader.feed(piece) for piece in small(output, False)]  # type: ignore[arg-type]
    assert not any(delta.call for deltas in before for delta in deltas)
    assert len(join(last).calls) == len(output.calls)
