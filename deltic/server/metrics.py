"""The /metrics page in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Any, Final, Protocol

import torch

from deltic import __version__
from deltic.engine.stats import WINDOW, Distribution, EngineSnapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_VERSIONS: Final = {"version": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}

Number = int | float
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. read: returns a number, numbers keyed by the value of `label`, a histogram, or None for no sample."""

    name: str
    kind: str
    help: str
    read: Callable[[Any], Any]
    label: str = ""


class RemoteCounts(Protocol):
    """Counts the prompts that were handed to other replicas."""

    outcomes: Mapping[str, int]


class Ended(Protocol):
    """Counts requests that the server ended early or handed over."""

    displaced: int
    unread: int

    @property
    def remote(self) -> RemoteCounts | None: ...


def exposition(models: Mapping[str, EngineSnapshot], responses: Mapping[int, int], lost_lines: int = 0) -> str:
    """Returns the metrics page of a server. responses: counts by status. lost_lines: of the request log."""
    statuses = {str(status): count for status, count in sorted(responses.items())}
    server = [
        Metric("http_responses_total", "counter", "Responses by status; 499: the client had disconnected.",
               lambda _: statuses, "status"),
        Metric("request_log_lost_total", "counter", "Lines of the request log that could not be written.",
               lambda _: lost_lines),
    ]
    build = ("# HELP deltic_build_info 1, with the running versions.\n# TYPE deltic_build_info gauge\n"
             f"deltic_build_info{_labels(_VERSIONS)} 1\n")
    return page(_ENGINE, models) + page(server, {None: None}) + build


def ended_early(models: Mapping[str, Ended]) -> str:
    """Returns the metrics of requests that the server ended before their answers were complete."""
    return page(_ENDED, models)


def page(metrics: Sequence[Metric], sources: Mapping[Any, Any]) -> str:
    """Returns the samples of these metrics. sources: objects that metrics are read from, by model; None: no label."""
    lines = list[str]()
    for metric in metrics:
        samples = [line for model, source in sources.items() for line in _samples(metric, model, source)]
        if samples:
            lines.append(f"# HELP deltic_{metric.name} {metric.help}")
            lines.append(f"# TYPE deltic_{metric.name} {metric.kind}")
            lines += samples
    return "".join(line + "\n" for line in lines)


def _samples(metric: Metric, model: str | None, source: Any) -> Iterator[str]:
    value = metric.read(source)
    common = {} if model is None else {"model": model}
    if isinstance(value, Distribution):
        yield from _histogram(metric.name, common, value)
    elif isinstance(value, Mapping):
        for label, number in value.items():
            yield f"deltic_{metric.name}{_labels({**common, metric.label: str(label)})} {number}"
    elif value is not None:
        yield f"deltic_{metric.name}{_labels(common)} {value}"


def _histogram(name: str, common: Labels, found: Distribution) -> Iterator[str]:
    """Yields a histogram's lines. Buckets are cumulative. The count is the last bucket, so they always agree."""
    counts = [*accumulate(found.counts)]
    for bound, count in zip((*map(str, found.bounds), "+Inf"), counts, strict=True):
        yield f"deltic_{name}_bucket{_labels({**common, 'le': bound})} {count}"
    yield f"deltic_{name}_sum{_labels(common)} {found.sum}"
    yield f"deltic_{name}_count{_labels(common)} {counts[-1]}"


def _labels(labels: Labels) -> str:
    shown = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{shown}}}" if shown else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _placed(counts: Sequence[Number], first: int = 0) -> dict[int, Number]:
    return dict(enumerate(counts, first))


def _tier(field: str) -> Callable[[EngineSnapshot], Mapping[str, Number]]:
    def read(now: EngineSnapshot) -> Mapping[str, Number]:
        found = {tier.name: getattr(tier, field) for tier in now.tiers}
        return {name: value for name, value in found.items() if value is not None}
    return read


def _expert(field: str) -> Callable[[EngineSnapshot], Number | None]:
    return lambda now: None if now.experts is None else getattr(now.experts, field)


def _layers(field: str) -> Callable[[EngineSnapshot], Mapping[int, Number]]:
    return lambda now: {} if now.experts is None else _placed(getattr(now.experts, field))


_ENDED: Final = (
    Metric("requests_displaced_total", "counter", "Requests that gave their places to those of clients with fewer.",
           attrgetter("displaced")),
    Metric("requests_unread_total", "counter", "Requests that ended because their client did not read.",
           attrgetter("unread")),
    Metric("remote_prefills_total", "counter", "Prompts for prefill replicas, by outcome: done there, computed here "
           "because they were busy or failed, or without a client meanwhile.",
           lambda now: now.remote and now.remote.outcomes, "outcome"),
)

_ENGINE: Final = (
    Metric("requests_running", "gauge", "Answers being generated (each of a request's n choices is one).",
           attrgetter("running")),
    Metric("requests_waiting", "gauge", "Answers that wait for a place in the batch, or for memory.",
           attrgetter("waiting")),
    Metric("requests_paused", "gauge", "Answers that wait for their client to read on.", attrgetter("paused")),
    Metric("requests_finished_total", "counter", "Answers that ended, by reason.", attrgetter("finishes"),
           "finished_reason"),
    Metric("requests_failed_total", "counter", "Answers that ended with an error.", attrgetter("failed")),
    Metric("preemptions_total", "counter", "Answers that went back to waiting for lack of memory.",
           attrgetter("preemptions")),
    Metric("steps_total", "counter", "Steps of the engine, each a run of the model over one batch.",
           attrgetter("steps")),
    Metric("prompt_tokens_computed_total", "counter", "Prompt tokens that the model has prefilled.",
           attrgetter("prompt_tokens")),
    Metric("prompt_tokens_reused_total", "counter", "Prompt tokens of ended answers that were in the cache.",
           attrgetter("reused_tokens")),
    Metric("generated_tokens_total", "counter", "Tokens of answers.", attrgetter("generated_tokens")),
    Metric("generated_tokens_per_second", "gauge", f"Tokens of answers per second, over the last {WINDOW} seconds.",
           attrgetter("pace")),
    Metric("drafted_tokens_total", "counter", "Tokens that speculation drafted, by their position in a step.",
           lambda now: _placed(now.drafted, 1), "position"),
    Metric("accepted_tokens_total", "counter", "Accepted drafts, by their position in a step.",
           lambda now: _placed(now.accepted, 1), "position"),
    Metric("speculation_saved_seconds", "gauge", "Seconds by which steps with drafts were faster than without.",
           attrgetter("saved_seconds")),
    Metric("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.",
           attrgetter("first_token")),
    Metric("inter_token_latency_seconds", "histogram", "Between two tokens of an answer.", attrgetter("inter_token")),
    Metric("e2e_request_latency_seconds", "histogram", "From a request's arrival to an answer's end.",
           attrgetter("latency")),
    Metric("queue_time_seconds", "histogram", "From a request's arrival to its place in the batch.",
           attrgetter("queued")),
    Metric("cache_pages_used", "gauge", "K/V pages in use, by running answers and kept prefixes.",
           attrgetter("pages.used")),
    Metric("cache_pages", "gauge", "Most K/V pages that fit on the device.", attrgetter("pages.size")),
    Metric("cache_slots_used", "gauge", "Slots for recurrent states in use, by running answers and kept prefixes.",
           attrgetter("slots.used")),
    Metric("cache_slots", "gauge", "Most slots for recurrent states that fit on the device.", attrgetter("slots.size")),
    Metric("cache_bytes", "gauge", "Bytes in use.", _tier("bytes"), "tier"),
    Metric("cache_budget_bytes", "gauge", "Bytes that may be used.", _tier("budget"), "tier"),
    Metric("cache_checkpoints", "gauge", "Kept states at which a prompt can resume.", _tier("checkpoints"), "tier"),
    Metric("cache_evictions_total", "counter", "Kept states that were evicted.", _tier("evictions"), "tier"),
    Metric("cache_restored_prefixes_total", "counter", "Prefixes restored to the device.", _tier("restored"), "tier"),
    Metric("cache_restored_tokens_total", "counter", "Tokens of these prefixes.", _tier("restored_tokens"), "tier"),
    Metric("expert_hits_total", "counter", "Experts that a step needed of a layer and found in memory.",
           _layers("hits"), "layer"),
    Metric("expert_misses_total", "counter", "Experts that were read for a step: from the model's files, beside a GPU "
           "from the host's memory, or computed there.", _layers("misses"), "layer"),
    Metric("expert_read_bytes_total", "counter", "Bytes of experts that were read from there.", _expert("bytes")),
    Metric("expert_promotions_total", "counter", "Experts that replaced another one in memory.",
           _expert("promotions")),
    Metric("expert_computed_total", "counter", "Misses that the host has computed beside a GPU.",
           _expert("computed")),
    Metric("expert_computed_bytes_total", "counter", "Bytes of these.", _expert("computed_bytes")),
    Metric("expert_computing_seconds_total", "counter", "Time in which the host computed them.",
           _expert("computing")),
    Metric("expert_predicted_total", "counter", "Experts that were read ahead of their layer.",
           _expert("predicted")),
    Metric("expert_predicted_useful_total", "counter", "Those of them that the layer needed.", _expert("useful")),
    Metric("expert_reading_seconds_total", "counter", "Time in which experts were being read.", _expert("reading")),
    Metric("expert_waiting_seconds_total", "counter", "Time that steps waited for experts.", _expert("waited")),
)
