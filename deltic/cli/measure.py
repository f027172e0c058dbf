"""Times the engine on random token ids: no tokenizer, no stop, always the same work."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from deltic import __version__
from deltic.cli.machine import commit, machine_facts
from deltic.cli.parser import UsageError
from deltic.errors import DelticError
from deltic.params import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from deltic.engine.engine import Engine
    from deltic.llm import LLM

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: `batch` sequences of so many prompt tokens and new tokens."""

    prompt_tokens: int
    new_tokens: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement. Rates are totals over the batch; None where the case leaves nothing to measure."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None
    time_to_first_token_ms: float
    overhead_ms: float | None


@dataclass(slots=True)
class _Trace:
    """What happened when, in seconds since the start. steady: from the step in which the last sequence got its first
    token to that in which the first one ended, as (time, tokens so far)."""

    first: dict[str, float] = field(default_factory=dict)
    steady: list[tuple[float, int]] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    ended: bool = False


def measure(engine: Engine, case: Case, repeat: int, seed: int = 0) -> list[Measurement]:
    """Run the case `repeat` times after a short warm-up."""
    trial(engine, Case(min(case.prompt_tokens, _WARM_UP_TOKENS), min(case.new_tokens, 2), case.batch), seed)
    return [trial(engine, case, seed + number) for number in range(1, repeat + 1)]


def trial(engine: Engine, case: Case, seed: int = 0) -> Measurement:
    """Run the case once; prompts are a function of the seed."""
    return _summary(_trace(engine, case, random.Random(seed)), case)


def check_room(llm: LLM, case: Case, asked: str = "--prompt-tokens and --new-tokens") -> None:
    """UsageError if the case does not fit into the model's context or batch. asked: what its tokens come from."""
    tokens, memory = case.prompt_tokens + case.new_tokens, llm.runtime.memory
    if tokens > memory.max_context:
        raise UsageError(f"{asked} are {tokens} together and the context holds "
                         f"{memory.max_context}: ask for fewer, or raise --max-context or --memory")
    if case.batch > memory.max_batch:
        raise UsageError(f"--batch {case.batch} is more than the {memory.max_batch} sequences that can run at the same "
                         "time: ask for fewer, or raise --max-batch or --memory")


def model_facts(llm: LLM) -> dict[str, Any]:
    """Which model was measured."""
    runtime = llm.runtime
    dtype = runtime.config.dtype if runtime.options.dtype == "auto" else runtime.options.dtype
    kv = "float8_e4m3fn" if runtime.options.kv_dtype == "fp8" else dtype
    return {"model": runtime.name, "layers": runtime.config.num_hidden_layers, "dtype": dtype, "kv_dtype": kv,
            "state_dtype": runtime.options.state_dtype, "device": runtime.options.device}


def origin_facts(llm: LLM) -> dict[str, Any]:
    """On what machine it was, and by which code."""
    from deltic.ops import explain

    return {"machine": {**machine_facts(), "threads": llm.runtime.threads}, "version": __version__, "commit": commit(),
            "ops": explain(llm.runtime.ops)}


def _trace(engine: Engine, case: Case, draw: random.Random) -> _Trace:
    requests = [_request(engine, case, index, draw) for index in range(case.batch)]
    trace, tokens, started = _Trace(), 0, time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter() - started
        for event in events:
            if event.finish == "error":
                raise DelticError(f"the measurement failed: {event.error}")
            tokens += event.token is not None
            trace.first.setdefault(event.request, now)
        _note(trace, case, now, tokens, engine.stats.last_overhead)
        trace.ended = trace.ended or any(event.finish for event in events)
    return trace


def _note(trace: _Trace, case: Case, now: float, tokens: int, overhead: float) -> None:
    if len(trace.first) < case.batch or trace.ended:
        return
    if trace.steady:
        trace.overheads.append(overhead)
    trace.steady.append((now, tokens))


def _request(engine: Engine, case: Case, index: int, draw: random.Random) -> EngineRequest:
    vocabulary = engine.runtime.config.vocab_size
    prompt = tuple(draw.randrange(vocabulary) for _ in range(case.prompt_tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=case.new_tokens, ignore_eos=True)
    return EngineRequest(f"bench-{index}", prompt, sampling)


def _summary(trace: _Trace, case: Case) -> Measurement:
    decode = None
    if len(trace.steady) > 1:
        (start, before), (end, after) = trace.steady[0], trace.steady[-1]
        decode = (after - before) / (end - start)
    overhead = median(trace.overheads) * 1e3 if trace.overheads else None
    return Measurement(case.batch * case.prompt_tokens / max(trace.first.values()), decode,
               median(trace.first.values()) * 1e3, overhead)
