"""Lines of conversations in the cache: what a branch keeps is evicted before its main line.

The machine plays a main line with sub-agents, titles, retries and forks, and other clients beside them, in a cache that
holds the main line and what runs, and next to nothing else. Whatever the branches do, the main line's next turn resumes
at the end of its last one.
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
from support import examples
from test_cache_frames import toy_shared
from test_cache_machine import PHASES, step, toy_cache

from deltic.cache import lineage
from deltic.cache.handles import SequenceCache
from deltic.cache.lineage import Line, Lines
from deltic.cache.manager import HybridCache
from deltic.cache.radix_tree import Checkpoint, PrefixTree
from deltic.params import PAGE, Lineage

MAIN = Lineage("main")
LONGEST = 12 * PAGE  # of the main line
ROOM = 10, 5  # pages and slots for what runs beside the main line's end
SOME = st.lists(st.integers(0, 3), min_size=1, max_size=2 * PAGE + 5)


@dataclass(eq=False)
class Talk:
    """A conversation: its tokens so far, and the sequence of the turn that runs."""

    lineage: Lineage
    tokens: list[int] = field(default_factory=list)
    running: SequenceCache | None = None


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
        is copied."""
        held = {page for owner in self.cache.accounts.owners for page in owner.pages}
        busy = self.cache.accounts.held_slots
        return len(held) + pages <= ROOM[0] and busy + slots < ROOM[1]

    def begin(self, talk: Talk, said: list[int]) -> bool:
        """Admits the next turn and prefills its prompt; False, and nothing happens, if it has no room."""
        prompt = [*talk.tokens, *said]
        if talk is not self.main and not self.fits(-(-len(prompt) // PAGE) + 2, 2):
            return False
        cache = self.cache.admit(prompt, lineage=talk.lineage, keys=list(prompt))
        assert cache is not None
        talk.running, talk.tokens = cache, prompt
        self.grow(talk, prompt[cache.done:])
        kept = self.cache.reserve_checkpoint(cache, cache.done)
        if kept is not None:
            cache.likely_resume.add(cache.done)
            self.cache.accounts.copy_state(cache, kept)
            self.cache.commit_checkpoints(cache)
        return True

    def grow(self, talk: Talk, tokens: list[int]) -> None:
        cache = talk.running
        assert cache is not None and self.cache.reserve(cache, len(tokens)) == len(tokens)
        step(self.cache, cache, tokens)

    def end(self, talk: Talk) -> None:
        assert talk.running is not None
        talk.tokens = list(talk.running.tokens)
        self.cache.release(talk.running, keep=True)
        talk.running = None

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
            trunk = self.branches[pick % len(self.branches)] if self.branches and kind != "fork" else self.main
            talk = Talk(replace(trunk.lineage, forks=True), list(trunk.tokens))
        if self.begin(talk, [7]):
            self.branches.append(talk)

    @precondition(lambda self: self.branches)
    @rule(pick=st.integers(0, 9), tokens=SOME)
    def branch_goes_on(self, pick: int, tokens: list[int]) -> None:
        talk = self.branches[pick % len(self.branches)]
        if talk.running is None:
            if talk.lineage != MAIN:  # a title has one turn
                self.begin(talk, tokens)
        elif self.fits(3, 0):
            self.grow(talk, tokens)

    @precondition(lambda self: self.branches)
    @rule(pick=st.integers(0, 9), rests=st.booleans())
    def branch_ends_a_turn(self, pick: int, rests: bool) -> None:
        talk = self.branches[pick % len(self.branches)]
        if talk.running is None:
            return
        if rests:  # it is preempted, and goes on
            rest = self.cache.preempt(talk.running, keep=True)
            line, known = talk.running.line, list(talk.running.tokens)
            cache = self.cache.admit([*known, 8], lineage=line or Lineage(), keys=[*known, 8])
            self.cache.resume_preempted(rest, cache)
            assert cache and cache.done == len(known) and cache.line is line
            talk.running = cache
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
    second = spoken(cache, [3] * 20, Lineage("second", "main"))
    assert second is None or end.line is None, "a sequence comes before anything that is kept"
    cache.check()


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
