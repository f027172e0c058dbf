"""Ground truth: a real model and real text, against transformers and llama.cpp. See tests/README.md."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from real_models import documents, in_transformers, smollm2
from support import load_gguf
from torch import Tensor

from deltic import LLM, SamplingParams
from deltic.chat.tokenizer import Tokenizer, TokenizerFiles
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.file import GgufFile
from deltic.loader.model_files import open_model
from deltic.ops.cpu import missing
from deltic.session import Session

pytestmark = pytest.mark.slow

WINDOW, WINDOWS = 2048, 10
"""Tokens of a context, and how many contexts of text are read."""
QUESTIONS = (
    "What is the capital of France?", "Name three colors.", "What is 2 + 2?", "Who wrote Romeo and Juliet?",
    "What is water made of?", "Which planet is closest to the sun?", "Write a haiku about rain.",
    "Explain in one sentence why the sky is blue.", "List the days of the week.", "What do bees make?")


@dataclass(frozen=True)
class Kind:
    """options: how the model is loaded. rms: bound of the logits' error. agree: share of positions at which the best
    token must be that of transformers."""

    options: dict[str, Any]
    rms: float
    agree: float


KINDS = {"float32": Kind({"dtype": "float32", "packed_weights": "off"}, 1e-4, 1.0),
         "bfloat16": Kind({"dtype": "bfloat16", "packed_weights": "off"}, 0.12, 0.97),
         "packed": Kind({"dtype": "bfloat16", "packed_weights": "on"}, 0.4, 0.9)}
needs_kernels = pytest.mark.skipif(bool(missing()), reason=str(missing()))
KIND = pytest.mark.parametrize("kind", ["float32", "bfloat16", pytest.param("packed", marks=needs_kernels)])


def options(kind: str, **changes: Any) -> dict[str, Any]:
    return {"threads": 2, "max_context": WINDOW + 64, "max_batch": 4, "memory": "512MiB", "speculate": "off",
            **KINDS[kind].options, **changes}


@cache
def tokenizer() -> Tokenizer:
    texts = open_model(str(smollm2())).tokenizer()
    assert texts
    return Tokenizer.from_files(TokenizerFiles(texts.tokenizer, texts.special_tokens, texts.templates), smollm2())


def test_a_bos_token_before_raw_prompts() -> None:
    """As transformers puts it there where it is told to; this model's own rule is none."""
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    texts, question = open_model(str(smollm2())).tokenizer(), "Gravity is a force that"
    assert texts and tokenizer().around == ([], [])
    names = {name: texts.special_tokens[name] for name in ("bos_token", "eos_token")}
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(texts.tokenizer), add_bos_token=True, **names)
    assert tokenizer().encode(question, add_special=True) == theirs.encode(question, add_special_tokens=False)
    ours = Tokenizer(theirs.backend_tokenizer, names)
    ids = ours.encode(question, add_special=True)
    assert ids == theirs.encode(question) and ids[0] == ours.bos_id and len(ids) > 5
    with LLM(smollm2(), **options("float32")) as llm:
        scores = [llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))[0].choices[0].prompt_logprobs
                  for prompt in (question, ids)]
    with torch.no_grad():
        logits = in_transformers(smollm2())(torch.tensor([ids])).logits[0]
    wanted = -torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    assert [score.token for score in scores[1] or ()] == pytest.approx(wanted.tolist(), abs=1e-3)
    assert len(scores[0] or ()) == len(ids) - 2


@cache
def windows() -> tuple[tuple[int, ...], ...]:
    """Token ids of this repository's documents."""
    ids = tokenizer().encode(documents())
    assert len(ids) >= WINDOW * WINDOWS
    return tuple(tuple(ids[start:start + WINDOW]) for start in range(0, WINDOW * WINDOWS, WINDOW))


def loss(logits: Tensor, tokens: tuple[int, ...]) -> float:
    """Sum over the tokens after the first, in nats."""
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum"))


@cache
def theirs() -> tuple[Tensor, list[float]]:
    """transformers' logits of the first window, and its loss in each."""
    model, first, losses = in_transformers(smollm2()), None, []
    torch.set_num_threads(2)
    for tokens in windows():
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        first = logits if first is None else first
        losses.append(loss(logits, tokens))
    assert first is not None
    return first, losses


def test_text_comes_back() -> None:
    texts = open_model(str(smollm2())).tokenizer()
    tokenizer = Tokenizer.from_files(texts, smollm2())  # type: ignore[arg-type]
    for text in (documents(), "Sätze, 漢字 and 1234567 e\u0301!", "  two  spaces\n\n\tand it's\r\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([id]) for id in tokenizer.encode("in 2026")] == ["in", " ", "2", "0", "2", "6"]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_weights_equal_transformers() -> None:
    """It reads GGUF files by itself, and puts the rows of queries and keys back by itself."""
    from transformers import AutoModelForCausalLM

    path, file = smollm2(), GgufFile.open(smollm2())
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected, config = model.state_dict(), config_from_gguf(file)
    assert all(torch.equal(expected[name], tensor) for name, tensor in load_gguf(file, config, "float32").items())
    assert model.config.rope_parameters["rope_theta"] == config.rope.theta


@KIND
def test_logits_and_perplexity_equal_transformers(kind: str) -> None:
    expected, losses = theirs()
    session, found = Session(str(smollm2()), **options(kind)), []
    for tokens in windows():
        session.reset()
        logits = session.prefill(tokens, all_logits=True)
        if not found:
            rms = float((logits - expected).square().mean().sqrt())
            agree = float((logits.argmax(-1) == expected.argmax(-1)).float().mean())
            print(f"{kind}: logits differ by {rms:.2g} (RMS), {agree:.2%} of the best tokens agree")
            assert rms <= KINDS[kind].rms and agree >= KINDS[kind].agree
        found.append(loss(logits, tokens))
    ours, wanted = (math.exp(sum(part) / (WINDOWS * (WINDOW - 1))) for part in (found, losses))
    print(f"{kind}: perplexity {ours:.4f}, transformers {wanted:.4f} ({ours / wanted - 1:+.3%})")
    assert abs(ours / wanted - 1) <= 0.005


# What must not change a bit


Answer = list[tuple[tuple[int, ...], Any]]


GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=3)


def answers(llm: LLM, prompts: list[list[int]]) -> Answer:
    """Tokens, and the log probabilities of the best."""
    return [told(output.choices[0]) for output in llm.generate(prompts, GREEDY)]


def told(choice: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(choice.tokens), choice.logprobs


def prompts() -> list[list[int]]:
    """Ends of nearly a whole context, and a short one."""
    return [list(windows()[0][:1990]), list(windows()[1][:1200]), list(windows()[2][:30])]


@needs_kernels
@pytest.mark.parametrize("kind", ["bfloat16", "packed"])
def test_speculation_changes_no_bit(kind: str) -> None:
    with LLM(str(smollm2()), **options(kind)) as plain, LLM(str(smollm2()), **options(kind, speculate="ngram")) as fast:
        wanted, found = answers(plain, prompts()), fast.generate(prompts(), GREEDY)
        assert [told(output.choices[0]) for output in found] == wanted
        accepted = sum(output.choices[0].usage.accepted_tokens for output in found)
        print(f"{kind}: {accepted} tokens of the answers were drafted")
        assert accepted > 0


@needs_kernels
@pytest.mark.parametrize("kind", ["bfloat16", "packed"])
def test_reuse_and_neighbours_change_no_bit(kind: str) -> None:
    """Each prompt alone in a fresh cache; together; again; and as the end of a longer one that shares its beginning."""
    with LLM(str(smollm2()), **options(kind, prefix_cache=False)) as cold:
        wanted = [answers(cold, [prompt])[0] for prompt in prompts()]
    with LLM(str(smollm2()), **options(kind)) as warm:
        assert answers(warm, prompts()) == wanted
        assert answers(warm, prompts()) == wanted
    with LLM(str(smollm2()), **options(kind)) as warm:
        warm.generate([prompts()[0][:700]], SamplingParams(max_tokens=1))
        choice = warm.generate(prompts()[:1], GREEDY)[0].choices[0]
        assert choice.usage.cached_tokens >= 688 and told(choice) == wanted[0]


# llama.cpp


@needs_kernels
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP does not name a llama-server")
def test_answers_equal_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the first place where its two best tokens lie closer than 0.1."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    import llama_cpp_agrees as peer

    monkeypatch.setattr(peer, "NEW_TOKENS", 48)
    with LLM(str(smollm2()), **options("packed", dtype="float32")) as llm, \
            peer._server(Path(os.environ["LLAMA_CPP"]), smollm2(), 2) as port:
        for question in QUESTIONS:
            text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt = llm.chat_processor.tokenizer.encode(text)
            assert list(prompt) == peer._ask(port, "tokenize", content=text, parse_special=True)["tokens"]
            compare(question, peer._ours(llm, list(prompt)), peer._theirs(port, list(prompt)))


def compare(question: str, ours: list[Any], theirs: list[Any]) -> None:
    for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        if len(their.best) > 1 and their.margin < 0.1:
            print(f"{question}: equal for {index} tokens, then undecided")
            return
        assert our.token == their.token, f"{question}: token {index}"
    assert abs(len(ours) - len(theirs)) <= 1, question  # the token that ends an answer may be told or not

