"""Raw completions, with the real openai client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from test_server_harness import Scripted, Served, each, serving, tiny

from deltic import LLM, RandomModel

LIMITS: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_text_and_token_ids_are_the_same_prompt(served: Served) -> None:
    text = served.client.completions.create(**LIMITS, prompt="Once upon")
    ids = served.client.completions.create(**LIMITS, prompt=tiny().chat_processor.tokenizer.encode("Once upon"))
    assert text.object == "text_completion" and text.choices[0].text == ids.choices[0].text
    assert text.choices[0].finish_reason == "length" and text.usage and ids.usage
    assert text.usage.total_tokens == ids.usage.total_tokens and ids.usage.prompt_tokens_details
    assert ids.usage.prompt_tokens_details.cached_tokens == ids.usage.prompt_tokens, "the same prompt again is reused"


def test_several_prompts_and_choices_are_numbered_through(served: Served) -> None:
    prompts = ["Once", "Twice", "A third time"]
    alone = [served.client.completions.create(**LIMITS, prompt=prompt).choices[0].text for prompt in prompts]
    together = served.client.completions.create(**LIMITS, prompt=prompts, n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    tokenizer = tiny().chat_processor.tokenizer
    ids = served.client.completions.create(**LIMITS, prompt=[tokenizer.encode(text) for text in prompts])
    assert [choice.text for choice in ids.choices] == alone
    assert together.usage and together.usage.completion_tokens == 36


@each("prompt", ["Once upon", tiny().chat_processor.tokenizer.encode("Once upon")])
def test_echo(served: Served, prompt: Any) -> None:
    plain = served.client.completions.create(**LIMITS, prompt=prompt).choices[0].text
    echoed = served.client.completions.create(**LIMITS, prompt=prompt, echo=True).choices[0].text
    chunks = served.client.completions.create(**LIMITS, prompt=prompt, echo=True, stream=True)
    assert echoed == "Once upon" + plain == "".join(chunk.choices[0].text for chunk in chunks)


def test_the_best_of_several(served: Served) -> None:
    asked: dict[str, Any] = LIMITS | {"temperature": 3.0, "seed": 5, "prompt": ["Once", "Twice"], "echo": False}
    many = served.client.completions.create(**asked | {"n": 4}, logprobs=0).choices
    best = served.client.completions.create(**asked, best_of=4)
    worth = {choice.index: sum(choice.logprobs.token_logprobs) / 6 for choice in many if choice.logprobs}
    expected = [max(range(start, start + 4), key=worth.__getitem__) for start in (0, 4)]
    assert [choice.text for choice in best.choices] == [many[index].text for index in expected]
    assert [choice.index for choice in best.choices] == [0, 1] and best.choices[0].logprobs is None
    assert best.usage and best.usage.completion_tokens == 48
    two = served.client.completions.create(**asked | {"prompt": "Once", "echo": True}, n=2, best_of=4).choices
    assert two[0].text == "Once" + best.choices[0].text and two[1].text.startswith("Once")


def test_echo_without_new_tokens(served: Served) -> None:
    answer = served.client.completions.create(model="tiny", prompt="Once upon", max_tokens=0, echo=True)
    assert answer.choices[0].text == "Once upon" and answer.usage and answer.usage.completion_tokens == 0


def test_sixteen_tokens_are_the_default(served: Served) -> None:
    answer = served.client.completions.create(model="tiny", prompt="Once", extra_body={"ignore_eos": True})
    assert answer.usage and answer.usage.completion_tokens == 16


@each("stream", [False, True])
def test_legacy_logprobs(served: Served, stream: bool) -> None:
    asked = LIMITS | {"prompt": "Once upon", "logprobs": 2, "stream": stream}
    answer = served.client.completions.create(**asked)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs or []]
    assert len(tokens) == len(offsets) == len(tops) == 6 and all(token in top for token, top in zip(tokens, tops))
    tokenizer = tiny().chat_processor.tokenizer
    words = [(at, token) for at, token in zip(offsets, tokens) if tokenizer.token_to_id(token) not in tokenizer.special]
    assert all(text[at:].startswith(token) for at, token in words if not token.startswith("bytes:"))


def test_characters_of_several_tokens_have_true_offsets_and_bytes() -> None:
    with serving(Scripted("a\U0001f642é b").model()) as served:
        choice = served.client.completions.create(model="tiny", prompt="x", logprobs=1).choices[0]
        chat = served.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}],
                                                     logprobs=True, top_logprobs=2)
    assert choice.text == "a\U0001f642é b" and choice.logprobs and choice.logprobs.text_offset
    assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
    assert choice.logprobs.text_offset[-1] == choice.text.index(" b")
    scores = chat.choices[0].logprobs.content if chat.choices[0].logprobs else None
    assert scores and b"".join(bytes(score.bytes or ()) for score in scores).decode() == choice.text
    assert scores[0].top_logprobs[1].logprob == -9999.0, "infinity is no JSON"


def test_a_model_without_tokenizer_takes_token_ids() -> None:
    model = RandomModel(shape=tiny().runtime.config)
    with serving(LLM(model, max_context=64, memory="16MiB", max_batch=2, threads=1)) as served:
        choice = served.client.completions.create(model="default", prompt=[1, 2], max_tokens=3, logprobs=1).choices[0]
        assert choice.logprobs and choice.logprobs.tokens and len(set(choice.logprobs.tokens)) == 3
        with pytest.raises(openai.BadRequestError, match="has no tokenizer"):
            served.client.chat.completions.create(model="default", messages=[{"role": "user", "content": "x"}])


@each(("fields", "param"), [
    ({"suffix": "end"}, "suffix"), ({"best_of": 3, "stream": True}, "best_of"),
    ({"best_of": 1000}, "n"), ({"n": 2, "best_of": 1}, "best_of"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [True]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [99999999]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"logprobs": 50}, "logprobs"), ({"max_tokens": 0, "n": 2}, "n"), ({"prompt": [[1]] * 3000}, "prompt"),
    ({"prompt": ["ok", [5], [99999999]]}, "prompt[2]"), ({"prompt": ["ok", "word " * 3000]}, "prompt[1]"),
])
def test_refusals_name_the_field(served: Served, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        served.client.completions.create(**({"model": "tiny", "prompt": "x"} | fields))
    assert refusal.value.param == param
    assert served.wait_idle() < 5
    tiny().worker.call(lambda engine: engine.check())
