"""Attacks for `bench/hostile.py`: what one client can send, over and over, to slow the others down.

Each attack sends one round to a port and returns; the caller repeats it. All are valid HTTP and, unless the docstring
says otherwise, requests that a server should answer.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import socket
import struct
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

from http_load import SOURCE, get, head, post

Attack = Callable[[int], Awaitable[Any]]
CHAT, TEXT, COUNT = "/v1/chat/completions", "/v1/completions", "/v1/messages/count_tokens"


# Requests


def user(text: Any, **more: Any) -> dict[str, Any]:
    """A chat request with one message."""
    return {"messages": [{"role": "user", "content": text}], **more}


def words(count: int, seed: int = 0) -> str:
    """Text of about `count` tokens."""
    draw = random.Random(seed)
    return " ".join(draw.choice(("the", "red", "house", "is", "on", "a", "hill", "and", "we", "see", "it"))
                    for _ in range(count * 5 // 6))


async def at_once(requests: int, port: int, path: str, body: dict[str, Any] | bytes) -> None:
    """The same request on so many connections at once."""
    await asyncio.gather(*(post(port, path, body) for _ in range(requests)))


# Raw connections


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from the attacker's address."""
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(SOURCE.get(), 0))


async def pour(port: int, pieces: list[bytes], seconds: float) -> None:
    """Send the first piece, then the others again and again, until the server hangs up or the time is over. Reads
    nothing."""
    reader, writer = await connect(port)
    until, turn = time.monotonic() + seconds, 0
    try:
        writer.write(pieces[0])
        while time.monotonic() < until and not reader.at_eof():
            writer.write(pieces[1 + turn % (len(pieces) - 1)])
            turn += 1
            async with asyncio.timeout(seconds):
                await writer.drain()
            await asyncio.sleep(0.001)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()


def chunked_head(path: str) -> bytes:
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            "transfer-encoding: chunked\r\n\r\n").encode()


def deaf_socket(port: int, request: bytes) -> socket.socket:
    """A connection that sends a request and never reads its answer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.bind((SOURCE.get(), 0))
    sock.connect(("127.0.0.1", port))
    sock.sendall(request)
    return sock


async def hold(sockets: list[socket.socket], seconds: float) -> None:
    """Keep connections open, then close them."""
    try:
        await asyncio.sleep(seconds)
    finally:
        for sock in sockets:
            sock.close()


# Bodies and connections


async def tiny_chunks(port: int) -> None:
    """Bodies in chunks of one byte that never end, on paths that exist and that do not."""
    chunks = b"1\r\n \r\n" * 2000
    await asyncio.gather(*(pour(port, [chunked_head(path), chunks], 20)
                           for path in (CHAT, TEXT, "/nothing", "/v1/models") for _ in range(2)))


async def header_flood(port: int) -> None:
    """Requests with as many headers as fit."""
    many = "".join(f"x-{index}: {'y' * 20}\r\n" for index in range(1500))
    request = f"GET /health HTTP/1.1\r\nhost: localhost\r\n{many}connection: close\r\n\r\n".encode()
    await asyncio.gather(*(pour(port, [request, b""], 0.2) for _ in range(32)))


async def pipelining(port: int) -> None:
    """Thousands of requests in one write, without reading an answer."""
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 500
    await asyncio.gather(*(pour(port, [request, request], 5) for _ in range(8)))


async def upgrades(port: int) -> None:
    """Requests for a WebSocket, which the server does not serve."""
    request = (b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
               b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
    await asyncio.gather(*(pour(port, [request, request], 2) for _ in range(16)))


async def slow_writers(port: int) -> None:
    """Bodies that come byte by byte, two a second."""
    async def one() -> None:
        _, writer = await connect(port)
        writer.write(head(CHAT, 1000))
        for _ in range(20):
            writer.write(b" ")
            await asyncio.sleep(0.5)
        writer.close()
    await asyncio.gather(*(one() for _ in range(100)), return_exceptions=True)


async def slow_readers(port: int) -> None:
    """Large answers that are read a few bytes at a time."""
    async def one(path: str) -> None:
        reader, writer = await connect(port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        for _ in range(20):
            await reader.read(256)
            await asyncio.sleep(0.5)
        writer.close()
    await asyncio.gather(*(one(path) for path in ("/openapi.json", "/", "/metrics") for _ in range(100)),
                         return_exceptions=True)


async def idle(port: int) -> None:
    """Connections that send nothing, or half a header."""
    sockets = []
    try:
        for number in range(1500):
            sock = socket.socket()
            sock.setblocking(False)
            sock.bind((SOURCE.get(), 0))
            sockets.append(sock)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port)), 5)
            if number % 3 == 0:
                sock.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n")
    except (OSError, TimeoutError):
        await asyncio.sleep(1)
    await hold(sockets, 30)


async def large_json(port: int) -> None:
    """JSON that is small in bytes and large in objects."""
    await post(port, CHAT, b'{"messages":[' + b",".join([b"[{}]"] * 1_500_000) + b"]}")
    await post(port, CHAT, b'{"messages":[' + b",".join([b"{}"] * 90_000) + b"]}")


async def deep_json(port: int) -> None:
    """JSON that is nested as deeply as the body holds."""
    await post(port, CHAT, b'{"messages":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}")
    nested = b'{"a":' * 90 + b"1" + b"}" * 90
    await post(port, CHAT, b'{"messages":[{"role":"user","content":"x","a":' + nested + b"}]}")


async def many_bodies(port: int) -> None:
    """Ten bodies of three megabytes at once."""
    await at_once(10, port, TEXT, {"prompt": "hi " * 1_000_000, "max_tokens": 1})


async def long_text(port: int) -> None:
    """A prompt of ten million characters, which no context holds."""
    await post(port, TEXT, {"prompt": "hi " * 3_300_000, "max_tokens": 1})


# Conversations, tools and counting


async def arguments(port: int) -> None:
    """A tool call whose arguments are a megabyte of a Python literal."""
    text = "{'a': [" + "(1, 'x'), " * 100_000 + "]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    await post(port, CHAT, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
                                         {"role": "tool", "tool_call_id": "c", "content": "y"}], "max_tokens": 1})


def turns(count: int, text: str = "x") -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index in range(count)]


async def histories(port: int) -> None:
    """As many messages as may be sent."""
    await at_once(4, port, CHAT, {"messages": turns(4001), "max_tokens": 1})


def tools(count: int, parameters: int) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": {f"p{key}": {"type": "string"} for key in range(parameters)}}
    return [{"type": "function", "function": {"name": f"f{index}", "parameters": schema}} for index in range(count)]


async def tool_lists(port: int) -> None:
    """As many tools as may be sent, each with a large schema."""
    await at_once(4, port, CHAT, user("Hi", tools=tools(500, 30), max_tokens=1))


async def tokenize(port: int) -> None:
    """Sixteen connections that have 31,000 letters tokenized, which are one word."""
    draw = random.Random(time.time_ns())
    text = "".join(draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(31_000))
    await at_once(16, port, "/tokenize", {"prompt": text})


async def count_tokens(port: int) -> None:
    """Sixteen connections that count the tokens of long conversations."""
    await at_once(16, port, COUNT, {"messages": turns(401, words(300)), "model": "tiny"})


async def response_chains(port: int) -> None:
    """Responses that go on from each other."""
    previous = None
    for turn in range(20):
        body = {"input": words(100, turn), "max_output_tokens": 16,
                **({"previous_response_id": previous} if previous else {})}
        reply = await post(port, "/v1/responses", body)
        previous = json.loads(reply.body).get("id") if reply.done else None


# Pictures


def picture(data: bytes, kind: str) -> dict[str, Any]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def png(width: int, height: int) -> bytes:
    """A picture of one colour: large in pixels, small as a file."""
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + width // 8)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
            + chunk(b"IDAT", packed) + chunk(b"IEND", b""))


def saved(kind: str, width: int, height: int, **options: Any) -> bytes:
    """As `png`, by Pillow."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("1" if kind == "TIFF" else "L", (width, height)).save(out, kind, **options)
    return out.getvalue()


def frames(count: int, side: int) -> bytes:
    """A GIF of many frames."""
    from PIL import Image

    pictures = [Image.new("P", (side, side), color=index % 250) for index in range(count)]
    out = io.BytesIO()
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:])
    return out.getvalue()


async def pictures(port: int, data: bytes, kind: str) -> None:
    """Twelve requests with six pictures each."""
    parts = [picture(data, kind) for _ in range(6)]
    await at_once(12, port, CHAT, user([*parts, {"type": "text", "text": "What is this?"}], max_tokens=4))


async def small_tiffs(port: int) -> None:
    """TIFFs of a few KB and 89 megapixels."""
    await pictures(port, saved("TIFF", 9400, 9400, compression="group4"), "tiff")


async def small_pngs(port: int) -> None:
    """PNGs of a few KB and 88 megapixels."""
    await pictures(port, png(9376, 9400), "png")


async def small_gifs(port: int) -> None:
    """GIFs that are small as files and large in pixels and frames."""
    await pictures(port, frames(60, 1000), "gif")


async def small_webps(port: int) -> None:
    """WebP files of a few KB and 89 megapixels."""
    await pictures(port, saved("WEBP", 9400, 9400, lossless=True), "webp")


# Generation


async def fan_out(port: int) -> None:
    """As many prompts, and as many answers of each, as may be asked for."""
    await post(port, TEXT, {"prompt": ["a"] * 2048, "n": 128, "max_tokens": 4, "temperature": 1.0})
    await post(port, TEXT, {"prompt": ["a"] * 16, "n": 8, "max_tokens": 4, "temperature": 1.0})


async def full_queue(port: int) -> None:
    """As many answers as may wait, each as long as it may be."""
    many = {"prompt": "Tell a story.", "n": 128, "max_tokens": 30_000, "ignore_eos": True, "temperature": 1.0}
    await asyncio.gather(*(post(port, TEXT, many, 20) for _ in range(4)), post(port, TEXT, {**many, "n": 16}, 20))


async def looping_clients(port: int) -> None:
    """Sixty-four connections that each ask again as soon as they have an answer."""
    async def one(number: int) -> None:
        for turn in range(10):
            await post(port, CHAT, user(f"What is the capital of country {number} {turn}?", max_tokens=24))
    await asyncio.gather(*(one(number) for number in range(64)))


async def long_prompt(port: int) -> None:
    """A prompt that nearly fills the context."""
    await post(port, TEXT, {"prompt": words(30_000, time.time_ns()), "max_tokens": 1})


async def conversation(port: int) -> None:
    """An agent's conversation that nearly fills the context, turn after turn."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": words(180, index)} for index in range(151)]
    for turn in range(3):
        reply = await post(port, CHAT, {"messages": messages, "max_tokens": 8})
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": words(20, turn)}]


async def penalties(port: int) -> None:
    """Penalties over a long context, and as many biases as may be given."""
    bias = {str(token): 1.0 for token in range(300)}
    await post(port, TEXT, {"prompt": words(20_000), "max_tokens": 200, "repetition_penalty": 1.1, "ignore_eos": True,
                            "frequency_penalty": 0.1, "logit_bias": bias, "logprobs": 5})


async def shared_beginning(port: int) -> None:
    """Two hundred requests that begin with the same 20,000 tokens."""
    text = words(20_000)
    await asyncio.gather(*(post(port, TEXT, {"prompt": f"{text} {number}", "max_tokens": 4, "ignore_eos": True})
                           for number in range(200)))


async def unread_streams(port: int) -> None:
    """Two hundred streams whose client never reads."""
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 30_000, "ignore_eos": True, "logprobs": 5}).encode()
    sockets = []
    for _ in range(200):
        try:
            sockets.append(deaf_socket(port, head(TEXT, len(body)) + body))
        except OSError:
            break
    await hold(sockets, 30)


async def aborted_streams(port: int) -> None:
    """Streams that are opened and closed at once."""
    body = json.dumps(user(words(200, time.time_ns()), stream=True, max_tokens=1000)).encode()
    for _ in range(100):
        try:
            deaf_socket(port, head(CHAT, len(body)) + body).close()
        except OSError:
            await asyncio.sleep(0.1)


async def near_miss_stops(port: int) -> None:
    """The most stop strings a request may have; the answer keeps matching all but their last letter."""
    held = "the capital of France is " * 40
    stops = [held[index:] + "~" for index in range(64)]
    bias = {str(token): -20.0 for token in range(10)}
    await at_once(8, port, TEXT, {"prompt": held * 3, "max_tokens": 2000, "ignore_eos": True, "stop": stops,
                                  "temperature": 0, "logit_bias": bias})


async def answer_scores(port: int) -> None:
    """Many answers with all the log-probabilities that can be asked for."""
    await post(port, CHAT, user("Tell me a story.", n=128, max_tokens=150, logprobs=True, top_logprobs=20,
                                ignore_eos=True, temperature=1.0))


async def prompt_scores(port: int) -> None:
    """Long prompts with the log-probabilities of every token."""
    await asyncio.gather(*(post(port, TEXT, {"prompt": words(8_000, time.time_ns() + number), "prompt_logprobs": 20,
                                             "max_tokens": 1}) for number in range(4)))


# Constrained answers


async def slow_grammars(port: int) -> None:
    """Sixty-four ambiguous grammars, each of its own."""
    await asyncio.gather(*(post(port, CHAT, user("Hi", max_tokens=200, guided_grammar=(
        f'start: s\ns: s s | "a" | "b" | s s s | "x{time.time_ns()}{number}"'))) for number in range(64)))


async def fitting_grammars(port: int) -> None:
    """Grammars of their own that are quickly compiled."""
    await asyncio.gather(*(post(port, CHAT, user("Hi", max_tokens=50, guided_grammar=(
        f'start: "x{number}" NAME\nNAME: /[A-Z]{{2,40}}/'))) for number in range(32)))


async def slow_regexes(port: int) -> None:
    """Regular expressions that are large as automata."""
    await asyncio.gather(*(post(port, CHAT, user("Hi", max_tokens=50, guided_regex=(
        f"(a|b)*a(a|b){{{10 + number % 10}}}x{time.time_ns()}"))) for number in range(32)))


async def large_schemas(port: int) -> None:
    """Schemas with many properties, each of its own."""
    def schema(number: int) -> dict[str, Any]:
        names = [f"p{number}_{time.time_ns()}_{key}" for key in range(300)]
        return {"type": "object", "properties": {name: {"type": "string", "maxLength": 20} for name in names},
                "required": names, "additionalProperties": False}
    await asyncio.gather(*(post(port, CHAT, user("Hi", max_tokens=50, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": schema(number), "strict": True}}))
        for number in range(8)))


async def scrapes(port: int) -> None:
    """The pages that a server makes anew for each reader."""
    await asyncio.gather(*(get(port, path) for path in ("/metrics", "/openapi.json", "/") for _ in range(16)))


ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (
    tiny_chunks, header_flood, pipelining, upgrades, slow_writers, slow_readers, idle, large_json, deep_json,
    many_bodies, long_text, arguments, histories, tool_lists, tokenize, count_tokens, response_chains, small_tiffs,
    small_pngs, small_gifs, small_webps, fan_out, full_queue, looping_clients, long_prompt, conversation, penalties,
    shared_beginning, unread_streams, aborted_streams, near_miss_stops, answer_scores, prompt_scores, slow_grammars,
    fitting_grammars, slow_regexes, large_schemas, scrapes)}
