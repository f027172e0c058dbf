"""What a `Session` shows of the inside of a model: outputs of layers, recurrent states, logits of many prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import gguf_tensors, metadata_of, write
from support import numbers, odd_runtime, odd_shape, same_logits, session_over, transformers_model
from test_gguf_metadata import TINY, tokenizer_metadata

from deltic import Session
from deltic.errors import RequestError, UnavailableError
from deltic.loader.dummy import random_weights

TOKENS = numbers(0, 50, 509)


def session(**limits: Any) -> Session:
    return session_over(odd_runtime(), **{"batch": 4, "budget": 16, "context": 128, **limits})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Session]:
    """A model in transformers, and here."""
    path = tmp_path_factory.mktemp("model")
    return transformers_model(path), Session(path, memory="8MiB", token_budget=16, speculate="off")


# Hidden states


def test_hidden_states_are_those_of_transformers(pair: tuple[Any, Session]) -> None:
    theirs, ours = pair
    tokens = numbers(1, 40, ours.vocab_size)
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    ours.reset()
    found = ours.hidden_states(tokens)
    assert found.shape == (ours.config.num_hidden_layers + 1, 40, ours.config.hidden_size)
    assert found.dtype == torch.float32 and ours.position == 40
    for layer, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.allclose(a[0], b, atol=2e-4), f"layer {layer}: {float((a[0] - b).abs().max())}"


def test_recurrent_states_are_those_of_transformers(pair: tuple[Any, Session]) -> None:
    theirs, ours = pair
    tokens = numbers(2, 33, ours.vocab_size)
    with torch.no_grad():
        cache = theirs(torch.tensor([tokens]), use_cache=True).past_key_values
    ours.reset()
    ours.prefill(tokens)
    found = ours.recurrent_states()
    assert list(found) == list(ours.config.linear_layers) and found
    for layer, state in found.items():
        their = cache.layers[layer].recurrent_states[0][0]
        assert state.shape == their.shape and torch.allclose(their, state, atol=2e-4), layer


def test_hidden_states_leave_the_session_as_prefill_does() -> None:
    one, other = session(), session()
    one.hidden_states(TOKENS[:40])
    other.prefill(TOKENS[:40])
    same_logits(other.step(7)[None], one.step(7)[None], 1e-4)


# Recurrent states


def test_recurrent_states_are_copies_at_the_present_position() -> None:
    one = session()
    assert all(not state.any() for state in one.recurrent_states().values())
    one.prefill(TOKENS[:20])
    before = one.recurrent_states()
    for state in one.recurrent_states().values():
        state.zero_()
    one.verify(TOKENS[20:24])
    one.accept(3)
    after = one.recurrent_states()
    other = session()
    other.prefill(TOKENS[:23])
    for layer, state in other.recurrent_states().items():
        assert torch.allclose(state, after[layer], atol=1e-4) and not torch.allclose(state, before[layer], atol=1e-4)
    same_logits(other.step(9)[None], one.step(9)[None], 1e-4)


def test_heads_of_a_quantized_file_are_in_the_usual_order(tmp_path: Path) -> None:
    shape = odd_shape()
    file = write(tmp_path / "model.gguf", {**metadata_of(shape), **tokenizer_metadata(TINY)},
                 gguf_tensors(shape, random_weights(shape, "float32")))
    plain, packed = (Session(file, memory="8MiB", packed_weights=mode) for mode in ("off", "on"))
    assert packed.runtime.pools.tiled and not plain.runtime.pools.tiled  # type: ignore[union-attr]
    states = []
    for one in (plain, packed):
        one.prefill(TOKENS[:20])
        states.append(one.recurrent_states())
    for layer, state in states[0].items():
        assert torch.allclose(state, states[1][layer], atol=1e-3), layer


# Hooks


def test_a_hook_sees_every_layer_in_order_and_only_within_its_block() -> None:
    one, seen = session(), list[tuple[int, int]]()
    plain = session().prefill(TOKENS[:40])
    with one.hook(lambda layer, output: seen.append((layer, len(output)))):
        found = one.prefill(TOKENS[:40])
    same_logits(plain[None], found[None], 1e-4)
    layers = range(-1, 6)
    assert seen == [(layer, count) for count in (16, 16, 8) for layer in layers]
    one.step(1)
    assert len(seen) == 3 * len(layers)


def test_what_a_hook_returns_takes_the_place_of_the_output() -> None:
    one, outputs = session(), dict[int, torch.Tensor]()

    def steer(layer: int, output: torch.Tensor) -> torch.Tensor | None:
        return output * 2 if layer == 2 else None

    with one.hook(steer), one.hook(lambda layer, output: outputs.update({layer: output.clone()})):
        steered = one.prefill(TOKENS[:9])
    other = session()
    plain = other.hidden_states(TOKENS[:9])
    assert torch.allclose(outputs[2], 2 * plain[3], atol=1e-4) and torch.allclose(outputs[1], plain[2], atol=1e-4)
    other.reset()
    assert not torch.allclose(steered, other.prefill(TOKENS[:9]), atol=1e-3)


def test_an_error_of_a_hook_leaves_the_session_where_it_was() -> None:
    one = session()
    one.prefill(TOKENS[:5])
    for wrong, error, words in ((lambda *_: 1 / 0, ZeroDivisionError, "zero"),
                                (lambda layer, output: output[:, 1:], RequestError, "None or a tensor"),
                                (lambda layer, output: 5, RequestError, "at layer -1, not 5")):
        with pytest.raises(error, match=words), one.hook(wrong):  # type: ignore[arg-type]
            one.prefill(TOKENS[5:30])
        assert one.position == 5
    other = session()
    other.prefill(TOKENS[:5])
    same_logits(other.step(3)[None], one.step(3)[None], 1e-4)
    with pytest.raises(RequestError, match="hook takes a function"), one.hook(5):  # type: ignore[arg-type]
        pass


# Logits of many prompts


@pytest.mark.parametrize("lengths", [(1,), (5, 40, 1, 17), (1, 1, 1), (30,) * 9])
@pytest.mark.parametrize("all_logits", [False, True])
def test_rows_of_a_batch_have_the_logits_that_they_have_alone(lengths: tuple[int, ...], all_logits: bool) -> None:
    rows = [numbers(3 + place, count, 509) for place, count in enumerate(lengths)]
    one = session()
    one.prefill(TOKENS[:7])
    found = one.batch_logits(rows, all_logits)
    for row, logits in zip(rows, found, strict=True):
        alone = session().prefill(row, all_logits)
        assert logits.shape == alone.shape and logits.dtype == torch.float32
        same_logits(alone.reshape(-1, 509), logits.reshape(-1, 509), 1e-4)
    other = session()
    other.prefill(TOKENS[:7])
    same_logits(other.step(3)[None], one.step(3)[None], 1e-4)
    one.runtime.cache.check()


def test_a_batch_shares_steps() -> None:
    one = session(budget=64)
    steps = list[int]()
    with one.hook(lambda layer, output: steps.append(len(output)) if layer == 0 else None):
        one.batch_logits([TOKENS[:20], TOKENS[:30], TOKENS[:14]])
    assert steps == [64]


def test_a_batch_that_is_refused_leaves_nothing_behind() -> None:
    one = session(context=64, pages=6)
    free = one.runtime.cache.pages.free
    for rows, words in (([[1, 2], []], "no tokens"), ([[1, 509]], "outside of the vocabulary"),
                        ("text", "rows must be"),
                        (5, "rows must be"), ([5], "tokens must be integers"), ([[1] * 65], "exceed the context")):
        with pytest.raises(RequestError, match=words):
            one.batch_logits(rows)  # type: ignore[arg-type]
    one.prefill([1] * 60)
    with pytest.raises(RequestError, match="no room for a prompt of 60 tokens"):
        one.batch_logits([TOKENS[:20], [1] * 60])
    one.reset()
    assert one.runtime.cache.pages.free == free and one.batch_logits([]) == []
    one.runtime.cache.check()


def test_layers_of_a_forked_session_are_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    one = session()
    monkeypatch.setattr(one, "_process", 1)
    for call in (lambda: one.hidden_states([1]), one.recurrent_states, lambda: one.batch_logits([[1]])):
        with pytest.raises(UnavailableError):
            call()
