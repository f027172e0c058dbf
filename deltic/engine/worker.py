"""The thread that steps the engine."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from deltic.engine.engine import Engine
from deltic.types import Request, TokenOut

log = logging.getLogger("deltic")

_SETTLE = 0.2  # seconds at rest before the accounts are checked: the check must not delay the next request
_PAUSE = 0.002  # seconds to sleep when a step could do nothing, so that this does not spin
_MAX_FAILURES = 3

Command = Callable[[], None]


class Listener(Protocol):
    """Who hears from the worker; called in the worker's thread."""

    def on_events(self, events: list[TokenOut]) -> None: ...

    def on_end(self) -> None: ...


class Worker:
    """Owns the engine while it runs. `ask`, `fault` and `stop` are for other threads, `add` and `abort` to be asked."""

    def __init__(self, engine: Engine, listener: Listener) -> None:
        self._engine, self._listener = engine, listener
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deltic-engine", daemon=True)
        self._live: dict[str, int] = {}
        self._since: float | None = None
        self._checked, self._failures = True, 0
        self._fault: str | None = None

    def start(self) -> None:
        self._thread.start()

    def ask(self, command: Command) -> None:
        """Carry out a command between two steps."""
        self._inbox.put(command)

    def fault(self, stuck_after: float) -> str | None:
        """Why the engine makes no progress or cannot be trusted, if so."""
        since = self._since
        if self._fault:
            return self._fault
        if not self._thread.is_alive():
            return "the engine's thread has ended"
        if since is not None and (waited := time.monotonic() - since) > stuck_after:
            return f"the engine has finished no step for {waited:.0f} seconds"
        return None

    def stop(self, patience: float) -> bool:
        """End the thread, and all requests; False if it does not react."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(patience)
        return not self._thread.is_alive()

    def add(self, requests: Sequence[Request], reply: Callable[[Exception | None], None]) -> None:
        """Queue all of the requests, or none."""
        try:
            for request in requests:
                self._engine.add(request)
                self._live[request.id] = request.sampling.n
        except Exception as error:  # the engine's refusal, or a bug: either way this client's alone
            reply(error)
            self.abort([request.id for request in requests])
        else:
            reply(None)

    def abort(self, requests: Sequence[str]) -> None:
        for request in requests:
            if self._live.pop(request, None):
                self._engine.abort(request)

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    self._step()
            self._finish()
        except BaseException as error:
            self._fault = self._fault or f"the engine's thread has ended: {error!r}"
            log.critical("the engine's thread has ended", exc_info=True)
        finally:
            self._listener.on_end()

    def _obey(self) -> bool:
        """Carry out all commands that are there; without work, sleep until there is one. False: the end."""
        command = self._wait() if not self._engine.has_work else _nothing
        while command is not None:
            self._carry_out(command)
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return True
        return False

    def _carry_out(self, command: Command) -> None:
        self._checked = False
        try:
            command()
        except Exception as error:
            self._fault = f"the engine failed outside of a step: {error!r}"
            log.exception("the engine failed outside of a step")

    def _wait(self) -> Command | None:
        self._since = None
        command = self._settle() if not self._checked else self._inbox.get()
        self._since = time.monotonic()
        return command

    def _settle(self) -> Command | None:
        try:
            return self._inbox.get(timeout=_SETTLE)
        except queue.Empty:
            self._check()
            return self._inbox.get()

    def _check(self) -> None:
        self._checked = True
        try:
            self._engine.check()
            self._fault = None
        except Exception as error:
            self._fault = f"the engine's accounts are wrong: {error}"
            log.critical("the engine's accounts are wrong; restart the server", exc_info=True)

    def _step(self) -> None:
        steps = self._engine.stats.steps
        self._since = self._since or time.monotonic()
        try:
            events = self._engine.step()
        except Exception as error:
            log.exception("the engine failed outside of a request; all requests end with an error")
            events = self._recover(f"internal error: {error}")
        else:
            self._failures = 0
        if events or self._engine.stats.steps != steps:
            self._since = time.monotonic()
            self._tell(events)
        else:
            time.sleep(_PAUSE)

    def _recover(self, message: str) -> list[TokenOut]:
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            raise RuntimeError(f"{_MAX_FAILURES} steps in a row failed, the last with {message}")
        events = [TokenOut(request, 0, None, finish="error", error=message) for request in self._live]
        self.abort(list(self._live))
        return events

    def _tell(self, events: list[TokenOut]) -> None:
        for event in events:
            if event.finish and event.request in self._live:
                self._live[event.request] -= 1
                if not self._live[event.request]:
                    del self._live[event.request]
        if events:
            self._listener.on_events(events)

    def _finish(self) -> None:
        """Leave the engine empty, as it was found."""
        self.abort(list(self._live))
        if self._engine.has_work:
            self._tell(self._engine.step())


def _nothing() -> None:
    pass
