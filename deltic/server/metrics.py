"""/metrics: an engine's figures in Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from deltic import __version__
from deltic.engine.stats import WINDOW, Distribution, EngineSnapshot, TierUsage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VERSIONS = {"version": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}

Number = int | float
Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Family:
    """All samples of one metric, as (suffix of the name, labels, value)."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, Number], ...]


def exposition(models: Mapping[str, EngineSnapshot], responses: Mapping[int, int], lost_lines: int = 0) -> str:
    """The page. models: by what clients call them, the label of their samples. responses: how many of each status.
    lost_lines: of the request log."""
    families: dict[str, list[tuple[_Family, Labels]]] = {}
    for model, now in models.items():
        for family in (*_requests(now), *_tokens(now), *_drafts(now), *_durations(now), *_pools(now),
                       *_tiers(now.tiers), *_experts(now)):
            families.setdefault(family.name, []).append((family, {"model": model}))
    for family in _server(responses, lost_lines):
        families[family.name] = [(family, {})]
    return "".join(line + "\n" for found in families.values() for line in _lines(found))


def samples(figures: Mapping[str, tuple[str, str, Iterable[tuple[str, Number]]]]) -> str:
    """A page of figures. figures: by name their kind (counter, gauge), what they count, and how much by model."""
    return "".join(line + "\n" for name, (kind, help, values) in figures.items() for line in (
        f"# HELP deltic_{name} {help}", f"# TYPE deltic_{name} {kind}",
        *(f'deltic_{name}{{model="{_escape(model)}"}} {value}' for model, value in values)))


class Ended(Protocol):
    """Counts requests that the server has ended."""

    displaced: int
    unread: int


def ended_early(models: Mapping[str, Ended]) -> str:
    """A page of the requests that a server has ended before their answers were complete, by model."""
    lines = {"displaced": "Requests that gave their places to those of clients with fewer.",
             "unread": "Requests that ended as their client did not read."}
    return samples({f"requests_{name}_total": ("counter", line, [
        (model, getattr(counts, name)) for model, counts in models.items()]) for name, line in lines.items()}
    ) if models else ""


def _server(responses: Mapping[int, int], lost_lines: int) -> Iterator[_Family]:
    """What is no model's."""
    yield _Family("http_responses_total", "counter", "Responses by status; 499 where the client was gone before.",
                  tuple(("", {"status": str(status)}, count) for status, count in sorted(responses.items())))
    yield _one("request_log_lost_total", "counter", "Lines of the request log that could not be written.", lost_lines)
    yield _Family("build_info", "gauge", "1, with the versions that run.", (("", _VERSIONS, 1),))


def _requests(now: EngineSnapshot) -> Iterator[_Family]:
    yield _one("requests_running", "gauge", "Answers being made (each of a request's n choices is one).", now.running)
    yield _one("requests_waiting", "gauge", "Answers that wait for a place in the batch, or for memory.", now.waiting)
    yield _one("requests_paused", "gauge", "Answers that wait for their client to read on.", now.paused)
    yield _Family("requests_finished_total", "counter", "Answers that ended, by the reason.",
                  tuple(("", {"finished_reason": reason}, count) for reason, count in now.finishes.items()))
    yield _one("requests_failed_total", "counter", "Answers that ended with an error.", now.failed)
    yield _one("preemptions_total", "counter", "Times that an answer was sent back to wait for lack of memory.",
               now.preemptions)
    yield _one("steps_total", "counter", "Steps of the engine, each a run of the model over one batch.", now.steps)


def _tokens(now: EngineSnapshot) -> Iterator[_Family]:
    yield _one("prompt_tokens_computed_total", "counter", "Prompt tokens that the model has read.", now.prompt_tokens)
    yield _one("prompt_tokens_reused_total", "counter", "Prompt tokens of ended answers that the cache knew.",
               now.reused_tokens)
    yield _one("generated_tokens_total", "counter", "Tokens of answers.", now.generated_tokens)
    yield _one("generated_tokens_per_second", "gauge",
               f"Tokens of answers per second, over the last {WINDOW} seconds.", now.pace)


def _drafts(now: EngineSnapshot) -> Iterator[_Family]:
    for name, line, counts in (("drafted", "Tokens that speculation drafted, by their place in a step.", now.drafted),
                               ("accepted", "Drafts that were right, by their place in a step.", now.accepted)):
        yield _Family(f"{name}_tokens_total", "counter", line,
                      tuple(("", {"position": str(place + 1)}, count) for place, count in enumerate(counts)))
    yield _one("speculation_saved_seconds", "gauge", "Seconds by which steps with drafts were faster than without.",
               now.saved_seconds)


def _durations(now: EngineSnapshot) -> Iterator[_Family]:
    yield _histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", now.first_token)
    yield _histogram("inter_token_latency_seconds", "Between two tokens of an answer.", now.inter_token)
    yield _histogram("e2e_request_latency_seconds", "From a request's arrival to an answer's end.", now.latency)
    yield _histogram("queue_time_seconds", "From a request's arrival to its place in the batch.", now.queued)


def _pools(now: EngineSnapshot) -> Iterator[_Family]:
    for name, pool, unit in (("pages", now.pages, "K/V pages"), ("slots", now.slots, "Slots for recurrent states")):
        yield _one(f"cache_{name}_used", "gauge", f"{unit} in use, by running answers and kept prefixes.", pool.used)
        yield _one(f"cache_{name}", "gauge", f"{unit} on the device.", pool.size)


def _tiers(tiers: Iterable[TierUsage]) -> Iterator[_Family]:
    tiers = tuple(tiers)
    for name, kind, line, field in (
            ("cache_bytes", "gauge", "Bytes in use.", "bytes"),
            ("cache_budget_bytes", "gauge", "Bytes that may be used.", "budget"),
            ("cache_checkpoints", "gauge", "Kept states that a prompt can resume at.", "checkpoints"),
            ("cache_evictions_total", "counter", "Kept states that were given up.", "evictions"),
            ("cache_restored_prefixes_total", "counter", "Prefixes brought back to the device.", "restored"),
            ("cache_restored_tokens_total", "counter", "Tokens of these prefixes.", "restored_tokens")):
        values = ((tier.name, getattr(tier, field)) for tier in tiers)
        yield _Family(name, kind, line, tuple(("", {"tier": tier}, value) for tier, value in values
                                              if value is not None))


def _experts(now: EngineSnapshot) -> Iterator[_Family]:
    found = now.experts
    if found is None:
        return
    for name, line, layers in (("hits", "Experts that a step wanted of a layer and found in memory.", found.hits),
                               ("misses", "Experts that were read for a step: from the model's files, beside a GPU "
                                          "from the host's memory, or computed there.", found.misses)):
        yield _Family(f"expert_{name}_total", "counter", line,
                      tuple(("", {"layer": str(layer)}, count) for layer, count in enumerate(layers)))
    yield _one("expert_read_bytes_total", "counter", "Bytes of experts that were read from there.", found.bytes)
    yield _one("expert_promotions_total", "counter", "Experts that took the place of another one in memory.",
               found.promotions)
    yield _one("expert_computed_total", "counter", "Misses that the host has computed beside a GPU.",
               found.computed)
    yield _one("expert_computed_bytes_total", "counter", "Bytes of these.", found.computed_bytes)
    yield _one("expert_computing_seconds_total", "counter", "Time in which the host computed them.", found.computing)
    yield _one("expert_predicted_total", "counter", "Experts that were read ahead of their layer.", found.predicted)
    yield _one("expert_predicted_useful_total", "counter", "Those of them that the layer wanted.", found.useful)
    yield _one("expert_reading_seconds_total", "counter", "Time in which experts were being read.", found.reading)
    yield _one("expert_waiting_seconds_total", "counter", "Time that steps waited for experts.", found.waited)


def _one(name: str, kind: str, line: str, value: Number) -> _Family:
    return _Family(name, kind, line, (("", {}, value),))


def _histogram(name: str, line: str, found: Distribution) -> _Family:
    """Buckets are cumulative; the last one and the count are both the sum of what was read, so they always agree."""
    counts, bounds = tuple(accumulate(found.counts)), (*map(str, found.bounds), "+Inf")
    buckets = tuple(("_bucket", {"le": bound}, count) for bound, count in zip(bounds, counts, strict=True))
    return _Family(name, "histogram", line, (*buckets, ("_sum", {}, found.sum), ("_count", {}, counts[-1])))


def _lines(found: Sequence[tuple[_Family, Labels]]) -> Iterator[str]:
    """A family, with the samples of all models."""
    family, name = found[0][0], f"deltic_{found[0][0].name}"
    if any(one.samples for one, _ in found):
        yield f"# HELP {name} {family.help}"
        yield f"# TYPE {name} {family.kind}"
    for one, common in found:
        for suffix, labels, value in one.samples:
            shown = ",".join(f'{key}="{_escape(text)}"' for key, text in {**common, **labels}.items())
            yield f"{name}{suffix}" + (f"{{{shown}}} {value}" if shown else f" {value}")


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
