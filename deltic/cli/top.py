"""`deltic top`: the activity of a server and its replicas, from their metrics."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from deltic.cli import options
from deltic.cli.client import ServerClient, add_server, client_of
from deltic.cli.output import grid, takes_escapes
from deltic.cli.parser import UsageError
from deltic.engine.stats import BOUNDS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_EVERY: Final = 1.0
_RECENT: Final = 60.0
"""Seconds between two views, and the period in seconds for reuse and times to first token."""
_AROUND: Final = 10
"""Number of lines of a view that are not rows."""
_WIDEST: Final = 40
"""Maximum number of characters of a name."""
_SAMPLE: Final = re.compile(
    r"deltic_(build_info|requests_running|requests_waiting|prompt_tokens_computed_total|prompt_tokens_reused_total|"
    r"generated_tokens_per_second|time_to_first_token_seconds_bucket|cache_bytes|cache_budget_bytes)"
    r"(?:{(.*)})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COUNTERS: Final = ("_total", "_bucket")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_FOOTNOTE: Final = ("reused, first token: in the last minute, or since the start if there was no request. "
                    "tokens/s: in the last 10 seconds. Ctrl-C ends.")

Json = dict[str, Any]
Labels = tuple[tuple[str, str], ...]


def add_top(parser: argparse.ArgumentParser) -> None:
    parser.description = ("Show the replicas of a running server: running and waiting answers, tokens per second, the "
                          "part of the prompt tokens that was reused, the time to the first token (half and 95 % of "
                          "the requests have it within that time), and the memory of the cache. On a terminal the "
                          "table is renewed every second; Ctrl-C ends.")
    add_server(parser, "url")
    parser.add_argument("--once", action="store_true", help="print one table, as without a terminal")
    options.add_json(parser)


def run_top(args: argparse.Namespace) -> int:
    client = client_of(args, "URL")
    now = read_figures(client)
    if args.json:
        print(json.dumps({"url": client.url, **status_of(now)}, ensure_ascii=False))
    elif args.once or not takes_escapes(sys.stdout):
        rows = table_of(status_of(now))
        print(grid(rows) if rows else _no_model(client))
    else:
        with suppress(KeyboardInterrupt):
            _watch(client, now)
    return 0


# Figures


@dataclass(frozen=True, slots=True)
class Figures:
    """Samples of /metrics by name and labels."""

    samples: Mapping[tuple[str, Labels], float]

    def by_source(self) -> dict[tuple[str, str], Figures]:
        """Returns the samples of each model of each replica. On a single server the replica's name is empty."""
        found: dict[tuple[str, str], dict[tuple[str, Labels], float]] = defaultdict(dict)
        for (name, labels), value in self.samples.items():
            known = dict(labels)
            if "model" in known:
                found[known.get("replica", ""), known["model"]][name, labels] = value
        return {source: Figures(found[source]) for source in sorted(found)}

    def since(self, before: Figures) -> Figures:
        """Returns the increase of each counter since then. If one is lower now, all have restarted."""
        old = {key: value for key, value in before.samples.items() if key[0].endswith(_COUNTERS)}
        gained = {key: value - old.get(key, 0.0) for key, value in self.samples.items()}
        return self if any(gained[key] < 0 for key in old.keys() & gained.keys()) else Figures(gained)

    def sum(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)

    def sums(self, name: str, label: str) -> dict[str, float]:
        """Returns the sum for each value of a label."""
        found: dict[str, float] = defaultdict(float)
        for (metric, labels), value in self.samples.items():
            if metric == name:
                found[dict(labels).get(label, "")] += value
        return dict(found)

    def first_tokens(self) -> list[tuple[float, float]]:
        """Returns the histogram of seconds to the first token: bounds, each with the number of requests up to it."""
        counts = self.sums("time_to_first_token_seconds_bucket", "le")
        return sorted((float(bound), count) for bound, count in counts.items())


def read_figures(client: ServerClient) -> Figures:
    """Returns the server's metrics. Raises UsageError if it cannot be reached, is not deltic's or requires a key."""
    def read(content: bytes) -> Figures:
        found = Figures(dict(_samples(content.decode())))
        found.first_tokens()  # raises ValueError for bounds that are not numbers
        return found

    found = client.ask("/metrics", read)
    if not found.sum("build_info"):
        raise UsageError(f"the server at {client.url} is not a deltic server: its /metrics has no deltic_build_info")
    return found


def _samples(page: str) -> Iterator[tuple[tuple[str, Labels], float]]:
    for line in page.splitlines():
        if found := _SAMPLE.fullmatch(line):
            value = float(found[3])
            if not math.isfinite(value):
                raise ValueError(found[3])
            yield (found[1], tuple((name, _name(text)) for name, text in _LABEL.findall(found[2] or ""))), value


def _name(escaped: str) -> str:
    """Returns the value of a label. A model's name must not be able to control the terminal."""
    text = re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), escaped)
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


# The status


def status_of(now: Figures, before: Figures | None = None) -> Json:
    """Returns the figures of each replica and of all together. before: the figures a minute ago."""
    known = before.by_source() if before else {}
    rows = [{"replica": replica or None, "model": model, **_facts(figures, known.get((replica, model)))}
            for (replica, model), figures in now.by_source().items()]
    return {"version": ", ".join(sorted(now.sums("build_info", "version"))), "replicas": rows,
            "all": _facts(now, before)}


def _facts(now: Figures, before: Figures | None) -> Json:
    recent = now.since(before) if before else now
    prompts = recent if _prompt_tokens(recent) else now
    budgets = now.sums("cache_budget_bytes", "tier")
    return {
        "running": int(now.sum("requests_running")), "waiting": int(now.sum("requests_waiting")),
        "tokens_per_second": round(now.sum("generated_tokens_per_second"), 1),
        "prompt_tokens": int(_prompt_tokens(prompts)),
        "reused_prompt_tokens": int(prompts.sum("prompt_tokens_reused_total")),
        "first_token_ms": _quantiles(recent.first_tokens()) or _quantiles(now.first_tokens()) or None,
        "cache": {tier: {"bytes": int(used), "budget": int(budgets.get(tier, 0))}
                  for tier, used in now.sums("cache_bytes", "tier").items()},
    }


def _quantiles(buckets: list[tuple[float, float]]) -> dict[str, int | None]:
    """Returns the milliseconds within which 50 % and 95 % of the requests had their first token, rounded up to the
    bound of a bucket; None above the last bound. Empty without requests."""
    requests = buckets[-1][1] if buckets else 0
    found = {}
    for name, share in (("p50", 0.5), ("p95", 0.95)) if requests > 0 else ():
        bound = next(bound for bound, count in buckets if count >= share * requests)
        found[name] = None if math.isinf(bound) else round(1000 * bound)
    return found


def _prompt_tokens(figures: Figures) -> float:
    return figures.sum("prompt_tokens_computed_total") + figures.sum("prompt_tokens_reused_total")


# The table


def table_of(status: Json) -> list[Json]:
    """Returns a row for each replica and model. If there are several, the first row sums them up."""
    rows = status["replicas"]
    names = [name for name in ("replica", "model") if len({row[name] for row in rows}) > 1]
    names = names or ["replica" if rows and rows[0]["replica"] else "model"]
    tiers = [*dict.fromkeys(tier for row in rows for tier in row["cache"])]
    shown = [{**{name: (row[name] or "")[:_WIDEST] for name in names}, **_cells(row, tiers)} for row in rows]
    if len(rows) < 2:
        return shown
    return [{**dict.fromkeys(names, ""), names[0]: f"all {len(rows)}", **_cells(status["all"], tiers)}, *shown]


def _cells(facts: Json, tiers: list[str]) -> Json:
    prompt, reused = facts["prompt_tokens"], facts["reused_prompt_tokens"]
    first = facts["first_token_ms"] or {"p50": "-", "p95": "-"}
    return {"running": facts["running"], "waiting": facts["waiting"], "tokens/s": round(facts["tokens_per_second"]),
            "reused": f"{100 * reused / prompt:.0f} %" if prompt else "-",
            "first_token": _within(first["p50"]), "p95": _within(first["p95"]),
            **{tier: _memory(**facts["cache"][tier]) if tier in facts["cache"] else "-" for tier in tiers}}


def _within(milliseconds: int | str | None) -> str:
    if isinstance(milliseconds, int):
        return f"≤ {milliseconds:,} ms"
    return milliseconds or f"> {BOUNDS[-1]:.0f} s"


def _memory(bytes: int, budget: int) -> str:
    step = min((max(bytes, budget, 1).bit_length() - 1) // 10, len(_UNITS) - 1)
    used, size = (f"{value:,.{int(0 < value < 10)}f}" for value in (bytes / 1024 ** step, budget / 1024 ** step))
    return f"{used} of {size} {_UNITS[step]}"


def _no_model(client: ServerClient) -> str:
    return f"no language model is loaded at {client.url}"


# The terminal


def _watch(client: ServerClient, now: Figures) -> None:
    """Shows the status until an exception ends it. A server error is shown below the last table."""
    from rich.console import Console
    from rich.live import Live

    console, problem = Console(), ""
    known = deque([(time.monotonic(), now)])
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_view(client, known, problem, console), refresh=True)
            time.sleep(_EVERY)
            try:
                known.append((time.monotonic(), read_figures(client)))
                problem = ""
            except UsageError as error:
                problem = str(error)
            while known[-1][0] - known[0][0] > _RECENT:
                known.popleft()


def _view(client: ServerClient, known: deque[tuple[float, Figures]], problem: str, console: Console) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    status = status_of(known[-1][1], known[0][1] if len(known) > 1 else None)
    models = ", ".join(sorted({row["model"] for row in status["replicas"]}))
    head = Text(f"{models} at {client.url}, deltic {status['version']}   {time.strftime('%H:%M:%S')}", style="bold")
    rows = table_of(status)
    hidden = max(len(rows) - max(console.height - _AROUND, 1), 0)
    if hidden:
        busy = sorted(rows[1:], key=lambda row: -row["running"] - row["waiting"])
        rows = [rows[0], *busy[:len(rows) - 1 - hidden]]
    more = f"{hidden:,} more with fewer requests: deltic top --once shows all. " if hidden else ""
    return Group(head, "", _rich_table(rows) if rows else Text(_no_model(client)), "",
                 Text(more + _FOOTNOTE, style="dim"), Text(problem, style="red"))


def _rich_table(rows: list[Json]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in rows[0]:
        is_name = name in ("replica", "model")
        table.add_column(name.replace("_", "\n"), justify="left" if is_name else "right", no_wrap=True)
    for number, row in enumerate(rows):
        style = "bold" if len(rows) > 1 and not number else ""
        table.add_row(*(Text(f"{value:,}" if isinstance(value, int) else value) for value in row.values()), style=style)
    return table
