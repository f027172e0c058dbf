"""Anthropic's messages and token counts: requests become chat requests, and answers are translated back."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, ClassVar, Final

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.chat.choices import Choice
from deltic.chat.output_router import Delta
from deltic.chat.processor import PreparedRequest
from deltic.errors import RequestError, show
from deltic.params import Usage
from deltic.server.errors import NO_THREADS, ProblemError, anthropic_error, anthropic_event
from deltic.server.fields import Known, SaltedFields, check_within, renamed, sent_name, usable_tools
from deltic.server.generation import GenerationStream, ServedModel
from deltic.server.http import EventStream, event, json_response, written
from deltic.server.models import ModelRegistry
from deltic.server.openai_schema import TEXT_SCHEMA, ChatRequest, SamplingFields, prepare_chat
from deltic.server.routing import ApiRoute, Check

_PING: Final = event({"type": "ping"}, "ping")
_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}
_RUNNING: Final = {"stop_reason": None, "stop_sequence": None}
_THINKING: Final = ("enabled", "adaptive", "between_tools", "disabled")
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_BLANK: Final = {"type": "text", "text": "\n\n"}

_PIECE: Final = Known.of("type text cache_control")
_SOURCE: Final = Known.of("type media_type data url file_id", content=_PIECE)
_RESULT: Final = Known.of("type text title context cache_control", source=_SOURCE, content=_PIECE).only(
    None, "text", "image", "document", "search_result")
_BLOCK: Final = Known.of(
    "type text id name input tool_use_id is_error thinking signature data title context cache_control",
    source=_SOURCE, content=_RESULT).only(
    None, "text", "image", "document", "search_result", "tool_use", "tool_result", "thinking", "redacted_thinking")
_KNOWN: Final = {
    "messages": Known.of("role", content=_BLOCK), "system": _BLOCK,
    "tools": Known.of("type name description input_schema strict cache_control"),
    "tool_choice": Known.of("type name disable_parallel_tool_use"),
    "thinking": Known.of("type budget_tokens display"), "output_config": Known.of("effort format")}

Json = dict[str, Any]
Names = dict[str, str]
"""Maps field names of a chat request to the client's names."""


def routes(models: ModelRegistry, check: Check) -> list[Route]:
    async def create(request: Request) -> Response:
        served, body, (prepared, names) = await models.read(request, MessagesRequest, _prepare)
        run = await served.start(request, [prepared], "messages", not body.stream, {**body.notes.sent, **names})
        context = served.llm.engine.max_context
        if body.stream:
            first = _message(served.name, Usage(len(prepared.request.ids), 0, 0), (), _RUNNING)
            events = _stream(run, first, BlockEvents(body.shows_thinking), context)
            return EventStream(events, anthropic_event, run.close, _PING)
        done, = await served.gather(request, run)
        assert done.done
        content = _blocks_of(done.done.said, body.shows_thinking)
        answer = _message(served.name, run.usage, content, _stop_fields(done.done, context))
        return await written(request, answer, run.size)

    async def count(request: Request) -> Response:
        _, _, (prepared, _) = await models.read(request, CountRequest, _prepare, answers=False)
        return json_response({"input_tokens": len(prepared.request.ids)})

    return [ApiRoute("/v1/messages", create, check, body=MessagesRequest, refuse=anthropic_error),
            ApiRoute("/v1/messages/count_tokens", count, check, body=CountRequest, refuse=anthropic_error)]


def _prepare(served: ServedModel, body: CountRequest) -> tuple[PreparedRequest, Names]:
    chat, names = body.chat()
    with renamed(names):
        prepared = prepare_chat(served, chat, translated=True)
    body.ignored.extend(sent_name(name, names) for name in chat.ignored)
    return prepared, names


async def _stream(run: GenerationStream, first: Json, content: BlockEvents, context: int) -> AsyncIterator[bytes]:
    def encoded(*events: Json) -> bytes:
        return b"".join(event(data, data["type"]) for data in events)

    yield encoded({"type": "message_start", "message": first})
    choice = None
    async for deltas in run.deltas():
        for delta in deltas:
            choice = delta.done
            if events := [*content.events(delta.deltas)]:
                yield encoded(*events)
    assert choice
    last = {"type": "message_delta", "delta": _stop_fields(choice, context), "usage": _usage(run.usage)}
    yield encoded(*content.close(), last, {"type": "message_stop"})


# Answers


def _usage(usage: Usage) -> Json:
    """Returns the `usage` of an answer. Tokens that are kept for later cost nothing and are not counted."""
    return {"input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}}


def _message(model: str, usage: Usage, content: Iterable[Json], stop: Json) -> Json:
    return {"id": "msg_" + uuid.uuid4().hex, "type": "message", "role": "assistant", "model": model,
            "content": content, **stop, "usage": _usage(usage)}


def _stop_fields(choice: Choice, context: int) -> Json:
    """Returns the fields that give the reason why an answer ended. context: the model's context length in tokens."""
    if choice.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    reason = _REASONS[choice.finish]
    if choice.finish == "length" and choice.usage.prompt_tokens + choice.usage.completion_tokens >= context:
        reason = "model_context_window_exceeded"
    elif choice.calls and choice.finish == "stop":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": None}


def _blocks_of(said: Iterable[Delta], shows_thinking: bool) -> Iterator[Json]:
    """Yields the content blocks of a finished answer."""
    for (kind, _), group in groupby(said, _key):
        deltas = list(group)
        text = "".join(delta.text for delta in deltas)
        if kind == "tool":
            yield _call(deltas) | {"input": _input(deltas)}
        elif kind == "reasoning":
            yield {"type": "thinking", "thinking": text if shows_thinking else "", "signature": signature(text)}
        else:
            yield {"type": "text", "text": text}


class BlockEvents:
    """Turns the content of an answer into events."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking, self._index = shows_thinking, -1
        self._open: tuple[str, int | None] | None = None
        self._thoughts: list[str] = []

    def events(self, deltas: Iterable[Delta]) -> Iterator[Json]:
        for delta in deltas:
            if _key(delta) != self._open:
                yield from self.close()
                self._open = _key(delta)
                self._index += 1
                yield {"type": "content_block_start", "index": self._index, "content_block": _empty(delta)}
            if piece := self._piece(delta):
                yield {"type": "content_block_delta", "index": self._index, "delta": piece}

    def close(self) -> Iterator[Json]:
        """Ends the open block."""
        if self._open is None:
            return
        if self._open[0] == "reasoning":
            yield {"type": "content_block_delta", "index": self._index, "delta": {
                "type": "signature_delta", "signature": signature("".join(self._thoughts))}}
            self._thoughts.clear()
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _piece(self, delta: Delta) -> Json | None:
        if delta.call:
            arguments = delta.call.arguments
            return {"type": "input_json_delta", "partial_json": arguments} if arguments else None
        if delta.kind != "reasoning":
            return {"type": "text_delta", "text": delta.text}
        self._thoughts.append(delta.text)
        return {"type": "thinking_delta", "thinking": delta.text} if self._shows_thinking else None


def signature(thoughts: str) -> str:
    """Returns a stand-in for a signature. Signatures are not verified: thinking is recognized by its text."""
    return "deltic-" + blake2b(thoughts.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _key(delta: Delta) -> tuple[str, int | None]:
    return delta.kind, delta.call.index if delta.call else None


def _empty(delta: Delta) -> Json:
    if delta.kind == "tool":
        return _call([delta]) | {"input": {}}
    if delta.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _call(deltas: Sequence[Delta]) -> Json:
    calls = [delta.call for delta in deltas if delta.call]
    return {"type": "tool_use", "id": calls[0].id, "name": "".join(call.name or "" for call in calls)}


def _input(deltas: Sequence[Delta]) -> Any:
    """Returns the arguments of a tool call. If the call was cut off, only the complete arguments are returned."""
    text = "".join(delta.call.arguments for delta in deltas if delta.call)
    return from_json(text or "{}", allow_partial=True)


# Requests


class CountRequest(SaltedFields):
    """The body of /v1/messages/count_tokens."""

    schemas: ClassVar[Mapping[str, Any]] = {"messages": {"type": "array", "minItems": 1, "items": {
        "type": "object", "required": ["role", "content"],
        "properties": {"role": {"enum": ["user", "assistant"]}, "content": TEXT_SCHEMA}}}}

    model: str | None = None
    messages: list[Any]
    system: Any = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # as in a chat request
    chat_template_kwargs: dict[str, Any] | None = None
    history: str | None = None

    @property
    def shows_thinking(self) -> bool:
        """True if the text of the thinking is wanted."""
        return (self.thinking or {}).get("display") != "omitted"

    def chat(self) -> tuple[ChatRequest, Names]:
        """Returns the equivalent chat request, and the client's names of its fields."""
        names = Names({
            "max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config",
            "response_format.json_schema": "output_config.format", "reasoning_effort": "output_config.effort",
            "thinking_budget": "thinking.budget_tokens", "enable_thinking": "thinking"})
        translation = _Translation(names)
        messages = translation.messages(self.system, self.messages)
        tools = usable_tools(self.tools or (), (None, "custom"), self.ignored)
        for own, (index, _) in enumerate(tools):
            names[f"tools[{own}].function"] = f"tools[{index}]"
            names[f"tools[{own}].function.parameters"] = f"tools[{index}].input_schema"
        fields = {"model": self.model, "messages": messages, "history": self.history, "cache_salt": self.cache_salt,
                  "chat_template_kwargs": self.chat_template_kwargs,
                  "tools": [_function(tool, f"tools[{index}]") for index, tool in tools],
                  "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
                  **_tool_choice(self.tool_choice), **self._thinking(), **self._format(), **self._more()}
        check_within(self, _KNOWN)
        return ChatRequest(**fields), names

    def _thinking(self) -> Json:
        """Returns the fields of a chat request for the thinking. Without the `thinking` field, thinking is off, as
        Anthropic's clients expect, unless the template's variable asks for it."""
        if self.thinking is None and "enable_thinking" in (self.chat_template_kwargs or {}):
            return {}
        given = self.thinking or {"type": "disabled"}
        kind, budget = given.get("type"), given.get("budget_tokens")
        if kind not in _THINKING:
            raise RequestError(f"thinking.type must be one of {', '.join(_THINKING)}, not {show(kind)}",
                               "thinking.type")
        if kind == "enabled" and type(budget) is not int:
            raise RequestError(f"thinking.budget_tokens must be a number of tokens, not {show(budget)}",
                               "thinking.budget_tokens")
        return {"enable_thinking": kind != "disabled", "thinking_budget": budget if kind == "enabled" else None}

    def _format(self) -> Json:
        given = self.output_config or {}
        effort, form = given.get("effort"), given.get("format")
        if effort is not None and not isinstance(effort, str):
            raise RequestError(f"output_config.effort must be text, not {show(effort)}", "output_config.effort")
        if form is None:
            return {"reasoning_effort": effort}
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise RequestError("output_config.format must be of the type json_schema", "output_config.format")
        schema = {name: value for name, value in form.items() if name != "type"}
        return {"reasoning_effort": effort,
                "response_format": {"type": "json_schema", "json_schema": {**schema, "strict": True}}}

    def _more(self) -> Json:
        return {}


class MessagesRequest(CountRequest, SamplingFields):
    """The body of /v1/messages."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "input": "messages", "response_format": "output_config.format", "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort", "instructions": "system"}

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    structured_outputs: Any = None  # as in a chat request
    thread: Any = None

    def _more(self) -> Json:
        if self.thread is not None:
            raise ProblemError(400, "thread is not supported: nothing is kept between requests, send all messages",
                               "thread", NO_THREADS)
        if self.max_tokens < 0:  # 0 prefills the prompt for a later request
            raise RequestError(f"max_tokens must be at least 0, not {show(self.max_tokens)}", "max_tokens")
        return {**self.same("max_tokens", "structured_outputs"), "stop": self.stop_sequences}


def _tool_choice(choice: Mapping[str, Any] | None) -> Json:
    if not choice:
        return {}
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    if kind != "tool" and (not isinstance(kind, str) or kind not in _TOOL_CHOICES):
        raise RequestError(f"tool_choice.type must be one of {', '.join((*_TOOL_CHOICES, 'tool'))}, not {show(kind)}",
                           "tool_choice.type")
    if not isinstance(alone, bool | None):
        raise RequestError(f"tool_choice.disable_parallel_tool_use must be true or false, not {show(alone)}",
                           "tool_choice.disable_parallel_tool_use")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tool_choice": named if kind == "tool" else _TOOL_CHOICES[kind],
            "parallel_tool_calls": False if alone and kind != "none" else None}


def _function(tool: Any, path: str) -> Json:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise RequestError(f'{path} must be of the form {{"name": ..., "input_schema": {{...}}}}', path)
    if tool.get("type") not in (None, "custom"):
        raise RequestError(f"{path} has the type {show(tool['type'])}: tools that a server runs are not there, only "
                           "the client's own", f"{path}.type")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{path}.input_schema must be a JSON schema, not {show(schema)}", f"{path}.input_schema")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema,
                "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


Placed = list[tuple[Json, str]]
"""Content blocks with their paths in the request."""


class _Translation:
    """Translates messages. names: gets the client's names of the chat request's messages, parts and calls."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found = list[Json]()

    def messages(self, system: Any, messages: list[Any]) -> list[Json]:
        if system:
            self._add("system", {"role": "system"}, _text(system, "system"), "system")
        for index, message in enumerate(messages):
            self._message(message, f"messages[{index}]")
        return self._found

    def _message(self, message: Any, path: str) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(f"{path}.role must be one of user, assistant, not {show(role)}", f"{path}.role")
        content, place = message.get("content"), f"{path}.content"
        if role == "assistant":
            self._assistant(_blocks(content, place), path)
        elif role == "system" or isinstance(content, str):
            self._add(path, {"role": role}, _text(content, place))
        else:
            self._user(_blocks(content, place), path)

    def _add(self, path: str, message: Json, content: str | Placed, content_path: str | None = None) -> str:
        """Adds a message. Returns its name in the chat request."""
        own = f"messages[{len(self._found)}]"
        self._names[own] = path
        if content_path:
            self._names[f"{own}.content"] = content_path
        if not isinstance(content, str):
            self._names |= {f"{own}.content[{index}]": place for index, (_, place) in enumerate(content)}
        shown = content if isinstance(content, str) else [block for block, _ in content]
        self._found.append({**message, "content": shown})
        return own

    def _user(self, blocks: Placed, path: str) -> None:
        """Adds a user message. Tool results become separate messages."""
        parts = Placed()
        for block, place in blocks:
            if block["type"] != "tool_result":
                parts.append((block, place))
                continue
            if parts:
                self._add(path, {"role": "user"}, _with_images(parts))
                parts = []
            self._result(block, place, path)
        if parts or not blocks:
            self._add(path, {"role": "user"}, _with_images(parts))

    def _result(self, block: Json, place: str, path: str) -> None:
        content = _text(block.get("content") or "", f"{place}.content")
        wrong, id = block.get("is_error"), block.get("tool_use_id")
        if not isinstance(wrong, bool | None):
            raise RequestError(f"{place}.is_error must be true or false, not {show(wrong)}", f"{place}.is_error")
        if not isinstance(id, str | None):
            raise RequestError(f"{place}.tool_use_id must be text, not {show(id)}", f"{place}.tool_use_id")
        self._add(path, {"role": "tool", "tool_call_id": id}, "error" if wrong and not content else content)

    def _assistant(self, blocks: Placed, path: str) -> None:
        parts = Placed()
        calls = Placed()
        thoughts = list[str]()
        for block, place in blocks:
            if block["type"] == "thinking":
                thought = block.get("thinking")
                if not isinstance(thought, str):
                    raise RequestError(f"{place}.thinking must be text, not {show(thought)}", f"{place}.thinking")
                thoughts.append(thought)
            elif block["type"] == "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                calls.append(({"id": block.get("id"), "type": "function", "function": function}, place))
            else:
                parts.append((block, place))
        message: Json = {"role": "assistant", "tool_calls": [call for call, _ in calls] or None}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        own = self._add(path, message, parts)
        for index, (_, place) in enumerate(calls):
            call = f"{own}.tool_calls[{index}]"
            self._names |= {call: place, f"{call}.function": place, f"{call}.function.arguments": f"{place}.input"}


def _text(content: Any, path: str) -> str | Placed:
    """Returns a text, or its blocks separated by blank lines."""
    return content if isinstance(content, str) else _spaced(_blocks(content, path))


def _with_images(parts: Placed) -> Placed:
    """Returns the blocks unchanged if they contain images, else separated by blank lines."""
    return parts if any(block["type"] == "image" for block, _ in parts) else _spaced(parts)


def _spaced(blocks: Placed) -> Placed:
    spaced = Placed()
    for block, place in blocks:
        if spaced and block["type"] != "image":
            spaced.append((_BLANK, place))
        spaced.append((block, place))
    return spaced


def _blocks(content: Any, path: str) -> Placed:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{path} must be text or a list of blocks, not {show(content)}", path)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{path}[{index}] must be an object with a type, not {show(block)}", f"{path}[{index}]")
    return [(block, f"{path}[{index}]") for index, block in enumerate(content)]
