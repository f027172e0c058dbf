"""Saved states cross devices: written on a GPU and continued on a CPU, and the other way round."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from deltic import LLM, SamplingParams, Session
from deltic.cache.offload.state_manifest import StateError
from deltic.params import TokenLogprobs

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

PROMPTS, ANSWER = 200, 12
MARGIN = 0.5
"""Logits of bfloat16 models on two backends are closer than this."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=2)
SMALL: dict[str, Any] = {"memory": "256MiB", "max_batch": 16, "dtype": "bfloat16"}
WORDS = ("river", "capital", "of", "France", "seven", "plus", "what", "is", "the", "longest", "a", "bird", "tell", "me")


def texts() -> list[str]:
    draw = Random(5)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randrange(20, 60))) for _ in range(PROMPTS)]


def margin(logprobs: TokenLogprobs) -> float:
    best, second, *_ = sorted((logprob for _, logprob in logprobs.top), reverse=True)
    return best - second


@pytest.mark.parametrize(("written", "read"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_the_greedy_tokens_are_the_same_where_margins_allow(tmp_path: Path, written: str, read: str) -> None:
    """Each answer equals the one of the reading device alone up to the first token whose best two logits are close."""
    with LLM(device=written, **SMALL) as writer:
        prompts = [writer.chat_processor.tokenizer.encode(text) for text in texts()]
        saved = [writer.save_state(prompt, tmp_path, str(number)).id for number, prompt in enumerate(prompts)]
    following = [[*prompt, 11, 12] for prompt in prompts]
    with LLM(device=read, **SMALL) as alone:
        expected = [output.choices[0] for output in alone.generate(following, GREEDY)]
    compared = 0
    with LLM(device=read, **SMALL) as reader:
        for prompt, id, wanted in zip(prompts, saved, expected, strict=True):
            assert reader.load_state(tmp_path, id).exact is False
            found = reader.generate([[*prompt, 11, 12]], GREEDY)[0].choices[0]
            assert found.usage.cached_tokens == len(prompt)
            for mine, other, logprobs in zip(found.tokens, wanted.tokens, wanted.logprobs, strict=True):
                if mine != other:
                    assert margin(logprobs) < MARGIN, (id, mine, other, logprobs)
                    break
                compared += 1
        reader.engine.check()
    assert compared > PROMPTS * ANSWER // 2


def test_the_same_device_has_the_same_bits(tmp_path: Path) -> None:
    tokens = Session(device="cuda", dtype="bfloat16").runtime.config.vocab_size
    prompt = [Random(1).randrange(tokens) for _ in range(300)]
    one, other = Session(device="cuda", dtype="bfloat16"), Session(device="cuda", dtype="bfloat16")
    one.prefill(prompt)
    assert one.save(tmp_path) == other.load(tmp_path)
    for token in (3, 1, 4):
        assert torch.equal(one.step(token), other.step(token))
    assert torch.equal(one.prefill(prompt, True), other.prefill(prompt, True))


def test_a_conversation_comes_back_on_the_gpu(tmp_path: Path) -> None:
    """Both times the answers are decoded from equal states, in equal steps."""
    with LLM(device="cuda", speculate="off", **SMALL) as llm:
        prompts = [llm.chat_processor.tokenizer.encode(text) for text in texts()[:12]]
        saved = [llm.save_state(prompt, tmp_path).id for prompt in prompts]
        expected = [output.choices[0].tokens for output in llm.generate([[*prompt, 5] for prompt in prompts], GREEDY)]
        llm.worker.call(lambda engine: engine.runtime.cache.clear())
        for id in saved:
            assert llm.load_state(tmp_path, id).exact is True
        found = [output.choices[0] for output in llm.generate([[*prompt, 5] for prompt in prompts], GREEDY)]
        assert [choice.tokens for choice in found] == expected
        assert all(choice.usage.cached_tokens == len(prompt) for choice, prompt in zip(found, prompts, strict=True))
        llm.engine.check()


def test_changed_files_leave_the_gpu_as_it_was(tmp_path: Path) -> None:
    session = Session(device="cuda", dtype="bfloat16")
    session.prefill([1, 2, 3, 4] * 20)
    session.save(tmp_path)
    for path in sorted(tmp_path.glob("*.safetensors")):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(StateError, match="was changed"):
            session.load(tmp_path)
        path.write_bytes(data)
    assert session.position == 80
    kept = session.step(7)
    session.load(tmp_path)
    assert torch.equal(session.step(7), kept)
