"""Shared by the tests with real coding agents: an engine that plays a model, and a sandbox for agents."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_sandbox import relay
from support import odd_shape, with_sample
from test_chat_history import EOS, TINY, TOKENIZER
from test_server_harness import Served, serving

from deltic.chat.processor import ChatProcessor
from deltic.config import EngineConfig
from deltic.engine.adapters import AdapterSet
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.worker import Worker
from deltic.errors import RequestError
from deltic.ops.noise import sample_key
from deltic.ops.types import Sampled, Sampling
from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.runner.model_runner import ModelRunner

CONTEXT = 131_072
PATIENCE = 600.0  # seconds for a program that ends by itself
SANDBOX = Path(__file__).with_name("agent_sandbox.py")


# The model


@dataclass
class Seen:
    """A prompt, parsed as a model reads it.

    tools: the parameter names of each tool. system: the system message with the tools. question: the last user
    message. results: the tool results after it. thinks: the think block is open.
    """

    text: str
    tools: dict[str, list[str]]
    system: str
    question: str
    results: list[str]
    thinks: bool

    @classmethod
    def read(cls, text: str) -> Seen:
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", text, re.DOTALL)
        block = re.search(r"<tools>\n(.*?)\n</tools>", turns[0][1], re.DOTALL)
        tools = [json.loads(line) for line in block[1].splitlines()] if block else []
        functions = [tool.get("function", tool) for tool in tools]
        names = {function["name"]: list(function.get("parameters", {}).get("properties", {}))
                 for function in functions}
        users = [(at, said) for at, (role, said) in enumerate(turns) if role == "user"]
        asked = max((at for at, said in users if not said.startswith("<tool_response>")), default=0)
        results = [result for at, said in users if at > asked
                   for result in re.findall(r"<tool_response>\n(.*?)\n</tool_response>", said, re.DOTALL)]
        return cls(text, names, turns[0][1] if turns[0][0] == "system" else "", turns[asked][1], results,
                   text.endswith("<think>\n"))

    def tool(self, *parameters: str) -> str:
        """The first tool that has these parameters."""
        return next(name for name, has in self.tools.items() if set(parameters) <= set(has))


def call(name: str, **arguments: str) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


@dataclass
class Turn:
    """A request, its answer, and the number of cached prompt tokens (None: it never ended)."""

    prompt: tuple[int, ...]
    seen: Seen
    answer: str
    ids: tuple[int, ...]
    cached: int | None = None


class Player(Engine):
    """A real engine that prefills all prompts; a script chooses the tokens of the answers."""

    def __init__(self, runtime: ModelRunner) -> None:
        super().__init__(with_sample(runtime, self._sample))
        self.script: Callable[[Seen], str] = lambda seen: "Nothing was asked."
        self.turns: dict[str, Turn] = {}
        self._tokens: dict[int, int] = {}
        self._draw = runtime.decoder.ops.sample

    def add(self, request: EngineRequest) -> None:
        seen = Seen.read(TOKENIZER.decode(request.prompt, skip_special=False))
        try:
            said = self.script(seen)
        except (AssertionError, LookupError, StopIteration) as error:  # status 400: nobody asks again
            raise RequestError(f"the script has no answer: {error!r} to {seen}", "messages") from error
        answer = ("Let me see.\n</think>\n\n" if seen.thinks else "") + said
        ids = (*TOKENIZER.encode(answer), EOS)
        seed = len(self.turns) + 1
        for index, token in enumerate(ids):
            self._tokens[sample_key(seed, 0, len(request.prompt) + index)] = token
        assert isinstance(request.output, SamplingParams)
        output = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, seed=seed,
                                max_tokens=request.output.max_tokens, stop_token_ids=(EOS,), max_repeat=0)
        self.turns[request.id] = Turn(request.prompt, seen, answer, ids)
        super().add(replace(request, output=output))

    def step(self) -> list[Any]:
        events = super().step()
        for event in events:
            if isinstance(event, TokenEvent) and event.usage:
                self.turns[event.request].cached = event.usage.cached_tokens
        return events

    def _sample(self, logits: Any, sampling: Sampling) -> Sampled:
        sampled = self._draw(logits, sampling)
        found = [self._tokens.get(key, token) for key, token in
                 zip(sampling.key.tolist(), sampled.tokens.tolist(), strict=True)]
        return replace(sampled, tokens=sampled.tokens.new_tensor(found), landed=False)


@contextmanager
def playing(script: Callable[[Seen], str], history: str, memory: str = "1GiB") -> Iterator[tuple[Served, Player]]:
    """Runs a server over an engine that answers by script."""
    shape = odd_shape(vocab_size=3072, max_position_embeddings=CONTEXT)
    options = EngineConfig(dtype="float32", memory=memory, max_batch=4, max_context=CONTEXT)
    engine = Player(load(RandomModel(shape=shape), options))
    engine.script = script
    model = SimpleNamespace(engine=engine, worker=Worker(engine), runtime=engine.runtime,
                            adapters=AdapterSet(engine.runtime),
                            chat_processor=ChatProcessor.from_directory(TINY, longest=CONTEXT, history=history))
    model.close = lambda: model.worker.stop(5)
    with serving(model, served_name="player") as served:
        yield served, engine


# Where agents run


@contextmanager
def door(served: Served, path: Path) -> Iterator[None]:
    """A Unix socket that leads to the server."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        threading.Thread(target=relay, args=(listener, socket.AF_INET, (host, int(port))), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True)
class Room:
    """An empty home with a working directory. Programs in it reach only the server, at its own URL."""

    home: Path
    served: Served

    @property
    def work(self) -> Path:
        return self.home / "work"

    def run(self, *command: str | Path) -> str:
        """Returns the stdout of the command, which must succeed."""
        port = self.served.url.rsplit(":", 1)[1]
        sandbox = ("unshare", "--map-root-user", "--net", sys.executable, str(SANDBOX), str(self.home / "door"), port)
        environment = {"HOME": str(self.home), "PATH": os.environ["PATH"], "TERM": "dumb", "LANG": "C.UTF-8"}
        with door(self.served, self.home / "door"):
            done = subprocess.run([*sandbox, *map(str, command)], cwd=self.work, env=environment, text=True,
                                  stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE)
        (self.home / "door").unlink()
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stdout}\n{done.stderr}"
        return done.stdout


# Installation


def installed(name: str, *commands: Sequence[str | Path]) -> Path:
    """A directory below the system's for temporary files, in which the commands have run once, for all sessions: PLACE
    stands for it. A command that fails is a failure."""
    place = Path(tempfile.gettempdir()) / f"deltic-tests-{os.getuid()}" / re.sub(r"[^\w.=-]+", "-", name)
    if not (place / "done").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for command in commands:
            words = [str(word).replace("PLACE", str(place)) for word in command]
            done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=PATIENCE)
            assert done.returncode == 0, f"{' '.join(words)} failed, so {name} cannot be tested: {done.stderr[-2000:]}"
        (place / "done").touch()
    return place


def from_npm(package: str, program: str) -> Path:
    """A program of a package of the npm registry; skips the test where there is no node."""
    npm = shutil.which("npm")
    if not npm:
        pytest.skip(f"{package} runs on node, which is not installed")
    place = installed(package, [npm, "install", "--prefix", "PLACE", "--no-audit", "--no-fund", "--silent", package])
    return place / "node_modules" / ".bin" / program


def from_python(package: str, program: str) -> Path:
    """A program of a package of the Python registry, in an environment of its own."""
    python = "PLACE/venv/bin/python"
    place = installed(package, [sys.executable, "-m", "venv", "PLACE/venv"],
                      [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package])
    return place / "venv" / "bin" / program
