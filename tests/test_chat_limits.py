"""A prompt that is too long is refused before it costs anything, and large ones cost one at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from deltic.chat import tokenizer as module
from deltic.chat.conversation import Conversation, encode_prompt, load_template
from deltic.chat.processor import ChatProcessor
from deltic.chat.tokenizer import Tokenizer
from deltic.config import Limits
from deltic.errors import BusyError, LongPromptError, RequestError, TemplateError
from deltic.params import SamplingParams

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
LONGEST = 1000
LONG = {"words": "hi " * 700_000, "letters": "a" * 2_000_000, "zeros": "\0" * 2_000_000, "lines": "\n." * 1_000_000,
        "other": "\u6f22" * 1_000_000, "marks": "<|im_start|>" * 200_000, "thoughts": "<think>x" * 300_000}


class Counted:
    """A backend that says how much it is given to encode, and how many threads are at it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = self.running = self.most = 0
        self.go = Event()
        self.go.set()

    def __getattr__(self, name: str) -> Any:
        assert name not in ("encode", "encode_batch"), f"{name} stops all other threads"
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        self.characters += sum(map(len, texts))
        assert self.go.wait(60)
        self.running -= 1
        return self._backend.encode_batch_fast(texts, **options)


def counted(**options: Any) -> tuple[ChatProcessor, Counted]:
    tokenizer = Tokenizer.from_directory(TINY)
    processor = ChatProcessor(tokenizer, **options)
    backend = tokenizer._backend = Counted(tokenizer._backend)  # type: ignore[assignment]
    return processor, backend


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("chat", [True, False])
def test_long_prompt_is_refused_after_encoding_little(text: str, chat: bool) -> None:
    processor, backend = counted(longest=LONGEST)
    why = r"more than 999 tokens and the maximum context length is 1000 tokens, .* raise `"
    with pytest.raises(LongPromptError, match=why) as found:
        processor.chat([{"role": "user", "content": text}]) if chat else processor.complete(text)
    assert found.value.field == ("messages" if chat else "prompt")
    assert backend.characters < len(text) / 10


def test_long_conversation_of_short_messages_is_refused() -> None:
    processor, backend = counted(longest=LONGEST)
    messages = [{"role": role, "content": "hi there " * 40} for _ in range(500) for role in ("user", "assistant")]
    for mode in ("template", "preserve"):
        with pytest.raises(LongPromptError, match="maximum context length is 1000 tokens"):
            processor.chat([*messages, messages[0]], history=mode)
    assert backend.characters < 400_000


def test_the_longest_prompt_is_taken() -> None:
    text = "The quick brown fox. " * 40
    free, messages = ChatProcessor.from_directory(TINY), [{"role": "user", "content": text}]
    for ask in (lambda processor: processor.complete(text), lambda processor: processor.chat(messages)):
        size = len(ask(free).request.prompt)
        for options, fits in (({"longest": size + 1}, True), ({"longest": size}, False),
                              ({"limits": Limits(max_prompt_tokens=size)}, True),
                              ({"longest": 5000, "limits": Limits(max_prompt_tokens=size - 1)}, False),
                              ({"longest": size, "limits": Limits(max_prompt_tokens=size)}, False)):
            processor = ChatProcessor.from_directory(TINY, **options)
            if fits:
                assert ask(processor).request.prompt == ask(free).request.prompt
                continue
            named = "maximum context length is" if options["longest"] == size else r"\(max_prompt_tokens\)"
            with pytest.raises(LongPromptError, match=f"has {size} tokens .*{named}"):
                ask(processor)


class Endless(Sequence[int]):
    """Token ids that must not be looked at."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError

    def __iter__(self) -> Iterator[int]:
        raise AssertionError


def test_special_tokens_trigger_no_full_collection() -> None:
    """Which hold up the whole process, and come when there is much new to look at."""
    tokenizer = Tokenizer.from_directory(TINY)
    talk = Conversation.read(load_template(tokenizer), tokenizer, [{"role": "user", "content": "<|im_end|>" * 20_000}],
                             parse_special=True)
    text = talk.render(talk.messages)
    gc.collect()
    before = len(gc.get_objects())
    spelled = encode_prompt(tokenizer, text)
    gc.collect()
    assert len(spelled.anchors) > 20_000 and len(gc.get_objects()) - before < 500


def test_token_ids_are_counted_first() -> None:
    with pytest.raises(LongPromptError, match=f"has {1 << 40} tokens"):
        ChatProcessor.from_directory(TINY, longest=LONGEST).complete(Endless(), SamplingParams())


def test_large_texts_are_encoded_one_at_a_time() -> None:
    processor, backend = counted()
    backend.go.clear()
    threads = [Thread(target=processor.complete, args=("some words " * 30_000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    small = Thread(target=processor.complete, args=("some words",))
    small.start()
    while backend.running < 2:
        assert small.is_alive()
    backend.go.set()
    for thread in (*threads, small):
        thread.join(60)
    assert backend.most == 2 and not backend.running


def test_who_waits_too_long_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    processor = ChatProcessor.from_directory(TINY)
    with processor.tokenizer._turn, pytest.raises(BusyError, match="try again"):
        processor.complete("x " * 200_000)
    assert processor.complete("x " * 200_000).request.prompt


def test_encoding_returns_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(module, "_trim_memory", lambda: trims.append(1))
    processor, free = ChatProcessor.from_directory(TINY, longest=LONGEST), ChatProcessor.from_directory(TINY)
    free.complete("x " * 300_000)
    assert not trims
    free.complete("x " * 530_000)
    assert trims == [1]
    with pytest.raises(LongPromptError):
        processor.complete("x " * 530_000)
    assert trims == [1, 1]


@pytest.mark.parametrize("own", [True, False])
def test_the_template_has_the_seconds_that_the_limits_say(own: bool) -> None:
    slow = "{% for a in range(99999) %}{% for b in range(9) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    tokenizer = Tokenizer.from_directory(TINY)
    tokenizer.chat_templates["default"] = slow
    processor = ChatProcessor(tokenizer, slow if own else None, limits=Limits(template_seconds=0.01))
    with pytest.raises(RequestError, match="seconds"):
        processor.chat([{"role": "user", "content": "Hi"}])


def test_a_template_file_without_end_is_refused() -> None:
    with pytest.raises(TemplateError, match="longer than 1 MiB"):
        ChatProcessor.from_directory(TINY, template=Path("/dev/zero"))
