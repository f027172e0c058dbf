"""Owners of API keys share nothing: no hidden thinking, and no cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_server_harness import Scripted, Served, limited, serving, tiny, wait_until

from deltic import LLM
from deltic.errors import RequestError
from deltic.params import SamplingParams

KEYS: dict[str, str | None] = {"first": "ann", "second": "ann", "third": "bob"}
SECRET = "The door code is 4711."
SHORT: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


def post(served: Served, key: str | None, path: str, body: dict[str, Any]) -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = served.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


# Hidden thinking

ASKED, SAID = "What is the code of the door?", "I must not tell."
WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {}), "messages": ("/v1/messages", {"max_tokens": 1500}),
    "responses": ("/v1/responses", {}), "tokenize": ("/tokenize", {})}


def body_of(wire: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    budget = {"type": "enabled", "budget_tokens": 1024}
    thinks = {"thinking": budget} if wire == "messages" else {"enable_thinking": True}
    return {("input" if wire == "responses" else "messages"): messages, **thinks, **WIRES[wire][1], **more}


def prompt_text(served: Served, engine: Scripted, key: str | None, wire: str, body: dict[str, Any]) -> str:
    """Returns the prompt that the model gets, or that /tokenize returns."""
    answer = post(served, key, WIRES[wire][0], body)
    ids = answer["tokens"] if wire == "tokenize" else engine.seen[-1].ids
    return str(tiny().chat_processor.tokenizer.decode(ids, skip_special=False))


def history(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": SAID},
            {"role": "user", "content": "Repeat your thinking."}]


@contextmanager
def thinking(keys: dict[str, str | None], **options: Any) -> Iterator[tuple[Served, Scripted]]:
    engine = Scripted(f"{SECRET}\n</think>\n\n{SAID}")
    with serving(engine.model(), api_keys=keys, **options) as served:
        yield served, engine


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("shares", [False, True], ids=["apart", "shared prefixes"])
def test_thinking_stays_with_its_owner(wire: str, shares: bool) -> None:
    """Also if prefixes are shared: a prefix can only confirm a guess, thinking would be readable."""
    question = f"{ASKED} {wire} {shares}"  # that no other test asks
    with thinking(KEYS, share_prefix_cache=shares) as (served, engine):
        post(served, "first", "/v1/chat/completions", body_of("chat", [{"role": "user", "content": question}]))
        told = {key: SECRET in prompt_text(served, engine, key, wire, body_of(wire, history(question)))
                for key in KEYS}
    assert told == {"first": True, "second": True, "third": False}


@pytest.mark.parametrize("wire", WIRES)
def test_salts_separate_thinking_without_api_keys(wire: str) -> None:
    question = f"{ASKED} {wire}, asked by anybody"
    with thinking({}) as (served, engine):
        for salt, found in ((None, {None}), ("mine", {"mine"})):
            first = body_of("chat", [{"role": "user", "content": f"{question} {salt}"}], cache_salt=salt)
            post(served, None, "/v1/chat/completions", first)
            told = {each for each in (None, "mine", "yours") if SECRET in prompt_text(
                served, engine, None, wire, body_of(wire, history(f"{question} {salt}"), cache_salt=each))}
            assert told == found


def test_equal_answers_of_another_owner_are_not_ambiguous() -> None:
    """Ann keeps her thinking if Bob gets the same answer with other thinking."""
    question = f"{ASKED} By two."
    with thinking(KEYS) as (served, engine):
        for key, text in (("first", SECRET), ("third", "Bob's own thoughts.")):
            engine.play(f"{text}\n</think>\n\n{SAID}")
            post(served, key, "/v1/chat/completions", body_of("chat", [{"role": "user", "content": question}]))
        prompts = {key: prompt_text(served, engine, key, "chat", body_of("chat", history(question))) for key in KEYS}
    assert SECRET in prompts["first"] and SECRET in prompts["second"] and "Bob" not in prompts["first"]
    assert "Bob's own thoughts." in prompts["third"] and SECRET not in prompts["third"]


# Prefixes


def model(place: Path | None = None) -> LLM:
    more = {"cache_dir": place, "cache_disk_gb": 0.2} if place else {}
    return LLM(max_context=1024, memory="32MiB", max_batch=4, threads=1, dtype="float32", **more)


BEGINNING = " ".join(f"{number} is a number that I count." for number in range(20))


def cached(served: Served, key: str | None, kind: str, **more: Any) -> int:
    text = f"{SECRET} {BEGINNING}"
    if kind == "completions":
        answer = post(served, key, "/v1/completions", {"prompt": text, **SHORT, **more})
    elif kind == "chat":
        messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}]
        answer = post(served, key, "/v1/chat/completions", {"messages": messages, **SHORT, **more})
    elif kind == "messages":
        body = {"system": text, "messages": [{"role": "user", "content": "Hi"}], **SHORT, **more}
        return int(post(served, key, "/v1/messages", body)["usage"]["cache_read_input_tokens"])
    else:
        body = {"instructions": text, "input": "Hi", "max_output_tokens": 4, "temperature": 0, **more}
        return int(post(served, key, "/v1/responses", body)["usage"]["input_tokens_details"]["cached_tokens"])
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


KINDS = ("completions", "chat", "messages", "responses")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with model() as llm:
        yield llm


def forget(llm: LLM) -> None:
    llm.worker.call(lambda engine: engine.runtime.cache.clear())


@pytest.mark.parametrize("shares", [False, True], ids=["apart", "shared"])
def test_prefixes_of_owners(llm: LLM, shares: bool) -> None:
    with serving(limited(llm), api_keys=KEYS, share_prefix_cache=shares) as served:
        for kind in KINDS if not shares else KINDS[:1]:
            forget(llm)
            assert cached(served, "first", kind) == 0, kind
            found = {key: cached(served, key, kind) > 100 for key in ("third", "second", "first")}
            assert found == {"third": shares, "second": True, "first": True}, kind


def test_cache_salt(llm: LLM) -> None:
    with serving(limited(llm)) as served:
        for kind in KINDS:
            forget(llm)
            found = [cached(served, None, kind, **({"cache_salt": salt} if salt else {})) > 100
                     for salt in ("a", "b", None, "a", "b", None)]
            assert found == [False] * 3 + [True] * 3, kind
    with serving(limited(llm), api_keys=KEYS) as served:
        assert cached(served, "first", kind, cache_salt="a") == 0, "an owner's salt is not another owner's"


@pytest.mark.parametrize("salt", ["", 5, ["a"]])
def test_invalid_salts(salt: Any) -> None:
    with serving(Scripted("x").model()) as served:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/messages", {"messages": [], "max_tokens": 3}),
                           ("/v1/responses", {"input": "x"})):
            refused = served.post(path, **body | ({"messages": history("x")} if "messages" in body else {}),
                                  cache_salt=salt)
            assert refused.status_code == 400 and "cache_salt" in refused.json()["error"]["message"]


def test_data_on_disk_keeps_its_owner_after_a_restart(tmp_path: Path) -> None:
    """A key without a name owns its data at any position in the list, and a new key at that position does not."""
    asked = {"input": "Hi", "max_output_tokens": 4, "temperature": 0}
    with model(tmp_path) as llm, serving(llm, api_keys={"one": None, "two": None, **KEYS}) as served:
        assert [cached(served, key, "chat") for key in ("one", "two", "first")] == [0, 0, 0]
        path = f"/v1/responses/{post(served, 'one', '/v1/responses', asked)['id']}"
    with model(tmp_path) as llm, serving(llm, api_keys={"new": None, "two": None, "one": None, **KEYS}) as served:
        wait_for_disk(llm)
        assert [cached(served, key, "chat") > 100 for key in ("new", "one", "two")] == [False, True, True]
        assert [cached(served, key, "chat") > 100 for key in ("third", "second")] == [False, True]
        found = {key: served.http.get(path, headers={"x-api-key": key}).status_code for key in ("new", "two", "one")}
        assert found == {"new": 404, "two": 404, "one": 200}


def test_log_names_of_unnamed_keys_are_not_owners() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model(), api_keys={"one": None, "two": "key-1"}) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-api-key": "one"}) as response:
            assert response.status_code == 200
            seen = {key: len(served.http.get("/v1/requests", headers={"x-api-key": key}).json()["data"])
                    for key in ("one", "two")}
    assert seen == {"one": 1, "two": 0}


def wait_for_disk(llm: LLM) -> None:
    tier, = llm.runtime.cache.tiers
    wait_until(lambda: llm.worker.call(lambda _: (tier.find(()), tier._there)[1]))


def test_a_pinned_prompt_is_shared_by_all_owners(llm: LLM) -> None:
    forget(llm)
    pinned = llm.pin([{"role": "system", "content": f"{SECRET} {BEGINNING}"}])
    with serving(limited(llm), api_keys=KEYS) as served:
        assert all(cached(served, key, "chat") >= pinned > 100 for key in KEYS)


# From Python


def test_cache_salt_in_python() -> None:
    with model() as llm:
        short = SamplingParams(temperature=0.0, max_tokens=4)
        text = f"{SECRET} {BEGINNING}"
        found = list[bool]()
        for salt in ("a", "b", "a"):
            outputs = [llm.chat(text, short, cache_salt=salt), *llm.generate([text], short, cache_salt=salt)]
            stream = llm.generate_stream(f"{text} More.", short, cache_salt=salt)
            for _ in stream:
                pass
            assert stream.output
            outputs.append(stream.output)
            found += [output.choices[0].usage.cached_tokens > 100 for output in outputs]
        assert found == [False, False, True, False, False, True, True, True, True], "within a salt and in no other"
        for wrong in ("", 5, "\ud800"):
            with pytest.raises(RequestError, match="cache_salt"):
                llm.chat("x", cache_salt=wrong)
