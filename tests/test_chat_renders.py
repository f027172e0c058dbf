"""Counts renderings of the template for a request: one for the prompt and one for each continuation."""

from __future__ import annotations

from typing import Any

import pytest
from test_chat_boundaries import LONG
from test_chat_history import SYSTEM, THOUGHT, TINY_TEMPLATE, TOKENIZER, TOOLS, Talk
from test_chat_support import QWEN_LIKE

from deltic.chat import template as module
from deltic.chat.processor import ChatProcessor
from deltic.chat.template import ChatTemplate
from deltic.config import Limits
from deltic.errors import LongPromptError

TEMPLATES = pytest.mark.parametrize("template", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])


@pytest.fixture
def renders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages were rendered each time."""
    found: list[int] = []
    render = ChatTemplate.render

    def counted(template: ChatTemplate, messages: Any, *others: Any, **variables: Any) -> str:
        found.append(len(messages))
        return render(template, messages, *others, **variables)
    monkeypatch.setattr(ChatTemplate, "render", counted)
    return found


def taken(renders: list[int]) -> int:
    count = len(renders)
    renders.clear()
    return count


@TEMPLATES
@pytest.mark.parametrize(("tools", "thinking", "most"), [
    (None, False, 2), (None, True, 2), (TOOLS, False, 3), (TOOLS, True, 4)])
def test_render_count_of_template_turn(
        template: str, tools: Any, thinking: bool, most: int, renders: list[int]) -> None:
    processor = ChatProcessor(TOKENIZER, template, thinking_budget=9)
    client = Talk(processor, "template", thinking, tools=tools, messages=[SYSTEM])
    counts = []
    for question in ("Hi", "And?", "So?"):
        job = client.say(question)
        counts.append(taken(renders))
        client.hear(job, "Hello")
    assert counts[1:] == [most, most] and counts[0] <= most + 4  # the opening, and how thinking ends


@TEMPLATES
def test_render_count_of_preserved_turn(template: str, renders: list[int]) -> None:
    client = Talk(ChatProcessor(TOKENIZER, template), "preserve", True, tools=TOOLS, messages=[SYSTEM])
    counts = []
    for question in ("Hi", "And?", "So?", "Why?"):
        job = client.say(question)
        counts.append(taken(renders))
        client.hear(job, "Hello", thought=THOUGHT)
    assert counts[1:] == [2, 1, 1] and counts[0] <= 6, "the first asks how the template goes on, too"


@TEMPLATES
@pytest.mark.parametrize("messages", LONG, ids=range(len(LONG)))
@pytest.mark.covering
def test_long_conversation_renders_few_messages_twice(
        template: str, messages: list[Any], renders: list[int]) -> None:
    processor = ChatProcessor(TOKENIZER, template, history="template")
    for _ in range(2):
        renders.clear()
        processor.chat(messages, tools=TOOLS, variables={"enable_thinking": True})
    assert len(renders) <= 6 and max(renders) == len(messages) and sum(renders) < 2 * len(messages)


@TEMPLATES
def test_cached_system_prefixes_do_not_change_prompts(template: str) -> None:
    warm = ChatProcessor(TOKENIZER, template)
    for tools in (None, TOOLS):
        for text in ("Hello", "0", "Hello there", ""):
            for messages in ([], [SYSTEM], [SYSTEM | {"content": "0"}]):
                asked = [*messages, {"role": "user", "content": text}]
                for variables in ({"enable_thinking": True}, {}):
                    jobs = [processor.chat(asked, tools=tools, variables=variables)
                            for processor in (warm, warm, ChatProcessor(TOKENIZER, template))]
                    assert len({job.request.stable_prefixes for job in jobs}) == 1


@pytest.mark.parametrize("mode", ["template", "preserve"])
def test_system_prefix_that_changes_with_date_is_rendered_again(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = TINY_TEMPLATE.replace("{%- if tools", "{{- strftime_now('%d %b') }}{%- if tools", 1)
    assert template != TINY_TEMPLATE

    class Day:
        day = 1

        @classmethod
        def now(cls) -> Any:
            return cls

        @classmethod
        def strftime(cls, _: str) -> str:
            return f"day {cls.day}\n"
    monkeypatch.setattr(module, "datetime", Day)
    client = Talk(ChatProcessor(TOKENIZER, template), mode, messages=[SYSTEM])
    client.hear(client.say("Hi"), "Hello")
    Day.day = 2
    job = client.say("And?")
    assert "day 2" in TOKENIZER.decode(job.request.prompt) and "day 1" not in TOKENIZER.decode(job.request.prompt)
    fresh = ChatProcessor(TOKENIZER, template, history=mode).chat(client.messages, variables={"enable_thinking": False})
    assert job.request.stable_prefixes == fresh.request.stable_prefixes


def test_far_too_long_prompt_is_not_rendered(renders: list[int]) -> None:
    processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE, longest=100, limits=Limits())
    with pytest.raises(LongPromptError):
        processor.chat([SYSTEM, {"role": "user", "content": "word " * 1000}])
    assert not renders
    with pytest.raises(LongPromptError):
        processor.chat([SYSTEM, {"role": "user", "content": "word " * 140}])
    assert len(renders) == 1
