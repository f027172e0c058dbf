"""Scripted requests as programs send them, in token ids, for `deltic bench --scenario`.

A script is a generator of groups of requests that arrive together; it is sent the answers of each group, since the
prompts that follow hold them. Prompts carry the boundaries that a chat template would show: where the prompts that
follow will part. Tokens are drawn from a seed, so that equal seeds mean equal work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

Tokens = tuple[int, ...]
Answers = Sequence[Tokens]
Draw = Callable[[int], Tokens]
"""Makes so many random tokens."""

_STEPS = 4
"""Calls of the model that an agent needs for one user message."""
_OPENING = 4
"""Tokens at a prompt's end that open the answer and its thinking; when the thinking is dropped, they change."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its name, alone in its group; the prompt; the positions where following prompts may part."""

    name: str
    prompt: Tokens
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestGroup:
    """Requests that arrive together. restarted: at a new engine, which has only what the last one left on disk."""

    asks: tuple[Ask, ...]
    restarted: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ask.prompt) for ask in self.asks)


Script = Generator[RequestGroup, Answers, None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """prompt_tokens: of the system message and tools.
    turn_tokens: of each user message, tool result or request of its own.
    new_tokens: of each answer.
    turns: user messages, steps or waves.
    batch: requests that arrive together.
    """

    prompt_tokens: int
    turn_tokens: int
    new_tokens: int
    turns: int
    batch: int = 1

    def changed(self, **given: int | None) -> Sizes:
        """With the sizes that are given, and are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked, in a line; how much by default; and the script."""

    line: str
    sizes: Sizes
    script: Callable[[Sizes, Draw], Script]


def drawing(seed: int, vocabulary: int) -> Draw:
    """Random ids below `vocabulary`, a function of the seed."""
    draw = random.Random(f"scenario {seed}")
    return lambda count: tuple(draw.randrange(vocabulary) for _ in range(count))


def rehearse(scenario: Scenario, sizes: Sizes) -> list[RequestGroup]:
    """The groups as they will be, in number and length, without a model."""
    script, groups, answers = scenario.script(sizes, lambda count: (0,) * count), [], None
    while (group := advance(script, answers)) is not None:
        groups.append(group)
        answers = [(0,) * sizes.new_tokens] * len(group.asks)
    return groups


def advance(script: Script, answers: Answers | None) -> RequestGroup | None:
    """The next group, given the answers to the last one (None at the start); None at the end."""
    try:
        return next(script) if answers is None else script.send(answers)
    except StopIteration:
        return None


def _multi_turn(sizes: Sizes, draw: Draw) -> Script:
    system = draw(sizes.prompt_tokens)
    yield from _talk(system, len(system), _names("turn", sizes.turns), sizes, draw)


def _edit(sizes: Sizes, draw: Draw) -> Script:
    """The user goes back to a message in the middle, writes another one, and goes on from there."""
    system, names = draw(sizes.prompt_tokens), _names("turn", sizes.turns)
    before = yield from _talk(system, len(system), names, sizes, draw)
    middle = sizes.turns // 2
    again = [f"{name} again" for name in names[middle:]]
    yield from _talk(before[middle], len(system), again, sizes, draw)


def _restart(sizes: Sizes, draw: Draw) -> Script:
    system = draw(sizes.prompt_tokens)
    before = yield from _talk(system, len(system), _names("turn", sizes.turns), sizes, draw)
    prompt = before[-1] + draw(sizes.turn_tokens)
    yield RequestGroup((Ask("after the restart", prompt, (len(system), len(prompt))),), restarted=True)


def _agent(sizes: Sizes, draw: Draw) -> Script:
    """Tool calls after one long prefix. A new user message drops the thinking of the steps before, so its prompt parts
    from theirs where the last user message ends; beside it goes a request for a title, from another prefix."""
    system, aside = draw(sizes.prompt_tokens), draw(sizes.turn_tokens)
    settled = system
    for start in range(0, sizes.turns, _STEPS):
        message = draw(sizes.turn_tokens)
        answer: Tokens = ()
        settled += message
        prompt = settled + draw(_OPENING)
        for step in range(start, min(start + _STEPS, sizes.turns)):
            asks = [Ask(f"step {step + 1}", prompt, (len(system), len(settled), len(prompt)))]
            if step == start:
                asks.append(Ask("title", aside + message, (len(aside),)))
            answer, *_ = yield RequestGroup(tuple(asks))
            prompt += answer + draw(sizes.turn_tokens)
        settled += answer[len(answer) // 2:]


def _shared_system(sizes: Sizes, draw: Draw) -> Script:
    system = draw(sizes.prompt_tokens)
    for wave in range(1, sizes.turns + 1):
        yield RequestGroup(tuple(Ask(f"wave {wave} request {number}", system + draw(sizes.turn_tokens), (len(system),))
                          for number in range(1, sizes.batch + 1)))


def _talk(before: Tokens, system: int, names: Sequence[str], sizes: Sizes,
          draw: Draw) -> Generator[RequestGroup, Answers, list[Tokens]]:
    """A chat that repeats every answer as it was; returns what stood before each turn, and what stands at the end.

    system: tokens of the system message, which other chats may share.
    """
    history = [before]
    for name in names:
        prompt = history[-1] + draw(sizes.turn_tokens)
        answer, = yield RequestGroup((Ask(name, prompt, (system, len(prompt))),))
        history.append(prompt + answer)
    return history


def _names(word: str, count: int) -> list[str]:
    return [f"{word} {number}" for number in range(1, count + 1)]


SCENARIOS = {
    "multi-turn": Scenario("a chat whose every prompt is the last one, its answer and a new message",
                           Sizes(1024, 64, 24, 8), _multi_turn),
    "agent": Scenario("a long prefix with tools, many small tool results, and user messages that drop the thinking",
                      Sizes(2048, 48, 16, 12), _agent),
    "edit": Scenario("a chat whose middle message is then replaced, and which goes on from there",
                     Sizes(1024, 64, 24, 6), _edit),
    "restart": Scenario("a chat that goes on in a new engine, which finds the prefix on disk",
                        Sizes(1024, 64, 24, 4), _restart),
    "shared-system": Scenario("waves of requests that arrive together and share a long prefix",
                              Sizes(1024, 64, 16, 2, 4), _shared_system),
}
