"""Which requests give up their places, when the room for waiting ones is full and another client wants one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HeldRequest(Protocol):
    """A request that runs or waits."""

    @property
    def client(self) -> str:
        """The client whose share it takes."""

    @property
    def waiting(self) -> int:
        """Answers that have no token yet."""

    @property
    def begun(self) -> int:
        """Answers that have one, and are not finished."""


Request = TypeVar("Request", bound=HeldRequest)


def to_give_up(held: Sequence[tuple[Request, int]], client: str, size: int, most: int) -> list[Request] | None:
    """The requests to end so that one more of a client fits; None if it has to be refused itself.

    held: requests in the order in which they came, each with its size: its answers, or the tokens of its prompts. All
    sizes together may be `most`; one that is larger fits where there is nothing else. The client that holds most gives
    up its newest request that waits, one that has begun only if it has no other; but never so that the newcomer would
    hold as much as that client does.
    """
    total = sum(taken for _, taken in held)
    if not total or total + size <= most:
        return []
    clients = Counter[str]()
    for request, taken in held:
        clients[request.client] += taken
    own, going = clients.pop(client, 0) + size, list[Request]()
    sizes = {id(request): taken for request, taken in held}
    while total + size > most:
        largest = max(clients, key=clients.__getitem__, default=None)
        if largest is None or clients[largest] <= own:
            return None
        candidates = [request for request, taken in held if request.client == largest and request.waiting and taken
                      and request not in going]
        if not candidates:  # all that it holds runs
            del clients[largest]
            continue
        newest = max(range(len(candidates)), key=lambda index: (not candidates[index].begun, index))
        going.append(candidates[newest])
        clients[largest] -= sizes[id(candidates[newest])]
        total -= sizes[id(candidates[newest])]
    return going
