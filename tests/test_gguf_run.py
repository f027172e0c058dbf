"""A GGUF file runs like the directory that it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_models import BLOCKY, gguf_tensors, metadata_of, write, write_model
from support import load_directory, numbers
from test_gguf_metadata import TINY, tokenizer_metadata

from deltic import LLM, SamplingParams
from deltic.chat.output_router import AnswerCall
from deltic.cli import main
from deltic.errors import ModelError
from deltic.loader.dummy import random_weights
from deltic.loader.model_files import open_model

QUESTION = "What is the capital of France?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as a file of float32."""
    files = open_model(None)
    weights = load_directory(files.path, files.config, "float32")
    path = tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf"
    write(path, {**metadata_of(files.config), **tokenizer_metadata(TINY), "general.name": "tiny as a file"},
          gguf_tensors(files.config, weights))
    return path


def llm_of(model: Path | None) -> LLM:
    return LLM(model and str(model), dtype="float32", memory="64MiB", max_context=1024, threads=1)


def test_the_embedded_model_answers_the_same_from_a_file(tiny_file: Path) -> None:
    ours, theirs = llm_of(None), llm_of(tiny_file)
    calls: list[tuple[tuple[AnswerCall, ...], ...]] = []
    for llm in (ours, theirs):
        assert llm.chat(QUESTION, GREEDY).text == "The capital of France is Paris."
        messages = [{"role": "user", "content": "What is the weather in Rome?"}]
        output = llm.chat(messages, GREEDY, tools=TOOLS, thinking=True)
        calls.append(tuple((call.name, call.arguments) for call in output.calls))  # type: ignore[arg-type]
    assert calls[0] == calls[1]
    assert theirs.chat(QUESTION, GREEDY).choices[0].usage.cached_tokens > 10, "the cache knows nothing of files"


def test_logits_of_a_float_file_equal_those_of_the_directory(tiny_file: Path) -> None:
    prompt = numbers(3, 60, 3000)
    found = [llm_of(model).generate([list(prompt)], SamplingParams(temperature=0.0, max_tokens=20, logprobs=5,
                                                                     ignore_eos=True))[0].choices[0]
             for model in (None, tiny_file)]
    assert found[0].tokens == found[1].tokens
    for left, right in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert left.token == pytest.approx(right.token, abs=1e-4)


@pytest.mark.parametrize("arguments", [["run", "MODEL", QUESTION], ["inspect", "MODEL", "--json"]])
def test_command_line_takes_gguf_files(tiny_file: Path, arguments: list[str],
                                       capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny_file) if word == "MODEL" else word for word in arguments]) == 0
    output = capsys.readouterr().out
    if arguments[0] == "run":
        assert output.strip() == "The capital of France is Paris."
    else:
        assert json.loads(output)["path"] == str(tiny_file)


def test_directory_with_one_file(tiny_file: Path) -> None:
    assert open_model(tiny_file.parent).path == tiny_file


def random_file(path: Path, kind: str) -> Path:
    write_model(path, BLOCKY, random_weights(BLOCKY, "float32"), kind)
    return path


def test_several_files_need_a_name(tmp_path: Path) -> None:
    for kind in ("F32", "Q8_0"):
        random_file(tmp_path / f"m-{kind}.gguf", kind)
    with pytest.raises(ModelError, match=r"several GGUF files: name one of m-F32\.gguf, m-Q8_0\.gguf"):
        open_model(tmp_path)
    assert open_model(tmp_path / "m-Q8_0.gguf").gguf


def test_a_file_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = random_file(tmp_path / "m.gguf", "F32")
    with pytest.raises(ModelError, match=r"m\.gguf.*tokenizer\.ggml\.tokens"):
        llm_of(path)
