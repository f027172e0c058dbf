"""A long conversation's next turn over HTTP: its first token, and how much of the time is not the engine's.

    python bench/warm_turn.py                                          # the embedded model on the CPU
    python bench/warm_turn.py --model qwen3.5-4b --device cuda         # random weights of true shape
    python bench/warm_turn.py --kind agent --tokens 100000 --model qwen3.5-4b --device cuda

The processor time is that of the server's threads in one turn, by the kind of thread: `MainThread` is the event loop,
`deltic-large` reads bodies and prepares prompts, `deltic-engine` has the model's own work, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from common import environment, port_of, record
from http_load import post

KINDS = ("chat", "agent", "long")
NEW, ANSWER = 100, 24
"""Tokens of a question, and of an answer."""
WORDS = "the of a to in is that it was for on are as with his they at be this from have or by one had not but what all"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, default="chat", help="chat: turns of 450 tokens; agent: tools, calls "
                        "and results; long: one message of three quarters of all tokens")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--model", help="a preset, with random weights; default: the embedded model")
    parser.add_argument("--layers", type=int, help="of a preset; default: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(args)
    else:
        _measure(args)


def _measure(args: argparse.Namespace) -> None:
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        port = port_of(process)
        body = _conversation(args.kind, args.tokens)
        body["ignore_eos"] = args.model is not None  # a real answer continues behind its end with other special tokens
        turns = [_turn(process, port, body) for _ in range(args.turns + 1)]
    finally:
        process.terminate()
        process.wait(60)
    cold, *warm = turns
    assert all(turn["cached"] > 0.9 * turn["prompt"] for turn in warm), "the conversation was read anew"

    def middle(name: str) -> float:
        return round(median([float(turn[name]) for turn in warm]), 2)

    threads = {name: round(median(turn["threads"][name] for turn in warm), 2) for name in cold["threads"]}
    record("warm_turn", {
        "kind": args.kind, "model": args.model, "device": args.device, "tokens": cold["prompt"],
        "messages": len(body["messages"]), "bytes": len(json.dumps(body)), "first_token_ms": middle("first_ms"),
        "engine_ms": middle("engine_ms"), "beside_engine_ms": middle("beside_ms"),
        "cold_ms": cold["first_ms"], "cold_beside_engine_ms": cold["beside_ms"],
        "processor_ms": {name: used for name, used in threads.items() if used > 0.05}})


def _turn(process: subprocess.Popen[str], port: int, body: dict[str, Any]) -> dict[str, Any]:
    """Sends the conversation, and appends the answer and another question."""
    assert process.stdout
    reply = asyncio.run(post(port, "/v1/chat/completions", body, 600.0))
    assert reply.done, reply
    server = json.loads(process.stdout.readline())
    body["messages"] += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": _text(NEW)}]
    first = round(reply.first * 1e3, 2)
    return {**server, "first_ms": first, "beside_ms": round(first - server["engine_ms"], 2)}


def _conversation(kind: str, tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": ANSWER, "temperature": 0, "stream": True, "max_repeat": 0,
                            "messages": [{"role": "system", "content": _text(300)}]}
    messages = body["messages"]
    if kind == "agent":
        body["tools"] = [_tool(index) for index in range(20)]
        messages.append({"role": "user", "content": _text(NEW)})
        for index in range(max(tokens - 4000, 0) // 300):
            call = {"name": f"tool_{index % 20}", "arguments": json.dumps({"path": _text(20), "count": index})}
            messages += [{"role": "assistant", "content": "", "tool_calls": [
                {"id": f"call_{index}", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": f"call_{index}", "content": _text(230)}]
        messages += [{"role": "assistant", "content": _text(50)}, {"role": "user", "content": _text(NEW)}]
        return body
    if kind == "long":
        messages += [{"role": "user", "content": _text(tokens * 3 // 4)}, {"role": "assistant", "content": _text(350)}]
        tokens //= 4
    for _ in range(tokens // 450):
        messages += [{"role": "user", "content": _text(NEW)}, {"role": "assistant", "content": _text(350)}]
    messages.append({"role": "user", "content": _text(NEW)})
    return body


def _tool(index: int) -> dict[str, Any]:
    properties = {"path": {"type": "string", "description": _text(20)}, "count": {"type": "integer", "default": 3}}
    return {"type": "function", "function": {
        "name": f"tool_{index}", "description": _text(80),
        "parameters": {"type": "object", "properties": properties, "required": ["path"]}}}


_DRAW = random.Random(0)


def _text(words: int) -> str:
    """Words of one token each."""
    return " ".join(_DRAW.choice(WORDS.split()) for _ in range(words))


# In the server's process


def _serve(args: argparse.Namespace) -> None:
    import deltic.server.app as app_module
    from deltic import LLM, RandomModel
    from deltic.chat.processor import ChatProcessor
    from deltic.loader.hub import resolve

    longest = args.tokens * 5 // 4 + 4096
    if args.model is None:
        llm = LLM(device=args.device, max_context=min(longest, 32_768), speculate="off")
    else:
        llm = LLM(RandomModel(args.model, args.layers), device=args.device, dtype="bfloat16", speculate="off",
                  max_context=longest, max_batch=16)
        words = ChatProcessor.from_directory(resolve(None), longest=longest)
        for token in range(llm.runtime.config.vocab_size):
            if not words.tokenizer.token_bytes(token):
                words.tokenizer._bytes[token] = f" w{token}".encode()
        llm._chat_processor, llm.runtime.path = words, resolve(None)
    _report()
    app_module.serve(llm, port=0)


def _report() -> None:
    """Prints a line at the end of each answer."""
    from deltic.server.generation import GenerationStream

    before, close = _processor(), GenerationStream.close

    def closing(self: GenerationStream) -> None:
        nonlocal before
        close(self)
        now = _processor()
        handle, threads = self._handle, {name: round(now[name] - before[name], 3) for name in now}
        before = now
        print(json.dumps({"engine_ms": round(((handle.first_token or 0) - handle.began) * 1e3, 3),
                          "prompt": handle.prompt_tokens, "cached": self.usage.cached_tokens, "threads": threads}),
              flush=True)

    GenerationStream.close = closing  # type: ignore[method-assign]


def _processor() -> Counter[str]:
    """Milliseconds of a processor that each kind of thread has used so far."""
    used = Counter[str]()
    for thread in threading.enumerate():
        place = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if place.exists():
            used[thread.name.partition("_")[0]] += int(place.read_text().split()[0]) / 1e6  # type: ignore[assignment]
    return used


if __name__ == "__main__":
    main()
