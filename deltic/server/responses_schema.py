"""OpenAI's Responses request schema, translated to chat requests."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from deltic.errors import RequestError, show, valid_text
from deltic.server.content import text_of, thought_of
from deltic.server.fields import Known, check_within, usable_tools
from deltic.server.openai_schema import ChatRequest, SamplingFields

_HOSTED: Final = frozenset((
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search", "mcp",
    "code_interpreter", "image_generation", "local_shell", "shell", "computer", "computer_use_preview", "apply_patch",
    "tool_search", "programmatic_tool_calling"))
"""Types of tools that OpenAI runs itself."""
_KINDS: Final = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
                 "custom_tool_call_output", "item_reference")
_MISSPELT: Final = 0.85
"""difflib ratio from which a type counts as a misspelling of a known type."""
_SEALED: Final = "deltic:"
"""Prefix of our "encrypted" content."""
_ENCRYPTED: Final = "reasoning.encrypted_content"
_RESPONSE: Final = "resp_"
_OWN_DIGITS: Final = 16
_ITEM: Final = re.compile(rf"[a-z]+_([0-9a-f]{{32}})[0-9a-f]{{{_OWN_DIGITS}}}")
_PREFIXES: Final = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_CUSTOM: Final = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_NO_PARAMETERS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}}
_NAMES: Final[Mapping[str, str]] = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "response_format.json_schema": "text.format", "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity"}
"""The client's names for the fields of a chat request."""
_UNSUPPORTED: Final = {
    "background": "responses are made while the client waits",
    "conversation": "use previous_response_id",
    "prompt": "there are no stored prompts",
    "moderation": "there is none",
    "top_logprobs": "use chat completions",
}

_TEXT: Final = Known.of("type text refusal image_url").only(None, "input_text", "output_text", "input_image")
_KNOWN: Final = {
    "input": Known.of("type id role status name namespace arguments call_id input summary encrypted_content",
                      content=_TEXT, output=_TEXT).only(None, *_KINDS),
    "reasoning": Known.of("effort summary generate_summary"), "text": Known.of("format verbosity"),
    "stream_options": Known.of("include_obfuscation"),
    "tools": Known.of("type name description parameters strict").only("function", "custom")}

Json = dict[str, Any]
Names = dict[str, str]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool of the client. namespace: the group that contains the tool. custom: the tool takes a text. place: path of
    the tool in the request."""

    name: str
    namespace: str | None
    custom: bool
    place: str
    given: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """Returns the name that the model uses for the tool."""
        return _shown(self.name, self.namespace)

    def function(self) -> Json:
        """Returns the tool as it appears in a chat request."""
        parameters = self.given.get("parameters")
        if self.custom:
            parameters = _CUSTOM
        elif parameters is None:
            parameters = _NO_PARAMETERS
        function = {"name": self.shown, "description": self.given.get("description"), "parameters": parameters,
                    "strict": self.given.get("strict")}
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class ResponsesRequest(SamplingFields):
    """The body of /v1/responses."""

    schemas: ClassVar[Mapping[str, Any]] = {"input": {"type": ["string", "array"], "items": {"type": "object"}}}
    elsewhere: ClassVar[Mapping[str, str]] = {
        "messages": "input", "response_format": "text.format", "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity", "system": "instructions"}

    model: str | None = None
    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    image: Any = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # the fields below mean the same as in a chat request
    stop: Any = None
    structured_outputs: Any = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    history: str | None = None

    @property
    def seals(self) -> bool:
        """True if the client wants reasoning in a form that it can send back."""
        return _ENCRYPTED in (self.include or ())

    def items(self, response: str, find: Callable[[str], Json | None]) -> list[Json]:
        """Returns the input as items with ids. response: id of the new response. find: returns a stored item."""
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if not isinstance(given, list):
            raise RequestError("input must be text or a list of items", "input")
        items: list[Json] = []
        named = set[str]()
        for index, item in enumerate(given):
            path = f"input[{index}]"
            if not _is_reference(item):
                items.append(_identified(item, path, response, index == len(given) - 1))
                continue
            id = valid_text(item.get("id"), f"{path}.id")
            found = None if id in named else find(id)  # a short request must not become a long conversation
            if found is None:
                why = "is there already" if id in named else "is not kept: send it whole"
                raise RequestError(f"{path} names the item {show(id)}, which {why}", f"{path}.id")
            named.add(id)
            items.append(found)
        return items

    def chat(self, before: Sequence[Json], items: Sequence[Json]) -> tuple[ChatRequest, Names]:
        """Returns the equivalent chat request, and the client's names of its fields. before: the items of previous
        responses."""
        self._refuse()
        names, messages = dict(_NAMES), list[Json]()
        if self.instructions:
            names |= {"messages[0]": "instructions", "messages[0].content": "instructions"}
            messages.append({"role": "system", "content": self.instructions})
        places = [*["previous_response_id"] * len(before), *(f"input[{index}]" for index in range(len(items)))]
        for item, place in zip([*before, *items], places, strict=True):
            _add(messages, item, place, names)
        if len(messages) == bool(self.instructions):  # clients test the connection without input
            messages.append({"role": "user", "content": ""})
        tools, choice = self._tools(names)
        check_within(self, _KNOWN)
        same = self.same("model", "stop", "structured_outputs", "enable_thinking",
                         "thinking_budget", "chat_template_kwargs", "history", "parallel_tool_calls", "service_tier")
        return ChatRequest(messages=messages, tools=tools, tool_choice=choice, max_tokens=self.max_output_tokens,
                           **self._format(), **self._effort(), **same), names

    def client_tools(self) -> dict[str, ClientTool]:
        """Returns the client's tools, keyed by the name that the model uses."""
        return {tool.shown: tool for tool in _client_tools(self.tools or (), "tools", self.ignored)}

    def echo(self) -> Json:
        """Returns the request fields that a response repeats."""
        same = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key",
                "safety_identifier", "temperature", "top_p", "user")
        return {**{name: getattr(self, name) for name in same}, "metadata": self.metadata or {}, "background": False,
                "parallel_tool_calls": self.parallel_tool_calls is not False, "store": self.store is not False,
                "reasoning": {"effort": (self.reasoning or {}).get("effort"), "summary": None},
                "service_tier": "default", "text": {"format": {"type": "text"}, **(self.text or {})},
                "tool_choice": self.tool_choice or "auto", "tools": self.tools or [], "top_logprobs": 0,
                "truncation": self.truncation or "disabled"}

    def _refuse(self) -> None:
        for name, why in _UNSUPPORTED.items():
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: {why}", name)
        if self.truncation not in (None, "auto", "disabled"):
            raise RequestError(f"truncation must be auto or disabled, not {show(self.truncation)}", "truncation")
        if "message.output_text.logprobs" in (self.include or ()):
            raise RequestError("include cannot have message.output_text.logprobs: use chat completions", "include")
        self.ignored.extend(f"include.{name}" for name in self.include or () if name != _ENCRYPTED)
        self.ignored.extend(name for name in ("image", "max_tool_calls") if getattr(self, name) is not None)
        if self.truncation == "auto":
            self.ignored.append("truncation")

    def _tools(self, names: Names) -> tuple[list[Json] | None, Any]:
        known, choice = self.client_tools(), self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            given = choice.get("tools")
            if not isinstance(given, list):
                raise RequestError(f"tool_choice.tools must be a list of tools, not {show(given)}", "tool_choice.tools")
            allowed = [tool.get("name") for tool in given if isinstance(tool, dict)]
            known = {shown: tool for shown, tool in known.items()
                     if tool.name in allowed or tool.namespace in allowed}
            choice = choice.get("mode")
        elif isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            name = choice.get("name")
            meant = next((tool.shown for tool in known.values() if tool.name == name), name)
            choice = {"type": "function", "function": {"name": meant}}
        names |= {f"tools[{index}].function": tool.place for index, tool in enumerate(known.values())}
        return [tool.function() for tool in known.values()] or None, choice

    def _format(self) -> Json:
        text = self.text or {}
        form = text.get("format") or {"type": "text"}
        verbosity = text.get("verbosity")
        if verbosity not in (None, "low", "medium", "high"):
            raise RequestError(f"text.verbosity must be low, medium or high, not {show(verbosity)}", "text.verbosity")
        if not isinstance(form, dict):
            raise RequestError(f"text.format must be an object, not {show(form)}", "text.format")
        if form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": schema}
        return {"response_format": form, "verbosity": verbosity}

    def _effort(self) -> Json:
        given = self.reasoning or {}
        self.ignored.extend(f"reasoning.{name}" for name in ("summary", "generate_summary") if given.get(name))
        effort = given.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise RequestError(f"reasoning.effort must be text, not {show(effort)}", "reasoning.effort")
        return {"reasoning_effort": effort}


def seal(thoughts: str) -> str:
    """Returns thinking in the place of encrypted content. It is not secret."""
    return _SEALED + base64.b64encode(thoughts.encode("utf-8", "replace")).decode()


def new_response() -> str:
    """Returns the id of a new response."""
    return _RESPONSE + uuid.uuid4().hex


def new_id(kind: str, response: str) -> str:
    """Returns the id of a new item, which contains the id of its response."""
    return _PREFIXES.get(kind, "item_") + response.removeprefix(_RESPONSE) + uuid.uuid4().hex[:_OWN_DIGITS]


def response_of(item: str) -> str | None:
    """Returns the response to which an item belongs, from the item's id; None if the id is not ours."""
    found = _ITEM.fullmatch(item)
    return _RESPONSE + found[1] if found else None


def _client_tools(tools: Sequence[Any], place: str, ignored: list[str], namespace: str | None = None
                  ) -> Iterator[ClientTool]:
    """Yields the client's tools, including those in namespaces. Tools that OpenAI runs are noted as ignored."""
    for index, tool in usable_tools(tools, ("function", "custom", "namespace", *_HOSTED), ignored):
        path = f"{place}[{index}]"
        kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else (None, None)
        if isinstance(kind, str) and kind in _HOSTED:
            ignored.append(f"tools.{kind}")
        elif kind == "namespace" and isinstance(name, str) and isinstance(tool.get("tools"), list) and not namespace:
            yield from _client_tools(tool["tools"], f"{path}.tools", ignored, name)
        elif kind in ("function", "custom") and isinstance(name, str):
            yield ClientTool(name, namespace, kind == "custom", path, tool)
        else:
            raise RequestError(f'{path} must be of the form {{"type": "function", "name": ...}}', path)


def _shown(name: str, namespace: Any) -> str:
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _is_reference(item: Any) -> bool:
    """Returns True if an item is only a reference by id; the type may be left out."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _identified(item: Any, path: str, response: str, last: bool) -> Json:
    """Returns an item with type and id, after checking its content. last: a misspelt type is refused."""
    if not isinstance(item, dict):
        raise RequestError(f"{path} must be an object, not {show(item)}", path)
    kind = item.get("type") or "message"
    if not isinstance(kind, str):
        raise RequestError(f"{path}.type must be text, not {show(kind)}", f"{path}.type")
    if last and kind not in _KINDS and (meant := difflib.get_close_matches(kind[:64], _KINDS, 1, _MISSPELT)):
        raise RequestError(f"{path} has the unknown type {show(kind)}: do you mean {meant[0]!r}?", f"{path}.type")
    checked: Json = {**item, "type": kind, "id": item.get("id") or new_id(kind, response)}
    _message(checked, path)
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        checked["content"] = [{"type": part, "text": item["content"]}]
    return checked


def _add(messages: list[Json], item: Json, place: str, names: Names) -> None:
    """Adds an item to the messages. Consecutive assistant items become one message."""
    message = _message(item, place)
    calls = message.get("tool_calls") or []
    if message["role"] == "assistant" and messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        last["content"] = _joined(last["content"], message["content"])
        last["tool_calls"] = (last.get("tool_calls") or []) + calls or None
        if "reasoning_content" in message:
            last["reasoning_content"] = last.get("reasoning_content", "") + message["reasoning_content"]
    else:
        messages.append(message)
    own = f"messages[{len(messages) - 1}]"
    names.setdefault(own, place)
    if calls:
        call = f"{own}.tool_calls[{len(messages[-1]['tool_calls']) - 1}]"
        names |= {call: place, f"{call}.function": place, f"{call}.id": f"{place}.call_id"}
    elif item["type"] == "reasoning":
        names.setdefault(f"{own}.reasoning_content", f"{place}.content")
    else:
        names.setdefault(f"{own}.tool_call_id", f"{place}.call_id")
        names.setdefault(f"{own}.content", f"{place}.{'output' if message['role'] == 'tool' else 'content'}")


def _message(item: Mapping[str, Any], path: str) -> Json:
    kind = item["type"]
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise RequestError(f"{path}.role must be one of user, assistant, system, developer, not {show(role)}",
                               f"{path}.role")
        return {"role": role, "content": _content(item.get("content"), f"{path}.content")}
    if kind == "reasoning":
        thoughts = _thoughts(item, path)
        return {"role": "assistant", "content": ""} | ({"reasoning_content": thoughts} if thoughts else {})
    if kind in ("function_call", "custom_tool_call"):
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str):
            raise RequestError(f"{path}.name must be the name of a function, not {show(name)}", f"{path}.name")
        if kind == "custom_tool_call":
            arguments = {"input": valid_text(item.get("input"), f"{path}.input")}
        return _called(item.get("call_id"), _shown(name, item.get("namespace")), arguments)
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"),
                "content": _content(item.get("output"), f"{path}.output")}
    return _foreign(item, kind, item.get("call_id"))


def _called(id: Any, name: str, arguments: Any) -> Json:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _foreign(item: Mapping[str, Any], kind: str, call: Any) -> Json:
    """Converts an item of another server: a call of its tools, the output of one, or content."""
    if kind.endswith("_output") and isinstance(call, str):
        return {"role": "tool", "tool_call_id": call, "content": _output(item)}
    if kind.endswith("_call") and isinstance(call, str):
        fields = ("arguments", "action", "operation", "input")
        given: Any = next((item[name] for name in fields if item.get(name)), {})
        return _called(call, kind.removesuffix("_call"), given if isinstance(given, dict | str) else {})
    return {"role": "assistant", "content": [item]}


def _output(item: Mapping[str, Any]) -> str | list[Any]:
    """Returns the output of another server's call: a text, parts, a screenshot, or other readable content."""
    output = item.get("output")
    if isinstance(output, dict) and isinstance(output.get("image_url"), str):
        return [{"type": "input_image", "image_url": output["image_url"]}]
    if isinstance(output, list) and output and all(
            isinstance(part, dict) and isinstance(part.get("type"), str) for part in output):
        return output
    return output if isinstance(output, str) else [item]


def _thoughts(item: Mapping[str, Any], path: str) -> str:
    """Returns the thinking of an item. A summary does not count as thinking."""
    sealed = item.get("encrypted_content")
    if item.get("content"):
        content = _content(item["content"], f"{path}.content")
        return content if isinstance(content, str) else "".join(text_of(part) or thought_of(part) for part in content)
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{path}.encrypted_content is damaged", f"{path}.encrypted_content") from error
    return ""


def _content(content: Any, path: str) -> str | list[Json]:
    """Returns the parts of a content, or its text if all parts are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} must be text or a list of parts, not {show(content)}", path)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{path}[{index}] must be an object with a type, not {show(part)}",
                               f"{path}[{index}].type")
    texts = [text for part in content if (text := text_of(part)) is not None]
    return "".join(texts) if len(texts) == len(content) else content


def _joined(first: str | list[Json], second: str | list[Json]) -> str | list[Json]:
    """Joins two contents."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second))
    return [part for each in parts for part in each]
