"""`deltic eval`: the perplexity of a text."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import deltic
from deltic import LLM, Session
from deltic.cli import main
from deltic.cli.eval import perplexity

TINY = Path(deltic.__file__).parent / "models" / "tiny"
TEXT = "The capital of France is Paris. Ünïcode, too: 数字 1234567890.\n" * 4


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chances() -> tuple[list[int], torch.Tensor]:
    """The text's tokens, and the log probability of each but the first after all before."""
    with LLM(memory="16MiB") as llm:
        ids = llm.chat_processor.tokenizer.encode(TEXT)
        assert not llm.chat_processor.tokenizer.around[0]
    logits = Session(memory="16MiB").prefill(ids, all_logits=True)
    return ids, logits.double().log_softmax(-1)[range(len(ids) - 1), ids[1:]]


def evaluate(capsys: pytest.CaptureFixture[str], *argv: Any) -> dict[str, Any]:
    assert main(["eval", "tiny", *map(str, argv), "--json", "--memory", "16MiB", "--dtype", "float32"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_perplexity_of_a_whole_text(file: Path, chances: tuple[list[int], torch.Tensor],
                                                capsys: pytest.CaptureFixture[str]) -> None:
    ids, scores = chances
    found = evaluate(capsys, file)
    assert found["tokens"] == len(ids) and found["scored_tokens"] == len(ids) - 1
    assert math.isclose(found["log_likelihood"], float(scores.sum()), rel_tol=1e-4)
    assert math.isclose(found["perplexity"], math.exp(-float(scores.mean())), rel_tol=1e-4)
    assert found["scored_bytes"] == len(TEXT.encode()) - len("The")
    assert math.isclose(found["bits_per_byte"], -found["log_likelihood"] / math.log(2) / found["scored_bytes"])


def test_each_token_is_scored_once_in_windows(chances: tuple[list[int], torch.Tensor]) -> None:
    ids, _ = chances
    ids = ids[:40]
    session = Session(memory="16MiB")
    with LLM(memory="16MiB", dtype="float32") as llm:
        text = llm.chat_processor.tokenizer.decode(ids)
        for window, stride in ((20, None), (20, 19), (20, 5), (7, 1), (2, None)):
            found = perplexity(llm, text, window, stride)
            step, total, scored = stride or window - 1, 0.0, 1
            while scored < len(ids):
                end = min(window if scored == 1 else scored + step, len(ids))
                start = max(0, end - window)
                session.reset()
                logits = session.prefill(ids[start:end], all_logits=True).double().log_softmax(-1)
                total += sum(float(logits[place - start - 1, ids[place]]) for place in range(scored, end))
                scored = end
            assert (found.tokens, found.scored, found.stride) == (len(ids), len(ids) - 1, step)
            assert math.isclose(found.log_likelihood, total, rel_tol=1e-4), (window, stride)


def test_a_bos_token_of_the_tokenizer_begins_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(memory="16MiB", dtype="float32") as llm:
        words, prompts = llm.chat_processor.tokenizer, list[list[int]]()
        ids, generate = words.encode(TEXT), llm.generate
        words.__dict__["around"] = ([3], [])
        monkeypatch.setattr(llm, "generate", lambda rows, *more: (prompts.extend(rows), generate(rows, *more))[1])
        found = perplexity(llm, TEXT, 16)
    assert found.scored == found.tokens == len(ids) and found.nbytes == len(TEXT.encode())
    assert all(prompt[0] == 3 and len(prompt) <= 16 for prompt in prompts) and prompts[0][1:] == ids[:15]


def test_standard_input_and_a_table(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                    ) -> None:
    class Piped:
        buffer = io.BytesIO(TEXT.encode())

    monkeypatch.setattr("sys.stdin", Piped())
    assert main(["eval", "tiny", "-", "--memory", "16MiB", "--dtype", "float32"]) == 0
    piped = capsys.readouterr().out
    assert piped.startswith("perplexity ") and "bits per byte" in piped and "scored of" in piped
    assert f"{evaluate(capsys, file)['perplexity']:.4f}" in piped


def test_l8_wrong_texts_and_windows_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (content, argv, words) in enumerate((
            (b"", [], "too few tokens"), (b"a\xff", [], r"not valid UTF-8 \(byte 1\)"), (None, [], "cannot be read"),
            (b"text", ["--window", "100000"], "--window 100000 is more than"), (b"text", ["--window", "1"], "--window"),
            (b"text", ["--window", "8", "--stride", "8"], "at most 7"),
            (b"text", ["--random", "qwen3.5-0.8b"], "random"))):
        path = tmp_path / f"text{number}"
        if content is not None:
            path.write_bytes(content)
        assert main(["eval", "tiny", str(path), *argv, "--memory", "4MiB"]) == 2
        error = capsys.readouterr().err
        assert re.search(words, error), error
