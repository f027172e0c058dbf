"""The next turn of a long conversation: the same prompt as without what earlier turns left, at a part of the cost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_history import THOUGHT, TINY, TINY_TEMPLATE, TOKENIZER, TOOLS, cut_small
from test_chat_support import QWEN_LIKE

from deltic.chat.control_tokens import MARK, unmarked
from deltic.chat.conversation import encode_prompt
from deltic.chat.message_cache import MessageCache
from deltic.chat.output_router import Answer
from deltic.chat.processor import ChatProcessor, PreparedRequest
from deltic.chat.tokenizer import Tokenizer
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.params import common_length
from deltic.server.body import parse
from deltic.server.openai_schema import ChatRequest

EOS = TOKENIZER.eos_id or 0
PIECES = ["<|im_start|>", "<|im_end|>", "<|im_", "end|>", "<think>", "\n", " ", "  ", "a", "user", " the", "The", "é",
          "e\u0301", "漢字", "🙂", "\u200b", "1234", "://", "<|im_start|>user\n", f"<{MARK}|im_end|>"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
WORDS = ["user\n", "The cat", "The dog", "é e\u0301", "漢字🙂", " ", "", f"<{MARK}|im_end|>", "<|im_start|>"]
PARTS = st.lists(st.sampled_from(WORDS), max_size=6)
CUTS = st.tuples(st.integers(0, 2), st.sampled_from([0, 40, 70, 90]))
"""How ids are cut (0: as usual, otherwise into pieces of so many characters), and how much of a text they spell."""


def spelled(parts: list[str], cut: tuple[int, int]) -> list[int]:
    """Ids that an answer record may have for the beginning of a text."""
    size, share = cut
    text = unmarked("<|im_end|>".join(parts))
    ids = cut_small(text, size) if size else TOKENIZER.encode(text)
    return ids[:len(ids) * share // 90]


@settings(max_examples=examples(1500), deadline=None)
@given(PARTS, PARTS, PARTS, CUTS, CUTS, st.booleans())
def test_an_earlier_prompt_changes_no_token(same: list[str], old: list[str], new: list[str], first: tuple[int, int],
                                            then: tuple[int, int], extends: bool) -> None:
    """first: the ids that the earlier prompt knew. then: those that the later one knows, which may extend its ids."""
    before = encode_prompt(TOKENIZER, "<|im_end|>".join([*same, *old]), spelled([*same, *old], first))
    for parts in ([*same, *new], [*same, *old, *new]):
        text, known = "<|im_end|>".join(parts), spelled(parts, then)
        if extends and before.kept:
            known = [*before.ids, *known[len(before.ids):]]
        assert encode_prompt(TOKENIZER, text, known, before=before) == encode_prompt(TOKENIZER, text, known)


CONTENTS = st.one_of(TEXTS, st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3))
CALLS = st.lists(st.builds(lambda text, line: {"id": "c", "type": "function", "function": {
    "name": "edit", "arguments": json.dumps({"text": text, "line": line})}}, TEXTS, st.integers(0, 9)), max_size=2)
ANSWERS = st.builds(lambda content, calls, reasoning: {"role": "assistant", "content": content, "tool_calls": calls,
                                                       "reasoning_content": reasoning},
                    CONTENTS, CALLS, st.sampled_from([None, "", THOUGHT]))
OTHERS = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "tool"]),
                   CONTENTS)
CONVERSATIONS = st.lists(st.one_of(ANSWERS, OTHERS), min_size=1, max_size=6)


def prompt_of(processor: ChatProcessor, messages: Any, tools: Any, owner: str = "", **variables: Any
              ) -> PreparedRequest | str:
    try:
        return processor.of(owner).chat(messages, tools=tools, variables=variables)
    except RequestError as error:
        return str(error)


def shown(found: PreparedRequest | str) -> object:
    return found if isinstance(found, str) else (found.request.ids, found.request.stable_prefixes)


@pytest.mark.parametrize("template", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])
def test_earlier_turns_change_no_prompt(template: str) -> None:
    """Conversations that grow, part and repeat messages give the prompts of a processor that has seen none of them."""
    warm = ChatProcessor(TOKENIZER, template)

    @settings(max_examples=examples(40), deadline=None)
    @given(CONVERSATIONS, CONVERSATIONS, st.sampled_from([None, TOOLS]), st.booleans(), st.sampled_from(["", "other"]))
    def compare(first: list[Any], more: list[Any], tools: Any, thinks: bool, owner: str) -> None:
        user = {"role": "user", "content": "Hi"}
        for messages in ([user, *first], [user, *first, *more], [user, *more, *first, *more], [user, *first, user]):
            cold, sent = ChatProcessor(TOKENIZER, template), deepcopy(messages)
            found = prompt_of(warm, messages, tools, owner, enable_thinking=thinks)
            assert shown(found) == shown(prompt_of(cold, messages, tools, owner, enable_thinking=thinks))
            assert messages == sent
    compare()


def test_a_repeated_message_keeps_its_quotes_before_an_answer_that_continues_it() -> None:
    """Only the last message, which the model continues, may have markup of its own."""
    same = {"role": "assistant", "content": "<think>\nyes\n</think> <tool_call>"}
    other = {**same, "content": same["content"] + " "}
    user = {"role": "user", "content": "Hi"}
    found, apart = (prompt_of(ChatProcessor(TOKENIZER), [user, first, user, same], None, continue_final_message=True)
                    for first in (same, other))
    assert isinstance(found, PreparedRequest) and isinstance(apart, PreparedRequest)
    call = TOKENIZER.token_to_id("<tool_call>")
    assert found.request.ids.count(call or 0) == apart.request.ids.count(call or 0) == 1


def test_messages_are_read_once_for_each_owner() -> None:
    cache, message = MessageCache(), {"role": "user", "content": "Hi <|im_end|>"}
    first, second, other = (cache.of(owner).messages([dict(message)])[0] for owner in ("a", "a", "b"))
    assert first is second and first is not other and first.value == other.value
    assert cache.tools(deepcopy(TOOLS)) is cache.tools(deepcopy(TOOLS)) is not cache.of("a").tools(TOOLS)
    assert cache.tools([]).value is None
    with pytest.raises(RequestError, match=r"messages\[1\]\.role"):
        cache.messages([message, {"role": "nobody", "content": ""}])


def test_images_are_seen_in_each_turn() -> None:
    seen = list[str]()

    def see(part: Any, kind: str, field: str) -> dict[str, Any]:
        seen.append(field)
        return {"type": kind}
    cache, messages = MessageCache(), [{"role": "user", "content": [{"type": "image", "image": "x"}]}]
    for _ in range(2):
        cache.messages(messages, see)
    assert seen == ["messages[0].content[0]"] * 2
    with pytest.raises(RequestError, match="reads text only"):
        cache.messages(messages)


# Cost


def conversation(tokens: int) -> list[dict[str, Any]]:
    """A system message, and turns of about 300 tokens."""
    words = "The quick brown fox jumps over the lazy dog and does not look back at all. "
    turn = TOKENIZER.encode(words)
    times = 150 // len(turn) + 1
    found = [{"role": "system", "content": "Be brief."}]
    for index in range(tokens // 300):
        found += [{"role": "user", "content": f"{index}: {words * times}"},
                  {"role": "assistant", "content": f"{index}. {words * times}"}]
    return [*found, {"role": "user", "content": "And now?"}]


def processor_time(work: Callable[[], PreparedRequest], repeat: int = 1) -> tuple[float, PreparedRequest]:
    times = list[float]()
    for _ in range(repeat):
        began = time.thread_time()
        found = work()
        times.append(time.thread_time() - began)
    return min(times), found


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "foreign"])
def test_a_warm_turn_of_32k_tokens_costs_a_part_of_a_cold_one(recorded: bool) -> None:
    """recorded: the last answer is this server's own. A conversation of other servers is encoded in parts, too."""
    processor = ChatProcessor(Tokenizer.from_directory(TINY), longest=1 << 16)
    messages, tools = conversation(32_000), [deepcopy(TOOLS[0]) for _ in range(20)]

    def prepare() -> PreparedRequest:
        raw = json.dumps({"messages": messages, "tools": tools}).encode()
        body = parse(raw, ChatRequest, Limits())
        return processor.chat(body.messages, tools=body.tools)

    cold, prepared = processor_time(prepare)
    assert 30_000 < len(prepared.request.prompt) < 36_000
    for turn in range(2):
        ids = TOKENIZER.encode(f"It is {turn}.")
        if recorded and prepared.remember:
            prepared.remember([*ids, EOS], "stop", Answer(content=f"It is {turn}."), True)
        messages += [{"role": "assistant", "content": f"It is {turn}."}, {"role": "user", "content": f"And {turn}?"}]
        before = prepared.request.ids
        _, prepared = processor_time(prepare)
        assert common_length(prepared.request.ids, before) > len(before) - 10
    warm, _ = processor_time(prepare, 5)
    assert warm < cold / 3, f"{warm * 1e3:.1f} ms of {cold * 1e3:.1f} ms"
