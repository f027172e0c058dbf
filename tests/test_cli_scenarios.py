"""`deltic bench --scenario`: the scripts of the scenarios, and the promised numbers of reused tokens."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import fresh_pools, numbers, odd_runtime, small_runtime

from deltic.cache.manager import HybridCache
from deltic.cli import bench as command
from deltic.cli import main
from deltic.cli.output import grid
from deltic.engine.engine import Engine
from deltic.errors import DelticError

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
from scenarios import (  # noqa: E402
    SCENARIOS,
    Ask,
    BenchRun,
    RequestGroup,
    Restartable,
    Scenario,
    Script,
    Sizes,
    Summary,
    Timed,
    advance,
    drawing,
    medians,
    rehearse,
    run_scenario,
    serve,
)

sys.path.remove(str(BENCH))

SYSTEM, TURN, NEW = 40, 21, 20
SMALL = ["--prompt-tokens", str(SYSTEM), "--turn-tokens", str(TURN), "--new-tokens", str(NEW), "--dtype", "float32",
         "--threads", "1", "--memory", "16MiB", "--speculate", "off", "--json"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Any) -> None:
    """Spares collections of a process full of tests, and asking git for the commit."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr("deltic.cli.bench.commit", lambda: None)


def bench(capsys: Any, *argv: str) -> dict[str, Any]:
    assert main(["bench", *SMALL, *argv]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    result = json.loads(out)
    check(result)
    return dict(result)


def check(result: dict[str, Any]) -> None:
    """The sums of every report."""
    summary, requests = result["summary"], result["requests"]
    assert summary["prompt_tokens"] == sum(request["prompt_tokens"] for request in requests)
    cached = sum(request["cached_tokens"] for request in requests)
    assert summary["computed_tokens"] == summary["prompt_tokens"] - cached
    assert summary["reuse_share"] == pytest.approx(cached / summary["prompt_tokens"], abs=1e-4)
    assert all(0 < request["time_to_first_token_ms"] < request["total_ms"] for request in requests)
    assert summary["last_cold_ms"] > 0 and summary["last_warm_ms"] > 0 and summary["cold_over_warm"] > 0


def cached(result: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(r["request"], r["prompt_tokens"], r["cached_tokens"]) for r in result["requests"]]


def chat(turns: int) -> list[tuple[str, int, int]]:
    """A chat that reuses everything except the last token of the last answer, which the model has not read."""
    first = SYSTEM + TURN
    lengths = [first + (NEW + TURN) * turn for turn in range(turns)]
    return [(f"turn {turn + 1}", length, length - TURN - 1 if turn else 0) for turn, length in enumerate(lengths)]


def test_multi_turn(capsys: Any) -> None:
    result = bench(capsys, "--scenario", "multi-turn", "--turns", "3", "--repeat", "3")
    assert cached(result) == chat(3) and result["summary"]["evictions"] == 0
    facts = {"model", "layers", "dtype", "device", "machine", "version", "commit", "ops", "peak_memory_mib"}
    assert facts < set(result) and result["model"] == "tiny" and result["dtype"] == "float32"
    sizes = {"scenario": "multi-turn", "prompt_tokens": SYSTEM, "turn_tokens": TURN, "new_tokens": NEW, "turns": 3,
             "repeat": 3}
    assert sizes.items() <= result.items()
    assert len(result["runs"]) == 3 and all(cached(run) == chat(3) for run in result["runs"])
    for run in result["runs"]:
        check(run)
    first = sorted(run["requests"][0]["total_ms"] for run in result["runs"])
    assert result["requests"][0]["total_ms"] == pytest.approx(first[1], abs=1e-3)


def test_edit(capsys: Any) -> None:
    """The edited turn resumes at the end of the answer before it, like the turn that it replaces."""
    turns = chat(5)
    again = [(f"{name} again", *lengths) for name, *lengths in turns[2:]]
    assert cached(bench(capsys, "--scenario", "edit", "--turns", "5")) == [*turns, *again]


def test_restart(capsys: Any, tmp_path: Any) -> None:
    turns = chat(4)
    result = bench(capsys, "--scenario", "restart", "--turns", "3")
    assert cached(result) == [*turns[:3], ("after the restart", *turns[3][1:])]
    assert "loading" in result["note"]
    bench(capsys, "--scenario", "restart", "--turns", "1", "--cache-dir", str(tmp_path / "own"))
    assert any((tmp_path / "own").rglob("*")), "a directory that was given is used, and kept"


def test_agent(capsys: Any) -> None:
    """Six steps: a user message at each fourth, which resumes where the message before it ended."""
    opening, short = 4, NEW // 2
    expected, settled, before = [], SYSTEM, 0
    for start in (0, 4):
        settled += TURN
        length, known = settled + opening, before
        for step in range(start, min(start + 4, 6)):
            expected.append((f"step {step + 1}", length, known))
            if step == start:
                expected.append(("title", 2 * TURN, TURN if start else 0))
            length, known = length + NEW + TURN, length + NEW - 1
        before, settled = settled, settled + short
    assert cached(bench(capsys, "--scenario", "agent", "--turns", "6")) == expected


def test_shared_system(capsys: Any) -> None:
    result = bench(capsys, "--scenario", "shared-system", "--turns", "2", "--batch", "3")
    known = [0, SYSTEM, SYSTEM, SYSTEM, SYSTEM, SYSTEM]
    assert cached(result) == [(f"wave {1 + index // 3} request {1 + index % 3}", SYSTEM + TURN, tokens)
                              for index, tokens in enumerate(known)]


@pytest.mark.parametrize("name", ["multi-turn", *(
    pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS if name not in ("multi-turn", "restart"))])
def test_without_the_cache_nothing_is_reused(capsys: Any, name: str) -> None:
    result = bench(capsys, "--scenario", name, "--turns", "2", "--no-prefix-cache")
    assert not any(tokens for *_, tokens in cached(result))
    assert result["summary"]["time_to_first_token_warm_ms"] is None


def test_without_json_a_table_and_a_summary_are_printed(capsys: Any) -> None:
    argv = [argument for argument in SMALL if argument != "--json"]
    assert main(["bench", *argv, "--scenario", "multi-turn", "--turns", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.splitlines()[0].split("  ")[0] == "request"
    assert out.splitlines()[2].split()[:4] == ["turn", "2", "102", "80"]
    assert "\nmodel            tiny\n" in out
    assert "multi-turn: 83 of 163 prompt tokens were computed, 49.1% reused." in out and "no figure" in out


def test_wrong_options_are_named(capsys: Any) -> None:
    for argv, message in (
            (["--scenario", "fly"], "invalid choice: 'fly'"),
            (["--turns", "3"], "--turns needs --scenario"),
            (["--turn-tokens", "3"], "--turn-tokens needs --scenario"),
            (["--scenario", "edit", "--turns", "0"], "--turns: must be an integer from 1"),
            (["--scenario", "edit", "--turn-tokens", "none"], "--turn-tokens"),
            (["--scenario", "edit", "--batch", "2"], "the requests of edit come one after the other"),
            (["--scenario", "multi-turn", "--max-context", "100"], "the longest prompt and --new-tokens are"),
            (["--scenario", "shared-system", "--batch", "4", "--max-batch", "2"], "--batch 4"),
            (["--scenario", "restart", "--no-prefix-cache"], "needs the prefix cache")):
        assert main(["bench", "--memory", "16MiB", *argv]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("deltic: error: ") and message in err, argv


def test_the_command_names_the_scenarios() -> None:
    assert tuple(SCENARIOS) == command.SCENARIOS


def test_without_a_checkout_the_scenarios_are_missing(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("deltic.cli.bench._SCENARIO_SCRIPT", tmp_path / "scenarios.py")
    assert main(["bench", "--scenario", "edit"]) == 2
    assert "run it in a checkout" in capsys.readouterr().err


# Scripts


def test_a_rehearsal_has_the_shape_of_the_run() -> None:
    for name in SCENARIOS:
        for turns in (1, 2, 3, 7):
            check_rehearsal(name, turns)


def check_rehearsal(name: str, turns: int) -> None:
    sizes, scenario = Sizes(9, 5, 3, turns, 2), SCENARIOS[name]
    planned, run, draw = rehearse(scenario, sizes), [], drawing(3, 1000)
    script, answers = scenario.script(sizes, draw), None
    while group := advance(script, answers):
        run.append(group)
        answers = [draw(3) for _ in group.asks]
    assert shape(planned) == shape(run), (name, turns)
    for group in run:
        assert len({ask.name for ask in group.asks}) == len(group.asks)
        for ask in group.asks:
            assert all(0 < position <= len(ask.prompt) for position in ask.boundaries)
    assert [group.restarted for group in run].count(True) == (name == "restart")


def shape(groups: list[RequestGroup]) -> list[Any]:
    return [[(ask.name, len(ask.prompt), ask.boundaries) for ask in group.asks] for group in groups]


def test_the_defaults_fit_into_4096_tokens() -> None:
    for name, scenario in SCENARIOS.items():
        longest = max(group.longest for group in rehearse(scenario, scenario.sizes))
        assert longest + scenario.sizes.new_tokens < 4096, name


def test_equal_seeds_draw_equal_tokens() -> None:
    same, other = drawing(1, 50), drawing(2, 50)
    drawn = same(200)
    assert drawn == drawing(1, 50)(200) != other(200)
    assert set(drawn) <= set(range(50)) and len(set(drawn)) > 30 and same(200) != drawn


def test_agent_messages_drop_earlier_thinking() -> None:
    script = SCENARIOS["agent"].script(Sizes(30, 5, 8, 5), drawing(0, 1000))
    group, prompts = advance(script, None), []
    while group:
        prompts.append(group.asks[0].prompt)
        group = advance(script, [tuple(range(2000, 2008))] * len(group.asks))
    assert prompts[4][:35] == prompts[0][:35], "up to the end of the first message"
    assert prompts[4][35:39] == (2004, 2005, 2006, 2007), "then what remains of the last answer"
    assert all(prompts[step][:len(prompts[step - 1])] == prompts[step - 1] for step in (1, 2, 3))


# Runs


class Fixed:
    """A model over one runtime; a restart leaves nothing."""

    def __init__(self, pages: int = 200, slots: int = 24) -> None:
        self.pages, self.slots, self.restarts = pages, slots, 0
        self.engine = self.fresh()

    def restart(self) -> None:
        self.restarts += 1
        self.engine = self.fresh()

    def fresh(self) -> Engine:
        pools = fresh_pools(odd_runtime(), self.pages, self.slots)
        runtime = small_runtime(odd_runtime(), batch=4, budget=64, pages=self.pages)
        return Engine(replace(runtime, cache=HybridCache(pools)))


def test_a_restart_without_a_disk_reuses_nothing() -> None:
    model = Fixed()
    run = run_scenario(model, SCENARIOS["restart"], Sizes(30, 10, 5, 2))
    assert model.restarts == 1 and [timed.cached_tokens for timed in run.requests] == [0, 44, 0]
    assert run.summary.computed_tokens == 40 + 11 + 70


def test_a_run_starts_empty_and_leaves_the_engine_consistent() -> None:
    model, ticks = Fixed(), []
    first = run_scenario(model, SCENARIOS["multi-turn"], Sizes(30, 10, 5, 3), progress=lambda: ticks.append(1))
    assert len(ticks) == 4
    model.engine.check()
    again = run_scenario(model, SCENARIOS["multi-turn"], Sizes(30, 10, 5, 3))
    assert [t.cached_tokens for t in first.requests] == [t.cached_tokens for t in again.requests] == [0, 44, 59]
    assert len(model.engine.runtime.cache.tree) == 0


def test_states_without_room_are_counted() -> None:
    run = run_scenario(Fixed(slots=3), SCENARIOS["multi-turn"], Sizes(30, 10, 5, 3))
    assert run.summary.evictions > 0


def test_all_requests_of_a_group_are_answered_in_order() -> None:
    model = Fixed()
    asks = tuple(Ask(name, numbers(index, 20 + index, 500), ()) for index, name in enumerate("abc"))
    timed, answers = serve(model.engine, RequestGroup(asks), 6)
    assert [(t.request, t.prompt_tokens) for t in timed] == [("a", 20), ("b", 21), ("c", 22)]
    alone = [serve(Fixed().engine, RequestGroup((ask,)), 6)[1][0] for ask in asks]
    assert answers == alone and all(len(answer) == 6 for answer in answers)


def test_a_failed_request_ends_the_run() -> None:
    model = Fixed()

    def broken(*_: Any) -> Any:
        raise RuntimeError("kernel exploded")

    model.engine._commit = broken  # type: ignore[method-assign]
    with pytest.raises(DelticError, match=r"the measurement failed: turn 1: .*kernel exploded"):
        run_scenario(model, SCENARIOS["multi-turn"], Sizes(30, 10, 5, 3))


def test_medians_are_taken_number_by_number() -> None:
    def run(cached: int, first: float, warm: float | None) -> BenchRun:
        return BenchRun((Timed("a", 10, cached, first, 9.0),), Summary(10, 5, 0.5, 1, warm, 1.0, 2.0, first))

    found = medians([run(1, 5.0, None), run(3, 1.0, 4.0), run(2, 3.0, 6.0)])
    assert found.requests == (Timed("a", 10, 2, 3.0, 9.0),)
    assert found.summary == Summary(10, 5, 0.5, 1, 5.0, 1.0, 2.0, 3.0)
    assert medians([run(1, 5.0, None)]) == run(1, 5.0, None)


def test_grids_align_text_left_and_numbers_right() -> None:
    rows = [{"request": "turn 1", "prompt_tokens": 1200, "share": None},
            {"request": "x", "prompt_tokens": 7, "share": 0.5}]
    assert grid(rows).splitlines() == ["request  prompt tokens  share", "turn 1           1,200      -",
                                       "x                    7    0.5"]


def test_scenario_types() -> None:
    """The types of a script and a model."""
    model: Restartable = Fixed()

    def script(sizes: Sizes, draw: Any) -> Script:
        yield RequestGroup((Ask("only", draw(sizes.prompt_tokens), ()),))

    run = run_scenario(model, Scenario("one request", Sizes(20, 1, 2, 1), script), Sizes(20, 1, 2, 1))
    assert run.summary.prompt_tokens == run.summary.computed_tokens == 20
