"""Anthropic's requests, as the chat requests that say the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from deltic.errors import RequestError, show
from deltic.server.body import SaltedFields
from deltic.server.http import Problem, ProblemError
from deltic.server.openai.schema import ChatRequest, SamplingFields
from deltic.server.parts import ANTHROPIC, check_within, usable_tools

NO_THREADS = "thread_unsupported_request"
"""What tells Anthropic's clients to go on without a thread."""

_KINDS = ("enabled", "adaptive", "between_tools", "disabled")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_BLANK = {"type": "text", "text": "\n\n"}

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
        tools = usable_tools(self.tools or (), (None, "custom"), self.ignored)
        fields |= _tools(tools, self.tool_choice) | self._thinking() | self._format() | self._more()
        fields["continue_final_message"] = bool(messages) and messages[-1]["role"] == "assistant"
        for own, (index, _) in enumerate(tools):
            names |= {f"tools[{own}].function": f"tools[{index}]",
                      f"tools[{own}].function.parameters": f"tools[{index}].input_schema"}
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

    elsewhere: ClassVar[Mapping[str, str]] = {
        "input": "messages", "response_format": "output_config.format", "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort", "instructions": "system"}

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


def _tools(tools: list[tuple[int, Any]], choice: Mapping[str, Any] | None) -> dict[str, Any]:
    functions = [_tool(tool, f"tools[{index}]") for index, tool in tools]
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
            names |= {f"{own}.content[{part}]": place for part, place in enumerate(places)}
            for part, place in enumerate(_calls(message, path) if turned["role"] == "assistant" else ()):
                call = f"{own}.tool_calls[{part}]"
                names |= {call: place, f"{call}.function": place, f"{call}.function.arguments": f"{place}.input"}
            chat.append(turned)
    return chat, names


def _calls(message: Message, path: str) -> list[str]:
    """Where an assistant's message has calls."""
    content = message.get("content")
    return [f"{path}.content[{index}]" for index, block in enumerate(content if isinstance(content, list) else ())
            if block["type"] == "tool_use"]


def _turned(message: Any, path: str) -> Iterator[tuple[Message, list[str]]]:
    """One message as those of a chat, and where each part of their contents comes from: a tool's results have messages
    of their own."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{path}.role must be one of user, assistant, not {show(role)}", f"{path}.role")
    content, place = message.get("content"), f"{path}.content"
    if role == "assistant":
        yield _assistant(_blocks(content, place), place)
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
            parts[place] = block
            continue
        if parts:
            yield _of_user(parts)
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
        yield _of_user(parts)


def _of_user(parts: Mapping[str, Any]) -> tuple[Message, list[str]]:
    """A message with these blocks, by their places; where there are pictures among them, as they stand."""
    if any(block["type"] == "image" for block in parts.values()):
        return {"role": "user", "content": [*parts.values()]}, [*parts]
    content, places = _spaced(parts)
    return {"role": "user", "content": content}, places


def _assistant(blocks: list[Any], path: str) -> tuple[Message, list[str]]:
    """The message, and where the parts of its content come from."""
    parts, places = list[Any](), list[str]()
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
        else:
            parts.append(block)
            places.append(place)
    message: Message = {"role": "assistant", "content": parts, "tool_calls": calls or None}
    return message | ({"reasoning_content": "".join(thoughts)} if any(thoughts) else {}), places


def _separate(content: Any, path: str) -> tuple[Any, list[str]]:
    """A text, or its blocks with blank lines between them, a header being one of its own; and where each of them comes
    from."""
    if isinstance(content, str):
        return content, []
    return _spaced({f"{path}[{index}]": block for index, block in enumerate(_blocks(content, path))})


def _spaced(blocks: Mapping[str, Any]) -> tuple[list[Any], list[str]]:
    """Blocks by their places, with blank lines before those that follow and are no pictures; and the place of each."""
    spaced = list[tuple[Any, str]]()
    for place, block in blocks.items():
        spaced += [(_BLANK, place)] if spaced and block["type"] != "image" else []
        spaced.append((block, place))
    return [piece for piece, _ in spaced], [place for _, place in spaced]


def _blocks(content: Any, path: str) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{path} must be text or a list of blocks, not {show(content)}", path)
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(f"{path}[{index}] must be an object with a type, not {show(block)}", f"{path}[{index}]")
    return content
