"""Random valid requests of every field, at its limits, against a server that is watched: stalls, memory, answers.

    python bench/fuzz_server.py                    # 30 minutes
    python bench/fuzz_server.py --seconds 60 --seed 3

Every request that fixes its answer (greedy, or with a seed) is kept; a third of the requests repeat a kept one in other
company, and its answer must be the same. Exit code 1 if an answer differed, a status was 500, or the server died.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from attacks import CHAT, TEXT
from common import record
from http_load import SOURCE, Reply, Server, percentile, post, serving

CLIENTS = 24
STALL = 0.1
"""Seconds that the event loop may be late."""
ALPHABET = ("a", " ", "\n", "é", "漢", "🙂", "<", ">", "{", "}", '"', "'", "\\", "%", "\u200d", "<think>", "</think>",
            "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "The capital of ", "0", "\t", "\x00")


@dataclass
class Figures:
    """What happened."""

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    repeated: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)
    broken: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)


class Maker:
    """Random requests; the same seed makes the same ones."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def request(self) -> tuple[str, dict[str, Any]]:
        """A path and a body."""
        draw = self._draw
        if draw.random() < 0.4:
            return TEXT, self._common() | self._text_fields()
        return CHAT, self._common() | self._chat_fields()

    def _common(self) -> dict[str, Any]:
        draw, body = self._draw, dict[str, Any]()
        body["max_tokens"] = draw.choice((0, 1, 2, 8, 8, 24, 24, 64, 300))
        optional: dict[str, Any] = {
            "temperature": lambda: draw.choice((0, 0.01, 0.7, 1.0, 2.0)),
            "top_p": lambda: draw.choice((0.01, 0.5, 1)),
            "top_k": lambda: draw.choice((0, 1, 20, 300, 5000)), "min_p": lambda: draw.choice((0, 0.05, 1)),
            "repetition_penalty": lambda: draw.choice((0.5, 1.0, 1.3)),
            "presence_penalty": lambda: draw.choice((-2, 2)),
            "frequency_penalty": lambda: draw.choice((-2, 0.5, 2)), "min_tokens": lambda: draw.choice((0, 4, 24)),
            "ignore_eos": lambda: draw.random() < 0.5, "n": lambda: draw.choice((1, 2, 5, 16)),
            "stream": lambda: draw.random() < 0.6, "speculate": lambda: draw.random() < 0.5,
            "max_repeat": lambda: draw.choice((0, 3, 10)), "user": lambda: "x" * draw.choice((1, 1000)),
            "stop": lambda: [self._words(8) or "." for _ in range(draw.choice((1, 4, 64)))],
            "stop_token_ids": lambda: [draw.randrange(3000) for _ in range(draw.choice((1, 20)))],
            "logit_bias": lambda: {str(draw.randrange(3000)): draw.choice((-100, -1, 1, 100))
                                   for _ in range(draw.choice((1, 20, 300)))}}
        for name, make in optional.items():
            if draw.random() < 0.15:
                body[name] = make()
        if body.get("temperature", 1) != 0:
            body["seed"] = draw.randrange(1 << 63)
        return body

    def _text_fields(self) -> dict[str, Any]:
        draw = self._draw
        kind, body = draw.random(), dict[str, Any]()
        if kind < 0.2:
            body["prompt"] = [draw.randrange(3000) for _ in range(draw.choice((1, 15, 16, 17, 500, 5000)))]
        elif kind < 0.35:
            body["prompt"] = [self._words(20) or "x" for _ in range(draw.choice((1, 3, 16)))]
        else:
            body["prompt"] = self._words(draw.choice((1, 20, 20, 200, 200, 3000, draw.choice((3000, 60_000))))) or "x"
        body |= {"logprobs": draw.choice((0, 1, 5))} if draw.random() < 0.2 else {}
        return body | ({"echo": True} if draw.random() < 0.1 else {})

    def _chat_fields(self) -> dict[str, Any]:
        draw, body = self._draw, dict[str, Any]()
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._words(30)}] * (draw.random() < 0.5)
        for _ in range(draw.choice((0, 0, 1, 1, 3, 3, 40, draw.choice((40, 400))))):
            messages += self._turn()
        body["messages"] = [*messages, {"role": "user", "content": self._words(draw.choice((1, 30, 2000)))}]
        if draw.random() < 0.3:
            body["tools"] = [self._tool(index) for index in range(draw.choice((1, 3, 100)))]
        optional: dict[str, Any] = {
            "enable_thinking": lambda: draw.random() < 0.5, "thinking_budget": lambda: draw.choice((0, 1, 30)),
            "history": lambda: draw.choice(("template", "preserve")), "logprobs": lambda: True,
            "reasoning_effort": lambda: draw.choice(("low", "high")),
            "chat_template_kwargs": lambda: {draw.choice(("a", "self", "messages2")): self._words(5)},
            "tool_choice": lambda: draw.choice(("none", "auto"))}
        for name, make in optional.items():
            if draw.random() < 0.15:
                body[name] = make()
        return body | ({"top_logprobs": draw.choice((0, 1, 20))} if body.get("logprobs") else {})

    def _turn(self) -> list[dict[str, Any]]:
        draw = self._draw
        if draw.random() < 0.2:
            arguments = draw.choice((lambda: "{}", lambda: json.dumps({"a": self._words(10)}),
                                     lambda: "{'a': [" + "(1, 'x'), " * draw.choice((1, 3000)) + "]}",
                                     lambda: "[" * draw.choice((1, 3000))))()
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return [{"role": "user", "content": self._words(5)}, {"role": "assistant", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c", "content": self._words(20)}]
        answer: dict[str, Any] = {"role": "assistant", "content": self._words(10)}
        if draw.random() < 0.3:
            answer["reasoning_content"] = self._words(10)
        return [{"role": "user", "content": self._words(10)}, answer]

    def _tool(self, index: int) -> dict[str, Any]:
        kind = self._draw.choice(("string", "integer", "object", ["null", "array"]))
        return {"type": "function", "function": {"name": f"f{index}", "description": self._words(10), "parameters": {
            "type": "object", "properties": {"a": {"type": kind, "description": self._words(3)}}}}}

    def _words(self, count: int) -> str:
        return "".join(self._draw.choices(ALPHABET, k=self._draw.randint(0, count)))


class Fuzz:
    """Clients that send random requests until the time is over."""

    def __init__(self, server: Server, seed: int, seconds: float) -> None:
        self._server, self._until = server, time.perf_counter() + seconds
        self._maker, self._draw = Maker(seed), random.Random(seed + 1)
        self._known: list[tuple[str, dict[str, Any], list[str]]] = []
        self.figures = Figures()

    async def run(self) -> None:
        """All clients, and a look at the server every second."""
        await asyncio.gather(self._look(), *(self._client(number) for number in range(CLIENTS)))

    async def _look(self) -> None:
        while time.perf_counter() < self._until and self._server.process.poll() is None:
            await self._server.watch()
            await asyncio.sleep(1)
        if self._server.process.poll() is not None:
            self.figures.faults.append("the server died")

    async def _client(self, number: int) -> None:
        SOURCE.set(f"127.0.1.{number + 1}")
        while time.perf_counter() < self._until and not self.figures.faults:
            if self._known and self._draw.random() < 0.33:
                path, body, expected = self._draw.choice(self._known)
                self.figures.repeated += 1
                self._compare(body, expected, answers(await self._send(path, body)))
            else:
                path, body = self._maker.request()
                reply = await self._send(path, body)
                if reply.done and len(json.dumps(body)) < 20_000:
                    self._known.append((path, body, answers(reply)))
                    del self._known[:-200]

    async def _send(self, path: str, body: dict[str, Any]) -> Reply:
        reply = await post(self._server.port, path, body, 300)
        figures = self.figures
        figures.requests += 1
        figures.statuses[reply.status] += 1
        if reply.first:
            figures.firsts.append(reply.first)
        if reply.broken:
            figures.broken[reply.broken[:60]] += 1
        if reply.status in (500, 501, 502) or b'"server_error"' in reply.body:
            asked = json.dumps({"path": path, "body": body})[:2000]
            figures.faults.append(f"{asked} -> {reply.body[-300:]!r}")
        return reply

    def _compare(self, body: dict[str, Any], expected: list[str], found: list[str]) -> None:
        if found and found != expected:
            self.figures.differing.append({"body": json.dumps(body)[:3000], "expected": expected, "found": found})


def answers(reply: Reply) -> list[str]:
    """The text of each choice; nothing if the answer is not whole."""
    if not reply.done:
        return []
    texts: dict[int, str] = {}
    lines = [line[6:] for line in reply.body.split(b"\n") if line.startswith(b"data: {")] or [reply.body]
    for data in map(json.loads, lines):
        for choice in data.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or choice
            said = (part.get("reasoning_content") or "") + "|" * bool(part.get("tool_calls"))
            said += part.get("content") or part.get("text") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
    return [texts[index] for index in sorted(texts)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", default="128MiB")
    parser.add_argument("--serve", action="append", default=[], metavar="OPTION", help="an option of deltic serve")
    args = parser.parse_args()
    with serving("--memory", args.memory, *args.serve) as server:
        fuzz = Fuzz(server, args.seed, args.seconds)
        asyncio.run(fuzz.run())
    figures, looks = fuzz.figures, server.looks[1:]
    late = sorted((stack for look in looks for stack in look["stacks"]), reverse=True)
    record("fuzz_server", {
        "task": "fuzz", "seconds": args.seconds, "seed": args.seed, "memory": args.memory,
        "requests": figures.requests, "statuses": dict(figures.statuses), "repeated": figures.repeated,
        "differing": figures.differing[:3], "differing_count": len(figures.differing),
        "broken": dict(figures.broken), "faults": figures.faults[:3],
        "first_ms": {"median": percentile(figures.firsts, 0.5), "p99": percentile(figures.firsts, 0.99)},
        "loop_late_ms": {"worst": round(1e3 * max((look["lag_max"] for look in looks), default=0), 1),
                         "p99": percentile([look["lag_max"] for look in looks], 0.99),
                         "over_100_ms": sum(look["late"] for look in looks),
                         "by_minute": [round(1e3 * max(look["lag_max"] for look in looks[start:start + 60]), 1)
                                       for start in range(0, len(looks), 60)]},
        "late_where": late[:5], "longest_step_ms": round(1e3 * max(look["longest_step"] for look in looks), 1),
        "rss_mib": [look["rss_mib"] for look in looks[::60]], "peak_mib": looks[-1]["peak_mib"]})
    return int(bool(figures.differing or figures.faults))


if __name__ == "__main__":
    sys.exit(main())
