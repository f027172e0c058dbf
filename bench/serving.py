"""What the HTTP layer costs: tokens per second of 32 streams over HTTP beside those of the engine alone, in turns, and
the time to the first token that it adds to a single request.

    python bench/serving.py            # both models, about six minutes
    python bench/serving.py --model tiny --quick

The server is `deltic serve`'s, in a process of its own; asked for it, the same process runs the same prompts on the
same engine without HTTP, stepping it from a thread. The client is this process, made of bare sockets: it keeps what
comes and looks at it afterwards. Every answer is streamed in full; in one more round that is not timed the answers are
also asked for whole, and must be the same. Exit code 1 if they are not, or if a model keeps less than its share.

The random model has the embedded one's tokenizer, with a word for each token that this one lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from common import environment, port_of, record, spread

if TYPE_CHECKING:
    from deltic import LLM

STREAMS = 32
END = b"0\r\n\r\n"
FIRST = b'"content":"'
EMPTY = b'"content":""'


@dataclass(frozen=True)
class Case:
    """A model, and what is asked of it. share: of the engine's own speed that HTTP has to keep. added_ms: the time to
    the first token that it may add, if that is looked at: beside long prompts it is noise."""

    model: str
    quant: str
    tokens: int
    rounds: int
    pings: int
    share: float
    added_ms: float | None = None


CASES = (Case("tiny", "none", 256, 9, 31, 0.75, 5.0), Case("qwen3.5-0.8b", "q4_k", 16, 10, 5, 0.97))


def main() -> None:
    args = _arguments()
    if args.serve:
        return _serve(json.loads(args.serve))
    wanted = [case for case in CASES if case.model in (args.model or [case.model])]
    if args.quick:
        wanted = [replace(case, tokens=16, rounds=2, pings=5) for case in wanted]
    kept = [_measure(case, args.threads) for case in wanted]
    sys.exit(0 if all(kept) or args.quick else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=[case.model for case in CASES])
    parser.add_argument("--threads", type=int, help="of the kernels; default: what deltic chooses for the model")
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(case: Case, threads: int | None) -> bool:
    """Whether HTTP keeps its share."""
    with _server({"model": case.model, "quant": case.quant, "threads": threads}) as port:
        client = Client(port)
        rates, shares = _empty("http", "engine"), _empty("client", "server", "http_cpu", "engine_cpu")
        for turn in range(case.rounds + 1):
            order = (_http, _engine) if turn % 2 else (_engine, _http)
            found = {name: value for one in order for name, value in one(client, case, turn).items()}
            if turn:  # the first round warms up
                for name, values in (rates | shares).items():
                    values.append(found[name])
        firsts = [_firsts(client, case, number) for number in range(case.pings)]
        same = _whole_is_same(client, case)
    ratios = [http / engine for http, engine in zip(rates["http"], rates["engine"])]
    added = median(http for http, _ in firsts) - median(engine for _, engine in firsts)
    kept = same and median(ratios) >= case.share and (case.added_ms is None or added <= case.added_ms)
    record("serving", {
        "task": "serving", "model": case.model, "quant": case.quant, "streams": STREAMS, "tokens": case.tokens,
        "threads": threads, "unit": "tokens/s", "http": spread(rates["http"]), "engine": spread(rates["engine"]),
        "ratio": spread(ratios), "wanted_ratio": case.share, "client_cpu": spread(shares["client"]),
        "server_cpu": spread(shares["server"]),
        "cpu_us_per_token": {name: spread(shares[f"{name}_cpu"]) for name in rates},
        "first_ms": {"http": round(median(http for http, _ in firsts), 2),
                     "engine": round(median(engine for _, engine in firsts), 2), "added": round(added, 2)},
        "streamed_as_whole": same, "kept": kept})
    return kept


def _empty(*names: str) -> dict[str, list[float]]:
    return {name: [] for name in names}


def _bodies(case: Case, turn: int, streams: int = STREAMS, **more: Any) -> list[dict[str, Any]]:
    """Questions that nobody has asked before, so that none is answered from the cache."""
    return [{"messages": [{"role": "user", "content": f"{turn} times {stream}, what is that and why is it so?"}],
             "max_tokens": case.tokens, "temperature": 0, "ignore_eos": True, "max_repeat": 0,
             "enable_thinking": False, **more} for stream in range(streams)]


def _http(client: Client, case: Case, turn: int) -> dict[str, float]:
    """Tokens per second, how busy client and server were (1: one core), and the server's microseconds per token."""
    before, began = client.post("/usage", {}), time.process_time()
    streams = client.stream(_bodies(case, 2 * turn, stream=True, stream_options={"include_usage": True}))
    cpu, seconds = time.process_time() - began, max(stream.end for stream in streams)
    after = client.post("/usage", {})
    tokens = sum(_usage(stream)["completion_tokens"] for stream in streams)
    assert tokens == case.tokens * len(streams), f"{tokens} tokens have come"
    used = after["cpu"] - before["cpu"]
    return {"http": tokens / seconds, "client": cpu / seconds, "server": used / seconds,
            "http_cpu": 1e6 * used / tokens}


def _engine(client: Client, case: Case, turn: int) -> dict[str, float]:
    alone = client.post("/alone", {"bodies": _bodies(case, 2 * turn + 1)})
    assert alone["tokens"] == case.tokens * STREAMS, f"{alone['tokens']} tokens have come"
    return {"engine": alone["tokens"] / alone["seconds"], "engine_cpu": 1e6 * alone["cpu"] / alone["tokens"]}


def _firsts(client: Client, case: Case, number: int) -> tuple[float, float]:
    """Milliseconds to the first token of one request, over HTTP and of the engine alone."""
    ping = replace(case, tokens=4)
    stream, = client.stream(_bodies(ping, 10_000 + 2 * number, 1, stream=True))
    alone = client.post("/alone", {"bodies": _bodies(ping, 10_001 + 2 * number, 1)})
    return 1e3 * stream.first, 1e3 * alone["first"]


def _whole_is_same(client: Client, case: Case) -> bool:
    """Whether streams say what whole answers do."""
    case = replace(case, tokens=min(case.tokens, 64))
    streamed = [stream.text for stream in client.stream(_bodies(case, 99, 4, stream=True))]
    whole = [client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
             for body in _bodies(case, 99, 4)]
    return streamed == whole


@dataclass
class Stream:
    """A streamed answer: what came, and after how many seconds the first token and the end did."""

    pieces: list[bytes] = field(default_factory=list)
    first: float = 0.0
    end: float = 0.0

    @property
    def events(self) -> list[Any]:
        lines = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", b"".join(self.pieces)).split(b"\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]

    @property
    def text(self) -> str:
        return "".join(choice["delta"].get("content") or "" for event in self.events for choice in event["choices"])


def _usage(stream: Stream) -> dict[str, int]:
    usage: dict[str, int] = stream.events[-1]["usage"]
    return usage


class Client:
    """Bare sockets that stay open, watched by one thread."""

    def __init__(self, port: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS)]
        for raw in self._sockets:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path: str, body: Any) -> Any:
        """A request, and its whole answer."""
        raw = self._sockets[0]
        raw.setblocking(True)
        raw.sendall(_request(path, body))
        head, _, answer = _until(raw, b"\r\n\r\n").partition(b"\r\n\r\n")
        found = re.search(rb"content-length: (\d+)", head.lower())
        assert found and b" 200 " in head, head
        while len(answer) < int(found[1]):
            answer += raw.recv(1 << 16)
        return json.loads(answer)

    def stream(self, bodies: list[dict[str, Any]]) -> list[Stream]:
        """Requests at once, until all of them have been answered."""
        requests, streams = [_request("/v1/chat/completions", body) for body in bodies], [Stream() for _ in bodies]
        selector = selectors.EpollSelector()
        for raw, stream in zip(self._sockets, streams):
            raw.setblocking(False)
            selector.register(raw, selectors.EVENT_READ, (raw, stream))
        began = time.perf_counter()
        for raw, request in zip(self._sockets, requests):
            raw.sendall(request)
        while selector.get_map():
            for key, _ in selector.select():
                raw, stream = key.data
                piece = raw.recv(1 << 16)
                assert piece, "the server has hung up"
                stream.pieces.append(piece)
                if not stream.first and piece.count(FIRST) > piece.count(EMPTY):
                    stream.first = time.perf_counter() - began
                if piece.endswith(END):
                    stream.end = time.perf_counter() - began
                    selector.unregister(raw)
        return streams


def _request(path: str, body: Any) -> bytes:
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n").encode() + data


def _until(raw: socket.socket, end: bytes) -> bytes:
    data = b""
    while end not in data:
        data += raw.recv(1 << 16)
    return data


@contextmanager
def _server(settings: dict[str, Any]) -> Iterator[int]:
    command = [sys.executable, os.path.abspath(__file__), "--serve", json.dumps(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        yield port_of(process)
    finally:
        process.terminate()
        process.wait(30)


# In the server's process


def _serve(settings: dict[str, Any]) -> None:
    import deltic.server.app as app_module

    llm, plain = _load(settings), app_module.create_app

    def create_app(*args: Any, **options: Any) -> Any:
        app = plain(*args, **options)
        for path, answer in (("/alone", _alone), ("/usage", _cpu)):
            app.add_route(path, _route(llm, answer), methods=["POST"])
        return app
    app_module.create_app = create_app
    app_module.serve(llm, port=0)


def _load(settings: dict[str, Any]) -> LLM:
    from deltic import LLM, RandomModel
    from deltic.loader.hub import resolve

    options = {"max_batch": STREAMS, "max_context": 2048, "memory": "2GiB", "threads": settings["threads"],
               "quant": settings["quant"]}
    if settings["model"] == "tiny":
        return LLM(**options)
    llm, words = LLM(RandomModel(settings["model"]), **options), LLM(max_context=2048).chat_processor
    spelled = words.tokenizer._bytes
    for token in range(llm.runtime.config.vocab_size):
        if not words.tokenizer.token_bytes(token):
            spelled[token] = f" w{token}".encode()
    llm._chat_processor, llm.runtime = words, replace(llm.runtime, path=resolve(None))
    return llm


def _route(llm: LLM, answer: Any) -> Any:
    import asyncio

    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response

    async def route(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(answer, llm, await request.json()))
    return route


def _cpu(_: LLM, __: Any) -> dict[str, float]:
    return {"cpu": time.process_time()}


def _alone(llm: LLM, asked: Any) -> dict[str, float]:
    """The engine without HTTP: seconds from the first request to the first token and to the last."""
    from deltic.params import SamplingParams

    jobs = [llm.chat_processor.chat(body["messages"], SamplingParams(
        temperature=0, max_tokens=body["max_tokens"], ignore_eos=True, max_repeat=0),
        variables={"enable_thinking": False}) for body in asked["bodies"]]
    tokens, first = 0, 0.0
    with llm.worker.hold() as engine:
        began, cpu = time.perf_counter(), time.process_time()
        for job in jobs:
            engine.add(job.request)
        while engine.has_work:
            tokens += sum(event.token is not None for event in engine.step())
            first = first or (time.perf_counter() - began if tokens else 0.0)
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu, "first": first,
                "tokens": tokens}


if __name__ == "__main__":
    main()
