"""Input of clients and models is read in linear time. Each of these cases once took minutes or never ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_chat_support import MARKERS, read_calls

from deltic.chat.markers import Markers
from deltic.chat.messages import normalise_messages
from deltic.chat.output_router import CallOptions, OutputRouter
from deltic.chat.tool_arguments import coerce
from deltic.chat.tools import tool_schemas

SECONDS = 5.0
CALL, CALL_END = "<tool_call>", "</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@contextmanager
def soon() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize(
    "text",
    [
        "<function=a></function>" * 20_000 + "<parameter=x>",
        "<function=a>" + "<parameter=x><function=</parameter>" * 10_000,
        "<function=a>" + "<parameter=x><function=</parameter>" * 10_000 + "</function>" * 5_000,
        "<function=a>" + "<parameter=x>\n" * 20_000,
        "<function=a><parameter=x>" + "</parameter> \n" * 20_000 + "x",
        "<function=a><parameter=x>" + "</function>" * 20_000,
        '{"name": "f", "arguments": ' + "[" * 100_000,
        "{'name': 'f', 'arguments': {'a': " + "'', " * 20_000,
    ],
    ids=range(8),
)
def test_reading_calls_takes_linear_time(text: str) -> None:
    with soon():
        read_calls(text)


@pytest.mark.parametrize(
    ("opening", "piece"),
    [
        ('{"name": "f", "arguments": {"a": "', CALL_END),
        ('{"name": "f"', "}" + CALL_END),
        ("<function=f><parameter=a>", CALL_END),
        ("<function=f>", "</function>x" + CALL_END),
        ("", "<function=>" + CALL_END),
        ("<function=f>", "<function=f>" + CALL),
        ("", CALL),
        ('{"a": "', CALL + '{"b": "' + CALL_END),
        ("", "a>"),
        ("", "<function=a\n>"),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("texts", [(), MARKERS], ids=["tokens", "texts"])
def test_unterminated_calls_take_linear_time(opening: str, piece: str, texts: tuple[str, ...]) -> None:
    pieces = [CALL, opening, *[part for part in (piece.removesuffix(CALL).removesuffix(CALL_END),
                                                 piece[len(piece.removesuffix(CALL).removesuffix(CALL_END)):]) if part]]
    ids = {} if texts else {index: piece for index, piece in enumerate(pieces) if piece in MARKERS}
    router = OutputRouter(lambda token: pieces[token].encode(), markers=Markers(ids, texts), calls=CallOptions(TOOLS))
    with soon():
        for token in [0, 1, *list(range(2, len(pieces))) * 4_000]:
            router.feed(token)
        router.finish()


def every_part(count: int) -> dict[str, Any]:
    parts = [{"$ref": f"#/properties/p{index}"} for index in range(count)]
    return {"type": "object", "properties": {f"p{index}": {"anyOf": parts} for index in range(count)}}


def test_mutually_recursive_schemas() -> None:
    with soon():
        assert coerce("1", {"$ref": "#/properties/p0"}, every_part(40)) == "1"


def test_schema_types_are_computed_once_for_all_arguments() -> None:
    schema = {"type": "object", "properties": {f"p{index}": {"$ref": "#/$defs/big"} for index in range(5_000)},
              "$defs": {"big": {"anyOf": [{"enum": [str(index) for index in range(5_000)]}, {"type": "integer"}]}}}
    schemas = tool_schemas([{"function": {"name": "f", "parameters": schema}}])
    call = '{"name": "f", "arguments": {' + ", ".join(f'"p{index}": "1"' for index in range(5_000)) + "}}"
    with soon():
        (_, arguments), = read_calls(call, schemas)
        assert list(json.loads(arguments).items())[:2] == [("p0", 1), ("p1", 1)]


@pytest.mark.parametrize(
    "arguments",
    ["[" + "'', " * 300_000 + "]", "[" * 1_000_000, "{'a': '" + "\\" * 1_000_000, "(" * 100_000 + ")" * 100_000,
     "[" + "1," * 500_000 + "x", "-" * 1_000_000],
    ids=range(6),
)
def test_parsing_arguments_does_not_block_other_threads(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert longest_gap(lambda: normalise_messages(messages)) < 1.0
    assert normalise_messages(messages)[0]["tool_calls"][0]["function"]["arguments"] == {"arguments": arguments}


def longest_gap(work: Callable[[], object]) -> float:
    """The most seconds that a thread with nothing to do had to wait for its turn."""
    gaps, ended = [0.0], threading.Event()

    def wait() -> None:
        while not ended.is_set():
            before = time.perf_counter()
            time.sleep(0.001)
            gaps.append(time.perf_counter() - before)

    thread = threading.Thread(target=wait)
    thread.start()
    work()
    ended.set()
    thread.join()
    return max(gaps)
