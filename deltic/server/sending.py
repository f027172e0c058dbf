"""Sends large answers in pieces, and bounds how much of them waits for clients to read.

asyncio copies a body that is written as a whole twice on the event loop: 100 MiB would stall it for half a second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import Message, Scope, Send

log = logging.getLogger("deltic")

PIECE: Final = 64 << 10
"""Bytes that are written in a turn of the event loop."""
DROP: Final = "drop_connection"
"""Key in a scope's state of the function that closes the connection at once, if the server has one."""


@dataclass(eq=False, slots=True)
class _Unsent:
    """A body that is being sent. held: bytes that are not sent yet."""

    drop: Callable[[], None]
    held: int


class Outbox:
    """Sends the large bodies of a server. most_mib: bound of the unsent bytes. held: unsent bytes."""

    def __init__(self, most_mib: int) -> None:
        self.held = 0
        self._most_mib = most_mib
        self._sending: dict[_Unsent, None] = {}  # the oldest first

    async def send(self, scope: Scope, send: Send, message: Message) -> None:
        """Sends an ASGI message; a large body goes out in pieces."""
        body = message.get("body", b"")
        if len(body) <= PIECE:
            await send(message)
            return
        unsent = _Unsent(scope.get("state", {}).get(DROP, lambda: None), 0)
        self._hold(unsent, len(body))
        try:
            for start in range(0, len(body), PIECE):
                end = start + PIECE
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": body[start:end], "more_body": more})
                self._release(unsent, min(PIECE, unsent.held))
                await asyncio.sleep(0)  # a client that reads as fast as this writes would keep the loop
        finally:
            self._give_up(unsent)

    def _hold(self, unsent: _Unsent, size: int) -> None:
        """Counts a body. If all bodies take too much, the connections of the oldest are closed."""
        self.held += size
        unsent.held = size
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
        self.held -= size
        unsent.held -= size
