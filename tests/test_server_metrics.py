"""/metrics is valid for Prometheus at any time, and its numbers match the requests."""

from __future__ import annotations

import platform
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient
from test_server_harness import Served, read_all, serving, tiny, wait_until

import deltic
from deltic import LLM, SamplingParams
from deltic.config import Limits
from deltic.engine.engine import Engine
from deltic.engine.stats import WINDOW, Distribution, Histogram, Pace, TierUsage, TokenMeter, snapshot
from deltic.ops.stored import ExpertStatistics
from deltic.server.app import create_encoder_app
from deltic.server.body import BodyReader
from deltic.server.embeddings import EmbeddingService, Services
from deltic.server.metrics import ended_early, exposition
from deltic.server.records import RequestLog

SAMPLE = re.compile(r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)')
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
PARTS = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}

Labels = tuple[tuple[str, str], ...]


@dataclass
class Page:
    """A page of metrics: the kind of each family and the value of each sample."""

    kinds: dict[str, str] = field(default_factory=dict)
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.of(name)

    def of(self, name: str, **labels: str) -> float:
        """Returns the only sample with this name and these labels."""
        [value] = [value for (found, given), value in self.samples.items()
                   if found == f"deltic_{name}" and labels.items() <= dict(given).items()]
        return value

    def counters(self) -> dict[tuple[str, Labels], float]:
        """Returns the samples that must never decrease."""
        families = {f"{name}{part}" for name, kind in self.kinds.items() if kind != "gauge" for part in PARTS[kind]}
        return {key: value for key, value in self.samples.items() if key[0] in families}


def parse(text: str) -> Page:
    """Parses a page strictly: each family is HELP, TYPE, then all its samples."""
    assert text.endswith("\n") and "\r" not in text
    page, family, helped = Page(), "", ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped = line.split(" ", 3)[2]
            assert helped not in page.kinds and line.split(" ", 3)[3]
        elif line.startswith("# TYPE "):
            _, _, family, kind = line.split(" ")
            assert family == helped and kind in PARTS
            assert (kind == "counter") == family.endswith("_total")
            page.kinds[family] = kind
        else:
            name, labels, value = sample(line)
            assert name in [family + part for part in PARTS[page.kinds[family]]], line
            assert (name, labels) not in page.samples, line
            page.samples[name, labels] = value
    check_families(page)
    return page


def sample(line: str) -> tuple[str, Labels, float]:
    found = SAMPLE.fullmatch(line)
    assert found, line
    labels, at = [], 0
    text = found["labels"] or ""
    while at < len(text):
        label = LABEL.match(text, at)
        assert label and (label[3] or label.end() == len(text)), line
        labels.append((label[1], re.sub(r"\\(.)", lambda escaped: escaped[1].replace("n", "\n"), label[2])))
        at = label.end()
    assert len({name for name, _ in labels}) == len(labels)
    return found["name"], tuple(labels), float(found["value"])


def check_families(page: Page) -> None:
    for family, kind in page.kinds.items():
        own = {key: value for key, value in page.samples.items() if key[0] in [family + part for part in PARTS[kind]]}
        assert own, f"{family} has no sample"
        assert family.endswith("saved_seconds") or all(value >= 0 for value in own.values())
        if kind == "histogram":
            buckets = [(float(dict(labels)["le"]), value) for (name, labels), value in own.items()
                       if name.endswith("_bucket")]
            assert buckets == sorted(buckets) and [v for _, v in buckets] == sorted(v for _, v in buckets)
            [count] = [value for (name, _), value in own.items() if name.endswith("_count")]
            assert buckets[-1] == (float("inf"), count)


def scrape(served: Served, **headers: str) -> Page:
    answer = served.http.get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parse(answer.text)


def complete(served: Served, prompt: list[int], tokens: int, **more: Any) -> Any:
    answer = served.post("/v1/completions", prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, **more)
    assert answer.status_code == 200, answer.text
    served.wait_idle()
    return answer.json()["usage"]


def gained(before: Page, after: Page) -> dict[str, float]:
    """Returns the increase of each counter that rose."""
    falls = {key for key, value in before.counters().items() if after.counters()[key] < value}
    assert not falls
    return {key[0].removeprefix("deltic_"): value - before.counters()[key]
            for key, value in after.counters().items() if value != before.counters()[key]}


OF_THE_SERVER = ("deltic_request_log_lost_total", "deltic_http_responses_total", "deltic_build_info")
"""Samples of no model."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    tiny().worker.call(lambda engine: engine.runtime.cache.clear())
    with serving(tiny()) as running:
        yield running
        running.wait_idle()
        tiny().worker.call(lambda engine: engine.check())


def test_encoder_server_counts_lost_log_lines(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "log"))
    log.lost = 3
    with TestClient(create_encoder_app((), Limits(), request_log=log)) as http:
        assert parse(http.get("/metrics").text)["request_log_lost_total"] == 3


def all_metrics() -> Page:
    """Every metric that a server can have: with experts, all tiers and encoders."""
    experts = ExpertStatistics((1,), (1,), 1, 1, 1, 1, 1, 1.0, 1.0)
    now = snapshot(tiny().engine)
    tiers = (*now.tiers, TierUsage("disk", 0, 0, 0, 0, 0, 0))
    encoder = SimpleNamespace(batcher=SimpleNamespace(texts=0, tokens=0, batches=0, waiting=0, displaced=0))
    services = Services((EmbeddingService("m", encoder),), BodyReader(Limits()))  # type: ignore[arg-type]
    pages = (exposition({"m": replace(now, experts=experts, tiers=tiers)}, {200: 1}), services.metrics(),
             ended_early({"m": SimpleNamespace(displaced=0, unread=0, remote=SimpleNamespace(outcomes={"done": 1}))}))
    return parse("".join(pages))


def test_server_docs_list_every_metric() -> None:
    page = (Path(__file__).parents[1] / "docs" / "server.md").read_text(encoding="utf-8")
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    named = re.findall(r"`(deltic_[a-z0-9_]+)`", section)
    assert sorted(named) == sorted(all_metrics().kinds), "each stands in the table once"


def test_every_sample_names_the_model(served: Served) -> None:
    page = scrape(served)
    assert len(page.kinds) > 18
    assert all(name.startswith("deltic_") for name, _ in page.samples)
    assert {dict(labels)["model"] for name, labels in page.samples if name not in OF_THE_SERVER} == {"tiny"}
    assert served.http.head("/metrics").status_code == 200


def test_metrics_match_the_requests(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny().engine.scheduler, "times", None)  # slow steps would split the prompt
    before = scrape(served)
    assert before["requests_running"] == before["requests_waiting"] == 0
    usage = complete(served, [*range(100, 150)], 8)
    cold = scrape(served)
    rose = gained(before, cold)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert rose["prompt_tokens_computed_total"] == 50 and rose["generated_tokens_total"] == 8
    assert "prompt_tokens_reused_total" not in rose
    assert rose["time_to_first_token_seconds_count"] == rose["queue_time_seconds_count"] == 1
    assert 0 < rose["queue_time_seconds_sum"] < rose["time_to_first_token_seconds_sum"] < 60
    assert rose["requests_finished_total"] == 1 and 2 <= rose["steps_total"] <= 8
    drafted = usage["completion_tokens_details"]
    assert rose["steps_total"] == 8 - drafted["accepted_prediction_tokens"]
    assert cold.of("cache_checkpoints", tier="device") == before.of("cache_checkpoints", tier="device") + 2
    usage = complete(served, [*range(100, 150), 7, 8, 9], 5)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 50
    rose = gained(cold, scrape(served))
    assert rose["prompt_tokens_computed_total"] == 3 and rose["generated_tokens_total"] == 5
    assert rose["prompt_tokens_reused_total"] == 50


def test_each_choice_counts(served: Served) -> None:
    before = scrape(served)
    complete(served, [*range(200, 230)], 4, n=3)
    rose = gained(before, scrape(served))
    assert rose["prompt_tokens_computed_total"] == 30 and rose["generated_tokens_total"] == 12
    assert rose["requests_finished_total"] == 3 and "requests_failed_total" not in rose
    assert rose["time_to_first_token_seconds_count"] == 1, "one request, however many answers"


def test_latencies_and_finish_reasons_are_counted(served: Served) -> None:
    before = scrape(served)
    complete(served, [*range(400, 430)], 6, n=2)
    answer = served.post("/v1/completions", prompt=[*range(40)], max_tokens=50, temperature=0, stop=["e", "a", "o"])
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    with served.http.stream("POST", "/v1/completions", json={
            "prompt": [7], "max_tokens": 1900, "ignore_eos": True, "stream": True}) as stream:
        next(stream.iter_bytes())
    served.wait_idle()
    tiny().worker.call(lambda engine: engine.check())  # the engine hears of the end after the server
    after = scrape(served)
    rose = gained(before, after)

    def ended(reason: str) -> float:
        name = "requests_finished_total"
        return after.of(name, finished_reason=reason) - before.of(name, finished_reason=reason)

    assert (ended("length"), ended("stop"), ended("abort"), ended("error")) == (2, 1, 1, 0)
    assert rose["e2e_request_latency_seconds_count"] == 4
    assert rose["inter_token_latency_seconds_count"] == rose["generated_tokens_total"] - 4
    assert 0 < rose["inter_token_latency_seconds_sum"] < rose["e2e_request_latency_seconds_sum"]


def test_choices_that_never_began_are_counted() -> None:
    meter = TokenMeter()
    meter.end(SimpleNamespace(times=SimpleNamespace(arrived=0.0), finish="abort"), 2)  # type: ignore[arg-type]
    assert meter.finishes == {"stop": 0, "length": 0, "abort": 3, "error": 0}
    assert sum(meter.latency.read().counts) == 1


def test_responses_are_counted_by_status(served: Served) -> None:
    def counted(page: Page) -> dict[str, float]:
        return {dict(labels)["status"]: value for (name, labels), value in page.samples.items()
                if name == "deltic_http_responses_total"}

    before = counted(scrape(served))
    for _ in range(3):
        served.http.get("/nowhere")
    served.post("/v1/completions", prompt=5)
    raw = served.connect()
    raw.sendall(b"no HTTP\r\n\r\n")
    read_all(raw)
    after = counted(scrape(served))
    rose = {status: after[status] - before.get(status, 0) for status in after}
    assert (rose["404"], rose["400"], rose["200"]) == (3, 2, 1)


def test_build_info(served: Served) -> None:
    version = deltic.__version__
    assert scrape(served).of("build_info", version=version, python=platform.python_version(), torch=torch.__version__)


def test_cache_metrics_match_the_pools(served: Served) -> None:
    complete(served, [*range(300, 340)], 3)
    page, cache = scrape(served), tiny().engine.runtime.cache
    assert page["cache_pages_used"] == cache.pages.used > 0
    assert page["cache_slots_used"] == cache.slots.used > 0
    assert page.of("cache_bytes", tier="device") <= cache.sizes.bytes
    pools = cache.pools
    assert page.of("cache_budget_bytes", tier="device") == cache.sizes.bytes
    blocks = {storage.data_ptr(): storage.nbytes() for storage in (
        tensor.untyped_storage() for tensor in (*pools.page_tensors, *pools.slot_tensors))}
    assert cache.sizes.bytes == pytest.approx(sum(blocks.values()), rel=0.05), "but for large pages of the system"
    page_bytes = sum(tensor[:, 0].nbytes for tensor in pools.page_tensors)
    slot_bytes = sum(tensor[:, 0].nbytes for tensor in pools.slot_tensors)
    assert page.of("cache_bytes", tier="device") == (page["cache_pages_used"] * page_bytes
                                                    + page["cache_slots_used"] * slot_bytes)


def test_scraping_during_streams_never_fails(served: Served) -> None:
    before, busy = scrape(served), []
    body = {"max_tokens": 60, "stream": True, "ignore_eos": True}

    def stream(number: int) -> None:
        with served.http.stream("POST", "/v1/completions", json=body | {"prompt": [number, *range(40)]}) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    last = before
    while any(thread.is_alive() for thread in threads):
        page = scrape(served)
        gained(last, page)
        busy.append(page["requests_running"] + page["requests_waiting"])
        last = page
    served.wait_idle()
    after = scrape(served)
    rose = gained(before, after)
    assert max(busy) > 8 and len(busy) > 5
    assert rose["requests_finished_total"] == 16 and rose["generated_tokens_total"] == 960
    assert rose["time_to_first_token_seconds_count"] == rose["queue_time_seconds_count"] == 16
    wait_until(lambda: scrape(served)["generated_tokens_per_second"] > 0, 3)
    assert after["requests_running"] == after["requests_waiting"] == 0


@pytest.mark.parametrize("name", ['a "quoted" name', "back\\slash\\n", "two\nlines", "ümläut, {braces}"])
def test_names_of_models_are_escaped(name: str) -> None:
    page = parse(exposition({name: snapshot(tiny().engine)}, {}))
    assert {dict(labels)["model"] for sample, labels in page.samples if sample not in OF_THE_SERVER} == {name}


def test_a_key_is_asked_for() -> None:
    with serving(tiny(), api_keys={"secret": "me"}) as served:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            answer = served.http.get("/metrics", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert scrape(served, authorization="Bearer secret").samples
        assert served.health()[0] == 200


def test_metrics_after_the_engine_has_ended() -> None:
    """The counters stay readable."""
    llm = LLM(max_context=256, memory="8MiB", threads=1)
    with serving(llm) as served:
        llm.close()
        wait_until(lambda: served.health()[0] == 503)
        assert scrape(served)["requests_running"] == 0


# Figures that an engine may have: tiers below the device, and durations


def test_metrics_of_a_prefix_restored_from_host_memory() -> None:
    llm = LLM(max_context=256, memory="8MiB", host_memory="16MiB", threads=1, dtype="float32")
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = [*range(100, 150)]
    llm.generate([prompt], sampling)
    llm.worker.call(lambda engine: engine.runtime.cache.clear())
    before = parse(exposition({"tiny": snapshot(llm.engine)}, {}))
    assert before.of("cache_checkpoints", tier="device") == 0 < before.of("cache_checkpoints", tier="host")
    assert 0 < before.of("cache_bytes", tier="host") <= before.of("cache_budget_bytes", tier="host") == 16 << 20
    llm.generate([[*prompt, 7]], sampling)
    after = parse(exposition({"tiny": snapshot(llm.engine)}, {}))
    rose = gained(before, after)
    assert rose["prompt_tokens_reused_total"] == rose["cache_restored_tokens_total"] == 50
    assert after["cache_restored_prefixes_total"] == 1


def test_each_tier_has_samples() -> None:
    host = TierUsage("host", bytes=70, budget=1000, checkpoints=3, evictions=2, restored=5, restored_tokens=400)
    now = snapshot(tiny().engine)
    page = parse(exposition({"m": replace(now, tiers=(now.tiers[0], host))}, {}))
    assert page.of("cache_bytes", tier="host") == 70 and page.of("cache_budget_bytes", tier="host") == 1000
    assert page.of("cache_checkpoints", tier="host") == 3 and page.of("cache_evictions_total", tier="host") == 2
    assert page["cache_restored_prefixes_total"] == 5 and page["cache_restored_tokens_total"] == 400
    assert page.of("cache_evictions_total", tier="device") == now.tiers[0].evictions


def test_a_histogram() -> None:
    histogram = Histogram((0.1, 1.0))
    assert histogram.read() == Distribution((0.1, 1.0), (0, 0, 0), 0.0)
    for seconds in (0.05, 0.1, 0.5, 1.5, 60.0):
        histogram.observe(seconds)
    found = histogram.read()
    assert found.counts == (2, 1, 2) and found.sum == pytest.approx(62.15)
    page = parse(exposition({"m": replace(snapshot(tiny().engine), queued=found)}, {}))
    buckets = {dict(labels)["le"]: value for (name, labels), value in page.samples.items()
               if name == "deltic_queue_time_seconds_bucket"}
    assert buckets == {"0.1": 2, "1.0": 3, "+Inf": 5}
    assert page["queue_time_seconds_count"] == 5 and page["queue_time_seconds_sum"] == pytest.approx(62.15)


def test_pace_counts_whole_seconds() -> None:
    pace = Pace()
    assert pace.read(1000.0) == 0
    for _ in range(30):
        pace.count(1000.5)
    assert pace.read(1000.9) == 0, "the present second is not over"
    assert pace.read(1001.0) == pace.read(1000.5 + WINDOW) == 30 / WINDOW
    assert pace.read(1001.0 + WINDOW) == 0
    for second in range(2000, 2030):
        for _ in range(7):
            pace.count(second + 0.25)
    assert pace.read(2030.0) == 7 and pace.read(2029.3) == 7


def test_a_meter_observes_the_first_token_of_the_first_choice_only() -> None:
    meter = TokenMeter()
    for choice, generated in ((0, 1), (0, 2), (1, 1)):
        meter.token(SimpleNamespace(choice=choice, generated=generated, times=SimpleNamespace(
            arrived=1.0, admitted=3.5, last_token=None)))  # type: ignore
    assert sum(meter.first_token.read().counts) == sum(meter.queued.read().counts) == 1
    assert meter.queued.read().sum == 2.5


def test_a_snapshot_of_a_fresh_engine() -> None:
    now = snapshot(Engine(tiny().runtime))
    assert (now.running, now.waiting, now.finished, now.generated_tokens, now.pace) == (0, 0, 0, 0, 0)
    assert isinstance(now.tiers[0], TierUsage) and now.tiers[0].name == "device" and now.tiers[0].restored is None


# The parser must notice


GOOD = '# HELP deltic_a_total A.\n# TYPE deltic_a_total counter\ndeltic_a_total{model="m"} 1\n'
BAD: Mapping[str, str] = {
    "no help": GOOD.split("\n", 1)[1],
    "no type": GOOD.replace("# TYPE deltic_a_total counter\n", ""),
    "no samples": "\n".join(GOOD.split("\n")[:2]) + "\n",
    "no end of line": GOOD[:-1],
    "twice": GOOD + 'deltic_a_total{model="m"} 1\n',
    "a family in two places": GOOD + GOOD.replace('"m"', '"n"'),
    "a quote": GOOD.replace('"m"', '"m"m"'),
    "a backslash": GOOD.replace('"m"', r'"m\x"'),
    "a name": GOOD.replace("a_total", "a-total"),
    "a number": GOOD.replace(" 1", " one"),
    "a suffix": GOOD.replace("a_total", "a"),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_the_parser_notices(text: str) -> None:
    assert parse(GOOD)["a_total"] == 1
    with pytest.raises((AssertionError, KeyError, ValueError)):
        parse(text)
