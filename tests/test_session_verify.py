"""`Session.draft`, `verify`, `accept`: several tokens at once, of which as many stay as are accepted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from speculation_cases import (
    ANSWER,
    MODELS,
    PROMPT,
    embedded_prompt,
    embedded_with_head,
    expected,
    headed,
)
from support import (
    ROUNDING,
    numbers,
    odd_runtime,
    odd_shape,
    same_logits,
    session_over,
)

from deltic import RandomModel
from deltic.errors import ConfigError, RequestError
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session


@pytest.mark.parametrize("model", MODELS)
def test_a_session_verifies_and_accepts(model: str) -> None:
    runtime, answer = MODELS[model](), expected(model, "greedy")
    session, rng, done = session_over(runtime), random.Random(3), 0
    session.prefill(answer.prompt)
    parts = []
    while done < ANSWER - 1:
        count = rng.randint(1, min(6, ANSWER - 1 - done))
        right = rng.randint(0, count)
        wanted = answer.tokens[done:done + count]
        drafted = [*wanted[:right], *((token + 1) % 500 for token in wanted[right:])]
        logits = session.verify(drafted)
        session.accept(right)
        parts.append(logits[:right])
        done += right
        assert session.position == PROMPT + done
        if rng.random() < 0.2 and done < ANSWER - 1:
            parts.append(session.step(answer.tokens[done])[None])
            done += 1
    same_logits(answer.logits[1:], torch.cat(parts))
    snapshot = session.snapshot()
    after = session.step(5)
    session.restore(snapshot)
    same_logits(after[None], session.step(5)[None], ROUNDING)


@pytest.mark.parametrize("accepted", range(8, 14))
def test_tokens_that_were_verified_and_never_accepted_leave_nothing(accepted: int) -> None:
    """Also where the ring was full, so that the state has moved on."""
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    session = session_over(runtime)
    session.prefill(answer.prompt)
    session.verify(answer.tokens[:accepted])
    session.accept(accepted)
    for _ in range(2):
        session.verify([1, 2, 3, 4, 5, 6, 7, 8])
    logits = [session.verify(answer.tokens[accepted:accepted + 2])]
    session.verify([9] * 10)
    logits.append(session.step(answer.tokens[accepted])[None])
    wanted = answer.logits[[accepted + 1, accepted + 2, accepted + 1]]
    same_logits(wanted, torch.cat(logits))


def test_a_session_drafts_with_the_head() -> None:
    session, prompt = session_over(embedded_with_head()), embedded_prompt()
    logits, right, steps = session.prefill(prompt), 0, 0
    while session.position < len(prompt) + 12:
        token = int(logits.argmax())
        drafts = session.draft(token, 3)
        rows = session.verify([token, *drafts])
        count = 0
        while count < 3 and int(rows[count].argmax()) == drafts[count]:
            count += 1
        session.accept(1 + count)
        logits, right, steps = rows[count], right + count, steps + 1
    assert right >= steps
    with pytest.raises(RequestError, match="no draft head"):
        session_over(odd_runtime()).draft(1, 3)
    with pytest.raises(RequestError, match="count must be from 1 to 12"):
        session.draft(1, 13)


def test_a_head_of_few_tokens_gives_all_others_no_chance() -> None:
    session = Session(RandomModel(shape=odd_shape(), initializer_range=0.1, head=True), memory="8MiB", threads=1,
                      draft_vocab=64)
    prompt = numbers(0, 20, 509)
    session.prefill(prompt)
    drafts, logits = session.draft(7, 5, logits=True)
    assert logits.shape == (5, session.vocab_size) and logits.dtype == torch.float32
    assert logits[:, :64].isfinite().all() and (logits.isfinite().sum(-1) == 80).all()
    assert logits[:, prompt[-5:]].isfinite().all() and not logits.isnan().any() and not (logits == torch.inf).any()
    assert drafts == logits.argmax(-1).tolist() == session.draft(7, 5)
    kept = logits.clone()
    session.draft(8, 5, logits=True)
    assert torch.equal(logits, kept)


def test_a_session_refuses_what_it_cannot_verify() -> None:
    session = session_over(odd_runtime())
    session.prefill([1, 2, 3])
    with pytest.raises(RequestError, match="call verify right before"):
        session.accept(1)
    with pytest.raises(RequestError, match="at most 13"):
        session.verify([1] * 14)
    session.verify([4, 5])
    with pytest.raises(RequestError, match="count must be from 0 to 2"):
        session.accept(3)
    session.verify([4, 5])
    session.step(7)
    with pytest.raises(RequestError, match="call verify right before"):
        session.accept(1)


def test_a_session_needs_no_draft_model() -> None:
    with pytest.raises(ConfigError, match="speculate=draft is of no use here") as caught:
        Session(None, speculate="draft:tiny")
    assert caught.value.option == "speculate"


def moved_on(session: Session) -> None:
    session.step(7)


def came_back(session: Session) -> None:
    """To the very position, but not with what was verified in the ring."""
    snapshot = session.snapshot()
    session.verify([4, 5, 6])
    session.restore(snapshot)


def went_away_and_came_back(session: Session) -> None:
    snapshot = session.snapshot()
    session.verify([4, 5, 6])
    session.commit([7, 8, 9])
    session.restore(snapshot)


def verified_in_vain(session: Session) -> None:
    with pytest.raises(RequestError, match="at most 13"):
        session.verify([1] * 14)


@pytest.mark.parametrize("after", [moved_on, came_back, went_away_and_came_back, verified_in_vain])
def test_only_what_was_verified_right_before_is_accepted(after: Callable[[Session], None]) -> None:
    session = session_over(odd_runtime(), batch=4)
    session.prefill([1, 2, 3])
    session.verify([4, 5])
    session.accept(1)
    session.verify([5, 6])
    after(session)
    with pytest.raises(RequestError, match="call verify right before"):
        session.accept(1)


@pytest.mark.parametrize("runtime", [headed, embedded_with_head])
def test_drafts_at_the_start_depend_on_nothing_before(runtime: Callable[[], ModelRunner]) -> None:
    session = session_over(runtime())
    fresh = session.draft(7, 3)
    for start in (3, 4):
        session.prefill(numbers(start, 30, 400))
        session.reset()
        assert session.draft(7, 3) == fresh
    assert any(fresh), "a state that nobody wrote is NaN, which drafts token 0"
