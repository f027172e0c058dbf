"""OpenAI's requests for responses, as the chat requests that say the same."""

from __future__ import annotations

import base64
import binascii
import difflib
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from deltic.errors import RequestError, show, valid_text
from deltic.server.content import text_of, thought_of
from deltic.server.openai.schema import ChatRequest, SamplingFields
from deltic.server.parts import RESPONSES, check_within, usable_tools

_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}}
_HOSTED = frozenset((
    "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search", "mcp",
    "code_interpreter", "image_generation", "local_shell", "shell", "computer", "computer_use_preview", "apply_patch",
    "tool_search", "programmatic_tool_calling"))
_KINDS = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
          "custom_tool_call_output", "item_reference")
_MISSPELT = 0.85
"""How near to one of these types (difflib) another one has to be to be meant as it."""
_SEALED = "deltic:"  # begins what we give out as encrypted content
_ENCRYPTED = "reasoning.encrypted_content"
_RESPONSE = "resp_"
_OWN_DIGITS = 16
_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{32}})[0-9a-f]{{{_OWN_DIGITS}}}")
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}

Json = dict[str, Any]
Names = dict[str, str]
_NAMES: Mapping[str, str] = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
    "response_format.json_schema": "text.format", "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity"}
"""Our names of the fields of a chat request."""


@dataclass(frozen=True, slots=True)
class OwnTool:
    """A tool of the client's. namespace: the group of tools that it is one of. custom: it takes a text. place: where it
    stands in the request."""

    name: str
    namespace: str | None
    custom: bool
    place: str
    given: Mapping[str, Any]

    @property
    def shown(self) -> str:
        """What the model calls it."""
        return _shown(self.name, self.namespace)


class ResponsesRequest(SamplingFields):
    """The body of /v1/responses."""

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
    temperature: float | None = None
    top_p: float | None = None
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
    # as in a chat request
    stop: Any = None
    structured_outputs: Any = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    history: str | None = None

    @property
    def seals(self) -> bool:
        """Whether reasoning is wanted in a form that can be sent back by who keeps nothing."""
        return _ENCRYPTED in (self.include or ())

    def items(self, response: str, find: Callable[[str], Json | None]) -> list[Json]:
        """What is asked, as items that have ids. response: the id of what answers it. find: the item of this id, of a
        response that is kept."""
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
        """The same as a chat request, after the items of former responses, and how what it names is called here.
        RequestError names what cannot be had."""
        self._refuse()
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        names = {**_NAMES, **({"messages[0]": "instructions", "messages[0].content": "instructions"} if first else {})}
        places = [*["previous_response_id"] * len(before), *(f"input[{index}]" for index in range(len(items)))]
        messages = _messages([*before, *items], places, len(first), names)
        same = ("model", "temperature", "top_p", "stop", "structured_outputs", "enable_thinking", "thinking_budget",
                "chat_template_kwargs", "history", "parallel_tool_calls", "service_tier")
        tools, choice = self._tools(names)
        check_within(self, RESPONSES)
        messages = messages or [{"role": "user", "content": ""}]  # clients try with no input whether somebody is there
        return ChatRequest(messages=[*first, *messages], tools=tools, tool_choice=choice,
                           max_tokens=self.max_output_tokens, **self._format(), **self._effort(),
                           **self.choosing(), **{name: getattr(self, name) for name in same}), names

    def own_tools(self) -> dict[str, OwnTool]:
        """The client's tools, by what the model calls them. RequestError for what is no tool."""
        return {own.shown: own for own in _own_tools(self.tools or (), "tools", self.ignored)}

    def echo(self) -> Json:
        """What a response repeats of its request."""
        return {"instructions": self.instructions, "max_output_tokens": self.max_output_tokens,
                "max_tool_calls": self.max_tool_calls, "metadata": self.metadata or {}, "background": False,
                "parallel_tool_calls": self.parallel_tool_calls is not False, "store": self.store is not False,
                "previous_response_id": self.previous_response_id, "prompt_cache_key": self.prompt_cache_key,
                "reasoning": {"effort": (self.reasoning or {}).get("effort"), "summary": None},
                "safety_identifier": self.safety_identifier, "service_tier": "default",
                "temperature": self.temperature, "text": {"format": {"type": "text"}, **(self.text or {})},
                "tool_choice": self.tool_choice or "auto", "tools": self.tools or [], "top_logprobs": 0,
                "top_p": self.top_p, "truncation": self.truncation or "disabled", "user": self.user}

    def _refuse(self) -> None:
        for name, why in (("background", "responses are made while the client waits"),
                          ("conversation", "use previous_response_id"), ("prompt", "there are no stored prompts"),
                          ("moderation", "there is none"), ("top_logprobs", "use chat completions")):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: {why}", name)
        if self.truncation not in (None, "auto", "disabled"):
            raise RequestError(f"truncation must be auto or disabled, not {show(self.truncation)}", "truncation")
        for name in self.include or ():
            if name == "message.output_text.logprobs":
                raise RequestError(f"include cannot have {name}: use chat completions", "include")
        others = [f"include.{name}" for name in self.include or () if name != _ENCRYPTED]
        others += [name for name in ("image", "max_tool_calls") if getattr(self, name) is not None]
        self.ignored.extend([*others, *(["truncation"] if self.truncation == "auto" else [])])

    def _tools(self, names: Names) -> tuple[list[Json] | None, Any]:
        known, choice = self.own_tools(), self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            given = choice.get("tools")
            if not isinstance(given, list):
                raise RequestError(f"tool_choice.tools must be a list of tools, not {show(given)}", "tool_choice.tools")
            allowed = [tool.get("name") for tool in given if isinstance(tool, dict)]
            known = {shown: own for shown, own in known.items() if own.name in allowed or own.namespace in allowed}
            choice = choice.get("mode")
        elif isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
            name = choice.get("name")
            meant = next((own.shown for own in known.values() if own.name == name), name)
            choice = {"type": "function", "function": {"name": meant}}
        for place, own in enumerate(known.values()):
            names[f"tools[{place}].function"] = own.place
        return [_function(own) for own in known.values()] or None, choice

    def _format(self) -> Json:
        text = self.text or {}
        form = text.get("format") or {"type": "text"}
        verbosity = text.get("verbosity")
        if verbosity not in (None, "low", "medium", "high"):
            raise RequestError(f"text.verbosity must be low, medium or high, not {show(verbosity)}", "text.verbosity")
        if not isinstance(form, dict):
            raise RequestError(f"text.format must be an object, not {show(form)}", "text.format")
        if form.get("type") != "json_schema":
            return {"response_format": form, "verbosity": verbosity}
        named = {name: value for name, value in form.items() if name != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": named}, "verbosity": verbosity}

    def _effort(self) -> Json:
        given = self.reasoning or {}
        self.ignored.extend(f"reasoning.{name}" for name in ("summary", "generate_summary") if given.get(name))
        effort = given.get("effort")
        if effort is not None and not isinstance(effort, str):
            raise RequestError(f"reasoning.effort must be text, not {show(effort)}", "reasoning.effort")
        return {"reasoning_effort": effort}


def seal(thoughts: str) -> str:
    """Thinking in the place of an encrypted content: whoever has it may read it."""
    return _SEALED + base64.b64encode(thoughts.encode("utf-8", "replace")).decode()


def new_response() -> str:
    """The id of a response."""
    return _RESPONSE + uuid.uuid4().hex


def new_id(kind: str, response: str) -> str:
    """The id of an item. It says to which response the item belongs, so that it is found by its id alone."""
    return _PREFIXES.get(kind, "item_") + response.removeprefix(_RESPONSE) + uuid.uuid4().hex[:_OWN_DIGITS]


def response_of(item: str) -> str | None:
    """The response to which an item with this id belongs, if the id is one of ours."""
    found = _ITEM.fullmatch(item)
    return _RESPONSE + found[1] if found else None


def _own_tools(tools: Sequence[Any], place: str, ignored: list[str], namespace: str | None = None
               ) -> Iterator[OwnTool]:
    """The client's own tools, those of namespaces too; those that OpenAI runs are noted."""
    for index, tool in usable_tools(tools, ("function", "custom", "namespace", *_HOSTED), ignored):
        path = f"{place}[{index}]"
        kind, name = (tool.get("type"), tool.get("name")) if isinstance(tool, dict) else (None, None)
        if isinstance(kind, str) and kind in _HOSTED:
            ignored.append(f"tools.{kind}")
        elif kind == "namespace" and isinstance(name, str) and isinstance(tool.get("tools"), list) and not namespace:
            yield from _own_tools(tool["tools"], f"{path}.tools", ignored, name)
        elif kind in ("function", "custom") and isinstance(name, str):
            yield OwnTool(name, namespace, kind == "custom", path, tool)
        else:
            raise RequestError(f'{path} must be of the form {{"type": "function", "name": ...}}', path)


def _shown(name: str, namespace: Any) -> str:
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def _function(own: OwnTool) -> Json:
    tool = own.given
    given = tool.get("parameters")
    parameters = _CUSTOM if own.custom else _NOTHING if given is None else given
    function = {"name": own.shown, "description": tool.get("description"), "parameters": parameters,
                "strict": tool.get("strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _is_reference(item: Any) -> bool:
    """Whether an item is named instead of sent: by its id, the type may be left out."""
    return isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})


def _identified(item: Any, path: str, response: str, last: bool) -> Json:
    """An item with type and id; its contents are looked at, so that the error names them. last: it is the newest, and a
    type that seems to be misspelt is told."""
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


def _messages(items: Sequence[Json], places: Sequence[str], start: int, names: Names) -> list[Json]:
    """Chat messages: what the assistant said and called in a row is one.

    places: what the items are called. names: gets what the parts of messages are called, counted from `start`.
    """
    messages: list[Json] = []
    for item, place in zip(items, places, strict=True):
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
        own = f"messages[{start + len(messages) - 1}]"
        names.setdefault(own, place)
        if calls:
            call = f"{own}.tool_calls[{len(messages[-1]['tool_calls']) - 1}]"
            names |= {call: place, f"{call}.function": place, f"{call}.id": f"{place}.call_id"}
        elif item["type"] == "reasoning":
            names.setdefault(f"{own}.reasoning_content", f"{place}.content")
        else:
            names.setdefault(f"{own}.tool_call_id", f"{place}.call_id")
            names.setdefault(f"{own}.content", f"{place}.{'output' if message['role'] == 'tool' else 'content'}")
    return messages


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
        name = item.get("name")
        if not isinstance(name, str):
            raise RequestError(f"{path}.name must be the name of a function, not {show(name)}", f"{path}.name")
        if kind == "custom_tool_call":
            arguments: Any = {"input": valid_text(item.get("input"), f"{path}.input")}
        else:
            arguments = item.get("arguments")
        function = {"name": _shown(name, item.get("namespace")), "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [
            {"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": item.get("call_id"),
                "content": _content(item.get("output"), f"{path}.output")}
    return _foreign(item, kind, item.get("call_id"))


def _foreign(item: Mapping[str, Any], kind: str, call: Any) -> Json:
    """An item of another server's: a call of one of its tools, what came of it, or something that was said."""
    if kind.endswith("_output") and isinstance(call, str):
        return {"role": "tool", "tool_call_id": call, "content": _output(item)}
    if kind.endswith("_call") and isinstance(call, str):
        given: Any = next((item[name] for name in ("arguments", "action", "operation", "input") if item.get(name)), {})
        function = {"name": kind.removesuffix("_call"), "arguments": given if isinstance(given, dict | str) else {}}
        return {"role": "assistant", "content": "", "tool_calls": [
            {"id": call, "type": "function", "function": function}]}
    return {"role": "assistant", "content": [item]}


def _output(item: Mapping[str, Any]) -> str | list[Any]:
    """What came of another server's call: a text, parts, a screenshot, or something else to read."""
    output = item.get("output")
    if isinstance(output, dict) and isinstance(output.get("image_url"), str):
        return [{"type": "input_image", "image_url": output["image_url"]}]
    parts = isinstance(output, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str)
                                             for part in output)
    return output if isinstance(output, str) or (parts and output) else [item]


def _thoughts(item: Mapping[str, Any], path: str) -> str:
    sealed = item.get("encrypted_content")
    if item.get("content"):
        content = _content(item["content"], f"{path}.content")
        return content if isinstance(content, str) else "".join(text_of(part) or thought_of(part) for part in content)
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"{path}.encrypted_content is damaged", f"{path}.encrypted_content") from error
    return ""  # a summary is not what was thought


def _content(content: Any, path: str) -> str | list[Json]:
    """The text, where all parts are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} must be text or a list of parts, not {show(content)}", path)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(f"{path}[{index}] must be an object with a type, not {show(part)}",
                               f"{path}[{index}].type")
    texts = [text_of(part) for part in content]
    found = [text for text in texts if text is not None]
    return "".join(found) if len(found) == len(content) else content


def _joined(first: str | list[Json], second: str | list[Json]) -> str | list[Json]:
    """What was said in a row."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second))
    return [part for each in parts for part in each]
