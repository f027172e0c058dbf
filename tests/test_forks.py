"""Branches of a conversation: through `LLM`, through the server, and an agent with sub-agents in a small cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from agent_cases import Seen, playing
from test_server_harness import Served, limited, serving, tiny

from deltic import LLM, SamplingParams
from deltic.chat.history import AnswerEnd
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.params import Lineage
from deltic.server.errors import ProblemError
from deltic.server.forks import ForkStore, lineage_of

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


# Through the server


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny(), api_keys={"one": "one", "two": "two"}) as running:
        running.http.headers["authorization"] = "Bearer one"
        yield running


def ask(served: Served, messages: Any, **body: Any) -> httpx.Response:
    given = {"messages": messages, "temperature": 0, "max_tokens": 8, **body}
    return served.post("/v1/chat/completions", **given)


def test_requests_fork_a_response(served: Served) -> None:
    """Whole or streamed, by name or with the index of a choice; the answers are those to the whole conversation."""
    first = ask(served, QUESTION, n=2).json()
    streamed = ask(served, QUESTION, stream=True).text
    ids = [first["id"], json.loads(streamed.split("\n")[0].removeprefix("data: "))["id"]]
    text = first["choices"][0]["message"]["content"]
    for fork in (*ids, {"id": first["id"], "choice": 1}, {"id": ids[1]}):
        for question in FURTHER[:2]:
            branch = ask(served, [{"role": "user", "content": question}], fork_from=fork).json()
            whole = ask(served, [*QUESTION, {"role": "assistant", "content": text},
                                 {"role": "user", "content": question}]).json()
            assert branch["choices"][0]["message"] == whole["choices"][0]["message"]
            usage = branch["usage"]
            assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    twig = ask(served, [{"role": "user", "content": FURTHER[2]}], fork_from=branch["id"]).json()
    assert twig["usage"]["prompt_tokens_details"]["cached_tokens"] >= branch["usage"]["prompt_tokens"]


def test_a_response_of_the_responses_api_can_be_forked(served: Served) -> None:
    first = served.post("/v1/responses", input="What is the capital of France?", temperature=0,
                        max_output_tokens=8).json()
    branch = ask(served, [{"role": "user", "content": FURTHER[0]}], fork_from=first["id"])
    assert branch.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
    kept = served.post("/v1/responses", input="Hi", temperature=0, max_output_tokens=8, store=False).json()
    assert ask(served, QUESTION, fork_from=kept["id"]).status_code == 404


def refused(answer: httpx.Response, status: int, field: str, words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == field and words in error["message"], error


def test_forks_that_are_refused(served: Served) -> None:
    """Each names its field, and an ordinary request goes on meanwhile."""
    first = ask(served, QUESTION).json()
    id = first["id"]
    further = [{"role": "user", "content": FURTHER[0]}]
    for fork, status, field, words in (
            ("chatcmpl-unknown", 404, "fork_from", "is not kept"), ("\0\n" * 3, 404, "fork_from", "is not kept"),
            ("x" * 100_000, 404, "fork_from", "is not kept"), ("", 404, "fork_from", "is not kept"),
            (3, 400, "fork_from", "must be the id"), ([id], 400, "fork_from", "must be the id"),
            ({"id": id, "token": 3}, 400, "fork_from", "must be the id"),
            ({"id": id, "choice": "1"}, 400, "fork_from.choice", "must be the index"),
            ({"id": id, "choice": 1}, 400, "fork_from.choice", "has no choice 1"),
            ({"id": id, "choice": -1}, 400, "fork_from.choice", "has no choice -1")):
        answer = served.http.post("/v1/chat/completions", content=json.dumps(
            {"messages": further, "fork_from": fork}), headers={"content-type": "application/json"})
        refused(answer, status, field, words)
    refused(ask(served, [], fork_from=id), 400, "messages", "at least one")
    refused(ask(served, further, fork_from=id, cache_salt="x"), 400, "fork_from", "cache_salt")
    refused(ask(served, further, fork_from=id, add_generation_prompt=False), 400, "fork_from", "begins a new answer")
    refused(ask(served, [{"role": "system", "content": "Be"}], fork_from=id), 400, "messages", "cannot follow")
    refused(ask(served, [{"role": "user", "content": "a " * 3000}], fork_from=id), 400, "messages", "context")
    other = served.http.post("/v1/chat/completions", json={"messages": further, "fork_from": id},
                             headers={"authorization": "Bearer two"})
    refused(other, 404, "fork_from", "is not kept")
    unstored = ask(served, QUESTION, store=False).json()
    refused(ask(served, further, fork_from=unstored["id"]), 404, "fork_from", "is not kept")
    assert ask(served, further, fork_from=id).status_code == 200


def test_responses_expire_and_belong_to_a_model() -> None:
    with serving(limited(tiny(), max_stored_responses=2)) as served:
        further = [{"role": "user", "content": FURTHER[0]}]
        ids = [ask(served, [{"role": "user", "content": text}]).json()["id"] for text in ("A", "B")]
        assert ask(served, further, fork_from=ids[0], store=False).status_code == 200
        ask(served, [{"role": "user", "content": "C"}])
        refused(ask(served, further, fork_from=ids[1]), 404, "fork_from", "2 others were used since")
        assert ask(served, further, fork_from=ids[0]).status_code == 200
    store = ForkStore(Limits())
    store.put("a", "one", None, 0, AnswerEnd("", "", ""))
    with pytest.raises(RequestError, match="of the model 'one'") as caught:
        store.find("a", "two", None)
    assert caught.value.field == "fork_from"
    store = ForkStore(Limits(max_stored_responses=2))
    for id in "abc":
        for choice in range(128):
            store.put(id, "one", None, choice, AnswerEnd("", "", ""))
    with pytest.raises(ProblemError):
        store.find("b", "one", None)
    assert store.find({"id": "c", "choice": 127}, "one", None)


@pytest.mark.parametrize(("main", "branch"), [
    ({"x-session-affinity": "a", "x-session-id": "a"}, {"x-session-id": "b", "x-parent-session-id": "a"}),
    ({"session-id": "s", "thread-id": "a"}, {"session-id": "s", "thread-id": "b", "x-codex-parent-thread-id": "a"}),
    ({"x-claude-code-session-id": "s"}, {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "b"}),
    ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "b"},
     {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "c", "x-claude-code-parent-agent-id": "b"}),
])
def test_agents_name_sessions_in_headers(main: dict[str, str], branch: dict[str, str]) -> None:
    first, second = (lineage_of({name.encode(): value.encode() for name, value in headers.items()})
                     for headers in (main, branch))
    assert first.name and second.parent == first.name != second.name
    assert lineage_of({}) == Lineage()


# An agent


AGENT_TOOLS = [{"type": "function", "function": {"name": name, "description": name, "parameters": {
    "type": "object", "properties": {"text": {"type": "string"}}}}} for name in ("task", "read", "write")]


class Agent:
    """A client as coding agents are: it sends the whole conversation each time, with its session in a header."""

    def __init__(self, served: Served, session: str, system: str, parent: str = "") -> None:
        self.headers = {"x-session-affinity": session, **({"x-parent-session-id": parent} if parent else {})}
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.served, self.cached = served, list[int]()

    def turn(self, **message: Any) -> None:
        self.messages.append(message)
        self.cached.append(self.ask())

    def retry(self) -> None:
        self.messages.pop()
        self.ask()

    def ask(self) -> int:
        body = {"messages": self.messages, "tools": AGENT_TOOLS, "max_tokens": 400}
        answer = self.served.http.post("/v1/chat/completions", json=body, headers=self.headers).json()
        said = answer["choices"][0]["message"]
        self.messages.append({name: value for name, value in said.items() if value is not None})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def script(seen: Seen) -> str:
    return "Read line by line: " + "line and so on " * 12


@pytest.mark.parametrize(("named", "memory"), [
    pytest.param(True, "2600KiB", marks=pytest.mark.slow), (True, "1500KiB"),
    pytest.param(False, "2600KiB", marks=pytest.mark.slow)])
def test_sub_agents_do_not_evict_the_main_line(named: bool, memory: str) -> None:
    """An agent with three sub-agents at a time, a title and a retry, in a cache that holds little more than the main
    line and what runs, or not all that could run. Without the headers the same turns do evict it."""
    with playing(script, "preserve", memory=memory) as (served, player):
        main = Agent(served, "main", "You are the main agent. " * 20)
        for number in range(4):
            main.turn(role="user", content=f"Task {number}: " + "explain this file. " * 30)
            title = Agent(served, "main", "Give the conversation a title.")
            agents = [Agent(served, f"agent {number} {each}", f"You are sub-agent {each}. " * 12, "main")
                      for each in range(3)]
            if not named:
                main.headers, title.headers = {}, {}
                for agent in agents:
                    agent.headers = {}
            title.turn(role="user", content=f"Task {number}")
            main.retry()
            for step in range(3):
                with ThreadPoolExecutor(3) as threads:
                    for agent in agents:
                        threads.submit(agent.turn, role="user", content=f"Step {step}. " + "read this. " * 30)
        main.turn(role="user", content="Done?")
        player.check()
    assert all(before < after for before, after in pairwise(main.cached)) is named, main.cached
