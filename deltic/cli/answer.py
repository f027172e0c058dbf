"""Shows one answer while it comes, and measures it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltic.cli.machine import peak_memory_mib
from deltic.cli.terminal import reading_bar, takes_colors

if TYPE_CHECKING:
    from deltic.chat.deltas import AnswerCall, Delta
    from deltic.llm import LLM, Choice, Stream

_GLANCE = 0.1  # seconds between two looks at how far the prompt is read, and whether to stop


@dataclass(slots=True)
class AnswerTiming:
    """Seconds from the request to the first token and to the end, and how fast tokens came in between."""

    started: float
    tokens: int
    first: float | None = None
    first_tokens: int = 0
    end: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        if self.first is None or self.tokens <= self.first_tokens or self.end <= self.first:
            return None
        return (self.tokens - self.first_tokens) / (self.end - self.first)

    def timings(self) -> dict[str, float | None]:
        first = self.end if self.first is None else self.first
        rate = self.tokens_per_second
        return {"time_to_first_token_ms": round((first - self.started) * 1e3, 3),
                "total_ms": round((self.end - self.started) * 1e3, 3),
                "tokens_per_second": None if rate is None else round(rate, 3)}


def read_answer(llm: LLM, ask: Callable[[], Stream], show: Callable[[Delta], None],
         stopped: Callable[[], bool] = lambda: False) -> tuple[Stream, AnswerTiming]:
    """Start a stream and show its deltas until it ends or `stopped`; then it is closed."""
    meter, read_before, bar = AnswerTiming(time.perf_counter(), 0), llm.engine.stats.prompt_tokens, reading_bar()
    stream = ask()
    try:
        while stream.output is None and not stopped():
            deltas = stream.read(_GLANCE)
            if meter.first is None and stream.generated_tokens:
                bar.close()
                meter.first, meter.first_tokens = time.perf_counter(), stream.generated_tokens
            bar.update(llm.engine.stats.prompt_tokens - read_before, stream.prompt_tokens)
            for delta in deltas:
                show(delta)
    finally:
        bar.close()
        stream.close()
        meter.end, meter.tokens = time.perf_counter(), stream.generated_tokens
    return stream, meter


class Screen:
    """Content goes to stdout as it comes and nothing else does; thinking goes to stderr, dimmed on a terminal."""

    def __init__(self, thinking: bool = True) -> None:
        self._thinking = thinking
        self._dim = takes_colors(sys.stderr)
        self._last = {"content": "", "reasoning": ""}

    def show(self, delta: Delta) -> None:
        if delta.kind == "content":
            self._end_thinking()
            self._write(delta.text)
        elif delta.kind == "reasoning" and self._thinking:
            text = f"\x1b[2m{delta.text}\x1b[0m" if self._dim else delta.text
            print(text, end="", file=sys.stderr, flush=True)
            self._last["reasoning"] = delta.text or self._last["reasoning"]

    def close(self, calls: tuple[AnswerCall, ...] = ()) -> None:
        """End the line that is open, and print the calls, a line each."""
        self._end_thinking()
        last = self._last["content"]
        if (last and not last.endswith("\n")) or not (last or calls):
            self._write("\n")
        for call in calls:
            self._write(json.dumps(call_json(call), ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._last["content"] = text or self._last["content"]

    def _end_thinking(self) -> None:
        last, self._last["reasoning"] = self._last["reasoning"], ""
        if last:
            print("" if last.endswith("\n") else "\n", file=sys.stderr, flush=True)


def call_json(call: AnswerCall) -> dict[str, Any]:
    """A tool call in OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def statistics_line(choice: Choice, meter: AnswerTiming) -> str:
    """One line for people."""
    timings, usage = meter.timings(), choice.usage
    rate = timings["tokens_per_second"]
    speed = "" if rate is None else f" at {rate:.1f} tokens/s"
    if usage.drafted_tokens:
        speed += f" ({usage.accepted_tokens} of {usage.drafted_tokens} drafts accepted)"
    return (f"first token {timings['time_to_first_token_ms']:.0f} ms, {usage.completion_tokens} tokens{speed}, "
            f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
            f"peak memory {peak_memory_mib():,.0f} MiB")
