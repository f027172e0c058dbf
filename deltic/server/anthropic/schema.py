"""Anthropic's requests, as the chat requests that say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deltic.errors import RequestError, show
from deltic.server.body import SaltedFields
from deltic.server.http import Problem, ProblemError
from deltic.server.openai.schema import ChatRequest, SamplingFields
from deltic.server.parts import ANTHROPIC, check_within

NO_THREADS = "thread_unsupported_request"
"""What tells Anthropic's clients to go on without a thread."""

_KINDS = ("enabled", "adaptive", "between_tools", "disabled")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SEPARATOR = "\n\n"
_HEADS = {"document": ("title", "context"), "search_result": ("title", "source")}
"""Fields that say what a text is, and stand before it."""

Message = dict[str, Any]
Names = dict[str, str]


class CountRequest(SaltedFields):
    """The body of /v1/messages/count_tokens."""

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

    def chat(self) -> tuple[ChatRequest, Names]:
        """The same as a chat request, and how what it names is called here. RequestError names what cannot be had."""
        messages, names = _chat_messages(self.system, self.messages)
        fields: dict[str, Any] = {"model": self.model, "messages": messages, "history": self.history,
                                  "chat_template_kwargs": self.chat_template_kwargs, "cache_salt": self.cache_salt}
        fields |= _tools(self.tools, self.tool_choice) | self._thinking() | self._format() | self._more()
        fields["continue_final_message"] = bool(messages) and messages[-1]["role"] == "assistant"
        names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(self.tools or ()))}
        names |= {f"tools[{index}].function.parameters": f"tools[{index}].input_schema"
                  for index in range(len(self.tools or ()))}
        names |= {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "response_format": "output_config",
                  "response_format.json_schema": "output_config.format",
                  "reasoning_effort": "output_config.effort", "thinking_budget": "thinking.budget_tokens",
                  "enable_thinking": "thinking"}
        check_within(self, ANTHROPIC)
        return ChatRequest(**fields), names

    @property
    def shows_thinking(self) -> bool:
        """Whether thinking is to be sent, and not just that there was some."""
        return (self.thinking or {}).get("display") != "omitted"

    def _thinking(self) -> dict[str, Any]:
        """Without the field there is none, as Anthropic's clients expect, unless the template's variable says it."""
        if self.thinking is None and "enable_thinking" in (self.chat_template_kwargs or {}):
            return {}
        given = self.thinking or {"type": "disabled"}
        kind, budget = given.get("type"), given.get("budget_tokens")
        if kind not in _KINDS:
            raise RequestError(f"thinking.type must be one of {', '.join(_KINDS)}, not {show(kind)}", "thinking.type")
        if kind == "enabled" and type(budget) is not int:
            raise RequestError(f"thinking.budget_tokens must be a number of tokens, not {show(budget)}",
                               "thinking.budget_tokens")
        return {"enable_thinking": kind != "disabled", "thinking_budget": budget if kind == "enabled" else None}

    def _format(self) -> dict[str, Any]:
        given = self.output_config or {}
        effort, form = given.get("effort"), given.get("format")
        if effort is not None and not isinstance(effort, str):
            raise RequestError(f"output_config.effort must be text, not {show(effort)}", "output_config.effort")
        fields: dict[str, Any] = {"reasoning_effort": effort}
        if form is not None:
            if not isinstance(form, dict) or form.get("type") != "json_schema":
                raise RequestError("output_config.format must be of the type json_schema", "output_config.format")
            fields["response_format"] = {"type": "json_schema", "json_schema": {
                **{name: value for name, value in form.items() if name != "type"}, "strict": True}}
        return fields

    def _more(self) -> dict[str, Any]:
        return {}


class MessagesRequest(CountRequest, SamplingFields):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[Any] | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    structured_outputs: Any = None  # as in a chat request
    thread: Any = None

    def _more(self) -> dict[str, Any]:
        if self.thread is not None:
            raise ProblemError(Problem(400, "thread is not supported: nothing is kept between requests, send all "
                                       "messages", "thread", NO_THREADS))
        if self.max_tokens < 0:  # 0 reads the prompt ahead of who will ask
            raise RequestError(f"max_tokens must be at least 0, not {show(self.max_tokens)}", "max_tokens")
        same = ("max_tokens", "temperature", "top_p", "structured_outputs")
        return self.choosing() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}


def _tools(tools: list[Any] | None, choice: Mapping[str, Any] | None) -> dict[str, Any]:
    functions = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    if not choice:
        return {"tools": functions}
    kind, wanted = choice.get("type"), None
    if kind == "tool":
        wanted = {"type": "function", "function": {"name": choice.get("name")}}
    elif not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice.type must be one of {', '.join((*_CHOICES, 'tool'))}, not {show(kind)}",
                           "tool_choice.type")
    alone = choice.get("disable_parallel_tool_use")
    if not isinstance(alone, bool | None):
        raise RequestError(f"tool_choice.disable_parallel_tool_use must be true or false, not {show(alone)}",
                           "tool_choice.disable_parallel_tool_use")
    parallel = False if alone and kind != "none" else None
    return {"tools": functions, "tool_choice": wanted or _CHOICES[kind], "parallel_tool_calls": parallel}


def _tool(tool: Any, path: str) -> dict[str, Any]:
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


def _chat_messages(system: Any, messages: list[Any]) -> tuple[list[Message], Names]:
    chat: list[Message] = []
    names: Names = {}
    if system:
        names |= {"messages[0]": "system", "messages[0].content": "system"}
        content, places = _separate(system, "system")
        names |= {f"messages[0].content[{index}]": place for index, place in enumerate(places)}
        chat.append({"role": "system", "content": content})
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        for turned, places in _turned(message, path):
            own = f"messages[{len(chat)}]"
            names[own] = path
            for part, place in enumerate(places):
                if turned["role"] == "assistant":
                    call = f"{own}.tool_calls[{part}]"
                    names |= {call: place, f"{call}.function": place, f"{call}.function.arguments": f"{place}.input"}
                else:
                    names[f"{own}.content[{part}]"] = place
            chat.append(turned)
    return chat, names


def _turned(message: Any, path: str) -> Iterator[tuple[Message, list[str]]]:
    """One message as those of a chat, and where each part of their contents, or call, comes from: a tool's results have
    messages of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{path}.role must be one of user, assistant, not {show(role)}", f"{path}.role")
    content, place = message.get("content"), f"{path}.content"
    if role == "assistant":
        blocks = _blocks(content, place)
        calls = [f"{place}[{index}]" for index, block in enumerate(blocks) if block["type"] == "tool_use"]
        yield _assistant(blocks, place), calls
    elif role == "system" or isinstance(content, str):
        separated, places = _separate(content, place)
        yield {"role": role, "content": separated}, places
    else:
        yield from _user(_blocks(content, place), place)


def _user(blocks: list[Any], path: str) -> Iterator[tuple[Message, list[str]]]:
    parts: dict[str, Any] = {}
    for index, block in enumerate(blocks):
        place = f"{path}[{index}]"
        if block["type"] != "tool_result":
            parts[place] = _part(block, place)
            continue
        if parts:
            yield {"role": "user", "content": _joined([*parts.values()])}, [*parts]
            parts = {}
        result, places = _separate(block.get("content") or "", f"{place}.content")
        wrong, id = block.get("is_error"), block.get("tool_use_id")
        if not isinstance(wrong, bool | None):
            raise RequestError(f"{place}.is_error must be true or false, not {show(wrong)}", f"{place}.is_error")
        if not isinstance(id, str | None):
            raise RequestError(f"{place}.tool_use_id must be text, not {show(id)}", f"{place}.tool_use_id")
        failed = "error" if wrong and not result else result
        yield {"role": "tool", "tool_call_id": id, "content": failed}, places
    if parts or not blocks:
        yield {"role": "user", "content": _joined([*parts.values()])}, [*parts]


def _assistant(blocks: list[Any], path: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Any] = []
    for index, block in enumerate(blocks):
        place, kind = f"{path}[{index}]", block["type"]
        if kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise RequestError(f"{place}.thinking must be text, not {show(thought)}", f"{place}.thinking")
            thoughts.append(thought)
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # of another server: nobody can read it
            texts.append(_text(block, place))
    message: Message = {"role": "assistant", "content": "".join(texts), "tool_calls": calls or None}
    return message | ({"reasoning_content": "".join(thoughts)} if any(thoughts) else {})


def _separate(content: Any, path: str) -> tuple[Any, list[str]]:
    """A text, or its blocks as a list of parts, a header being one of its own; and where each part comes from."""
    if isinstance(content, str):
        return content, []
    parts = {f"{path}[{index}]": _part(block, f"{path}[{index}]") for index, block in enumerate(_blocks(content, path))}
    return [part if part["type"] != "text" or not index else {**part, "text": _SEPARATOR + part["text"]}
            for index, part in enumerate(parts.values())], [*parts]


def _joined(parts: list[Any]) -> Any:
    """The text, where all parts are."""
    if all(part["type"] == "text" for part in parts):
        return _SEPARATOR.join(part["text"] for part in parts)
    return parts


def _part(block: Mapping[str, Any], path: str) -> Any:
    """A block as a part of a chat."""
    source = block.get("source")
    if block["type"] != "image" or not isinstance(source, dict):
        return {"type": "text", "text": _text(block, path)}
    given = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": given if source.get("type") == "base64" else source.get("url")}}


def _blocks(content: Any, path: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{path} must be text or a list of blocks, not {show(content)}", path)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{path}[{index}] must be an object with a type, not {show(block)}", f"{path}[{index}]")
    return content


def _text(block: Mapping[str, Any], path: str) -> str:
    """What a block says: a text, or with its heads a document or a search result that is one."""
    kind, source = block["type"], block.get("source")
    form = source.get("type") if kind == "document" and isinstance(source, dict) else None
    if form == "text":
        said = _is_text(source.get("data"), f"{path}.source.data")  # type: ignore[union-attr]
    elif form == "content":
        said = _said(source.get("content"), f"{path}.source.content")  # type: ignore[union-attr]
    elif kind == "search_result":
        said = _said(block.get("content"), f"{path}.content")
    else:
        return _plain(block, path)
    heads = (_is_text(block[name], f"{path}.{name}") for name in _HEADS[kind] if block.get(name) is not None)
    return "\n".join((*heads, said))


def _said(content: Any, path: str) -> str:
    """A text, or blocks that are texts."""
    return _SEPARATOR.join(_plain(block, f"{path}[{index}]") for index, block in enumerate(_blocks(content, path)))


def _plain(block: Mapping[str, Any], path: str) -> str:
    if block["type"] != "text":
        raise RequestError(f"{path} is of type {show(block['type'])}, but this server reads text only", f"{path}.type")
    return _is_text(block.get("text"), f"{path}.text")


def _is_text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{path} must be text, not {show(value)}", path)
    return value
