"""Branches of a conversation: through `LLM`, through the server, and an agent with sub-agents in a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deltic import LLM, SamplingParams
from deltic.errors import RequestError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FURTHER = [f"And of {country}?" for country in ("Spain", "Italy", "Peru", "Chad", "Oman", "Fiji", "Cuba", "Mali")]


def greedy(count: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": count, **params})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_context=512, max_batch=8, threads=1) as model:
        yield model


# Through LLM


def test_branches_are_the_conversations_that_they_stand_for(llm: LLM) -> None:
    first = llm.chat(QUESTION, greedy(12))
    branches = llm.fork(first, FURTHER, greedy(10))
    for question, branch in zip(FURTHER, branches, strict=True):
        whole = [*QUESTION, {"role": "assistant", "content": first.text}, {"role": "user", "content": question}]
        expected = llm.chat(whole, greedy(10)).choices[0]
        found = branch.choices[0]
        assert found.tokens == expected.tokens and found.usage.prompt_tokens == expected.usage.prompt_tokens
        read = first.choices[0].usage.prompt_tokens + len(first.choices[0].tokens) - 1
        assert found.usage.cached_tokens >= read - 1, "a branch reads the conversation again"


def test_a_branch_has_branches_and_choices_are_told_apart(llm: LLM) -> None:
    first = llm.chat(QUESTION, greedy(6, temperature=2.0, top_k=4, top_p=1.0, seed=3, n=3))
    seen = set()
    for choice in first.choices:
        branch = llm.chat(FURTHER[0], greedy(6), fork_from=choice)
        twig = llm.chat(FURTHER[1], greedy(6), fork_from=branch)
        usage = twig.choices[0].usage
        assert usage.cached_tokens >= branch.choices[0].usage.prompt_tokens
        seen.add((choice.tokens, usage.prompt_tokens))
    assert len({tokens for tokens, _ in seen}) > 1
    stream = llm.stream(FURTHER[0], greedy(6), fork_from=first)
    text = "".join(delta.text for delta in stream)
    assert stream.output and stream.output.text == text and stream.output.choices[0].end


@pytest.mark.parametrize(("branches", "options", "words", "field"), [
    (["Why?"], {"fork_from": 3}, "must be an output of chat", "fork_from"),
    ("Why?", {}, "must be a list", "branches"),
    ([], {}, "must be a list", "branches"),
    ([[]], {}, "messages is empty", "messages"),
    (["Why?"], {"cache_salt": "another"}, "another cache_salt", "fork_from"),
    (["Why?"], {"variables": {"add_generation_prompt": False}}, "begins a new answer", "fork_from"),
    ([[{"role": "system", "content": "Be brief."}, *QUESTION]], {}, "cannot follow an answer", "messages"),
    (["Why? " * 600], {}, "context", "messages"),
])
def test_bad_forks(llm: LLM, branches: Any, options: dict[str, Any], words: str, field: str) -> None:
    first = llm.chat(QUESTION, greedy(4))
    with pytest.raises(RequestError, match=words) as caught:
        if "fork_from" in options:
            llm.chat(branches[0], **options)
        else:
            llm.fork(first, branches, greedy(4), **options)
    assert caught.value.field == field


def test_an_answer_that_no_conversation_repeats_cannot_be_forked(llm: LLM) -> None:
    first = llm.chat(QUESTION, greedy(12))
    stopped = llm.chat(QUESTION, greedy(12, stop=(first.text[2:5],)))
    raw = llm.generate(["Once upon"], greedy(3))[0]
    for output in (stopped, raw):
        with pytest.raises(RequestError, match="fork_from needs an answer"):
            llm.chat("Why?", fork_from=output)
