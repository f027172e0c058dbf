"""Random stories: requests, the room and the drafters that they find, what happens on the way. Seldom is there room for
two, often the same prompt; budgets cut prompts anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from speculation_cases import PATTERNS, Dictate, EndingAt, headed, moe_headed
from support import fresh_pools, moe_runtime, odd_runtime, qwen3_runtime

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import TierStore
from deltic.params import MAX_DRAFTS, PAGE, EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner

MODELS = {"odd": odd_runtime, "headed": headed, "qwen3": qwen3_runtime, "moe": moe_runtime, "moe, headed": moe_headed}
TIERS: dict[str, Callable[[str], TierStore]] = {
    "host": lambda place: HostStore(1 << 24), "small host": lambda place: HostStore(1 << 18),
    "disk": lambda place: DiskStore(place, "x", 1 << 28)}
VOCABULARY, AGAIN = 509, "'"

# What a story is


@dataclass(frozen=True)
class Room:
    """The limits of an engine, or of a model that drafts. rings: replay rings that there is memory for."""

    batch: int
    budget: int
    pages: int
    context: int
    slots: int
    rings: int
    reuse: bool = True
    tier: str | None = None

    def furnish(self, model: ModelRunner, place: str = "") -> ModelRunner:
        """The model with pools of this size."""
        pools = fresh_pools(model, self.pages, self.slots, self.rings)
        tiers = [TierIndex(TIERS[self.tier](place), threads=False)] if self.tier else []
        return replace(
            model, options=replace(model.options, token_budget=self.budget, max_batch=self.batch),
            memory=MemoryPlan(self.pages, self.slots, self.batch, min(self.context, self.pages * PAGE)),
            cache=HybridCache(pools, self.reuse, tiers))


@dataclass(frozen=True)
class Speculator:
    """Who drafts, at most how many tokens, and who says how many. pattern: of the scripted drafter. room: of a model
    that drafts. breaks: the call with which all fail."""

    drafters: tuple[str, ...]
    limit: int
    depth: str
    pattern: str
    room: Room
    breaks: int | None


@dataclass(frozen=True)
class Story:
    """events: what happens from outside, each with the number of the step before which it does and, unless it is
    "clear", the request that it happens to. A request whose id ends with AGAIN asks what another has asked."""

    seed: int
    model: str
    room: Room
    drafting: Speculator
    requests: tuple[EngineRequest, ...] = field(repr=False)
    events: tuple[tuple[int, str, str], ...]

    @property
    def choices(self) -> list[tuple[str, int]]:
        return [(request.id, choice) for request in self.requests for choice in range(request.output.n)]


# How it is drawn


def tokens_of(draw: Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCABULARY) for _ in range(length))


def sampling_of(draw: Random) -> SamplingParams:
    """Anything that may be asked."""
    spices: list[tuple[float, dict[str, Any]]] = [
        (0.3, {"presence_penalty": draw.uniform(-1, 1), "frequency_penalty": draw.uniform(-0.5, 0.5)}),
        (0.2, {"repetition_penalty": draw.choice([1.2, 0.9])}),
        (0.2, {"logit_bias": {token: draw.choice([-100, 3.0]) for token in tokens_of(draw, 3)}}),
        (0.3, {"top_k": draw.choice([0, 5, 40]), "top_p": draw.choice([1.0, 0.9]), "min_p": draw.choice([0.0, 0.03])}),
        (0.2, {"stop_token_ids": tokens_of(draw, 20), "min_tokens": draw.choice([0, 5, 20])}),
        (0.3, {"logprobs": draw.choice([0, 2, 5])}),
        (0.2, {"n": draw.randint(2, 3)}),
        (0.2, {"max_repeat": draw.choice([2, 3])})]
    settings: dict[str, Any] = {
        "temperature": draw.choice([0.0, 0.0, 1.0, 0.7]), "seed": draw.randrange(1 << 40),
        "max_tokens": draw.choice([1, draw.randint(1, 12), *[draw.randint(10, 60)] * 3, None])}
    for chance, change in spices:
        settings |= change if draw.random() < chance else {}
    return SamplingParams(**settings)


def request_of(draw: Random, name: str, openings: Sequence[tuple[int, ...]], context: int) -> EngineRequest:
    """Its prompt is an opening: whole, cut anywhere or at a page's end; and perhaps more."""
    opening = draw.choice(openings)
    cut = draw.choice([len(opening), draw.randint(1, len(opening)), max(len(opening) // PAGE * PAGE, 1)])
    prompt = (*opening[:cut], *tokens_of(draw, draw.choice([0, 0, draw.randint(1, 30)])))[:context - 2]
    places = {draw.randint(0, 20): token for token in tokens_of(draw, 4)}
    return EngineRequest(
        name, prompt, sampling_of(draw), tuple(draw.randint(1, len(prompt)) for _ in range(draw.choice([0, 2]))),
        matcher=partial(EndingAt, draw.randint(1, 30)) if draw.random() < 0.1 else None,
        guide=partial(Dictate, places) if draw.random() < 0.2 else None, speculate=draw.random() < 0.85)


def room_of(draw: Random) -> Room:
    """Pages for one whole context and little more."""
    context, batch = draw.choice([48, 64, 96, 160]), draw.randint(2, 4)
    return Room(batch, draw.choice([1, 3, 4, 4, 5, 5, 6, 7, 16, 64]), context // PAGE + draw.choice([0, 0, 0, 1, 2]),
                context, batch + draw.choice([1, 1, 2, 8]), draw.choice([0, 1, *[batch] * 6]), draw.random() < 0.95,
                draw.choice([None, None, None, *TIERS]))


def speculator_of(draw: Random, model: str, context: int) -> Speculator:
    drafters = ["scripted", "scripted", "ngram", "itself", "another", *["head"] * 3 * (model == "headed")]
    room = Room(4, draw.choice([5, 64]), draw.choice([3, context // PAGE, context // 4]), draw.choice([40, context]),
                draw.choice([1, 2, 12]), draw.choice([1, 2, 12]), draw.random() < 0.8)
    return Speculator(tuple(draw.choices(drafters, k=draw.choice([1, 1, 2]))), draw.choice([1, 3, 4, 7, MAX_DRAFTS]),
                    draw.choice(["fixed", "fixed", "adaptive", "fickle"]), draw.choice([*PATTERNS]), room,
                    draw.randint(1, 40) if draw.random() < 0.1 else None)


def pauses_of(draw: Random, requests: Sequence[EngineRequest], last: int) -> list[tuple[int, str, str]]:
    """Clients that read in fits and starts: each pause ends, and some are over before they began."""
    events = list[tuple[int, str, str]]()
    for request in requests:
        time = draw.randint(0, last + 10)
        for _ in range(draw.choice([0, 1, 1, 4])):
            end = time + draw.choice([0, 1, draw.randint(2, 40)])
            events += [(time, "pause", request.id), (end, "resume", request.id)]
            time = end + draw.randint(0, 20)
    return events


def story_of(seed: int) -> Story:
    draw = Random(seed)
    model, room = draw.choice(["odd", "odd", "headed", "qwen3"]), room_of(draw)
    longest = draw.choice([room.context // 4, room.context // 2, room.context - 10])
    openings = [tokens_of(draw, draw.randint(1, longest)) for _ in range(2)]
    requests = list[EngineRequest]()
    for index in range(draw.randint(2, 6)):
        requests.append(request_of(draw, f"r{index}", openings, room.context))
        if draw.random() < 0.8:
            requests.append(replace(requests[-1], id=requests[-1].id + AGAIN))
    events, time = list[tuple[int, str, str]](), 0
    gap, impatience = draw.choice([0, 3, 10]), draw.choice([0, 0, 0.2])
    for request in requests:
        events.append((time, "add", request.id))
        if draw.random() < impatience:
            events.append((time + draw.randint(0, 60), "abort", request.id))
        time += draw.randint(0, gap)
    if seed % 3 == 0:
        events += pauses_of(Random(f"pauses of {seed}"), requests, time)
    events += [(draw.randrange(150), "clear", "") for _ in range(draw.choice([0, 3, 20]))]
    return Story(seed, model, room, speculator_of(draw, model, room.context), tuple(requests), tuple(events))
