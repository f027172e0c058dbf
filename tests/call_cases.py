"""For the tests of tool calls: tools, what models wrote (`tool_outputs.jsonl`), and how it is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltic.chat.markers import THINK, THINK_END, Markers
from deltic.chat.output_router import Answer, CallOptions, Delta, OutputRouter, Region, join
from deltic.chat.tool_arguments import CallDelta, ToolArguments
from deltic.chat.tool_parsers import CallReader
from deltic.chat.tools import MINIMAX, PARSERS, QWEN, CallForm

THINKING = (THINK, THINK_END)
_ALL = {marker.encode() for marker in (*THINKING, *QWEN.block, *MINIMAX.block)}
_STRING, _INTEGER, _LIST = {"type": "string"}, {"type": "integer"}, {"type": "array"}
_PARAMETERS: dict[str, dict[str, Any]] = {
    "bash": {"command": _STRING, "timeout": _INTEGER, "background": {"type": "boolean"}},
    "read_file": {"path": _STRING, "offset": _INTEGER, "limit": _INTEGER},
    "write_file": {"path": _STRING, "content": _STRING},
    "edit": {"path": _STRING, "old": _STRING, "new": _STRING, "all": {"type": "boolean"}},
    "search": {"query": _STRING, "paths": _LIST, "options": {"type": "object"}},
    "set_temperature": {"room": _STRING, "celsius": {"type": "number"}},
    "plan": {"title": _STRING, "steps": {"type": "array", "items": {"$ref": "#/$defs/step"}}},
    "get_time": {"zone": {"enum": ["UTC", "Europe/Oslo"]}},
    "mixed": {"value": {"anyOf": [_LIST, _STRING]}, "count": {"type": ["integer", "null"]}, "flag": {"const": True}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
         for name, properties in _PARAMETERS.items()] + [{"type": "function", "function": {"name": "lookup"}}]
"""One of them says nothing about its parameters."""


CALLS = {name: CallOptions(TOOLS, form, new_id=lambda: "call_x") for name, form in PARSERS.items() if form}


@dataclass(frozen=True)
class Output:
    """What a model wrote, and how it is to be understood. start: the region that it begins in."""

    name: str
    form: str
    start: Region
    text: str
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]

    def __str__(self) -> str:
        return f"{self.form}: {self.name}"


def outputs() -> list[Output]:
    lines = (Path(__file__).parent / "tool_outputs.jsonl").read_text().splitlines()
    return [Output(**{**case, "calls": [(name, arguments) for name, arguments in case["calls"]]})
            for case in map(json.loads, lines)]


# A token is its bytes here; one that is the text of a marker is that marker.


def atoms(text: bytes, form: CallForm, ids: bool) -> list[bytes]:
    """The shortest tokens of a text: bytes, and markers if they have `ids`."""
    markers = "|".join((*THINKING, *form.block)).encode() if ids else b"(?!)"
    return re.findall(markers + b"|.", text, re.DOTALL)


def tokens(atoms: Sequence[bytes], sizes: Iterable[int]) -> list[bytes]:
    """Longer ones, of so many atoms each; markers stay alone."""
    found: list[bytes] = []
    left, wanted = 0, iter(sizes)
    for atom in atoms:
        if left <= 0 or len(atom) > 1 or found[-1] in _ALL:
            found.append(atom)
            left = next(wanted)
        else:
            found[-1] += atom
        left -= 1
    return found


def router(output: Output, ids: bool = False, **options: Any) -> OutputRouter:
    """As it is before the first token. ids: markers have tokens of their own."""
    form = PARSERS[output.form]
    assert form
    calls = CallOptions(TOOLS, form, new_id=lambda: "call_x", **options) if options else CALLS[output.form]
    texts = (*THINKING, *form.markers)
    known: Any = {marker.encode(): marker for marker in (*THINKING, *form.block)} if ids else {}
    own = tuple(text for text in texts if text.encode() not in known)
    reads: Any = bytes
    return OutputRouter(reads, markers=Markers(known, own), start=output.start, calls=calls)


def read(output: Output, tokens: Iterable[Any], ids: bool = False, **options: Any) -> list[Delta]:
    """What these tokens say."""
    reader = router(output, ids, **options)
    return [delta for token in tokens for delta in reader.feed(token)] + reader.finish()


def meaning(answer: Answer) -> tuple[str, str, list[tuple[str, Any]]]:
    """Of an answer, to be compared with an Output's."""
    return answer.reasoning, answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


def state(router: OutputRouter, said: Sequence[Delta]) -> object:
    """All that the router knows, and what it has said, without a trace of how the text was cut."""
    own = {name: value for name, value in vars(router).items()
           if name not in ("_token_bytes", "_calls", "_utf8", "stops", "_reader", "_out", "_markers")}
    return (join(said), own, router._utf8.getstate(), router.stops.held, router.stops.stopped,
            router._reader and _reader_state(router._reader))


def _reader_state(reader: CallReader) -> object:
    own = {name: "".join(value) if name in ("pieces", "_all_text") else value for name, value in vars(reader).items()
           if name not in ("arguments", "_possible_end", "form", "tags")}
    possible = reader._possible_end
    out = reader.arguments.out
    if possible is None:
        return own, _arguments_state(reader.arguments), _joined(out)
    return (own, _arguments_state(reader.arguments), _joined(out[:possible.emitted]), _joined(out[possible.emitted:]),
            "".join(possible.since), _reader_state(possible.before))


def _arguments_state(arguments: ToolArguments) -> object:
    return {name: "".join(value) if name in ("_text", "outside") else value for name, value in vars(arguments).items()
            if name not in ("out", "_schemas")}


def _joined(said: Sequence[CallDelta]) -> list[str]:
    joined: list[str] = []
    for name, arguments, _ in said:
        if name is None and joined:
            joined[-1] += arguments
        else:
            joined.append(f"{name} {arguments}")
    return joined
