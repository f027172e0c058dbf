"""The state-aware router as a request router of Ray Serve. Every process with a handle has its own router."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deltic.cluster.boundaries import Boundaries
from deltic.cluster.replica import unpacked
from deltic.cluster.router import MOST_KEYS, RoutedRequest, StateRouter

_MOST_CHOSEN = 10_000
"""Maximum number of chosen requests that are remembered: Serve does not report requests that are cancelled then."""


class StateAwareRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica with the best balance of seconds saved by its states and seconds of its queue."""

    queue_len_response_deadline_s = 1.0
    """Timeout in seconds for the chosen replica to accept a request. Serve's 0.1 is short for a busy machine, and
    another replica would have to compute the prompt."""
    max_queue_len_response_deadline_s = 4.0

    def initialize_state(self, most_keys: int = MOST_KEYS) -> None:
        """most_keys: maximum number of known boundaries; each takes about 160 bytes."""
        self._states = StateRouter(most_keys)
        self._reported: dict[str, float] = {}
        self._by_name: dict[str, RunningReplica] = {}
        self._chosen: dict[str, tuple[RoutedRequest, Boundaries]] = {}
        self._running: dict[str, RoutedRequest] = {}

    async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                              pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
        boundaries = _boundaries(pending_request)
        chosen = self._states.choose(boundaries)
        best = self._by_name.get(chosen.replica.name) if chosen else None
        if chosen is None or best is None:
            return [candidate_replicas]
        if pending_request is not None:
            self._chosen[pending_request.metadata.internal_request_id] = chosen, boundaries
            while len(self._chosen) > _MOST_CHOSEN:
                del self._chosen[next(iter(self._chosen))]
        others = [self._by_name[name] for name in self._states.least_busy() if name in self._by_name]
        return [[best], [replica for replica in others if replica is not best]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        id = pending_request.metadata.internal_request_id
        chosen, boundaries = self._chosen.pop(id, (None, None))
        if chosen and boundaries:
            request = self._running[id] = self._states.redirect(chosen, replica_id.to_full_id_str())
            self._states.sent(request, boundaries)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        request = self._running.pop(internal_request_id, None)
        if request:
            self._states.ended(request)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas start, end or report."""
        super().update_replicas(replicas)
        self._by_name = {replica.replica_id.to_full_id_str(): replica for replica in replicas}
        self._states.set_replicas([*self._by_name])
        for name, replica in self._by_name.items():
            stats = replica.routing_stats or {}
            if "time" in stats and self._reported.get(name) != stats["time"]:
                self._reported[name] = stats["time"]
                self._states.report(name, unpacked(stats))
        for name in self._reported.keys() - self._states.replicas.keys():
            del self._reported[name]


def _boundaries(pending: PendingRequest | None) -> Boundaries:
    """Returns the boundaries among the arguments of `Replica.request`."""
    found = [each for each in pending.args if isinstance(each, Boundaries)] if pending else []
    return found[0] if found else Boundaries()
