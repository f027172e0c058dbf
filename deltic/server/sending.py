"""Large answers: sent in pieces, and bounded together while their clients read them.

A body that is handed to asyncio as a whole is copied twice on the event loop: 100 MiB stall everything else for half a
second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message, Scope, Send

log = logging.getLogger("deltic")

PIECE = 64 << 10  # bytes written in a turn of the event loop
DROP = "drop_connection"
"""What closes the connection of a request at once, in its scope's state, where the server offers it."""


@dataclass(eq=False, slots=True)
class _Unsent:
    """A body on its way out. held: bytes that are not sent yet."""

    drop: Callable[[], None]
    held: int


class Outbox:
    """Sends the large bodies of a server's answers. most_mib: how much of them may wait to be read. held: bytes that
    do."""

    def __init__(self, most_mib: int) -> None:
        self._most_mib, self.held = most_mib, 0
        self._sending: dict[_Unsent, None] = {}  # in the order in which they began

    async def send(self, scope: Scope, send: Send, message: Message) -> None:
        """Send a message of ASGI, a body piece by piece."""
        body = message.get("body", b"")
        if len(body) <= PIECE:
            await send(message)
            return
        unsent = _Unsent(scope.get("state", {}).get(DROP, lambda: None), 0)
        self._hold(unsent, len(body))
        try:
            for at in range(0, len(body), PIECE):
                end = at + PIECE
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": body[at:end], "more_body": more})
                self._release(unsent, min(PIECE, unsent.held))
                await asyncio.sleep(0)  # a client that reads as fast as this writes would keep the loop
        finally:
            self._give_up(unsent)

    def _hold(self, unsent: _Unsent, size: int) -> None:
        """Count a body in. If all are too much, those go first that have been on their way for longest."""
        self.held, unsent.held = self.held + size, size
        while self._sending and self.held > self._most_mib << 20:
            oldest = next(iter(self._sending))
            log.warning("answers that clients have not read take more than %d MiB (max_unsent_mib): the connection of "
                        "the oldest is closed", self._most_mib)
            self._give_up(oldest)
            oldest.drop()
        self._sending[unsent] = None

    def _give_up(self, unsent: _Unsent) -> None:
        self._sending.pop(unsent, None)
        self._release(unsent, unsent.held)

    def _release(self, unsent: _Unsent, size: int) -> None:
        self.held, unsent.held = self.held - size, unsent.held - size
