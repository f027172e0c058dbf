"""A server that watches itself: `python bench/watched.py serve ...` is `deltic serve ...` with GET /watch beside it.

/watch says how late the event loop was at worst since the last look (and where all threads stood), how long the longest
step of the engine took, and the memory of the process.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import deltic.server.app as app_module
from deltic.cli import main
from deltic.engine.engine import Engine

BEAT = 0.005
"""Seconds between two beats of the event loop's heart."""
SUSPECT = 0.05
"""Seconds of silence from which on the threads' stacks are looked at."""


class Watch:
    """Lateness of the event loop, longest step and memory, since the last look."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self.stacks: list[tuple[float, str]] = []
        self.longest_step, self.steps = 0.0, 0
        self._beat = time.monotonic()
        self._task: asyncio.Task[None] | None = None

    async def look(self, _: Request) -> Response:
        """What happened since the last look; the first one starts the watch."""
        if self._task is None:
            self._task = asyncio.create_task(self._live())
            threading.Thread(target=self._suspect, daemon=True).start()
        lags, self.lags = sorted(self.lags), []
        stacks, self.stacks = self.stacks, []
        step, self.longest_step = self.longest_step, 0.0
        return JSONResponse({
            "lag_max": lags[-1] if lags else 0.0, "late": sum(lag > 0.1 for lag in lags), "beats": len(lags),
            "lag_p99": lags[len(lags) * 99 // 100] if lags else 0.0, "stacks": sorted(stacks, reverse=True)[:3],
            "longest_step": step, "steps": self.steps, **memory()})

    async def _live(self) -> None:
        while True:
            due = time.monotonic() + BEAT
            await asyncio.sleep(BEAT)
            self._beat = time.monotonic()
            self.lags.append(self._beat - due)

    def _suspect(self) -> None:
        while True:
            time.sleep(SUSPECT / 5)
            late = time.monotonic() - self._beat - BEAT
            if late > SUSPECT:
                self.stacks.append((round(late, 3), _where()))


def _where() -> str:
    """Where every other thread stands: its innermost lines."""
    names, own = {thread.ident: thread.name for thread in threading.enumerate()}, threading.get_ident()
    return " || ".join(f"{names.get(ident)}: " + " < ".join(
        f"{Path(line.filename).name}:{line.lineno} {line.name}" for line in traceback.extract_stack(frame)[:-6:-1])
        for ident, frame in sys._current_frames().items() if ident != own)


def memory() -> dict[str, int]:
    """Resident memory now and at the peak, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    found = {key: int(rest.split()[0]) // 1024 for key, _, rest in (line.partition(":") for line in lines)
             if key in ("VmRSS", "VmHWM")}
    return {"rss_mib": found["VmRSS"], "peak_mib": found["VmHWM"]}


def watch_steps(watch: Watch) -> None:
    """Time every step of every engine."""
    plain = Engine.step

    def step(self: Engine) -> Any:
        began = time.perf_counter()
        try:
            return plain(self)
        finally:
            watch.longest_step = max(watch.longest_step, time.perf_counter() - began)
            watch.steps += 1
    Engine.step = step  # type: ignore[method-assign]


def watch_app(watch: Watch) -> None:
    """Serve /watch in every application."""
    plain = app_module.create_app

    def create_app(*args: Any, **options: Any) -> Any:
        app = plain(*args, **options)
        app.add_route("/watch", watch.look, methods=["GET"])
        return app
    app_module.create_app = create_app


if __name__ == "__main__":
    watched = Watch()
    watch_steps(watched)
    watch_app(watched)
    sys.exit(main(sys.argv[1:]))
