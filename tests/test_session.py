"""`Session`: its answers, its guards, and that an error leaves it where it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Watch,
    numbers,
    odd_runtime,
    odd_shape,
    same_logits,
    session_over,
    stepwise_logits,
    transformers_model,
)
from torch import Tensor

from deltic import DelticError, RandomModel, Session
from deltic.errors import ConfigError, DegenerateError, ModelError, RequestError, UnavailableError
from deltic.ops.types import Batch

TOKENS = numbers(0, 90, 509)


def session(**limits: Any) -> Session:
    return session_over(odd_runtime(), **{"batch": 4, "budget": 16, "context": 128, **limits})


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """The logits after each of TOKENS, one token at a time."""
    return stepwise_logits(session(), TOKENS)


def close(found: Tensor, wanted: Tensor) -> None:
    same_logits(wanted.reshape(-1, wanted.shape[-1]), found.reshape(-1, found.shape[-1]), 1e-4)


# Answers


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 32, 33, 90])
def test_prefill_of_any_length_gives_the_last_logits(count: int, expected: Tensor) -> None:
    """Whether or not the length is a multiple of a page or of the budget."""
    one = session()
    logits = one.prefill(TOKENS[:count])
    assert logits.shape == (one.vocab_size,) and logits.dtype == torch.float32 and one.position == count
    close(logits, expected[count - 1])


@pytest.mark.parametrize("count", [1, 16, 17, 90])
def test_all_logits_are_those_of_every_step(count: int, expected: Tensor) -> None:
    one = session()
    logits = one.prefill(TOKENS[:count], all_logits=True)
    assert logits.shape == (count, one.vocab_size)
    close(logits, expected[:count])
    assert one.position == count


def test_prefill_continues_where_it_is(expected: Tensor) -> None:
    one = session()
    one.prefill(TOKENS[:7])
    close(one.prefill(TOKENS[7:50], all_logits=True), expected[7:50])
    one.commit(TOKENS[50:70])
    assert one.position == 70
    close(one.step(TOKENS[70]), expected[70])


def test_results_are_not_overwritten_by_later_steps() -> None:
    one = session()
    first = one.step(TOKENS[0])
    kept = first.clone()
    one.step(TOKENS[1])
    assert torch.equal(first, kept)


def test_tokens_may_come_as_tensors(expected: Tensor) -> None:
    close(session().prefill(torch.tensor(TOKENS[:9])), expected[8])  # type: ignore[arg-type]


# Snapshots


def test_restore_returns_as_often_as_wanted(expected: Tensor) -> None:
    one = session()
    one.prefill(TOKENS[:20])
    snapshot = one.snapshot()
    for other in (1, 40):
        one.prefill(numbers(other, other, 509))
        one.restore(snapshot)
        assert one.position == 20
    close(one.prefill(TOKENS[20:60], all_logits=True), expected[20:60])
    one.restore(snapshot)
    close(one.step(TOKENS[20]), expected[20])


def test_restoring_nothing_is_the_start(expected: Tensor) -> None:
    one = session()
    snapshot = one.snapshot()
    for back in (lambda: one.restore(None), one.reset, lambda: one.restore(snapshot)):
        one.prefill(numbers(3, 30, 509))
        back()
        assert one.position == 0
        close(one.step(TOKENS[0]), expected[0])


def test_snapshots_outlive_what_comes_after_them(expected: Tensor) -> None:
    one = session()
    one.prefill(TOKENS[:10])
    early = one.snapshot()
    one.prefill(TOKENS[10:40])
    late = one.snapshot()
    one.restore(early)
    close(one.step(TOKENS[10]), expected[10])
    one.restore(late)
    close(one.step(TOKENS[40]), expected[40])
    one.drop(early)
    one.restore(late)
    close(one.step(TOKENS[40]), expected[40])


def test_no_snapshot_left_is_an_error_and_dropping_helps() -> None:
    one = session(batch=2)
    one.prefill(TOKENS[:5])
    snapshots = [one.snapshot()]
    with pytest.raises(RequestError, match="snapshot"):
        for _ in range(9):
            snapshots.append(one.snapshot())
    assert one.position == 5
    one.drop(snapshots.pop())
    snapshots.append(one.snapshot())
    one.runtime.cache.check()


def test_everything_can_be_given_back() -> None:
    one = session()
    free = one.runtime.cache.slots.free
    one.prefill(TOKENS[:40])
    snapshot = one.snapshot()
    one.prefill(TOKENS[40:90])
    one.drop(snapshot)
    one.reset()
    cache = one.runtime.cache
    cache.check()
    assert cache.pages.free == cache.pages.size and cache.slots.free == free


@pytest.mark.parametrize("use", ["drop", "restore"])
def test_l8_a_dropped_snapshot_is_refused(use: str) -> None:
    """Its slot may hold another snapshot by now."""
    one = session()
    one.prefill(TOKENS[:20])
    gone = one.snapshot()
    one.drop(gone)
    one.step(1)
    kept = one.snapshot()
    with pytest.raises(DelticError, match="snapshot"):
        getattr(one, use)(gone)
    assert one.position == 21
    one.restore(kept)
    one.runtime.cache.check()


def test_l8_a_snapshot_of_another_session_is_refused() -> None:
    one, other = session(), session()
    other.prefill(TOKENS[:20])
    with pytest.raises(DelticError, match="snapshot"):
        one.restore(other.snapshot())
    assert one.position == 0


# Forks


def test_forks_go_on_from_where_they_were_made(expected: Tensor) -> None:
    """Each as if it were alone, in any order, and the first one, too."""
    one = session(batch=6)
    one.prefill(TOKENS[:21])
    first, second = one.fork(2)
    first.prefill(numbers(3, 30, 509))
    again = second.fork()
    close(one.prefill(TOKENS[21:60], all_logits=True), expected[21:60])
    close(second.step(TOKENS[21]), expected[21])
    close(again.prefill(TOKENS[21:50], all_logits=True), expected[21:50])
    close(first.fork().step(TOKENS[0]), first.step(TOKENS[0]))
    assert (one.position, first.position, second.position, again.position) == (60, 52, 22, 50)
    for session_, tokens in ((one, TOKENS[:60]), (first, [*TOKENS[:21], *numbers(3, 30, 509), TOKENS[0]]),
                             (second, TOKENS[:22]), (again, TOKENS[:50])):
        assert list(session_._cache.tokens) == list(tokens)
    one.runtime.cache.check()


def test_a_fork_takes_a_state_and_the_last_page() -> None:
    one = session(batch=8)
    one.prefill(TOKENS[:70])
    cache = one.runtime.cache
    slots, pages = cache.slots.free, cache.pages.free
    forks = one.fork(4)
    assert (slots - cache.slots.free, pages - cache.pages.free) == (4, 4)
    assert all(fork._cache.pages[:4] == one._cache.pages[:4] for fork in forks)
    for fork in forks:
        fork.step(1)
    cache.check()


def test_forks_share_snapshots(expected: Tensor) -> None:
    one = session(batch=6)
    one.prefill(TOKENS[:20])
    kept = one.snapshot()
    fork = one.fork()
    fork.prefill(numbers(3, 30, 509))
    fork.restore(kept)
    close(fork.step(TOKENS[20]), expected[20])
    fork.drop(kept)
    with pytest.raises(RequestError, match="dropped"):
        one.restore(kept)


def test_forks_give_their_memory_back() -> None:
    """At the end of a `with` block, and when they are forgotten."""
    one = session(batch=2)
    one.prefill(TOKENS[:20])
    cache = one.runtime.cache
    free = cache.slots.free
    with pytest.raises(RequestError, match="count must be from 1 to"):
        one.fork(99)
    for _ in range(3 * cache.slots.size):
        one.fork().step(1)
    fork = one.fork()
    assert cache.slots.free == free - 1
    with fork:
        fork.step(1)
    with pytest.raises(UnavailableError, match="closed"):
        fork.step(1)
    one.step(1)
    assert cache.slots.free == free
    cache.check()


def test_no_room_for_forks_is_an_error_and_closing_helps() -> None:
    one = session(batch=2)
    one.prefill(TOKENS[:20])
    free = one.runtime.cache.slots.free
    with pytest.raises(RequestError, match=f"no room for {free + 1} more forks: drop some") as caught:
        one.fork(free + 1)
    assert caught.value.field == "count"
    forks = one.fork(free)
    with pytest.raises(RequestError, match="no room for another fork"):
        one.fork()
    with forks.pop():
        pass
    one.fork().step(TOKENS[20])
    one.runtime.cache.check()
    for count in (0, -1, "2", 1.5):
        with pytest.raises(RequestError, match="count must be"):
            one.fork(count)  # type: ignore[call-overload]


# Guards


@pytest.mark.parametrize("call", ["prefill", "commit"])
@pytest.mark.parametrize(("tokens", "words"), [
    ([], "at least one"), ([509], "outside of the vocabulary"), ([-1], "outside of the vocabulary"),
    ([1] * 129, "exceed the context of 128"), ([1] * 20 + [999], "999 is outside"),
])
def test_l8_bad_tokens_are_refused_before_anything_happens(call: str, tokens: list[int], words: str,
                                                           expected: Tensor) -> None:
    one = session()
    one.prefill(TOKENS[:6])
    with pytest.raises(RequestError, match=words) as caught:
        getattr(one, call)([*tokens])
    assert caught.value.field == "tokens" and one.position == 6
    close(one.step(TOKENS[6]), expected[6])


def test_l8_a_step_beyond_the_context_is_refused() -> None:
    one = session()
    one.prefill([1] * 128)
    assert one.position == one.max_context == 128
    with pytest.raises(RequestError, match="128 \\+ 1 tokens exceed the context"):
        one.step(1)
    one.reset()
    one.step(1)


def test_l8_unknown_options_and_models_are_named() -> None:
    with pytest.raises(ConfigError, match="max_seq"):
        Session(max_seq=5)
    with pytest.raises(ModelError, match="no-such-model"):
        Session("./no-such-model")


def test_a_fork_is_told() -> None:
    """Over torch's ops it would wait for threads that are not there."""
    one = Session(ops=("torch",))
    one.prefill([1] * 40)
    child = os.fork()
    if not child:
        signal.alarm(20)
        code = 1
        try:
            one.prefill([1] * 40)
        except UnavailableError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(("batch", "count"), [(1, 17), (1, 128), (2, 128)])
def test_a_long_prefill_needs_no_more_room_than_its_tokens(batch: int, count: int) -> None:
    """With a pool of exactly one context, from any position."""
    one = session(batch=batch, pages=8)
    one.prefill(numbers(2, count, 509))
    assert one.position == count
    one.reset()
    one.step(5)
    one.prefill(numbers(2, 127, 509))
    assert one.position == 128


def test_a_full_session_can_return_to_its_snapshot() -> None:
    one = session(batch=3, pages=9)
    one.prefill(TOKENS[:5])
    snapshot = one.snapshot()
    one.prefill(numbers(2, 123, 509))
    one.restore(snapshot)
    assert one.position == 5


# Errors leave the session where it was


@dataclass(slots=True)
class Faulty(Watch):
    """Fails in the given runs, after the model has written its states and K/V."""

    fault: Callable[[Tensor], Tensor] = lambda logits: logits
    at: frozenset[int] = frozenset()

    def run(self, batch: Batch) -> Tensor:
        logits = Watch.run(self, batch)
        return self.fault(logits) if len(self.chunks) in self.at else logits


def raising(logits: Tensor) -> Tensor:
    raise RuntimeError("out of luck")


def interrupted(logits: Tensor) -> Tensor:
    raise KeyboardInterrupt


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], type[BaseException]]] = {
    "exception": (raising, RuntimeError), "interrupt": (interrupted, KeyboardInterrupt),
    "nan": (lambda logits: logits * float("nan"), DegenerateError),
    "inf": (lambda logits: logits - float("inf"), DegenerateError),
    "flat": (lambda logits: torch.ones_like(logits), DegenerateError),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("start", [0, 5, 16, 21])
@pytest.mark.parametrize(("count", "chunk"), [(1, 1), (9, 1), (50, 1), (50, 2), (50, 4)])
def test_l3_fault_in_any_chunk_does_not_change_the_session(
        kind: str, start: int, count: int, chunk: int, expected: Tensor) -> None:
    """L1, L3: the same tokens can be fed again, and the answer is as if nothing had happened."""
    fault, error = FAULTS[kind]
    one = session()
    for token in TOKENS[:start]:
        one.step(token)
    free = (one.runtime.cache.pages.free, one.runtime.cache.slots.free)
    one.runtime = Faulty(one.runtime, fault=fault, at=frozenset({chunk}))  # type: ignore[assignment]
    with pytest.raises(error):
        one.prefill(TOKENS[start:start + count])
    assert one.position == start
    one.runtime.cache.check()
    assert one.runtime.cache.slots.free == free[1]
    logits = one.prefill(TOKENS[start:start + count], all_logits=True)
    close(logits, expected[start:start + count])
    assert one.position == start + count


def test_error_of_degenerate_logits_has_numbers_and_a_hint() -> None:
    one = session()
    one.runtime = Faulty(one.runtime, fault=FAULTS["flat"][0], at=frozenset({1}))  # type: ignore[assignment]
    with pytest.raises(DegenerateError, match=r"from 1\.0 to 1\.0.*debug_layers"):
        one.step(1)


def test_l1_no_position_is_fed_twice(expected: Tensor) -> None:
    """A1.5, A1.9: the first token is chosen from prefill's logits; prompt and answer enter the state once each."""
    one = session()
    fed: list[int] = []

    @dataclass(slots=True)
    class Counting(Watch):
        def run(self, batch: Batch) -> Tensor:
            first = int(batch.done[0])
            fed.extend(range(first, first + batch.layout.tokens))
            return Watch.run(self, batch)

    one.runtime = Counting(one.runtime)  # type: ignore[assignment]
    logits = one.prefill(TOKENS[:37])
    for _ in range(20):
        logits = one.step(int(logits.argmax()))
    one.commit([1, 2, 3])
    assert fed == list(range(60)) and one.position == 60


# Loading


def test_a_session_over_random_weights() -> None:
    model = RandomModel(shape=odd_shape(), initializer_range=0.1)
    first, second = (Session(model, memory="4MiB", max_context=64) for _ in range(2))
    assert torch.equal(first.prefill([1, 2, 3]), second.prefill([1, 2, 3]))
    other = Session(RandomModel(shape=odd_shape(), initializer_range=0.1, seed=1), memory="4MiB")
    assert not torch.equal(first.step(4), other.prefill([1, 2, 3, 4]))
    assert first.max_context == 64 and first.vocab_size == 509


def test_a_session_says_what_it_has() -> None:
    one = Session(max_context=128, threads=1)
    assert one.config == one.runtime.config and one.config.vocab_size == one.vocab_size
    assert one.device == one.step(1).device == torch.device("cpu") and one.max_context == 128
    assert (one.has_vision, one.has_draft_head) == (True, True)
    less = Session(vision=False, speculate="off", max_context=128, threads=1)
    assert (less.has_vision, less.has_draft_head) == (False, False)
    plain = session()
    assert (plain.has_vision, plain.has_draft_head) == (False, False)


def test_a_session_over_a_directory(tmp_path: Path) -> None:
    theirs = transformers_model(tmp_path)
    tokens = numbers(0, 20, 307)
    with torch.no_grad():
        logits = theirs(torch.tensor([tokens])).logits[0]
    same_logits(logits, Session(str(tmp_path), memory="4MiB").prefill(tokens, all_logits=True))


def test_the_embedded_model_steps_as_it_reads() -> None:
    one = Session(max_context=64)
    tokens = numbers(4, 40, one.vocab_size)
    stepped = stepwise_logits(one, tokens)
    one.reset()
    same_logits(stepped, one.prefill(tokens, all_logits=True))


@pytest.fixture
def log_quiet(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level("INFO", logger="deltic")
    yield caplog


def test_debug_layers_name_every_layer(log_quiet: pytest.LogCaptureFixture) -> None:
    one = Session(RandomModel(shape=odd_shape(), initializer_range=0.1), memory="4MiB", debug_layers=True)
    one.prefill([1, 2, 3])
    statistics = one.runtime.statistics
    assert [entry.layer for entry in statistics] == list(range(6))
    assert all(entry.size == 40 and entry.nan == 0 and entry.minimum < entry.mean < entry.maximum
               for entry in statistics)
    one.step(4)
    assert len(one.runtime.statistics) == 6, "only the last step's"
