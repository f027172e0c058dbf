"""What callers from Python give by mistake is refused with an error that names the argument and the fix."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support import odd_runtime, session_over

from deltic import LLM, Encoder, RandomModel, SamplingParams, Session
from deltic.errors import ConfigError, DelticError, LongPromptError, ModelError, RequestError

ONE = SamplingParams(temperature=0.0, max_tokens=1)
HI = [{"role": "user", "content": "Hi"}]
ODD: list[Any] = [
    None, True, 0, -1, 3, 1 << 70, 2.5, float("nan"), "", "text", "\ud800", b"", b"hi", bytearray(b"hi"),
    memoryview(b"x"), [], (), {}, set(), {1}, [None], [True], [1, 2], (3,), [1.5], [-1], [1 << 70], ["a", "b"],
    ["a", 1], [[]], [[1], "a"], [[1], [2]], [["a"]], [b"a"], [{}], [{"role": "user"}], [{"role": 5}], [{1: 2}],
    {"role": "user", "content": "Hi"}, HI, [*HI, 3], [HI], iter(HI), (x for x in "ab"), range(3), deque([1]),
    array("i", [1]), np.array([1, 2]), np.array([[1], [2]]), np.array([0.5]), np.int64(3), torch.tensor([1, 2]),
    torch.tensor([[1]]), torch.tensor(1), torch.tensor([0.5]), object(), object, int, len, lambda *_: True,
    SamplingParams, Ellipsis]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_context=256, memory="16MiB", threads=1) as model:
        yield model


CALLS: dict[str, Callable[[LLM, Any], Any]] = {
    "chat messages": lambda llm, odd: llm.chat(odd, ONE),
    "chat sampling": lambda llm, odd: llm.chat(HI, odd),
    "chat tools": lambda llm, odd: llm.chat(HI, ONE, tools=odd),
    "chat thinking": lambda llm, odd: llm.chat(HI, ONE, thinking=odd),
    "chat variables": lambda llm, odd: llm.chat(HI, ONE, variables=odd),
    "chat thinking_budget": lambda llm, odd: llm.chat(HI, ONE, thinking_budget=odd),
    "achat messages": lambda llm, odd: asyncio.run(llm.achat(odd, ONE)),
    "stream messages": lambda llm, odd: list(llm.stream(odd, ONE)),
    "stream tools": lambda llm, odd: list(llm.stream(HI, ONE, tools=odd)),
    "generate prompts": lambda llm, odd: llm.generate(odd, ONE),
    "generate prompt": lambda llm, odd: llm.generate([odd], ONE),
    "generate sampling": lambda llm, odd: llm.generate([[1]], odd),
    "generate on_token": lambda llm, odd: llm.generate([[1]], ONE, odd) if not callable(odd) else None,
    "agenerate prompts": lambda llm, odd: asyncio.run(llm.agenerate(odd, ONE)),
    "generate_stream prompt": lambda llm, odd: list(llm.generate_stream(odd, ONE)),
    "pin messages": lambda llm, odd: llm.pin(odd),
    "pin tools": lambda llm, odd: llm.pin([{"role": "system", "content": "x"}], tools=odd),
}


@pytest.mark.parametrize("call", CALLS)
def test_l8_whatever_is_given_is_served_or_refused_by_name(llm: LLM, call: str) -> None:
    method, argument = call.split()
    refused = 0
    for odd in ODD:
        try:
            CALLS[call](llm, odd)
        except DelticError as error:
            refused += 1
            named = {"prompt": ("prompt", "text"), "prompts": ("prompt", "text"), "messages": ("messages",),
                     "tools": ("tools", "tool", "messages")}.get(argument, (argument,))
            said = f"{error} {getattr(error, 'field', '')}".lower()
            assert any(word in said for word in named), f"{method} {argument}={odd!r}: {error}"
            assert len(str(error)) < 400
    assert refused > 10 or argument in ("sampling", "thinking_budget", "on_token")
    with llm.worker.hold() as engine:
        assert not engine.has_work
        engine.check()


@pytest.mark.parametrize(("messages", "words"), [
    (b"hi", "messages must be a list of messages, or one user message as text, not b'hi': decode it"),
    (["a", "b"], r"messages\[0\] must be a message, not 'a': write \{\"role\": \"user\""),
    ([1, 2], r"messages\[0\] must be a message, not 1: token ids are for generate and generate_stream"),
    ([], "messages is empty: give at least one"), (None, "messages must be a list"),
    ({"role": "user", "content": "x"}, "put the message into a list"), (5, "messages must be a list"),
])
def test_l8_what_is_no_conversation(llm: LLM, messages: Any, words: str) -> None:
    for ask in (llm.chat, llm.stream):
        with pytest.raises(RequestError, match=words) as caught:
            ask(messages)
        assert (caught.value.field or "").startswith("messages")


def test_a_text_is_one_user_message_for_chat_and_stream_alike(llm: LLM) -> None:
    whole = llm.chat("What is 1+1?", SamplingParams(temperature=0.0, max_tokens=20), thinking=True)
    stream = llm.stream("What is 1+1?", SamplingParams(temperature=0.0, max_tokens=20), thinking=True)
    assert "reasoning" in {delta.kind for delta in stream}
    assert stream.output and stream.output.choices[0].tokens == whole.choices[0].tokens
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    prompts = [llm.stream("Hi", ONE, tools=tools).prompt_tokens for tools in (None, [tool])]
    assert prompts[1] > prompts[0] + 20, "tools are shown"


def test_prompts_may_be_arrays(llm: LLM) -> None:
    expected = llm.generate([[1, 2, 3], [4, 5, 6]], ONE)
    rows = [[1, 2, 3], [4, 5, 6]]
    for prompts in (np.array(rows), torch.tensor(rows), [np.array(row) for row in rows],
                    [torch.tensor(row) for row in rows], [array("i", row) for row in rows], tuple(map(tuple, rows))):
        found = llm.generate(prompts, ONE)  # type: ignore[arg-type]
        assert [output.choices[0].tokens for output in found] == [output.choices[0].tokens for output in expected]


@pytest.mark.parametrize(("prompt", "words"), [
    (b"hi", r"must be text or a list of token ids, not b'hi'"), ([1, "a"], "'a' is none"), ([1, 2.5], "2.5 is none"),
    ([True], "True is none"), (HI, "messages are for chat and stream"), (None, "not None"),
    ([], "is empty: give at least one token"),
])
def test_l8_what_is_no_prompt(llm: LLM, prompt: Any, words: str) -> None:
    for ask in (lambda: llm.generate([prompt], ONE), lambda: next(llm.generate_stream(prompt, ONE))):
        with pytest.raises(RequestError, match=words):
            ask()


@pytest.mark.parametrize(("prompt", "sampling", "words"), [
    ("", ONE, "the prompt is empty: give at least one token"), ([], ONE, "the prompt is empty"),
    ([1] * 300, ONE, "the prompt is too long: it has 300 tokens and the maximum context length is 256 tokens"),
    ("a\n1" * 400, ONE, "the prompt is too long: it has more"),
    ("\ud800", ONE, "prompt has a lone surrogate"), ([1 << 20], ONE, "the prompt has token ids outside of 0"),
    ([1], SamplingParams(stop_token_ids=(1 << 20,)), "token id 1048576 is outside of the vocabulary"),
])
def test_l8_which_of_several_prompts_is_refused(llm: LLM, prompt: Any, sampling: SamplingParams, words: str) -> None:
    prompts, params = ["Hi", [1, 2], prompt], [ONE, ONE, sampling]
    for ask in (lambda: llm.generate(prompts, params), lambda: asyncio.run(llm.agenerate(prompts, params))):
        with pytest.raises(RequestError, match=rf"^prompts\[2\]: {words}") as caught:
            ask()
        assert caught.value.field == ("prompts[2]" if sampling is ONE else "stop_token_ids")
        assert isinstance(caught.value, LongPromptError) == ("too long" in str(caught.value))


@pytest.mark.parametrize("call", ["chat", "achat", "stream", "generate", "agenerate", "generate_stream"])
def test_an_unknown_keyword_is_named_with_those_that_exist(llm: LLM, call: str) -> None:
    given: Any = "Hi" if "chat" in call or "stream" in call else ["Hi"]
    known = "tools, tool_choice" if call in ("chat", "achat", "stream") else "response_format, structured_outputs"
    with pytest.raises(TypeError, match=rf"^{call}\(\) got an unexpected keyword argument 'foo'; there are .*{known}"):
        found = getattr(llm, call)(given, ONE, foo=1)
        asyncio.run(found)
    with pytest.raises(TypeError, match=r"^generate\(\) got an unexpected keyword argument 'tools'"):
        llm.generate(["Hi"], ONE, tools=[])  # type: ignore[call-arg]


def test_l8_sampling_is_no_dictionary(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"sampling must be SamplingParams, not \{'temperature': 0\}: write"):
        llm.chat("Hi", {"temperature": 0})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"sampling\[1\] must be SamplingParams, not 5") as caught:
        llm.generate(["Hi", "Ho"], [ONE, 5])  # type: ignore[list-item]
    assert caught.value.field == "sampling[1]"


# Sessions


def test_l8_odd_arguments_of_a_session() -> None:
    session = session_over(odd_runtime(), batch=4, context=64)
    session.prefill([1, 2, 3])
    snapshot, other = session.snapshot(), session_over(odd_runtime(), batch=4, context=64).snapshot()
    calls: dict[str, Callable[[Session, Any], Any]] = {
        "restore": lambda s, odd: s.restore(odd), "drop": lambda s, odd: s.drop(odd),
        "prefill": lambda s, odd: s.prefill(odd), "step": lambda s, odd: s.step(odd),
        "commit": lambda s, odd: s.commit(odd), "verify": lambda s, odd: s.verify(odd),
        "draft": lambda s, odd: s.draft(1, odd), "accept": lambda s, odd: s.accept(odd)}
    for (name, call), odd in itertools.product(calls.items(), [*ODD, other]):
        if name == "restore" and odd is None:
            continue
        before = session.position
        try:
            call(session, odd)
        except RequestError as error:
            assert session.position == before, f"{name} {odd!r}: {error}"
        session.restore(snapshot)
    session.runtime.cache.check()
    with pytest.raises(RequestError, match="5 is no snapshot: give what snapshot"):
        session.restore(5)  # type: ignore[arg-type]


def test_l8_what_stands_for_tokens_of_a_session_is_a_tensor_of_numbers() -> None:
    session = session_over(odd_runtime(), batch=4, context=64)
    width = session.runtime.config.hidden_size
    good = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
    places = torch.arange(2).repeat(3, 1)
    rows: list[Any] = [*ODD, torch.zeros(2, width, dtype=torch.int64), good.to_sparse(), good.bool(), good.cfloat(),
                       good / 0, good * float("nan"), good.numpy(), good.tolist()]
    for odd in rows:
        with pytest.raises(RequestError, match="embeddings must be") as caught:
            session.prefill_assembled(odd)
        assert caught.value.field == "embeddings" and session.position == 0
    axes: list[Any] = [*(odd for odd in ODD if odd is not None), places.float(), places.bool(), places - 1,
                       places.numpy(), places.tolist(), places + (1 << 30), places.T]
    for odd in axes:
        with pytest.raises(RequestError, match="positions must be") as caught:
            session.prefill_assembled(good, odd)
        assert caught.value.field == "positions" and session.position == 0
    found = session.prefill_assembled(good, places)
    session.reset()
    assert torch.equal(session.prefill_assembled(good), found) and session.position == 2


# What a model is made of


@pytest.mark.parametrize("make", [LLM, Session, Encoder])
def test_l8_a_model_that_is_no_name_is_told_what_one_is(make: Any) -> None:
    for odd in (5, b"org/name", ["org/name"], object()):
        with pytest.raises(ModelError, match=r"a model is a GGUF file, a directory with .*, not "):
            make(odd)
    with pytest.raises(ConfigError, match="revision must be text, not 5") as caught:
        make("org/name", revision=5)
    assert caught.value.option == "revision"


def test_l8_random_weights_of_no_shape() -> None:
    shape: Any = {"hidden_size": 5}
    for fields, words in (({"layers": "2"}, "layers must be"), ({"layers": 0}, "layers must be"),
                          ({"layers": True}, "layers must be"), ({"shape": shape}, "shape must be a ModelConfig"),
                          ({"seed": "x"}, "seed must be"), ({"preset": 5}, "preset must be"),
                          ({"initializer_range": "x"}, "initializer_range must be")):
        with pytest.raises(ModelError, match=words):
            LLM(RandomModel(**fields))  # type: ignore[arg-type]


def test_l8_options_of_conversations_are_named() -> None:
    for option, odd in (("tool_call_parser", []), ("history", []), ("strip_billing_header", "no"),
                        ("parse_special", "no"), ("thinking_budget", "3"), ("thinking", "yes"),
                        ("chat_template", 5), ("progress", 5)):
        with pytest.raises(ConfigError, match=option) as caught:
            LLM(**{option: odd})
        assert caught.value.option == option
