"""The state-aware router: boundaries of requests, what a replica reports of its states, and which replica is chosen."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from test_cache_machine import toy_cache, write_state

from deltic.cache.manager import HybridCache
from deltic.cache.offload.types import PrefixHash
from deltic.cluster.boundaries import Boundaries, boundaries_of, response_key
from deltic.cluster.reachable import LoadReport, ReachableReport, ReachableStates
from deltic.cluster.router import WORTH, KeyIndex, StateRouter

SPEED = LoadReport(character=0.001, answer=0.5)


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system", *("user", "assistant") * len(contents))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents)], **more}


def shared(first: dict[str, Any], second: dict[str, Any], **headers: str) -> int:
    keys = boundaries_of(first).keys, boundaries_of(second, headers).keys
    return len(set(keys[0]) & set(keys[1]))


# Boundaries


def test_the_next_turn_of_a_conversation_passes_all_boundaries_of_this_one() -> None:
    one, two = chat("be brief", "hello"), chat("be brief", "hello", "hi", "who are you?")
    assert boundaries_of(two).keys[:2] == boundaries_of(one).keys
    assert boundaries_of(two).sizes[:2] == boundaries_of(one).sizes
    assert [*boundaries_of(two).sizes] == sorted(boundaries_of(two).sizes)


def test_requests_share_boundaries_up_to_where_they_part() -> None:
    long = "word " * 5000
    assert shared(chat("be brief", "hello"), chat("be brief", "bye")) == 1
    assert shared(chat("be brief", "hello"), chat("be long", "hello")) == 0
    assert shared(chat("s", long + "one?"), chat("s", long + "two?")) == 1 + len(long) // 2048
    assert shared({"prompt": long + "a"}, {"prompt": long + "b"}) == len(long) // 2048
    assert shared({"prompt": [*range(5000), 1]}, {"prompt": [*range(5000), 2]}) == 5000 // 256
    assert shared(chat("s", "hello", tools=[{"a": 1, "b": 2}]), chat("s", "hello", tools=[{"b": 2, "a": 1}])) == 3
    assert shared(chat("s", "hello", tools=[{"a": 1}]), chat("s", "hello", tools=[{"a": 2}])) == 0


def test_what_separates_prefixes_in_the_cache_separates_boundaries() -> None:
    assert shared(chat("s", "hello"), chat("s", "hello"), authorization="Bearer one") == 0
    assert shared(chat("s", "hello"), chat("s", "hello", cache_salt="other")) == 0
    assert shared(chat("s", "hello", temperature=0.1), chat("s", "hello", stream=True)) == 2


def test_a_stored_response_is_a_boundary() -> None:
    following = boundaries_of({"previous_response_id": "resp_1", "input": "more"}, {"authorization": "Bearer x"})
    assert following.keys[0] == response_key("resp_1") and len(following.keys) == 2
    assert boundaries_of({"previous_response_id": "resp_1", "input": "more"}).keys == following.keys


@pytest.mark.parametrize("body", [None, 3, [], {}, {"messages": None}, {"messages": 3}, {"messages": [None, 3, [[]]]},
                                  {"input": {"a": "\ud800"}}, {"prompt": [[1, 2], [3]]}, {"prompt": []},
                                  {"previous_response_id": 7}, {"fork_from": 7}, {"fork_from": {"id": [7]}},
                                  {"messages": [{"content": [{"text": "\ud800"}]}]}])
def test_any_json_has_boundaries(body: Any) -> None:
    found = boundaries_of(body)
    assert len(found.keys) == len(found.sizes)


def test_the_boundaries_of_a_huge_request_are_bounded() -> None:
    """A hostile request costs the router no more than others: the first and the last boundaries are kept."""
    turns = [str(number) for number in range(5000)]
    found, following = boundaries_of(chat(*turns)), boundaries_of(chat(*turns, "more"))
    assert len(found.keys) == 256
    assert len(set(found.keys) & set(following.keys)) == 255 and found.keys[-1] == following.keys[-2]


# Reports


class Tier:
    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.refreshed = False

    def holds(self, key: str) -> bool:
        return key in self.keys

    def refresh(self) -> bool:
        self.refreshed = True
        return False


def conversation(cache: HybridCache, prompt: Sequence[int], answer: Sequence[int], system: int) -> array[int]:
    """Runs a request that keeps its system prompt's state and its end, with the toy cache of the cache's tests."""
    sequence = cache.admit(prompt)
    assert sequence
    for stop in (system, len(prompt) + len(answer) - 1):
        if stop <= sequence.done:
            continue
        sequence.keys[:] = [*prompt, *answer]
        cache.reserve(sequence, stop - sequence.done)
        slot = cache.reserve_checkpoint(sequence, stop)
        assert slot is not None
        write_state(cache, slot, stop)
        cache.commit(sequence, stop - sequence.done)
        cache.commit_checkpoints(sequence)
    cache.release(sequence, keep=False)
    return array("q", [*prompt, *answer])


def seconds_of(report: ReachableReport) -> dict[int, float]:
    return dict(zip(report.keys, report.seconds, strict=True))


def reachable(tiers: Sequence[Tier] = (), most: int = 4096) -> tuple[HybridCache, ReachableStates]:
    cache = toy_cache(pages=40, slots=8)
    return cache, ReachableStates(cache.tree, tiers, most)


def test_a_boundary_saves_what_its_deepest_state_saves() -> None:
    """A prefix of 200 tokens with a state at 96 saves 96."""
    cache, states = reachable()
    tokens = conversation(cache, range(200), [7] * 5, system=96)
    states.learn(Boundaries((1, 2, 3), (480, 500, 1000)), tokens, 200)
    found = seconds_of(states.report(SPEED, 0.01))
    assert found == pytest.approx({1: 0.96, 2: 0.96, 3: 2.04})
    assert seconds_of(states.report(SPEED, 0.01)) == pytest.approx(found)


def test_the_end_of_the_system_prompt_is_known_exactly() -> None:
    """A boundary's characters only estimate its tokens: the system prompt's may be much shorter than others."""
    cache, states = reachable()
    tokens = conversation(cache, range(200), [7] * 5, system=96)
    states.learn(Boundaries((1, 2, 3), (250, 300, 1000), 300), tokens, 200, system=96)
    assert seconds_of(states.report(SPEED, 0.01)) == pytest.approx({2: 0.96, 3: 2.04})
    assert boundaries_of(chat("be brief", "hello")).system == 8
    assert boundaries_of({"system": "be brief", "messages": [{"role": "user", "content": "hello"}]}).system == 12


def test_evicted_states_are_reported_as_gone_and_tiers_count() -> None:
    tier = Tier()
    cache, states = reachable([tier])
    tokens = conversation(cache, range(200), [7] * 5, system=96)
    states.learn(Boundaries((1, 3), (480, 1000)), tokens, 200)
    before = states.report(SPEED, 0.01)
    tier.keys.add(PrefixHash(tokens).key(96))
    cache.clear()
    after = seconds_of(states.report(SPEED, 0.01))
    assert seconds_of(before)[3] == pytest.approx(2.04)
    assert after == pytest.approx({1: 0.96, 3: 0.864}), "changes that do not matter are not reported"
    tier.keys.clear()
    assert seconds_of(states.report(SPEED, 0.01)) == {1: 0.0, 3: 0.0}


def test_a_conversation_of_another_replica_is_noticed() -> None:
    tier = Tier()
    cache, states = reachable([tier])
    tokens = conversation(cache, range(200), [7] * 5, system=96)
    first = boundaries_of(chat("system " * 20, "question"))
    second = boundaries_of(chat("system " * 20, "question", "answer", "another"))
    assert states.knows(first) and not states.knows(second)
    states.learn(first, tokens, 200, 96)
    assert states.knows(second)
    states.report(SPEED, 0.01)
    assert states.knows(second)
    assert not states.refresh() and tier.refreshed


def test_a_stored_response_stands_for_the_end_of_its_request() -> None:
    cache, states = reachable()
    tokens = conversation(cache, range(200), [7] * 5, system=96)
    boundaries = Boundaries((1, 3), (480, 1000))
    states.learn(boundaries, tokens, 200)
    states.learn_end(99, boundaries)
    assert seconds_of(states.report(SPEED, 0.01))[99] == pytest.approx(2.04)


def test_reports_are_bounded_and_a_router_that_missed_some_catches_up() -> None:
    cache, states = reachable(most=2000)
    tokens = conversation(cache, range(200), [7] * 5, system=96)
    for start in range(0, 3000, 100):
        states.learn(Boundaries(tuple(range(start + 1, start + 101)), (1000,) * 100), tokens, 200)
    router = StateRouter()
    router.set_replicas(["a"])
    reports = [states.report(SPEED, 0.01) for _ in range(12)]
    assert max(len(report.keys) for report in reports) <= 1024
    for report in reports[1:]:
        router.report("a", report)
    assert all(router.index.get(key) for key in range(1001, 3001))
    assert not any(router.index.get(key) for key in range(1, 1001))


# The router


def report(held: dict[int, float], queue: float = 0.0) -> ReachableReport:
    return ReachableReport(LoadReport(queue, 0.001, 0.5), 0, len(held), array("Q", held), array("f", held.values()))


def router_of(**held: dict[int, float]) -> StateRouter:
    router = StateRouter()
    router.set_replicas([*held])
    for name, keys in held.items():
        router.report(name, report(keys))
    return router


def chosen(router: StateRouter, boundaries: Boundaries) -> str:
    request = router.choose(boundaries)
    assert request
    return request.replica.name


TURN = Boundaries((1, 2, 3), (1000, 2000, 2100))


def test_states_count_and_not_matching_prefixes() -> None:
    """b has seen more of the prompt, but its deepest state is shallower."""
    assert chosen(router_of(a={1: 0.9}, b={1: 0.1, 2: 0.3}, c={}), TURN) == "a"
    assert chosen(router_of(a={2: 0.3}, b={2: 1.9}, c={}), TURN) == "b"


def test_seconds_saved_are_weighed_against_seconds_of_queue() -> None:
    router = router_of(a={2: 1.0}, b={})
    assert chosen(router, TURN) == "a"
    router.report("a", report({2: 1.0}, queue=0.9 * WORTH))
    assert chosen(router, TURN) == "a"
    router.report("a", report({2: 1.0}, queue=1.1 * WORTH))
    assert chosen(router, TURN) == "b"


def test_what_was_sent_counts_until_it_ends() -> None:
    router = router_of(a={}, b={})
    first = router.choose(TURN)
    assert first
    router.sent(first, TURN)
    assert first.replica.queue == pytest.approx(2.6)
    other = Boundaries((7,), (2000,))
    assert chosen(router, other) != first.replica.name
    router.report(first.replica.name, report({}, queue=2.0))
    router.ended(first)
    assert first.replica.queue == 0.0


def test_a_router_assumes_that_a_replica_keeps_what_it_was_sent() -> None:
    router = router_of(a={}, b={}, c={})
    first = router.choose(TURN)
    assert first
    router.sent(first, TURN)
    router.ended(first)
    for _ in range(20):
        assert chosen(router, Boundaries((*TURN.keys, 4), (*TURN.sizes, 2200))) == first.replica.name
    router.report(first.replica.name, report({1: 0.0, 2: 0.0, 3: 0.0}))
    assert chosen(router, TURN) != first.replica.name


def test_equal_prefixes_spread_once_several_replicas_hold_them() -> None:
    router = router_of(**{f"r{number}": {1: 3.0} if number < 5 else {} for number in range(10)})
    counts = dict.fromkeys(router.replicas, 0)
    for key in range(100, 200):
        boundaries = Boundaries((1, key), (3000, 3100))
        request = router.choose(boundaries)
        assert request
        router.sent(request, boundaries)
        router.ended(request)
        counts[request.replica.name] += 1
    assert max(counts[f"r{number}"] for number in range(5)) <= 26
    assert sum(counts[f"r{number}"] for number in range(5)) >= 90


def test_what_is_new_spreads_over_idle_replicas() -> None:
    router = router_of(**{f"r{number}": {} for number in range(10)})
    for key in range(100, 200):
        boundaries = Boundaries((key,), (1000,))
        request = router.choose(boundaries)
        assert request
        router.sent(request, boundaries)
        router.ended(request)
    assert max(replica.total for replica in router.replicas.values()) == pytest.approx(15.0)


def test_replicas_come_and_go() -> None:
    router = router_of(a={2: 1.9}, b={})
    request = router.choose(TURN)
    assert request and request.replica.name == "a"
    router.sent(request, TURN)
    router.set_replicas(["b", "c"])
    router.ended(request)
    router.report("a", report({2: 1.9}))
    assert chosen(router, TURN) in ("b", "c")
    router.set_replicas([])
    assert router.choose(TURN) is None
    router.set_replicas(["a"])
    assert chosen(router, TURN) == "a" and not router.replicas["a"].queue


def test_a_late_replica_is_not_flooded() -> None:
    router = router_of(a={}, b={})
    for key in range(100, 300):
        boundaries = Boundaries((key,), (9500,))
        request = router.choose(boundaries)
        assert request
        router.sent(request, boundaries)
        router.ended(request)
    router.set_replicas(["a", "b", "c"])
    counts = {"a": 0, "b": 0, "c": 0}
    for key in range(300, 330):
        boundaries = Boundaries((key,), (1000,))
        request = router.choose(boundaries)
        assert request
        router.sent(request, boundaries)
        counts[request.replica.name] += 1
    assert max(counts.values()) <= 11


def test_a_redirected_request_counts_for_the_replica_that_got_it() -> None:
    router = router_of(a={2: 1.9}, b={})
    request = router.choose(TURN)
    assert request
    other = router.redirect(request, "b")
    assert other.replica.name == "b" and other.cost == pytest.approx(2.6)
    assert router.redirect(request, "a") is request and router.redirect(request, "gone") is request


def test_the_index_is_bounded_and_keeps_what_is_used() -> None:
    index, random = KeyIndex(1000), Random(1)
    for _ in range(10_000):
        index.put(random.getrandbits(64), random.randrange(50), 1.0)
        index.put(7, 3, 1.0)
    assert len(index) <= 1000
    assert index.get(7) == (3, 1.0)
    index.put(7, 4, 2.0)
    index.drop(7, 3)
    index.drop(7, 4)
    assert index.get(7) is None


def test_the_router_agrees_with_brute_force() -> None:
    """With few holders and replicas all are compared, so that the best score is found."""
    random = Random(3)
    for _ in range(200):
        names = [f"r{number}" for number in range(4)]
        held = {name: {key: random.random() for key in (1, 2, 3) if random.random() < 0.5} for name in names}
        queues = {name: random.random() * WORTH for name in names}
        router = StateRouter()
        router.set_replicas(names)
        for name in names:
            router.report(name, report(held[name], queues[name]))
        scores = {name: WORTH * held[name].get(max(held[name], default=0), 0.0) - queues[name] for name in names}
        assert scores[chosen(router, TURN)] == pytest.approx(max(scores.values()))

