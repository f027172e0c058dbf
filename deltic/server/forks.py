"""Branches: answers that requests fork, and the sessions that agents name in headers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from deltic.chat.history import AnswerEnd
from deltic.chat.history_store import OwnedEntries
from deltic.config import Limits
from deltic.errors import RequestError, show
from deltic.params import Lineage
from deltic.server.errors import ProblemError

_MOST_CHOICES: Final = 128, 8
"""Limits on kept choices: of one response, and on average for each of `max_stored_responses`."""

_SESSIONS: Final = (b"thread-id", b"x-session-affinity", b"x-session-id", b"session-id", b"session_id")
_PARENTS: Final = (b"x-codex-parent-thread-id", b"x-parent-session-id")
"""Headers of Codex, OpenCode and others: the id of a session, and the id of the session that started it."""
_CLAUDE: Final = (b"x-claude-code-session-id", b"x-claude-code-agent-id", b"x-claude-code-parent-agent-id")
"""Headers of Claude Code. The main agent sends no agent id."""


class ForkStore:
    """Keeps the ends of the answers of the most recently used responses, separately for each owner. The tokens of the
    answers are in the answer records of the model. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._most = limits.max_stored_responses
        self._kept: OwnedEntries[tuple[str, dict[int, AnswerEnd]]] = OwnedEntries(
            max(_MOST_CHOICES[0], _MOST_CHOICES[1] * self._most), self._most)
        self._lock = threading.Lock()

    def put(self, id: str, model: str, owner: str | None, choice: int, end: AnswerEnd) -> None:
        """Adds a choice of a response."""
        with self._lock:
            _, ends = self._kept.get(owner, id) or (model, {})
            self._kept.put(owner, id, (model, {**ends, choice: end}), len(ends) + 1)

    def find(self, fork: Any, model: str, owner: str | None) -> AnswerEnd:
        """Returns the answer end that `fork_from` names: the id of a response, or an object with id and choice."""
        given = {"id": fork} if isinstance(fork, str) else fork
        if not isinstance(given, dict) or not isinstance(given.get("id"), str) or given.keys() - {"id", "choice"}:
            raise RequestError(f"fork_from must be the id of a response, or an object with id and choice, not "
                               f"{show(fork)}", "fork_from")
        id, choice = given["id"], given.get("choice", 0)
        if type(choice) is not int:
            raise RequestError(f"fork_from.choice must be the index of a choice, not {show(choice)}",
                               "fork_from.choice")
        with self._lock:
            found = self._kept.get(owner, id)
        if found is None:
            raise ProblemError(404, f"the response {show(id)} is not kept: it is unknown, or {self._most} others were "
                               "used since (max_stored_responses), or its answer was cut, or store was false: send the "
                               "whole conversation in messages", "fork_from", "response_not_found")
        if found[0] != model:
            raise RequestError(f"the response {show(id)} is of the model {show(found[0])}: name it in model, or send "
                               "the whole conversation in messages", "fork_from")
        if choice not in found[1]:
            raise RequestError(f"the response {show(id)} has no choice {show(choice)} that can be forked",
                               "fork_from.choice")
        return found[1][choice]


def lineage_of(headers: Mapping[bytes, bytes]) -> Lineage:
    """Returns the session that a client names, and the session that it branches off."""
    session, agent, parent = (headers.get(name) for name in _CLAUDE)
    if session:
        return Lineage(_digest(session, agent), _digest(session, parent) if agent else "")
    session, parent = (next(filter(None, map(headers.get, names)), b"") for names in (_SESSIONS, _PARENTS))
    return Lineage(_digest(session), _digest(parent) if parent else "") if session else Lineage()


def _digest(*parts: bytes | None) -> str:
    return blake2b(b"\0".join(part or b"" for part in parts), digest_size=16).hexdigest()
