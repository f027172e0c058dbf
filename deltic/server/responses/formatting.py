"""The output of a response: its items, and the events by which they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from deltic.chat.deltas import Delta
from deltic.params import Usage
from deltic.server.responses.schema import OwnTool, new_id, seal

Json = dict[str, Any]


def usage_fields(usage: Usage) -> Json:
    """The `usage` of a response."""
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


class ResponsesOutput:
    """The items while they come; a whole answer goes the same way. response: its id. tools: the client's, by what
    the model calls them. seals: reasoning is wanted in a form that can be sent back."""

    def __init__(self, response: str, tools: Mapping[str, OwnTool], seals: bool) -> None:
        self.items: list[Json] = []
        self._response, self._tools, self._seals = response, tools, seals
        self._open: tuple[str, int | None] | None = None
        self._texts: list[str] = []

    def take(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        """The events of what comes."""
        for delta in deltas:
            key = delta.kind, delta.call.index if delta.call else None
            if key != self._open:
                yield from self.close()
                self._open = key
                yield from self._begin(delta)
            text = delta.call.arguments if delta.call else delta.text
            if text:
                self._texts.append(text)
                if self.items[-1]["type"] != "custom_tool_call":
                    yield self._event(f"{self._name}.delta", delta=text, **self._part(), **self._scores())

    def close(self, cut: bool = False) -> Iterator[Json]:
        """The end of the open item. cut: the answer was."""
        if self._open is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        self._open = None
        self._texts.clear()
        kind = item["type"]
        if kind == "custom_tool_call":
            item["input"] = text = _input_of(text)
            yield self._event(f"{self._name}.delta", delta=text)
            yield self._event(f"{self._name}.done", input=text)
        elif kind == "function_call":
            item["arguments"] = text
            yield self._event(f"{self._name}.done", arguments=text)
        else:
            item["content"] = [_part(kind, text)]
            yield self._event(f"{self._name}.done", text=text, **self._part(), **self._scores())
            yield self._event("content_part.done", part=item["content"][0], **self._part())
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = seal(text)
        item["status"] = "incomplete" if cut else "completed"
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    @property
    def _name(self) -> str:
        return {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments",
                "custom_tool_call": "custom_tool_call_input"}[self.items[-1]["type"]]

    def _begin(self, delta: Delta) -> Iterator[Json]:
        if delta.call:
            called = delta.call.name or ""
            tool = self._tools.get(called)
            kind, field = ("custom_tool_call", "input") if tool and tool.custom else ("function_call", "arguments")
            more: Json = {"call_id": delta.call.id, "name": tool.name if tool else called, field: ""}
            if tool and tool.namespace:
                more["namespace"] = tool.namespace
        elif delta.kind == "reasoning":
            kind, more = "reasoning", {"summary": [], "content": []}
        else:
            kind, more = "message", {"role": "assistant", "content": []}
        item = {"id": new_id(kind, self._response), "type": kind, "status": "in_progress", **more}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if not delta.call:
            yield self._event("content_part.added", part=_part(kind, ""), **self._part())

    def _part(self) -> Json:
        return {} if "call_id" in self.items[-1] else {"content_index": 0}

    def _scores(self) -> Json:
        return {"logprobs": []} if self.items[-1]["type"] == "message" else {}

    def _event(self, name: str, **more: Any) -> Json:
        place = len(self.items) - 1
        return {"type": f"response.{name}", "item_id": self.items[place]["id"], "output_index": place, **more}


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _input_of(arguments: str) -> str:
    """The text for a tool that takes one; what the model wrote instead, if it did."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")["input"]  # the call may have been cut
    except (ValueError, KeyError, TypeError):
        return arguments
    return found if isinstance(found, str) else arguments
