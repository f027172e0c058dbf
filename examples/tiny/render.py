"""A conversation as text: what `chat_template.jinja` writes for whole conversations, five times faster."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

_BEFORE_TOOLS = "<|im_start|>system\n# Tools\n\nYou may call these functions:\n\n<tools>"
_AFTER_TOOLS = (
    "\n</tools>\n\nTo call one, write this and nothing after it:\n\n<tool_call>\n<function=NAME>\n<parameter=KEY>\n"
    "VALUE\n</parameter>\n</function>\n</tool_call>\n\nFill every required parameter. Answer directly when no function "
    "helps."
)


def _call(call: Message) -> str:
    function = call["function"]
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in function["arguments"].items())
    return f"<tool_call>\n<function={function['name']}>\n{text}</function>\n</tool_call>"


def _assistant(message: Message, current: bool) -> str:
    text = message["content"].strip()
    calls = "\n".join(_call(call) for call in message.get("tool_calls", ()))
    thoughts = f"<think>\n{message.get('reasoning_content', '').strip()}\n</think>\n\n" if current else ""
    return f"<|im_start|>assistant\n{thoughts}{text}{chr(10) * 2 if text and calls else ''}{calls}<|im_end|>\n"


def render(messages: list[Message], tools: list[Message] | None) -> str:
    """The text of a conversation that a `Sample` holds, without the line break at its end.

    It covers what samples use: text alone, a system message first, arguments that are strings or numbers.
    """
    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else ""
    parts = []
    if tools:
        listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        tail = f"\n\n{system}" if system else ""
        parts.append(f"{_BEFORE_TOOLS}{listed}{_AFTER_TOOLS}{tail}<|im_end|>\n")
    elif messages[0]["role"] == "system":
        parts.append(f"<|im_start|>system\n{system}<|im_end|>\n")
    last_query = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "user":
            parts.append(f"<|im_start|>user\n{message['content'].strip()}<|im_end|>\n")
        elif role == "assistant":
            parts.append(_assistant(message, i > last_query))
        elif role == "tool":
            first = messages[i - 1]["role"] != "tool"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            response = f"\n<tool_response>\n{message['content'].strip()}\n</tool_response>"
            parts.append(("<|im_start|>user" if first else "") + response + ("<|im_end|>\n" if last else ""))
    return "".join(parts).removesuffix("\n")
