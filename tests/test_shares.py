"""Who gives up a place when the room is full: the client that holds most, unless the newcomer would hold as much."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from deltic.engine.policy import to_give_up


@dataclass(eq=False)
class One:
    """A request."""

    client: str
    waiting: int
    begun: int = 0


def sized(*requests: One) -> list[tuple[One, int]]:
    return [(request, request.waiting + request.begun) for request in requests]


def test_a_single_client_may_fill_the_queue() -> None:
    held = sized(*(One("a", 1) for _ in range(10)))
    assert to_give_up(held[:9], "a", 1, 10) == []
    assert to_give_up(held, "a", 1, 10) is None


def test_the_newest_waiting_request_is_given_up() -> None:
    running, old, new = One("a", 0, 4), One("a", 3), One("a", 3)
    assert to_give_up(sized(running, old, new), "b", 1, 10) == [new]
    assert to_give_up(sized(running, new, old), "b", 1, 10) == [old]


def test_running_requests_are_never_given_up() -> None:
    assert to_give_up(sized(One("a", 0, 10)), "b", 1, 10) is None


def test_requests_that_have_begun_are_given_up_last() -> None:
    waiting, begun = One("a", 2), One("a", 7, 1)
    assert to_give_up(sized(waiting, begun), "b", 1, 10) == [waiting]
    assert to_give_up(sized(begun), "b", 3, 10) == [begun]


def test_an_oversized_request_is_accepted_alone() -> None:
    assert to_give_up([], "a", 100, 10) == []
    assert to_give_up(sized(One("b", 1)), "a", 100, 10) is None


CLIENTS = "abcd"
REQUESTS = st.lists(st.builds(One, st.sampled_from(CLIENTS), st.integers(0, 6), st.integers(0, 3)), max_size=20)


@given(REQUESTS, st.sampled_from(CLIENTS), st.integers(1, 8))
def test_a_new_client_never_holds_more_than_the_others(requests: list[One], client: str, size: int) -> None:
    held = sized(*requests)
    most = max(sum(taken for _, taken in held), 1)
    going = to_give_up(held, client, size, most)
    before = Counter[str]()
    for request, taken in held:
        before[request.client] += taken
    after = Counter(before)
    after[client] += size
    if going is None:
        return
    assert len({id(request) for request in going}) == len(going)
    for request in going:
        assert request.client != client and request.waiting
        assert after[request.client] > before[client] + size, "it holds more than the newcomer when it gives up one"
        after[request.client] -= request.waiting + request.begun
    if before:
        assert sum(after.values()) <= most or not any(taken for _, taken in held)


@settings(max_examples=40)
@given(REQUESTS, st.integers(1, 3))
def test_a_small_request_displaces_a_large_waiting_one(requests: list[One], size: int) -> None:
    requests = [*requests, One("flood", 100)]
    held = sized(*requests)
    most = sum(taken for _, taken in held)
    assert to_give_up(held, "newcomer", size, most)
