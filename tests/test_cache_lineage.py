"""Lines of conversations in the cache: what a branch keeps is evicted before its main line.

The machine plays a main line with sub-agents, titles, retries and forks, and other clients beside them, in a cache that
holds the main line and one branch, and next to nothing else. Whatever the branches do, the main line's next turn
resumes at the end of its last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from plain_engine import PlainEngine
from support import examples
from test_cache_frames import toy_shared
from test_cache_machine import PHASES, step, toy_cache

from deltic.cache import lineage
from deltic.cache.block_accounts import BlockAccounts
from deltic.cache.handles import SequenceCache
from deltic.cache.lineage import Line, Lines
from deltic.cache.manager import HybridCache
from deltic.cache.radix_tree import Checkpoint, PrefixTree
from deltic.engine.sequence import Sequence
from deltic.params import PAGE, Lineage

MAIN = Lineage("main")
LONGEST = 12 * PAGE  # of the main line
ROOM = 10, 5  # pages and slots for what runs beside the main line's end
SOME = st.lists(st.integers(0, 3), min_size=1, max_size=2 * PAGE + 5)


class Loaded:
    """A load that has ended and found nothing."""

    begun, loaded, tier = True, None, None


@dataclass(eq=False)
class Talk:
    """A conversation: its tokens so far, the sequence of the turn that runs, and the line of one that was preempted."""

    lineage: Lineage
    tokens: list[int] = field(default_factory=list)
    running: SequenceCache | None = None
    line: Line | None = None


class LineageMachine(RuleBasedStateMachine):
    frames = False

    @initialize()
    def start(self) -> None:
        pages, slots = LONGEST // PAGE + ROOM[0], ROOM[1] + 1
        self.cache = toy_shared(pages + slots, slots) if self.frames else toy_cache(pages, slots)
        self.names, self.others = count(1), count(1000)
        self.main = Talk(MAIN, self.opening())
        self.branches: list[Talk] = []
        self.strangers: list[Talk] = []
        self.ended = 0
        self.turn(self.main, [5], [6] * 20)
        self.ended = self.check_main(0)

    # A turn, as the engine takes it

    def opening(self) -> list[int]:
        return [next(self.names) * 10] * 7

    def fits(self, pages: int, slots: int) -> bool:
        """True if it runs beside the main line's end, for which these pages and a slot stay, and a slot more while it
        is copied. States that running sequences hold for checkpoints take no part."""
        held = {page for owner in self.cache.accounts.owners for page in owner.pages}
        busy = len(self.cache.accounts.owners)
        return len(held) + pages <= ROOM[0] and busy + slots < ROOM[1]

    def begin(self, talk: Talk, said: list[int]) -> bool:
        """Admits the next turn and prefills its prompt, with checkpoints that wait for its first token; False, and
        nothing happens, if it has no room."""
        prompt = [*talk.tokens, *said]
        if talk is not self.main and not self.may_take(talk, -(-len(prompt) // PAGE) + 2, 2):
            return False
        cache = self.cache.admit(prompt, len(prompt) + 1, lineage=talk.line or talk.lineage, keys=list(prompt))
        if cache is None:
            assert self.cache.spared and talk in self.branches
            return False
        talk.running, talk.tokens = cache, prompt
        for position in (*range(cache.done + 3, len(prompt), 3), len(prompt)):
            if not self.grow(talk, prompt[cache.done:position]):
                return True
            kept = self.cache.reserve_checkpoint(cache, position)
            if kept is not None:
                cache.likely_resume.add(position)
                self.cache.accounts.copy_state(cache, kept)
        return True

    def may_take(self, talk: Talk, pages: int, slots: int) -> bool:
        """True if it fits, or if it is a branch that would fit alone and has others that run: these are preempted, or
        it waits for them."""
        own = len(talk.running.pages) if talk.running else 0
        others = any(one.running for one in self.branches if one is not talk)
        return self.fits(pages, slots) or (talk in self.branches and others and own + pages <= ROOM[0])

    def grow(self, talk: Talk, tokens: list[int]) -> bool:
        """False if it was preempted."""
        cache = talk.running
        assert cache is not None
        while self.cache.reserve(cache, len(tokens)) < len(tokens):
            assert self.cache.spared, "it does not fit alone"
            victim = next(one for one in reversed(self.branches) if one.running)
            assert victim.running
            victim.tokens, victim.line = list(victim.running.tokens), victim.running.line
            self.cache.commit_checkpoints(victim.running)
            self.cache.release(victim.running, keep=True, ended=False)
            victim.running = None
            if victim is talk:
                return False
        step(self.cache, cache, tokens)
        return True

    def end(self, talk: Talk) -> None:
        assert talk.running is not None
        talk.tokens = list(talk.running.tokens)
        self.cache.commit_checkpoints(talk.running)
        self.cache.release(talk.running, keep=True)
        talk.running = talk.line = None

    def turn(self, talk: Talk, said: list[int], answer: list[int]) -> int:
        """A whole turn. Returns the cached tokens."""
        assert self.begin(talk, said) and talk.running
        cached = talk.running.resumed.done if talk.running.resumed else 0
        self.grow(talk, answer)
        self.end(talk)
        return cached

    def check_main(self, cached: int) -> int:
        assert cached == self.ended, f"{cached} of {self.ended} tokens of the main line are cached"
        return len(self.main.tokens)

    # What happens

    @precondition(lambda self: len(self.main.tokens) < LONGEST - 4 * PAGE)
    @rule(said=SOME, answer=SOME)
    def main_goes_on(self, said: list[int], answer: list[int]) -> None:
        if self.fits(6, 2):
            self.ended = self.check_main(self.turn(self.main, [5, *said], answer))

    @precondition(lambda self: len(self.main.tokens) < LONGEST - 4 * PAGE)
    @rule(answer=SOME, again=SOME)
    def main_is_asked_again(self, answer: list[int], again: list[int]) -> None:
        """The client drops the first answer."""
        if self.fits(6, 2):
            prompt = [*self.main.tokens, 5]
            self.check_main(self.turn(self.main, [5], answer))
            self.main.tokens = prompt[:-1]
            self.turn(self.main, [5], again)
            self.ended = len(self.main.tokens)

    @rule(kind=st.sampled_from(("sub-agent", "title", "fork", "fork of a branch")), pick=st.integers(0, 9))
    def branch(self, kind: str, pick: int) -> None:
        name = f"agent {next(self.names)}"
        talk = Talk(MAIN if kind == "title" else Lineage(name, "main"), self.opening())
        if kind.startswith("fork"):
            ended = [self.main, *(one for one in self.branches if not (one.running or one.line))]
            trunk = self.main if kind == "fork" else ended[pick % len(ended)]
            talk = Talk(replace(trunk.lineage, forks=True), list(trunk.tokens))
        self.branches.append(talk)
        if not self.begin(talk, [7]):
            self.branches.remove(talk)

    @precondition(lambda self: self.branches)
    @rule(pick=st.integers(0, 9), tokens=SOME)
    def branch_goes_on(self, pick: int, tokens: list[int]) -> None:
        talk = self.branches[pick % len(self.branches)]
        if talk.running is None:
            if talk.lineage != MAIN or talk.line:  # a title has one turn
                self.begin(talk, tokens)
        elif self.may_take(talk, 3, 0):
            self.grow(talk, tokens)

    @precondition(lambda self: self.branches)
    @rule(pick=st.integers(0, 9))
    def branch_has_its_first_token(self, pick: int) -> None:
        running = self.branches[pick % len(self.branches)].running
        if running is not None:
            self.cache.commit_checkpoints(running)

    @precondition(lambda self: self.branches)
    @rule(pick=st.integers(0, 9), rests=st.booleans())
    def branch_ends_a_turn(self, pick: int, rests: bool) -> None:
        talk = self.branches[pick % len(self.branches)]
        if talk.running is None:
            return
        if rests and self.fits(1, 1):  # it is preempted, and goes on
            rest = self.cache.preempt(talk.running, keep=True)
            line, known = talk.running.line, list(talk.running.tokens)
            room = len(known) + 2 if self.cache.accounts.owners else 0
            cache = self.cache.admit([*known, 8], room, lineage=line or Lineage(), keys=[*known, 8])
            self.cache.resume_preempted(rest, cache)
            talk.running, talk.tokens, talk.line = cache, known, line
            if cache is None:
                assert self.cache.spared
            else:
                assert cache.done == len(known) and cache.line is line
        else:
            self.end(talk)

    @precondition(lambda self: any(talk.running for talk in self.branches))
    @rule(tokens=SOME)
    def stranger(self, tokens: list[int]) -> None:
        """Other clients, while a branch runs."""
        talk = Talk(Lineage(), [next(self.others)] * 3)
        if self.begin(talk, tokens):
            self.end(talk)

    @invariant()
    def accounts_add_up(self) -> None:
        self.cache.check()

    @invariant()
    def main_keeps_its_end(self) -> None:
        self.check_main(self.cache.tree.cached_length([*self.main.tokens, 5]))


class LineageInFrames(LineageMachine):
    frames = True


def play(machine: type[LineageMachine], programs: int) -> None:
    run_state_machine_as_test(machine, settings=settings(
        max_examples=programs, stateful_step_count=50, phases=PHASES))


@pytest.mark.parametrize("machine", [LineageMachine, LineageInFrames])
def test_branches_never_evict_their_main_line(machine: type[LineageMachine]) -> None:
    play(machine, examples(80))


def by_worth_alone(tree: PrefixTree, checkpoint: Checkpoint) -> tuple[bool, bool, float]:
    return checkpoint.guards > 0, checkpoint.likely_resume, tree._worth(checkpoint)


@pytest.mark.parametrize("broken", [
    pytest.param(lambda patch: patch.setattr(PrefixTree, "_order", by_worth_alone), id="no lines"),
    pytest.param(lambda patch: patch.setattr(Line, "enter", lambda line: None), id="never active"),
    pytest.param(lambda patch: patch.setattr(lineage, "_MOST_ENDS", 1), id="one end"),
    pytest.param(lambda patch: patch.setattr(Line, "needed", lambda line, resumed: set()), id="nothing is spared"),
    pytest.param(lambda patch: patch.setattr(BlockAccounts, "drop_checkpoint", lambda accounts, slots: False),
                 id="checkpoints to come are not dropped"),
])
def test_the_machine_finds_broken_rules(broken: Callable[[pytest.MonkeyPatch], None],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(LineageMachine, settings=settings(
            max_examples=400, stateful_step_count=50, phases=PHASES))


def spoken(cache: HybridCache, tokens: list[int], lineage: Lineage) -> SequenceCache:
    sequence = cache.admit(tokens, lineage=lineage, keys=list(tokens))
    assert sequence is not None and cache.reserve(sequence, len(tokens)) == len(tokens)
    step(cache, sequence, tokens[sequence.done:])
    return sequence


def test_what_a_branch_keeps_goes_before_its_main_line() -> None:
    """Even if it is longer, was used later, and its own branch runs. Among a line's ends the shortest goes first."""
    cache = toy_cache(20, 6)
    ends = [cache.release(spoken(cache, [number] * length, lineage), keep=True) for number, length, lineage in (
        (1, 20, MAIN), (2, 40, Lineage("agent", "main")), (3, 60, Lineage("agent of the agent", "agent")),
        (4, 10, MAIN))]
    running = spoken(cache, [5] * 5, Lineage("another", "agent of the agent"))
    left = list(ends)
    while left:
        assert cache.tree.evict()
        left.remove(next(end for end in left if end and end.line is None))
        cache.check()
        gone = [ends.index(end) for end in ends if end not in left]
        assert sorted(gone) == sorted([2, 1, 3, 0][:len(gone)])
    cache.release(running)


def test_a_checkpoint_does_not_take_the_place_of_a_main_line() -> None:
    """It is not kept instead."""
    cache = toy_cache(20, 3)
    end = cache.release(spoken(cache, [1] * 20, MAIN), keep=True)
    branch = spoken(cache, [2] * 20, Lineage("agent", "main"))
    assert cache.reserve_checkpoint(branch, 20) is not None and cache.reserve_checkpoint(branch, 10) is None
    assert end and end.line
    cache.release(branch)


def test_a_branch_waits_for_its_relatives_and_another_client_does_not() -> None:
    """A sequence takes the slot of a checkpoint that is not in the tree yet, but not that of its main line. Another
    client's sequence does, and so does a branch that waits for none of its own."""
    cache = toy_cache(20, 3)
    end = cache.release(spoken(cache, [1] * 20, MAIN), keep=True)
    first = spoken(cache, [2] * 20, Lineage("agent", "main"))
    assert cache.reserve_checkpoint(first, 20) is not None and cache.slots.free == 0
    second = spoken(cache, [3] * 20, Lineage("second", "main"))
    assert not first.checkpoint_slots and cache.slots.free == 0 and end and end.line
    assert cache.admit([4] * 20, 21, lineage=Lineage("third", "main")) is None and cache.spared == {end}
    cache.release(second)
    stranger = spoken(cache, [5] * 20, Lineage())
    assert end.line and cache.admit([4] * 20, 21, lineage=Lineage("third", "main")) is None
    another = cache.admit([6] * 20, 21)
    assert another and not cache.spared and end.line is None, "another client waits for a main line"
    for sequence in (another, first):
        cache.release(sequence)
    end = cache.release(spoken(cache, [1] * 20, MAIN), keep=True)
    second_stranger = spoken(cache, [5] * 20, Lineage())
    alone = cache.admit([4] * 20, 21, lineage=Lineage("third", "main"))
    assert alone and end and end.line is None
    for sequence in (stranger, second_stranger, alone):
        cache.release(sequence)
    cache.check()


def test_a_page_comes_from_a_relative_before_the_main_line() -> None:
    """Of seven pages the main line has three and each branch two: a third page has to come from the other branch."""
    cache = toy_cache(7, 6)
    end = cache.release(spoken(cache, [1] * 40, MAIN), keep=True)
    first, second = (spoken(cache, [2 + one] * 20, Lineage(f"agent {one}", "main")) for one in range(2))
    assert cache.reserve(first, 20) == 12 and cache.spared == {end}
    cache.release(second, keep=True, ended=False)
    assert cache.reserve(first, 20) == 20 and end and end.line
    assert cache.reserve(first, 80) == 80 and end.line is None, "nothing else is left"
    cache.check()


@pytest.mark.parametrize("agents", [1, 3])
def test_requests_pass_branches_that_wait(agents: int) -> None:
    """The main line has three of ten pages, the first sub-agent two to five, and each of the others six. They run one
    by one after it. Another client's request comes last and has its answer first."""
    engine = PlainEngine(0, pages=10, slots=12, rings=0, batch=8)
    engine.add("main", tuple([1] * 40), 4, lineage=MAIN)
    while engine.live:
        engine.step()
    main = engine.answers["main", 0]
    engine.add("first", tuple([2] * 30), 40, lineage=Lineage("first", "main"))
    engine.step()
    for number in range(agents):
        engine.add(f"agent {number}", tuple([3 + number] * 90), 4, lineage=Lineage(f"agent {number}", "main"))
    engine.add("stranger", tuple([9] * 10), 4)
    ended = ["main"]
    while engine.live:
        engine.step()
        ended += [name for name, _ in engine.answers if name not in ended]
        assert engine.cache.tree.cached_length([*main, 5]) >= 43
    assert ended == ["main", "stranger", "first", *(f"agent {number}" for number in range(agents))]
    assert agents > 1 or not engine.scheduler.preemptions


def test_branches_that_wait_do_not_keep_others_from_loading() -> None:
    """Six branches that have loaded their prompts from a tier wait, and another client's request loads its own."""
    engine, begun = PlainEngine(0, pages=10, slots=12, rings=0, batch=9), list[str]()

    def load(sequence: Sequence, begin: bool) -> bool:
        if begin and sequence.queue.load is None:
            sequence.queue.load = Loaded()
            begun.append(sequence.request.id)
        return sequence.queue.load is None

    engine.scheduler._await_load = load  # type: ignore[method-assign]
    engine.add("main", tuple([1] * 40), 4, lineage=MAIN)
    while engine.live:
        engine.step()
    engine.add("first", tuple([2] * 30), 20, lineage=Lineage("first", "main"))
    for number in range(6):
        engine.add(f"agent {number}", tuple([3 + number] * 90), 4, lineage=Lineage(f"agent {number}", "main"))
        engine.step()
    waiting = engine.scheduler.waiting
    assert len(engine.scheduler.running) == 1 and len(waiting) == 6
    assert sum(sequence.queue.load is not None for sequence in waiting) == 4, "too much content waits in memory"
    engine.add("stranger", tuple([99] * 10), 4)
    while ("stranger", 0) not in engine.answers:
        engine.step()
    assert len(engine.live) == 7 and begun.count("stranger") == 1
    while engine.live:
        engine.step()
    assert engine.cache.idle


def test_deep_and_many_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    for _ in range(40):
        line = Line(line)
    path = [*line.path()]
    assert [one.depth for one in path] == [3, 2, 1, 0]
    monkeypatch.setattr(lineage, "_MOST_LINES", 3)
    lines = Lines()
    first = lines.of(Lineage("child", "parent"), None)
    assert first and first.parent is lines.of(Lineage("parent"), None) and lines.of(Lineage("child"), None) is first
    assert lines.of(Lineage(), None) is None
    for number in range(9):
        lines.of(Lineage(str(number)), None)
    assert lines.of(Lineage("child"), None) is not first
    assert len(lines._named) == 3
