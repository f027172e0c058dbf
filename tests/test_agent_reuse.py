"""An agent's conversation of twenty turns through the real engine: how many tokens are computed, as numbers.

Tokenizer and template are the embedded model's. Answers are scripted, so a small random model suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import Answers, fresh_pools, odd_shape, take
from test_chat_history import CALL, EOS, SYSTEM, THOUGHT, TINY, TOKENIZER, TOOLS, Talk, cut_small

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.chat.processor import ChatProcessor, PreparedRequest
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.ops.noise import sample_key
from deltic.ops.types import Sampled, Sampling
from deltic.params import PAGE, EngineRequest, SamplingParams, common_length
from deltic.runner.model_runner import ModelRunner

TITLE = [{"role": "system", "content": "Give the conversation a title."}]
CONTEXT = 16_384
ANSWER = tuple(TOKENIZER.encode("<|im_start|>assistant\n"))


@cache
def model() -> ModelRunner:
    """A small model over the embedded tokenizer's vocabulary."""
    kinds = ("linear_attention", "full_attention", "linear_attention")
    shape = odd_shape(vocab_size=3072, max_position_embeddings=CONTEXT, num_hidden_layers=len(kinds), layer_types=kinds)
    return load(RandomModel(shape=shape), EngineConfig(dtype="float32", memory="8MiB", threads=1))


@dataclass
class Script:
    """A `sample` op that returns scripted tokens, by the key of their draw."""

    runtime: ModelRunner
    tokens: dict[int, int] = field(default_factory=dict)

    def sample(self, logits: Any, sampling: Sampling) -> Sampled:
        sampled = self.runtime.decoder.ops.sample(logits, sampling)
        found = [self.tokens.get(key, token) for key, token in
                 zip(sampling.key.tolist(), sampled.tokens.tolist(), strict=True)]
        return replace(sampled, tokens=sampled.tokens.new_tensor(found), landed=False)


@dataclass
class Served:
    """The prompt of a request, and the number of its computed tokens."""

    prompt: tuple[int, ...]
    computed: int


class Process:
    """An engine and a processor over a directory, as a server has them; `restarted` is the next one."""

    def __init__(self, directory: Path, mode: str | None) -> None:
        """mode: None: the default one."""
        self.directory, self.mode = directory, mode
        runtime = model()
        self.script = Script(runtime)
        ops = replace(runtime.decoder.ops, sample=self.script.sample)
        pools = fresh_pools(runtime, 3 * CONTEXT // PAGE, 200)
        tiers = [TierIndex(DiskStore(directory, "model", 1 << 30), threads=True)]
        self.runtime = replace(
            runtime, decoder=replace(runtime.decoder, ops=ops), cache=HybridCache(pools, True, tiers),
            options=replace(runtime.options, token_budget=512), memory=MemoryPlan(3 * CONTEXT // PAGE, 200, 4, CONTEXT))
        self.engine = Engine(self.runtime)
        chosen = {"history": mode} if mode else {}
        self.chat_processor = ChatProcessor.from_directory(TINY, notes=DiskRecords(directory, "model"), **chosen)
        self.requests = 0

    def restarted(self) -> Process:
        self.engine.close()
        self.chat_processor.flush()
        return Process(self.directory, self.mode)

    def serve(self, *asked: tuple[PreparedRequest, Sequence[int]]) -> list[Served]:
        """Runs jobs at the same time with scripted answers."""
        requests = [self._request(job, answer) for job, answer in asked]
        for request in requests:
            self.engine.add(request)
        answers: Answers = {}
        while self.engine.has_work:
            take(answers, self.engine.step())
        self.engine.check()
        found = []
        for request, (_, answer) in zip(requests, asked, strict=True):
            given = answers[(request.id, 0)]
            assert given.tokens == [*answer, EOS] and given.last.usage is not None
            usage = given.last.usage
            found.append(Served(request.prompt, usage.prompt_tokens - usage.cached_tokens))
        return found

    def _request(self, job: PreparedRequest, answer: Sequence[int]) -> EngineRequest:
        self.requests += 1
        start = len(job.request.prompt)
        for index, token in enumerate([*answer, EOS]):
            self.script.tokens[sample_key(self.requests, 0, start + index)] = token
        sampling = SamplingParams(temperature=1.0, seed=self.requests, stop_token_ids=(EOS,))
        return replace(job.request, id=str(self.requests), output=sampling)


@dataclass
class Agent:
    """A client of a process, and the ids of its last prompt and answer."""

    process: Process
    talk: Talk
    past: tuple[int, ...] = ()
    title: bool = False
    costs: list[tuple[str, int, int, int]] = field(default_factory=list)

    @property
    def preserves(self) -> bool:
        return self.process.mode != "template"

    def answer(self, kind: str, job: PreparedRequest, text: str) -> None:
        """Runs one request; only tokens that are new or rewritten by the template may be computed."""
        self.talk.hear(job, text)
        answer = self.talk.answer_ids
        asked = [(job, answer)]
        if self.title:
            title = self.process.chat_processor.chat([*TITLE, {"role": "user", "content": f"{text}: a title?"}])
            asked.append((title, cut_small("A title")))
        served, prompt = self.process.serve(*asked)[0], job.request.prompt
        common = common_length(self.past, prompt)
        if self.past:
            self.check(kind, served, common)
        self.costs.append((kind, len(prompt), common, served.computed))
        self.past = (*prompt, *answer)
        self.title = False

    def check(self, kind: str, served: Served, common: int) -> None:
        """At most a page more than what differs from all that went before. In preserve mode that is what came after
        the last answer; else the template rewrites from the last user message on at the most."""
        assert served.computed <= len(served.prompt) - common + PAGE, f"{kind}: {served.computed} computed"
        if kind in ("edit", "again"):
            return
        if self.preserves:
            assert common == len(self.past), f"{kind}: an earlier turn is spelled anew"
        else:
            assert common >= self.until_last_user(), f"{kind}: more is rewritten than since the last user message"

    def until_last_user(self) -> int:
        """Tokens that the template renders up to the answer to the user message before the last one."""
        users = [index for index, message in enumerate(self.talk.messages) if message["role"] == "user"]
        end = users[-2] if self.talk.messages[-2]["role"] == "user" and len(users) > 1 else users[-1]
        rendered = self.process.chat_processor.chat(
            self.talk.messages[:end + 1], tools=self.talk.tools, history="template",
            variables={"enable_thinking": self.talk.thinking}).request
        return next(at for at in rendered.stable_prefixes if rendered.prompt[at - len(ANSWER):at] == ANSWER)

    def turn(self, number: int) -> None:
        """A question, up to two calls with their results, an answer."""
        kind, job = "user", self.talk.say(f"Now fix number {number}, please.")
        for step in range(number % 3):
            self.title = number == 7
            self.answer(kind, job, f"Step {step}\n\n" + CALL.format(line=step))
            kind, job = "result", self.talk.result(f"done {step}: {'ok ' * (number % 5)}\n")
        self.answer(kind, job, f"Number {number} is fixed.")

    def restart(self) -> None:
        self.process = self.process.restarted()
        self.talk.chat_processor = self.process.chat_processor


def agent(directory: Path, mode: str | None, thinking: bool, returns: bool) -> Agent:
    process = Process(directory, mode)
    talk = Talk(process.chat_processor, None, thinking, returns, TOOLS, [SYSTEM], size=7)
    return Agent(process, talk)


CASES = [
    ("preserve", True, False),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("template", False, True), ("template", True, True), ("preserve", False, True), ("template", True, False),
        ("preserve", True, True))),
]


@pytest.mark.parametrize(("mode", "thinking", "returns"), CASES)
def test_twenty_turns(mode: str, thinking: bool, returns: bool, tmp_path: Path) -> None:
    """With tools and their results, a title beside it, a regenerated answer, an edit of turn 12, and a restart."""
    client = agent(tmp_path, mode, thinking, returns)
    before_twelve: list[dict[str, Any]] = []
    for number in range(20):
        if number == 12:
            before_twelve = list(client.talk.messages)
        client.turn(number)
        if number == 15:
            client.restart()

    # the last answer again: its prompt is known to the end
    client.talk.messages.pop()
    client.past = client.past[:len(client.past) - len(client.talk.answer_ids)]
    client.answer("again", client.talk.ask(), "Number 19 is really fixed.")
    assert client.costs[-1][3] <= (0 if mode == "preserve" else PAGE)

    # turn 12 is edited: all before it is known
    client.talk.messages = before_twelve
    kept = client.past
    client.answer("edit", client.talk.say("No: leave number 12 alone."), "Left alone.")
    _, prompt, common, computed = client.costs[-1]
    assert common == common_length(kept, client.past) and 1000 < common < prompt < common + 200
    client.turn(13)
    client.restart()
    client.turn(14)
    client.process.engine.check()
    total, computed = sum(cost[1] for cost in client.costs), sum(cost[3] for cost in client.costs)
    assert computed < 0.1 * total, f"{computed} of {total} prompt tokens were computed"


@pytest.mark.parametrize("returns", [True, False], ids=["returns", "drops"])
@pytest.mark.parametrize(("mode", "least", "most"), [(None, 1, 200), ("template", 2000, 4000)])
@pytest.mark.covering
def test_question_after_thirteen_tool_results(mode: str | None, least: int, most: int, returns: bool,
                                           tmp_path: Path) -> None:
    """What the template rewrites then is all since the last question. With the default nothing is rewritten."""
    client = agent(tmp_path, mode, True, returns)
    job = client.talk.say("Fix all thirteen files, please.")
    for step in range(13):
        client.answer("user" if not step else "result", job, f"Step {step}\n\n" + CALL.format(line=step))
        job = client.talk.result(f"done {step}: " + "ok " * 40)
    client.answer("result", job, "All thirteen are fixed.")
    client.answer("user", client.talk.say("Now the tests, please."), "They are fixed, too.")
    _, prompt, _, computed = client.costs[-1]
    assert prompt > 2000 and least <= computed <= most, f"{computed} of {prompt} tokens were read again"


@pytest.mark.parametrize("mode", ["template", "preserve"])
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.covering
def test_edits_of_the_last_message(mode: str, thinking: bool, tmp_path: Path) -> None:
    """Of a history that came in one prompt, and of a running chat: nothing but what is new is read."""
    client = agent(tmp_path, mode, thinking, returns=False)
    client.talk.tools = None
    for number in range(3):
        client.talk.messages += [{"role": "user", "content": f"Tell me about {number}"},
                                 {"role": "assistant", "content": f"{number} is a number. " * 30}]
    for edits in (2, 0, 1, 2):
        client.answer("user", client.talk.say("And what comes after that?"), "The one that follows it. " * 30)
        for edit in range(edits):
            del client.talk.messages[-2:]
            client.answer("edit", client.talk.say(f"Is it {edit}, or what is it else?"), "That is up to you. " * 30)
            assert client.costs[-1][3] < 60


def test_client_receives_reasoning(tmp_path: Path) -> None:
    """The router splits scripted answers into reasoning and calls."""
    client = agent(tmp_path, "preserve", True, True)
    client.turn(1)
    assistant = [message for message in client.talk.messages if message["role"] == "assistant"]
    assert assistant[0]["reasoning_content"].startswith(THOUGHT[:10]) and assistant[0]["tool_calls"]
