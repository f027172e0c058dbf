"""Profiler: measures how the time of prefill and decode divides among the operators of a model.

On a CPU, a wrapper times each call of the op table; operators then run one by one instead of in one native step. On a
GPU the steps stay as they are, including CUDA graphs: torch's profiler records the kernels, empty kernels between them
mark where a step, sampling and drafting begin, and the name of a kernel determines its operator. Without a profile in
progress, none of this has any cost.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from deltic.errors import RequestError, UnavailableError
from deltic.ops import Ops
from deltic.ops.cuda.marks import Marks, mark_of, operator_of
from deltic.ops.types import Batch
from deltic.params import MAX_DRAFTS
from deltic.runner.model_runner import ModelRunner

log = logging.getLogger("deltic")

_TIMED = ("embed", "rope", "add_norm", "gdn_mixer", "attention_mixer", "store_kv", "mlp", "moe", "head", "sample")
_PHASES = ("prefill", "decode", "mixed")
Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes an operator's name and function. Returns a function that does the same and measures its time."""


@dataclass(slots=True)
class OperatorTime:
    """One operator in one phase. calls: number of calls; on a GPU, number of kernels and copies."""

    calls: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class PhaseProfile:
    """The steps of one phase. seconds: total time from the beginning of each step to the end of its last operator."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    operators: dict[str, OperatorTime] = field(default_factory=dict)

    @property
    def between(self) -> float:
        """Seconds in which no operator ran, because the host planned or a device waited for the host."""
        return max(0.0, self.seconds - sum(each.seconds for each in self.operators.values()))


@dataclass(slots=True, eq=False)
class Profile:
    """Phases by name, complete after the end of its `with` block. `prefill`: steps with prompts; `decode`: steps with
    one token per row, or one token and drafts; `mixed`: steps with rows of both. `print` shows a table."""

    device: str
    phases: dict[str, PhaseProfile] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns the profile as values for JSON. share: fraction of the phase's seconds."""
        return {"device": self.device, "phases": {
            name: {"steps": phase.steps, "tokens": phase.tokens, "seconds": phase.seconds,
                   "operators": {operator: {"calls": calls, "seconds": seconds, "share": share}
                                 for operator, calls, seconds, share in _rows(phase)}}
            for name, phase in self.phases.items()}}

    def __str__(self) -> str:
        return "\n\n".join(_table(name, phase) for name, phase in self.phases.items()) or "no steps were profiled"


def _rows(phase: PhaseProfile) -> Iterator[tuple[str, int, float, float]]:
    """Yields name, calls, seconds and share of each operator, longest first, then of the time between operators."""
    found = sorted(phase.operators.items(), key=lambda item: -item[1].seconds)
    rest = OperatorTime(phase.steps, phase.between)
    for name, each in (*found, ("between operators", rest)):
        yield name, each.calls, each.seconds, each.seconds / phase.seconds if phase.seconds else 0.0


def _table(name: str, phase: PhaseProfile) -> str:
    lines = [f"{name}: {phase.steps:,} steps, {phase.tokens:,} tokens, {phase.seconds * 1e3:,.1f} ms",
             f"  {'operator':<18}{'calls':>9}{'ms':>12}{'us a call':>12}{'share':>8}"]
    for operator, calls, seconds, share in _rows(phase):
        each = seconds / calls * 1e6 if calls else 0.0
        lines.append(f"  {operator:<18}{calls:>9,}{seconds * 1e3:>12,.2f}{each:>12,.1f}{share:>8.1%}")
    return "\n".join(lines)


@contextmanager
def profiling(runtime: object, between_steps: Callable[[], AbstractContextManager[object]] = nullcontext
              ) -> Iterator[Profile]:
    """Profiles all steps until the `with` block ends. between_steps: returns a context in which no step runs."""
    if not isinstance(runtime, ModelRunner):
        raise RequestError("a compiled model has no operators to time: load the model itself", "model")
    profiler = (_OnHost if runtime.device.type == "cpu" else _OnCard)(runtime)
    with between_steps():
        if runtime.profiler is not None:
            raise RequestError("this model is being profiled: end that profile before", "profile")
        profiler.start()
    try:
        yield profiler.profile
    finally:
        try:
            with between_steps():
                profiler.stop()
        except UnavailableError:  # the engine was closed meanwhile, so no step runs
            profiler.stop()


class _Account:
    """Adds measurements to a profile, step by step."""

    def __init__(self, profile: Profile) -> None:
        self._phases, self._phase = profile.phases, PhaseProfile()
        self._began = self._ended = 0.0

    def begin(self, name: str, now: float) -> None:
        """Begins a step of the phase `name` at the time `now`."""
        self.close()
        self._phase = self._phases.setdefault(name, PhaseProfile())
        self._began = self._ended = now

    def add(self, operator: str, began: float, ended: float) -> None:
        """Adds an operator of the step that ran from `began` to `ended`."""
        found = self._phase.operators.setdefault(operator, OperatorTime())
        found.calls += 1
        found.seconds += ended - began
        self._ended = max(self._ended, ended)

    def close(self) -> None:
        """Ends the current step."""
        self._phase.seconds += self._ended - self._began
        self._phase, self._began, self._ended = PhaseProfile(), 0.0, 0.0


class _Profiler(ABC):
    """Replaces a runtime's operators with wrapped ones during a profile and restores them afterwards."""

    def __init__(self, runtime: ModelRunner) -> None:
        self.profile = Profile(str(runtime.device))
        self._runtime, self._account, self._undo = runtime, _Account(self.profile), list[Callable[[], None]]()

    @abstractmethod
    def start(self) -> None:
        """Installs the wrapped operators."""

    def stop(self) -> None:
        self._restore()
        self._account.close()
        order = {name: place for place, name in enumerate(_PHASES)}
        self.profile.phases = dict(sorted(self.profile.phases.items(), key=lambda item: order[item[0]]))

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _exchange(self, owner: Any, **values: object) -> None:
        """Sets attributes of `owner` until the profile ends."""
        for name, value in values.items():
            self._undo.append(partial(setattr, owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def _draft_runtime(self) -> ModelRunner | None:
        return self._runtime.draft if isinstance(self._runtime.draft, ModelRunner) else None


class _OnHost(_Profiler):
    """Times the calls of the op table on a CPU."""

    def start(self) -> None:
        runtime, draft, runner = self._runtime, self._draft_runtime(), self._runtime.mtp_runner
        self._exchange(runtime, profiler=self._begin, step=None,
                       decoder=replace(runtime.decoder, ops=_wrapped(runtime.ops, self._timed)))
        if draft is not None:
            ops = _wrapped(draft.ops, lambda _, function: self._timed("draft_model", function))
            self._exchange(draft, step=None, decoder=replace(draft.decoder, ops=ops))
        if runner is not None:
            head, step = runner.serving
            ops = _wrapped(head.ops, lambda _, function: self._timed("mtp", function))
            step = step and replace(step, follow=self._timed("mtp", step.follow), draft=self._timed("mtp", step.draft))
            self._exchange(runner, serving=(replace(head, ops=ops), step))

    def _begin(self, batch: Batch) -> None:
        self._account.begin(_count(self.profile, batch), time.perf_counter())

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self._account.add(name, began, time.perf_counter())
            return result
        return timed


class _OnCard(_Profiler):
    """Collects the GPU kernels that torch's profiler has recorded."""

    def start(self) -> None:
        runtime, draft, runner = self._runtime, self._draft_runtime(), self._runtime.mtp_runner
        self._marks, self._trace = Marks(runtime.device), torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        torch.cuda.synchronize(runtime.device)
        self._trace.start()
        ops = replace(runtime.ops, sample=self._marked("sample", runtime.ops.sample))
        self._exchange(runtime, profiler=self._begin, decoder=replace(runtime.decoder, ops=ops))
        if draft is not None:
            self._exchange(draft, profiler=lambda batch: self._marks.put("draft_model"))
        if runner is not None and (step := runner.serving[1]):
            # no marks around `follow`, which may be recorded in a graph
            ahead = step.draft_ahead and self._marked("mtp", step.draft_ahead)
            self._exchange(runner, serving=(runner.serving[0], replace(
                step, draft=self._marked("mtp", step.draft), draft_ahead=ahead)))

    def stop(self) -> None:
        self._restore()
        torch.cuda.synchronize(self._runtime.device)
        self._trace.stop()
        found = self._trace.profiler and self._trace.profiler.kineto_results
        kernels = [(event.name(), event.start_ns(), event.end_ns()) for event in (found.events() if found else ())
                   if event.device_type().name == "CUDA" and not event.is_user_annotation()]
        if self.profile.phases and not kernels:
            log.warning("torch's profiler has seen no kernels: a profile has the numbers of steps only")
        account_kernels(self._account, kernels)
        super().stop()

    def _begin(self, batch: Batch) -> None:
        self._marks.put(_count(self.profile, batch))

    def _marked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*arguments: Any) -> Any:
            self._marks.put(name)
            try:
                return function(*arguments)
            finally:
                self._marks.put("model")
        return marked


def account_kernels(account: _Account, kernels: list[tuple[str, int, int]]) -> None:
    """Divides kernels among phases and operators. kernels: names, and times in ns at which they began and ended."""
    region = ""  # if set, the operator to which all kernels count
    for name, began, ended in sorted(kernels, key=lambda kernel: kernel[1]):
        mark = mark_of(name)
        if mark in _PHASES:
            account.begin(mark, began / 1e9)
            region = ""
        elif mark is not None:
            region = "" if mark == "model" else mark
        else:
            account.add(region or operator_of(name), began / 1e9, ended / 1e9)


def _wrapped(ops: Ops, wrap: Wrap) -> Ops:
    return replace(ops, **{name: wrap(name, getattr(ops, name)) for name in _TIMED})


def _count(profile: Profile, batch: Batch) -> str:
    """Counts a step. Returns its phase."""
    layout = batch.layout
    drafts = layout.logits == layout.tokens and max(layout.chunks, default=1) <= MAX_DRAFTS + 1
    name = "decode" if layout.tokens == layout.rows or drafts else "mixed" if layout.decode_rows else "prefill"
    phase = profile.phases.setdefault(name, PhaseProfile())
    phase.steps += 1
    phase.tokens += layout.tokens
    return name
