"""Normalises the messages and tools of a request for chat templates, and removes billing headers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deltic.chat.tool_arguments import MAX_JSON_CHARS, loads
from deltic.chat.tools import CALLABLE, LONGEST_NAME
from deltic.errors import RequestError, show, valid_text

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant",
          "tool": "tool", "function": "tool"}
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields in which clients send reasoning, and in which templates look for it."""

_MEDIA = {"image": "image", "image_url": "image", "input_image": "image",
          "video": "video", "video_url": "video"}
_MAX_DEPTH = 64
See = Callable[[Mapping[str, Any], str, str], dict[str, Any]]
"""Function from a media part, its type (image or video) and its field to the part for chat templates."""


def normalise_messages(messages: Any, *, see: See | None = None) -> list[dict[str, Any]]:
    """Returns new plain messages. Raises RequestError that names a wrong field.

    - `content` and `contents` are both set: to text, or to a list of parts if `see` is given and one part is media.
      Missing content is empty text.
    - Reasoning is set under all of its names.
    - Call arguments become mappings. Text that is not a JSON object becomes the object that it begins, or {"arguments":
      TEXT}, so that a bad call does not fail every later request.
    - The role `function` and the field `function_call` become the equivalents for tools.
    - Keys without a value are dropped, unknown keys are kept.
    """
    return [normalise_message(message, f"messages[{index}]", see)
            for index, message in enumerate(check_messages(messages))]


def check_messages(messages: Any) -> Sequence[Any]:
    """Raises RequestError if the messages are not a list."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError("messages must be a list of messages", "messages")
    return messages


def normalise_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Returns a copy of the tools, or None if there are none. Raises RequestError that names a wrong one."""
    if not tools:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError("tools must be a list of tools", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """Returns a copy made of JSON types only, because templates must not reach methods of other objects."""
    if isinstance(value, str):
        return valid_text(value, field)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > _MAX_DEPTH:
        raise RequestError(f"{field} is nested more than {_MAX_DEPTH} levels deep", field)
    if isinstance(value, Mapping):
        return {valid_text(key, field): plain(item, f"{field}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"{field} must be made of JSON values, not {type(value).__name__}", field)


def _tool(tool: Any, field: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f'{field} must be of the form {{"type": "function", "function": {{"name": ...}}}}',
                           field)
    copied: dict[str, Any] = plain(tool, field)
    place = f"{field}.function" if "function" in tool else field
    if not CALLABLE.fullmatch(function["name"]):
        raise RequestError(f"{place}.name must be a name without <, > and line breaks and of at most {LONGEST_NAME} "
                           f"characters, as calls could not be told from text, not {show(function['name'])}",
                           f"{place}.name")
    _check_types(function, place, (("description", str, "text"), ("strict", bool, "true or false"),
                                   ("parameters", Mapping, "a JSON schema, an object")))
    _check_types(function.get("parameters") or {}, f"{place}.parameters", (
        ("properties", Mapping, "an object"), ("required", list | tuple, "a list of names")))
    return copied


def _check_types(given: Mapping[str, Any], field: str, types: Iterable[tuple[str, Any, str]]) -> None:
    """Raises RequestError that names the first field with a value of another type."""
    for name, kind, wanted in types:
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise RequestError(f"{field}.{name} must be {wanted}, not {show(given[name])}", f"{field}.{name}")


def normalise_message(message: Any, field: str, see: See | None) -> dict[str, Any]:
    """Returns one message as `normalise_messages` does. field: name of the message in errors."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{field} must be an object, not {type(message).__name__}", field)
    present = {key: value for key, value in message.items() if value is not None}
    special = ("role", "content", "contents", "tool_calls", "function_call")
    result: dict[str, Any] = {"role": _role(present.get("role"), f"{field}.role")}
    result |= {key: plain(value, f"{field}.{key}") for key, value in present.items() if key not in special}
    name = "contents" if "content" not in present and "contents" in present else "content"
    result["content"] = result["contents"] = _content(present.get(name, ""), f"{field}.{name}", see)
    _check_types(result, field, ((name, str, "text") for name in ("name", "tool_call_id", *REASONING)))
    reasoning = next((result[key] for key in REASONING if key in result), None)
    if reasoning is not None:
        result |= dict.fromkeys(REASONING, reasoning)
    if present.get("tool_calls"):
        result["tool_calls"] = _calls(present["tool_calls"], f"{field}.tool_calls")
    elif "function_call" in present:  # OpenAI's older form
        result["tool_calls"] = [_call(present["function_call"], f"{field}.function_call")]
    return result


def _role(role: Any, field: str) -> str:
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{field} must be one of {', '.join(_ROLES)}, not {role!r}", field)
    return _ROLES[role]


def _content(content: Any, field: str, see: See | None) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return valid_text(content, field)
    if not isinstance(content, list | tuple):
        raise RequestError(f"{field} must be text or a list of parts, not {type(content).__name__}", field)
    parts = [_part(part, f"{field}[{index}]", see) for index, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, field: str, see: See | None) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": valid_text(part, field)}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "refusal"):  # refusals are text
        return {"type": "text", "text": valid_text(part.get(kind), f"{field}.{kind}")}
    if not isinstance(kind, str) or kind not in _MEDIA:
        raise RequestError(f"{field} has the unknown type {kind!r}: parts are of type text"
                           + (", image_url or video_url" if see else ""), field)
    if see is None:
        raise RequestError(f"{field} is of type {_MEDIA[kind]}, but this model reads text only", field)
    return see(part, _MEDIA[kind], field)


def _calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{field} must be a list of calls, not {type(calls).__name__}", field)
    return [_call(call, f"{field}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, field: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{field}.function.name must be the name of a function", f"{field}.function.name")
    arguments = _arguments(function.get("arguments"), f"{field}.function.arguments")
    result = {key: plain(value, f"{field}.{key}") for key, value in call.items()
              if key not in ("function", "name", "arguments")}
    _check_types(result, field, (("id", str, "text"),))
    return {"type": "function", **result, "function": {
        "name": valid_text(function["name"], f"{field}.function.name"), "arguments": arguments}}


def _arguments(arguments: Any, field: str) -> dict[str, Any]:
    if arguments is None or isinstance(arguments, str):
        arguments = _read_arguments(valid_text(arguments or "", field))
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{field} must be a JSON object, not {type(arguments).__name__}", field)
    copied: dict[str, Any] = plain(arguments, field)
    return copied


def _read_cut_object(text: str) -> Any:
    """Returns the parsed beginning of an object that was cut off."""
    from pydantic_core import from_json  # loaded on first use, for fast command lines

    try:
        return from_json(text, allow_partial="trailing-strings") if len(text) <= MAX_JSON_CHARS else text
    except ValueError:
        return text


def _read_arguments(text: str) -> dict[str, Any]:
    try:
        value = loads(text) if text.strip() else None
        value = loads(value) if isinstance(value, str) else value  # some clients encode the value twice
    except ValueError:
        value = _read_cut_object(text)
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": text}


# Coding agents begin the system message with a changing line, which defeats prefix reuse, such as
# x-anthropic-billing-header: cc_version=2.1.15.abc; cc_entrypoint=cli; cch=00000;
_HEADER = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_SYSTEM = ("system", "developer")


def without_billing_headers(messages: Any) -> Any:
    """Removes billing headers from the beginning of system messages. Returns the same object if there are none.

    Takes messages as clients send them: a header in a separate part has no line end once parts are joined.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        return messages
    cleaned = [_without_header(message) for message in messages]
    return messages if all(new is old for new, old in zip(cleaned, messages)) else cleaned


def _without_header(message: Any) -> Any:
    if not isinstance(message, Mapping) or message.get("role") not in _SYSTEM:
        return message
    changed = {name: cleaned for name in ("content", "contents")
               if (cleaned := _content_without_header(message.get(name))) is not message.get(name)}
    return {**message, **changed} if changed else message


def _content_without_header(content: Any) -> Any:
    if isinstance(content, str):
        return _HEADER.sub("", content) if _HEADER.match(content) else content
    if not isinstance(content, list | tuple) or not content:
        return content
    part, *rest = content
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str) or not _HEADER.match(text):
        return content
    left = _HEADER.sub("", text)
    if not left:
        return _content_without_header(rest)
    return [{**part, "text": left} if isinstance(part, Mapping) else left, *rest]
