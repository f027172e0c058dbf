"""Requests as programs send them, in token ids, and how much of their prompts is reused: `deltic bench --scenario`.

A script is a generator of groups of requests that arrive together. It is sent the answers of each group, which later
prompts contain. Prompts have the boundaries of a chat template: the positions where later prompts may differ. Tokens
are drawn from a seed, so that equal seeds mean equal work.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from statistics import median, median_low
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deltic.cli.bench import Case, check_room, model_facts, origin_facts, trial
from deltic.cli.options import open_llm
from deltic.cli.output import Bar, grid, peak_memory_mib, table
from deltic.cli.parser import UsageError
from deltic.config import EngineConfig
from deltic.errors import DelticError
from deltic.params import EngineRequest, Event, SamplingParams

if TYPE_CHECKING:
    from deltic.engine.engine import Engine
    from deltic.llm import LLM

Tokens = tuple[int, ...]
Answers = Sequence[Tokens]
Draw = Callable[[int], Tokens]
"""Returns a number of random tokens."""

_STEPS = 4
"""Calls of the model for one user message to an agent."""
_OPENING = 4
"""Tokens at a prompt's end that open the answer and its thinking; they change when the thinking is dropped."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. name: unique in its group. boundaries: positions where later prompts may differ."""

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
    """prompt_tokens: of the system message and tools. turn_tokens: of each user message or tool result.
    new_tokens: of each answer. turns: user messages, steps or waves. batch: requests that arrive together.
    """

    prompt_tokens: int
    turn_tokens: int
    new_tokens: int
    turns: int
    batch: int = 1

    def changed(self, **given: int | None) -> Sizes:
        """Replaces the sizes that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Scenario:
    """line: a description. sizes: the defaults."""

    line: str
    sizes: Sizes
    script: Callable[[Sizes, Draw], Script]


def drawing(seed: int, vocabulary: int) -> Draw:
    """Draws ids below `vocabulary` from the seed."""
    draw = random.Random(f"scenario {seed}")
    return lambda count: tuple(draw.randrange(vocabulary) for _ in range(count))


def rehearse(scenario: Scenario, sizes: Sizes) -> list[RequestGroup]:
    """Returns the groups with zeros for tokens, without a model."""
    script, groups, answers = scenario.script(sizes, lambda count: (0,) * count), [], None
    while (group := advance(script, answers)) is not None:
        groups.append(group)
        answers = [(0,) * sizes.new_tokens] * len(group.asks)
    return groups


def advance(script: Script, answers: Answers | None) -> RequestGroup | None:
    """Returns the next group, or None at the end. answers: to the last group, None at the start."""
    try:
        return next(script) if answers is None else script.send(answers)
    except StopIteration:
        return None


def _multi_turn(sizes: Sizes, draw: Draw) -> Script:
    system = draw(sizes.prompt_tokens)
    yield from _talk(system, len(system), _names("turn", sizes.turns), sizes, draw)


def _edit(sizes: Sizes, draw: Draw) -> Script:
    """The user replaces a message in the middle and continues from there."""
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
    """Tool calls after a long prefix. A new user message drops the thinking of earlier steps, so that its prompt
    differs from theirs after the last user message. A title request with another
    prefix runs at the same time."""
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
    """A chat that repeats every answer as it was. Returns the history before each turn and at the end.

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
    "edit": Scenario("a chat whose middle message is replaced, and which continues from there",
                     Sizes(1024, 64, 24, 6), _edit),
    "restart": Scenario("a chat that continues in a new engine, which has the prefix on disk",
                        Sizes(1024, 64, 24, 4), _restart),
    "shared-system": Scenario("waves of requests that arrive together and share a long prefix",
                              Sizes(1024, 64, 16, 2, 4), _shared_system),
}


# Measurement


Record = TypeVar("Record", "Timed", "Summary")


class Restartable(Protocol):
    """The model of a scenario. `restart` makes a new engine, which has what the last one left on disk."""

    @property
    def engine(self) -> Engine: ...

    def restart(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """A request that was served, in milliseconds since it arrived."""

    request: str
    prompt_tokens: int
    cached_tokens: int
    time_to_first_token_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole scenario.

    computed_tokens: prompt tokens that were not in the cache. reuse_share: the cached share of the prompt tokens.
    evictions: states for which the pools had no room.
    time_to_first_token_warm_ms: median over requests with cached tokens, None without any.
    last_warm_ms, last_cold_ms: median time to first token of the last group, and of the same group without reuse.
    """

    prompt_tokens: int
    computed_tokens: int
    reuse_share: float
    evictions: int
    time_to_first_token_warm_ms: float | None
    last_warm_ms: float
    last_cold_ms: float
    cold_over_warm: float


@dataclass(frozen=True, slots=True)
class BenchRun:
    requests: tuple[Timed, ...]
    summary: Summary


def run_scenario(model: Restartable, scenario: Scenario, sizes: Sizes, seed: int = 0,
                 progress: Callable[[], None] = lambda: None) -> BenchRun:
    """Runs a scenario on empty pools, and its last group again without reuse. progress: called after each group."""
    script = scenario.script(sizes, drawing(seed, model.engine.runtime.config.vocab_size))
    model.engine.runtime.cache.clear()
    groups: list[list[Timed]] = []
    evictions, group = 0, advance(script, None)
    while group is not None:
        if group.restarted:
            model.restart()
        tree = model.engine.runtime.cache.tree
        before, last = tree.evictions, group
        timed, answers = serve(model.engine, group, sizes.new_tokens)
        groups.append(timed)
        evictions += tree.evictions - before
        progress()
        group = advance(script, answers)
    cold, _ = serve(_without_reuse(model.engine), last, sizes.new_tokens)
    progress()
    requests = tuple(timed for group in groups for timed in group)
    return BenchRun(requests, _summary(requests, groups[-1], cold, evictions))


def serve(engine: Engine, group: RequestGroup, new_tokens: int) -> tuple[list[Timed], list[Tokens]]:
    """Serves requests that arrive together; returns their times and answers, in order."""
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    last: dict[str, tuple[float, Event]] = {}
    answers: dict[str, list[int]] = {ask.name: [] for ask in group.asks}
    started = time.perf_counter()
    for ask in group.asks:
        engine.add(EngineRequest(ask.name, ask.prompt, sampling, ask.boundaries))
    while engine.has_work:
        for event in engine.step():
            now = (time.perf_counter() - started) * 1e3
            if event.token is not None:
                answers[event.request].append(event.token)
                first.setdefault(event.request, now)
            if event.finish:
                last[event.request] = now, event
    timed = [_timed(name, first.get(name, 0.0), *last[name]) for name in answers]
    return timed, [tuple(answer) for answer in answers.values()]


def medians(runs: Sequence[BenchRun]) -> BenchRun:
    """The median of each number over the runs."""
    requests = zip(*(run.requests for run in runs), strict=True)
    return BenchRun(tuple(map(_median, requests)), _median([run.summary for run in runs]))


def _timed(name: str, first: float, last: float, end: Event) -> Timed:
    if end.finish == "error" or end.usage is None:
        raise DelticError(f"the measurement failed: {name}: {end.error}")
    return Timed(name, end.usage.prompt_tokens, end.usage.cached_tokens, round(first, 3), round(last, 3))


def _without_reuse(engine: Engine) -> Engine:
    """An engine of the same model and pools, without a prefix cache."""
    from deltic.cache.manager import HybridCache
    from deltic.engine.engine import Engine
    from deltic.runner.model_runner import ModelRunner

    runtime, known = engine.runtime, engine.runtime.cache
    assert isinstance(runtime, ModelRunner), "a compiled model has its own pools"
    known.clear()
    assert not len(known.tree) and known.idle, "the pools are in use"
    return Engine(replace(runtime, cache=HybridCache(known.pools, reuse=False)))


def _summary(requests: Sequence[Timed], last: Sequence[Timed], cold: Sequence[Timed], evictions: int) -> Summary:
    prompt = sum(request.prompt_tokens for request in requests)
    cached = sum(request.cached_tokens for request in requests)
    warm = [request.time_to_first_token_ms for request in requests if request.cached_tokens]
    last_warm = median(request.time_to_first_token_ms for request in last)
    last_cold = median(request.time_to_first_token_ms for request in cold)
    return Summary(prompt, prompt - cached, round(cached / prompt, 4), evictions,
                   round(median(warm), 3) if warm else None, round(last_warm, 3), round(last_cold, 3),
                   round(last_cold / last_warm, 3))


def _median(records: Sequence[Record]) -> Record:
    names = [field.name for field in fields(records[0])]
    return type(records[0])(**{name: _middle([getattr(record, name) for record in records]) for name in names})


def _middle(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known or isinstance(known[0], str):
        return values[0]
    return median_low(known) if isinstance(known[0], int) else round(median(known), 4)


# The command


class BenchModel:
    """A model that can be loaded again, for this process alone. defaults: engine options that were not given."""

    def __init__(self, args: argparse.Namespace, **defaults: Any) -> None:
        self._args, self._defaults, self._opened = args, defaults, 0
        self._held = ExitStack()
        self._llm: LLM | None = self._open()

    @property
    def llm(self) -> LLM:
        assert self._llm, "the model is closed"
        return self._llm

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def restart(self) -> None:
        self.close()
        self._llm = self._open()

    def close(self) -> None:
        """Waits until the cache is on disk, and frees the memory, which may not hold the model twice."""
        if self._llm:
            self._held.close()
            self._llm.close()
            self._llm = None
            gc.collect()

    def _open(self) -> LLM:
        llm = open_llm(self._args, **self._defaults)
        self._opened += 1
        trial(self._held.enter_context(llm.worker.hold()), Case(prompt_tokens=16, new_tokens=2), self._opened)
        return llm


def run(args: argparse.Namespace) -> str:
    """Runs a scenario as the arguments of `deltic bench` say; returns the report."""
    name: str = args.scenario
    scenario = SCENARIOS[name]
    if args.batch and scenario.sizes.batch == 1:
        raise UsageError(f"--batch {args.batch}: the requests of {name} come one after the other; leave it out, or "
                         "take --scenario shared-system")
    sizes = scenario.sizes.changed(prompt_tokens=args.prompt_tokens, turn_tokens=args.turn_tokens,
                                   new_tokens=args.new_tokens, turns=args.turns, batch=args.batch)
    groups = rehearse(scenario, sizes)
    longest = Case(max(group.longest for group in groups), sizes.new_tokens, sizes.batch)
    with _opened(args, groups, longest) as model:
        check_room(model.llm, longest, "the longest prompt and --new-tokens")
        runs = _run_all(model, scenario, sizes, range(args.repeat or 1))
        found = medians(runs)
        result = {**model_facts(model.llm), "scenario": name, **asdict(sizes), "repeat": len(runs), **asdict(found),
                  "note": _NOTE, "peak_memory_mib": round(peak_memory_mib(), 1), "runs": [asdict(run) for run in runs],
                  **origin_facts(model.llm)}
    return json.dumps(result) if args.json else _as_text(result, found.summary)


_NOTE = "loading and warming up the model, after a restart too, is part of no figure"


@contextmanager
def _opened(args: argparse.Namespace, groups: Sequence[RequestGroup], longest: Case) -> Iterator[BenchModel]:
    """Opens a model with room for the groups, and with a cache directory if there is a restart."""
    with ExitStack() as stack:
        defaults: dict[str, Any] = {"max_batch": max(EngineConfig().max_batch, longest.batch),
                                    "max_context": longest.prompt_tokens + longest.new_tokens}
        if any(group.restarted for group in groups):
            defaults["cache_dir"] = stack.enter_context(TemporaryDirectory(prefix="deltic-bench-"))
        model = BenchModel(args, **defaults)
        stack.callback(model.close)
        yield model


def _run_all(model: BenchModel, scenario: Scenario, sizes: Sizes, seeds: Sequence[int]) -> list[BenchRun]:
    total, done = len(seeds) * (len(rehearse(scenario, sizes)) + 1), count(1)
    with Bar("running", 1, "groups of requests", patience=1.0) as bar:
        return [run_scenario(model, scenario, sizes, seed, lambda: bar.update(next(done), total)) for seed in seeds]


def _as_text(result: dict[str, Any], found: Summary) -> str:
    shown = ("model", "layers", "dtype", "device", "peak_memory_mib", "machine", "version", "commit")
    warm = found.time_to_first_token_warm_ms
    first = "" if warm is None else f" First token after {warm:,.0f} ms (median) with a cached prefix."
    sentence = (f"{result['scenario']}: {found.computed_tokens:,} of {found.prompt_tokens:,} prompt tokens were "
                f"computed, {found.reuse_share:.1%} reused.{first} The last prompt took {found.last_warm_ms:,.0f} ms, "
                f"without reuse {found.last_cold_ms:,.0f} ms: {found.cold_over_warm:.1f} x. Note: {_NOTE}.")
    return "\n\n".join([grid(result["requests"]), table({name: result[name] for name in shown}), sentence])
