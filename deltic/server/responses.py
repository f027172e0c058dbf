"""OpenAI's Responses API: creates responses, stores them and reads them again."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.choices import Choice
from deltic.chat.output_router import Delta
from deltic.chat.processor import PreparedRequest
from deltic.errors import GenerationError, RequestError, show
from deltic.params import Usage
from deltic.server.errors import ProblemError, openai_fields, problem_of
from deltic.server.fields import renamed, sent_name
from deltic.server.generation import GenerationStream, ServedModel
from deltic.server.http import EventStream, dump, dumped, event, json_response, spliced
from deltic.server.models import ModelRegistry
from deltic.server.openai_schema import prepare_chat
from deltic.server.records import RequestRecord, record_of
from deltic.server.response_store import Record, ResponseStore
from deltic.server.responses_schema import ClientTool, Names, ResponsesRequest, new_id, new_response, seal
from deltic.server.routing import ApiRoute, Check

_MOST_LISTED: Final = 100
_LISTED: Final = 20
_REASONS: Final = {"length": "max_output_tokens"}
_EVENTS: Final = {
    "message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input"}

Json = dict[str, Any]


def routes(models: ModelRegistry, store: ResponseStore, check: Check) -> list[Route]:
    endpoints, path = _ResponsesEndpoints(models, store), "/v1/responses"
    query = {"limit": {"type": "integer", "minimum": 1, "maximum": _MOST_LISTED}, "order": {"enum": ["asc", "desc"]},
             "after": {"type": "string"}}
    return [ApiRoute(path, endpoints.create, check, body=ResponsesRequest),
            ApiRoute(f"{path}/input_tokens", endpoints.count, check, body=ResponsesRequest),
            ApiRoute(f"{path}/{{id}}", endpoints.get, check),
            ApiRoute(f"{path}/{{id}}", endpoints.delete, check, method="DELETE"),
            ApiRoute(f"{path}/{{id}}/cancel", endpoints.cancel, check, method="POST"),
            ApiRoute(f"{path}/{{id}}/input_items", endpoints.input_items, check, query=query)]


@dataclass(slots=True)
class _NewResponse:
    """A response that is being generated."""

    id: str
    asked: RequestRecord
    output: ResponseOutput
    head: bytes
    """The fields that do not change, as JSON. They may be large and are encoded once."""
    input: bytes
    """The input items of the response, as JSON."""
    keeps: bool
    run: GenerationStream | None = None
    cancelled: bool = False
    _numbers: Iterator[int] = field(default_factory=count)

    def now(self, choice: Choice | None = None, error: str | None = None) -> Json:
        """Returns the fields that change. choice, error: the result that ended the response, if it has ended."""
        status = "in_progress"
        reason = _REASONS.get(choice.finish) if choice else None
        if choice:
            status = "incomplete" if reason else "completed"
        elif error:
            status = "cancelled" if self.cancelled else "failed"
        failed = {"code": "server_error", "message": error} if status == "failed" else None
        return {"status": status, "output": self.output.items if status != "in_progress" else [], "error": failed,
                "incomplete_details": {"reason": reason} if reason else None,
                "completed_at": int(time.time()) if status == "completed" else None,
                "usage": _usage(self.run.usage) if choice and self.run else None}

    def encoded(self, events: Iterable[Json]) -> bytes:
        """Returns item events, encoded as bytes."""
        return b"".join(event(data | {"sequence_number": next(self._numbers)}, data["type"]) for data in events)

    def whole_event(self, name: str, response: bytes) -> bytes:
        """Returns an event with the whole response."""
        start = dump({"type": name, "sequence_number": next(self._numbers)})
        return b"event: " + name.encode() + b"\ndata: " + start[:-1] + b',"response":' + response + b"}\n\n"

    def close(self) -> None:
        if self.run:
            self.run.close()


@dataclass(frozen=True, slots=True)
class _ResponsesEndpoints:
    models: ModelRegistry
    store: ResponseStore
    active: dict[str, _NewResponse] = field(default_factory=dict)

    async def create(self, request: Request) -> Response:
        prepare = partial(self._prepare, record_of(request))
        served, body, (prepared, names, new) = await self.models.read(request, ResponsesRequest, prepare)
        run = new.run = await served.start(request, [prepared], "input", not body.stream,
                                           {**body.notes.sent, **names}, new.id if new.keeps else "")
        self.active[new.id] = new
        if body.stream:
            return EventStream(self._stream(new, run), partial(self._failure, new), partial(self._end, new))
        try:
            done, = await served.gather(request, run)
        except GenerationError as error:
            if not new.cancelled:
                raise
            return _json(await self._finished(new, None, str(error)))
        finally:
            self._end(new)
        return _json(await self._finished(new, done.done))

    async def count(self, request: Request) -> Response:
        prepare = partial(self._prepare, record_of(request))
        _, _, (prepared, _, _) = await self.models.read(request, ResponsesRequest, prepare, answers=False)
        return json_response({"object": "response.input_tokens", "input_tokens": len(prepared.request.ids)})

    async def get(self, request: Request) -> Response:
        record = record_of(request)
        if request.query_params.get("stream") == "true":
            raise RequestError("stream is not supported here: responses are streamed when they are made", "stream")
        if new := self._active(request):
            return _json(await dumped(record, partial(spliced, new.head, new.now()), len(new.head)))
        return _json(await record.work(lambda: dump(self._stored(request)["response"])))

    async def delete(self, request: Request) -> Response:
        id, record = request.path_params["id"], record_of(request)
        if not await record.work(partial(self.store.delete, id, record.owner)):
            raise _missing(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        new = self._active(request)
        if new is None or new.run is None:
            stored = (await record_of(request).work(partial(self._stored, request)))["response"]
            raise RequestError(f"the response {stored['id']} is {stored['status']}: only one that is being made can be "
                               "cancelled", "response_id")
        new.cancelled = True
        new.run.cancel("the response was cancelled")
        return _json(spliced(new.head, new.now(error="cancelled")))

    async def input_items(self, request: Request) -> Response:
        query = request.query_params
        limit, order = query.get("limit", str(_LISTED)), query.get("order", "desc")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MOST_LISTED):
            raise RequestError(f"limit must be from 1 to {_MOST_LISTED}, not {show(limit)}", "limit")
        if order not in ("asc", "desc"):
            raise RequestError(f"order must be asc or desc, not {show(order)}", "order")

        def listed() -> bytes:
            items = self._stored(request)["input"]
            items = items if order == "asc" else items[::-1]
            start = next((place for place, item in enumerate(items, 1) if item["id"] == query.get("after")), 0)
            shown = items[start:start + int(limit)]
            return dump({"object": "list", "data": shown, "has_more": len(items) > start + len(shown),
                         "first_id": shown[0]["id"] if shown else "", "last_id": shown[-1]["id"] if shown else ""})

        return _json(await record_of(request).work(listed))

    def _prepare(self, asked: RequestRecord, served: ServedModel, body: ResponsesRequest
                 ) -> tuple[PreparedRequest, Names, _NewResponse]:
        id = new_response()
        owner = asked.owner
        limits = served.limits
        items = body.items(id, self.store.finder(owner))
        before = self.store.items(body.previous_response_id, limits.max_messages, owner)
        if before is None:
            raise ProblemError(400, f"the response {show(body.previous_response_id)} is not kept: send its items",
                               "previous_response_id", "previous_response_not_found")
        chat, names = body.chat(before, items)
        if len(chat.messages) > limits.max_messages:
            raise RequestError(f"the conversation has {len(chat.messages)} messages, and may have at most "
                               f"{limits.max_messages} (max_messages)", "input")
        if len(chat.tools or ()) > limits.max_tools:  # the tools of namespaces were not counted before
            raise RequestError(f"there are {len(chat.tools or ())} tools, and may be at most {limits.max_tools} "
                               "(max_tools)", "tools")
        with renamed(names):
            prepared = prepare_chat(served, chat, translated=True)
        body.ignored.extend(sent_name(name, names) for name in chat.ignored)
        head = {"id": id, "object": "response", "created_at": int(time.time()), "model": served.name, **body.echo()}
        output = ResponseOutput(id, body.client_tools(), body.seals)
        return prepared, names, _NewResponse(id, asked, output, dump(head), dump(items), body.store is not False)

    async def _stream(self, new: _NewResponse, run: GenerationStream) -> AsyncIterator[bytes]:
        begun = await dumped(new.asked, partial(spliced, new.head, new.now()), len(new.head))
        yield new.whole_event("response.created", begun) + new.whole_event("response.in_progress", begun)
        choice = None
        async for deltas in run.deltas():
            for delta in deltas:
                choice = delta.done
                work = partial(new.encoded, new.output.take(delta.deltas))
                large = new.output.may_close(delta.deltas)
                if text := await dumped(new.asked, work, run.size if large else 0):
                    yield text
        assert choice
        cut = choice.finish == "length"
        yield await dumped(new.asked, partial(new.encoded, new.output.close(cut)), run.size)
        whole = await self._finished(new, choice)
        yield new.whole_event("response.incomplete" if cut else "response.completed", whole)

    async def _finished(self, new: _NewResponse, choice: Choice | None, error: str | None = None) -> bytes:
        """Returns the whole response, and stores it if the client wants that."""
        def work() -> bytes:
            if choice and not new.output.items:
                for _ in (*new.output.take(choice.said), *new.output.close(choice.finish == "length")):
                    pass
            response = spliced(new.head, new.now(choice, error))
            if new.keeps:
                owner = new.asked.owner
                record = b'{"response":%b,"input":%b,"owner":%b}' % (response, new.input, json.dumps(owner).encode())
                self.store.put(new.id, record, owner)
            return response

        return await new.asked.work(work)

    def _failure(self, new: _NewResponse, error: Exception) -> bytes:
        problem = problem_of(error)
        if isinstance(error, GenerationError):
            return new.whole_event("response.failed", spliced(new.head, new.now(error=problem.message)))
        found = openai_fields(problem)["error"]
        return new.encoded([{"type": "error", "code": found["code"] or found["type"], "message": found["message"],
                             "param": found["param"]}])

    def _end(self, new: _NewResponse) -> None:
        self.active.pop(new.id, None)
        new.close()

    def _active(self, request: Request) -> _NewResponse | None:
        new = self.active.get(request.path_params["id"])
        return new if new and new.asked.owner == record_of(request).owner else None

    def _stored(self, request: Request) -> Record:
        id = request.path_params["id"]
        record = self.store.get(id, record_of(request).owner)
        if record is None:
            raise _missing(id)
        return record


def _missing(id: str) -> ProblemError:
    return ProblemError(404, f"the response {show(id)} does not exist: it was not kept, or not for so long",
                        "response_id")


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _usage(usage: Usage) -> Json:
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}


class ResponseOutput:
    """Turns deltas into the items of a response and their events.

    response: the response's id. tools: the client's tools, keyed by the name that the model uses. seals: the client
    wants reasoning in a form that it can send back.
    """

    def __init__(self, response: str, tools: Mapping[str, ClientTool], seals: bool) -> None:
        self.items: list[Json] = []
        self._response = response
        self._tools = tools
        self._seals = seals
        self._open: tuple[str, int | None] | None = None
        self._texts: list[str] = []

    def take(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        """Yields the events of these deltas."""
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
                    yield self._event("delta", delta=text, **self._details())

    def may_close(self, deltas: Iterable[Delta]) -> bool:
        """Returns True if these deltas may end an item. The item's whole text is then sent again."""
        thinks = bool(self.items) and self.items[-1]["type"] == "reasoning"
        return bool(self.items) and any(bool(delta.call) or (delta.kind == "reasoning") != thinks for delta in deltas)

    def close(self, cut: bool = False) -> Iterator[Json]:
        """Yields the events that end the open item. cut: the answer was cut off."""
        if self._open is None:
            return
        item, text = self.items[-1], "".join(self._texts)
        self._open = None
        self._texts.clear()
        kind = item["type"]
        if kind == "custom_tool_call":
            item["input"] = text = _input_of(text)
            yield self._event("delta", delta=text)
            yield self._event("done", input=text)
        elif kind == "function_call":
            item["arguments"] = text
            yield self._event("done", arguments=text)
        else:
            item["content"] = [_part(kind, text)]
            yield self._event("done", text=text, **self._details())
            yield self._part_event("done", item["content"][0])
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = seal(text)
        item["status"] = "incomplete" if cut else "completed"
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _begin(self, delta: Delta) -> Iterator[Json]:
        kind, more = self._new_item(delta)
        item = {"id": new_id(kind, self._response), "type": kind, "status": "in_progress", **more}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        if not delta.call:
            yield self._part_event("added", _part(kind, ""))

    def _new_item(self, delta: Delta) -> tuple[str, Json]:
        """Returns the type of an item and the fields specific to that type."""
        if delta.kind == "reasoning":
            return "reasoning", {"summary": [], "content": []}
        if not delta.call:
            return "message", {"role": "assistant", "content": []}
        called = delta.call.name or ""
        tool = self._tools.get(called)
        custom = tool is not None and tool.custom
        fields: Json = {"call_id": delta.call.id, "name": tool.name if tool else called}
        fields["input" if custom else "arguments"] = ""
        if tool and tool.namespace:
            fields["namespace"] = tool.namespace
        return "custom_tool_call" if custom else "function_call", fields

    def _details(self) -> Json:
        """Returns the additional fields of text events."""
        details: Json = {} if "call_id" in self.items[-1] else {"content_index": 0}
        return details | ({"logprobs": []} if self.items[-1]["type"] == "message" else {})

    def _event(self, name: str, **more: Any) -> Json:
        return self._named_event(f"{_EVENTS[self.items[-1]['type']]}.{name}", **more)

    def _part_event(self, name: str, part: Json) -> Json:
        return self._named_event(f"content_part.{name}", part=part, content_index=0)

    def _named_event(self, name: str, **more: Any) -> Json:
        place = len(self.items) - 1
        return {"type": f"response.{name}", "item_id": self.items[place]["id"], "output_index": place, **more}


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _input_of(arguments: str) -> str:
    """Returns the input of a tool that takes a text, or all of the model's arguments if they contain no such input."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")["input"]  # the call may have been cut
    except (ValueError, KeyError, TypeError):
        return arguments
    return found if isinstance(found, str) else arguments
