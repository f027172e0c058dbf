"""L6 and L3 in random stories: requests of every kind come, are aborted and push each other out while drafts are made
for some of them; each must answer what it answers alone without drafts.

Other tests put two things beside each other by hand. What is left goes wrong where three or four meet: drafts made in
the very step in which their sequence is sent back to wait, a prompt read again that ends where the step's budget does.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from speculation_cases import PATTERNS, Scripted
from story_cases import AGAIN, MODELS, VOCABULARY, Room, Story, story_of
from support import (
    Answer,
    Answers,
    Mismatch,
    moe_runtime,
    odd_runtime,
    qwen3_runtime,
    same_logits,
    serve,
    session_over,
    take,
)
from test_prefix_tree import tokens_of
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.engine.engine import Engine
from deltic.engine.scheduler import defers
from deltic.engine.sequence import Sequence as Running
from deltic.params import PAGE
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session
from deltic.spec_decode.draft_length import Acceptance, AdaptiveDraftLength, DraftLength, FixedDraftLength
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.mtp import Wants
from deltic.spec_decode.proposers import MtpProposer, NgramProposer, Proposer

PLAIN = {"odd": odd_runtime, "headed": odd_runtime, "qwen3": qwen3_runtime, "moe": moe_runtime,
         "moe, headed": moe_runtime}
"""Who answers the same: a head drafts, and leaves the rest as it is."""
OTHER = {**dict.fromkeys(PLAIN, qwen3_runtime), "qwen3": odd_runtime}
TOLERANCE, FAST, FLYING, DEFERRING, MIXED, SLOW, GROUP = (
    2e-3, (*range(50, 60), 64, 66, 77, 78, 81, 114, 119, 412), range(1500, 1515),
    (1600, 1605, 1611, 1617, 1618, 1625, 1627, 1628), range(700, 706), 1500, 50)


def alone(story: Story) -> Answers:
    """What its requests answer one by one, without drafts, with nothing kept from one to the next."""
    room = Room(3, 512, 4 * story.room.context // PAGE, story.room.context, slots=4, rings=0, reuse=False)
    runtime, answers = room.furnish(PLAIN[story.model]()), Answers()
    for request in story.requests:
        if not request.id.endswith(AGAIN):
            answers |= serve(runtime, [replace(request, speculate=False)])
    return {(name, choice): answers[name.removesuffix(AGAIN), choice] for name, choice in story.choices}


def drafter_of(kind: str, story: Story, runtime: ModelRunner, wanted: Answers) -> Proposer:
    limit, pattern = story.drafting.limit, PATTERNS[story.drafting.pattern]
    if kind == "scripted":
        return Scripted({who: answer.tokens for who, answer in wanted.items()}, pattern, limit, VOCABULARY)
    if kind == "ngram":
        return NgramProposer(limit)
    if kind == "head":
        assert runtime.mtp_runner
        return MtpProposer(runtime, runtime.mtp_runner, limit)
    model = PLAIN[story.model] if kind == "itself" else OTHER[story.model]
    return DraftModelProposer(story.drafting.room.furnish(model()), VOCABULARY, limit)


@dataclass
class Several:
    """Drafters of which each sequence has another in every step, or none; with the call `breaks` all fail."""

    drafters: Sequence[Proposer]
    limit: int
    draw: Random
    breaks: int | None
    calls: int = 0

    def draft(self, wants: Wants) -> list[list[int]]:
        self.calls += 1
        if self.calls == self.breaks:
            raise RuntimeError("the drafters of this story fail")
        drafts: list[list[int]] = [[] for _ in wants]
        asked = [self.draw.choice([*range(len(self.drafters))] * 5 + [-1]) for _ in wants]
        for number in sorted({*asked} - {-1}):
            mine = [index for index, other in enumerate(asked) if other == number]
            for index, found in zip(mine, self.drafters[number].draft([wants[index] for index in mine]), strict=True):
                drafts[index] = found
        return drafts

    def forget(self, sequence: Running) -> None:
        for drafter in self.drafters:
            drafter.forget(sequence)


@dataclass
class Fickle(FixedDraftLength):
    """Another depth in every step."""

    draw: Random = field(default_factory=Random)

    def choose(self, known: Sequence[Acceptance], rows: int) -> int:
        return self.draw.choice([0, 1, self.limit, self.limit, self.draw.randint(0, self.limit)])


class Clockwork(AdaptiveDraftLength):
    """Goes by made-up seconds, so that a story is the same each time it is told."""

    def timed(self, rows: int, drafts: int, seconds: float) -> None:
        super().timed(rows, drafts, 1 + rows / 8 + drafts / 16)


@dataclass
class Stage:
    """A story on its way. drafts: caches of models that draft. wanted: what its requests answer alone. reader: reads
    the tokens of kept states again; known: their logits."""

    story: Story
    engine: Engine
    drafts: list[HybridCache]
    wanted: Answers
    reader: Session
    answers: Answers = field(default_factory=dict)
    known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    pauses: int = 0

    @classmethod
    def of(cls, story: Story, place: str, ahead: bool = False, defers: bool = False) -> Stage:
        """ahead: steps are launched while others are in flight, with as many slots beside the room's as that takes.
        defers: steps of two rows and more leave most updates of states in replay rings."""
        drafting, draw, wanted = story.drafting, Random(story.seed), alone(story)
        room = replace(story.room, slots=story.room.slots + story.room.batch) if ahead else story.room
        runtime = room.furnish(MODELS[story.model](), place)
        drafters = [drafter_of(kind, story, runtime, wanted) for kind in drafting.drafters]
        depths: dict[str, DraftLength] = {
            "fixed": FixedDraftLength(drafting.limit),
            "adaptive": Clockwork(drafting.limit),
            "fickle": Fickle(drafting.limit, draw),
        }
        engine = Engine(runtime, Several(drafters, drafting.limit, draw, drafting.breaks), depths[drafting.depth],
                        ahead)
        engine.scheduler.defer_from = 2 if defers else None
        drafts = [drafter._runtime.cache for drafter in drafters if isinstance(drafter, DraftModelProposer)]
        return cls(story, engine, drafts, wanted, session_over(PLAIN[story.model](), batch=1))

    def tell(self) -> None:
        """To the end, with a look at all accounts after each step; then all must have been given back."""
        time, last = 0, max(time for time, *_ in self.story.events)
        while time <= last or self.engine.has_work:
            assert time < 20_000, "the story has no end"
            self.intervene(time)
            take(self.answers, self.engine.step())
            self.engine.check()
            for cache in self.drafts:
                cache.check()
            self.check_kept()
            time += 1
        rings = self.engine.runtime.cache.delta_logs
        assert rings.free == rings.size
        assert self.engine.speculator.drafter is None or all(cache.idle for cache in self.drafts)
        self.engine.close()

    def intervene(self, time: int) -> None:
        for _, what, name in [event for event in self.story.events if event[0] == time]:
            if what == "add":
                self.engine.add(next(request for request in self.story.requests if request.id == name))
            elif what == "clear":
                self.engine.runtime.cache.clear()
            else:
                before = len(self.engine.scheduler.paused)
                {"abort": self.engine.abort, "pause": self.engine.pause, "resume": self.engine.resume}[what](name)
                self.pauses += len(self.engine.scheduler.paused) > before

    def check_kept(self) -> None:
        """The logits kept with a state are those that its tokens end with. Seldom is drawn from wrong ones."""
        tree = self.engine.runtime.cache.tree
        for checkpoint in tree._checkpoints:
            tokens = tuple(tokens_of(checkpoint))
            if checkpoint.logits is not None and self.known.get(tokens) is not checkpoint.logits:
                self.reader.restore(None)
                same_logits(self.reader.prefill(tokens)[None], checkpoint.logits[None], TOLERANCE)
                self.known[tokens] = checkpoint.logits

    def compare(self) -> None:
        assert self.answers.keys() == self.wanted.keys()
        abortable = {name for _, what, name in self.story.events if what == "abort"}
        for (name, choice), answer in self.answers.items():
            try:
                same(self.wanted[name, choice], answer, name in abortable and answer.last.finish == "abort")
            except Mismatch as error:
                raise Mismatch(f"{name}, choice {choice}: {error}") from None

    @property
    def happened(self) -> Counter[str]:
        stats, tiers = self.engine.stats, self.engine.runtime.cache.tiers
        drafts = self.engine.speculator.stats
        accepted, drafted = sum(drafts.accepted_at), sum(drafts.drafted_at)
        return Counter({
            "preempted": self.engine.scheduler.preemptions, "accepted": accepted, "rejected": drafted - accepted,
            "aborted": sum(answer.last.finish == "abort" for answer in self.answers.values()),
            "reused": stats.reused_tokens, "restored": sum(tier.hits for tier in tiers),
            "ahead": stats.async_steps, "broken": int(self.engine.speculator.drafter is None), "paused": self.pauses})


def same(wanted: Answer, found: Answer, aborted: bool) -> None:
    """Raise Mismatch unless they are equal, up to where one was aborted. Without a margin: on one backend a row's
    numbers do not depend on what else is in the step."""
    length = len(found.tokens) if aborted else len(wanted.tokens)
    if found.tokens != wanted.tokens[:length]:
        place = next((i for i, pair in enumerate(zip(found.tokens, wanted.tokens)) if len({*pair}) > 1), length)
        raise Mismatch(f"another answer from token {place} of {len(wanted.tokens)} on")
    if not aborted and found.last.finish != wanted.last.finish:
        raise Mismatch(f"finish {found.last.finish} ({found.last.error}) instead of {wanted.last.finish}")
    for events in zip(found.events[:length], wanted.events):
        ours, theirs = ([logprobs.token, *(value for _, value in logprobs.top)] if (logprobs := event.logprobs) else []
                        for event in events)
        if ours != pytest.approx(theirs, abs=TOLERANCE, rel=0):
            raise Mismatch("other probabilities")


def tell(seeds: Sequence[int], ahead: bool = False, models: Mapping[str, str] | None = None, defers: bool = False
         ) -> Counter[str]:
    """What happened in all these stories, told of other models where `models` says so."""
    happened: Counter[str] = Counter()
    for story in map(story_of, seeds):
        story = replace(story, model=(models or {}).get(story.model, story.model))
        with tempfile.TemporaryDirectory() as place:
            stage = Stage.of(story, place, ahead, defers)
            try:
                stage.tell()
                stage.compare()
            except Exception as error:
                error.add_note(f"in {story}")
                raise
        happened += stage.happened
    return happened


def test_random_stories() -> None:
    """Everything happens in them that could go wrong. 59 and 412 are told because they did: the first when drafts
    outlived their sequence's preemption, the second when logits were kept with the state before them."""
    happened = tell(FAST)
    assert all(happened[what] > 2 for what in ("preempted", "accepted", "rejected", "aborted", "reused", "restored",
                                               "broken", "paused")), f"too little happened: {happened}"


def test_random_stories_with_async_scheduling() -> None:
    happened = tell(FLYING, ahead=True)
    assert all(happened[what] > 2 for what in ("ahead", "preempted", "aborted", "reused", "restored", "paused")), (
        f"too little happened: {happened}")


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_random_stories_with_deferred_writes(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Counter[bool]()

    def counted(cache: HybridCache, sequence_cache: SequenceCache) -> bool:
        deferred = defers(cache, sequence_cache)
        found[deferred] += 1
        return deferred

    monkeypatch.setattr("deltic.engine.scheduler.defers", counted)
    monkeypatch.setattr("deltic.engine.async_schedule.defers", counted)
    happened = tell(DEFERRING, ahead, defers=True)
    assert found[True] > 100 and found[False] > 20, found
    assert all(happened[what] > 2 for what in ("preempted", "aborted", "reused", "restored", "paused")), happened


EXPERTS = {"odd": "moe", "headed": "moe, headed", "qwen3": "moe"}


def test_random_stories_of_a_mixture_of_experts() -> None:
    happened = tell(MIXED, models=EXPERTS)
    assert all(happened[what] > 2 for what in ("preempted", "accepted", "rejected", "reused", "restored")), (
        f"too little happened: {happened}")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SLOW, 5 * GROUP))
def test_many_stories_of_a_mixture_of_experts(first: int) -> None:
    tell(range(first, first + GROUP), models=EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("first", range(0, SLOW, GROUP))
def test_many_stories(first: int, ahead: bool) -> None:
    tell(range(first, first + GROUP), ahead, defers=first % (4 * GROUP) == 0)
