"""Models compiled by TVM: equal to the engine, run by TVM's runtime alone; damaged directories refused."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_cases import ATTENTION, CHUNK, SHAPE, assert_same_answers, checkpoint, compiled, forced, session
from support import drain, greedy, numbers, same_logits, stepwise_logits

from deltic import LLM, SamplingParams, Session
from deltic.cli import main
from deltic.cli.convert import cache_folder
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load_any
from deltic.errors import ConfigError, ModelError, RequestError
from deltic.export.program import ProgramConversation, kind_of, open_program
from deltic.export.tvm.artifact import sums
from deltic.export.tvm.runtime import LIBRARY_PATH, accepting_older_names, runtime_libraries
from deltic.params import EngineRequest

pytest.importorskip("tvm_ffi", reason="needs deltic[tvm]")
pytestmark = pytest.mark.filterwarnings("ignore")

Artifacts = tuple[Path, Path]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """A hybrid model and its compiled directory."""
    place = tmp_path_factory.mktemp("tvm")
    source = checkpoint(place / "model", SHAPE, 0.1)
    return source, compiled(place / "compiled", source, chunk=CHUNK)


@pytest.fixture
def copy(hybrid: Artifacts, tmp_path: Path) -> Path:
    """A compiled directory that a test may damage."""
    return Path(shutil.copytree(hybrid[1], tmp_path / "copy"))


@pytest.fixture
def sessions(hybrid: Artifacts) -> Iterator[tuple[Session, Session]]:
    """Sessions over the engine and over the compiled model."""
    yield session(hybrid[0]), session(hybrid[1])


def test_compiled_model_equals_engine(sessions: tuple[Session, Session]) -> None:
    assert_same_answers(*sessions, count=30)


def test_session_restores_snapshot(sessions: tuple[Session, Session]) -> None:
    native, made = sessions
    expected = forced(native, (1, 2, 3), (4, 5))
    made.prefill((1, 2, 3))
    kept = made.snapshot()
    made.commit((9, 8, 7))
    made.restore(kept)
    same_logits(expected[1:], stepwise_logits(made, (4, 5)))
    assert made.prefill((6, 7), all_logits=True).shape == (2, made.vocab_size)


def test_prefix_reuse_equals_engine(hybrid: Artifacts) -> None:
    """Three turns, each continuing the last one; then a prompt that diverges in the middle."""
    counted = []
    for path in hybrid:
        options = {} if kind_of(path) else {"dtype": "float32"}
        engine = Engine(load_any(str(path), EngineConfig(threads=1, memory="16MiB", token_budget=CHUNK, **options)))
        history, computed = numbers(5, 40, SHAPE.vocab_size), list[int]()
        for turn in range(3):
            before = engine.stats.prompt_tokens
            engine.add(greedy(history, 6, f"turn {turn}"))
            answer = drain(engine)[f"turn {turn}", 0].tokens
            computed.append(engine.stats.prompt_tokens - before)
            history = (*history, *answer, *numbers(turn, 9, SHAPE.vocab_size))
        before = engine.stats.prompt_tokens
        engine.add(EngineRequest("edited", (*history[:40], 1, 2, 3), greedy(history, 4).output))
        drain(engine)
        counted.append((computed, engine.stats.prompt_tokens - before, history))
        engine.check()
    assert counted[0] == counted[1]
    assert counted[0][0][1:] == [10, 10] and counted[0][1] == 3


def test_memory_of_finished_sequences_is_reused(hybrid: Artifacts) -> None:
    """Free slots hold no pages: more tokens are served in total than the cache can hold."""
    model = load_any(str(hybrid[1]), EngineConfig(threads=1, memory="300KiB", token_budget=CHUNK))
    engine, rooms = Engine(model), model.memory.pages * 16
    for index in range(3 * rooms // 100 + 3):
        engine.add(greedy(numbers(index, 90, SHAPE.vocab_size), 10, f"r{index}"))
        assert len(drain(engine)[f"r{index}", 0].tokens) == 10


def test_runtime_needs_neither_torch_nor_compiler(hybrid: Artifacts) -> None:
    """Neither torch nor TVM's compiler is loaded. The variable names the runtime's directory."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.submodule_search_locations
    libraries = Path(spec.submodule_search_locations[0]) / "lib"
    code = (f"import sys, numpy\nfrom pathlib import Path\nfrom deltic.config import EngineConfig\n"
            f"from deltic.export.program import ProgramConversation, open_program\n"
            f"talk = ProgramConversation(open_program(Path({str(hybrid[1])!r}), EngineConfig()))\n"
            f"print(talk.read([1, 2, 3]).argmax())\n"
            f"assert not {{'torch', 'tvm'}} & set(sys.modules), 'torch or tvm was imported'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, LIBRARY_PATH: str(libraries)})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == int(session(hybrid[0]).prefill((1, 2, 3)).argmax())


def test_library_path_variable_is_the_only_place_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_PATH, str(tmp_path))
    with pytest.raises(ModelError, match=f"{tmp_path} has no libtvm_runtime"):
        list(runtime_libraries())


def test_conversation_computes_only_new_tokens(hybrid: Artifacts) -> None:
    """A common prefix is not computed again while its states are kept."""
    talk, native = ProgramConversation(open_program(hybrid[1], EngineConfig())), session(hybrid[0])
    draw, prompt = random.Random(1), list(numbers(1, 30, SHAPE.vocab_size))
    read = []
    for _ in range(12):
        native.reset()
        same_logits(native.prefill(prompt)[None], torch.from_numpy(talk.read(prompt).copy())[None])
        read.append(talk.computed)
        kept = draw.choice([len(prompt), len(prompt) - 1, 12])
        prompt = prompt[:kept] + list(numbers(kept, draw.choice([1, 1, 5]), SHAPE.vocab_size))
    assert read[0] == 30 and min(read) == 1 and sum(read) < 12 * 30


def test_conversation_refuses_empty_and_long_prompts(hybrid: Artifacts) -> None:
    talk = ProgramConversation(open_program(hybrid[1], EngineConfig()))
    with pytest.raises(RequestError, match="no tokens"):
        talk.read([])
    with pytest.raises(RequestError, match="context"):
        talk.read([1] * 257)
    assert talk.read([1, 2]).shape == (SHAPE.vocab_size,)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}), encoding="utf-8")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def without_sums(place: Path) -> None:
    stored = json.loads((place / "tensor-cache.json").read_text())
    stored["records"] = [{key: value for key, value in record.items() if key != "sums"} for record in stored["records"]]
    edit(place / "tensor-cache.json", **stored)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def of_parameter(place: Path, said: Any) -> None:
    stored = json.loads((place / "tensor-cache.json").read_text())
    stored["records"][0]["records"][0] = said
    edit(place / "tensor-cache.json", **stored)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no parameters": (lambda place: (place / "tensor-cache.json").unlink(),
                      "neither tensor-cache.json nor ndarray-cache.json"),
    "v2 under the loader of v1": (
        lambda place: (place / "tensor-cache.json").rename(place / "ndarray-cache.json"), "generation v2"),
    "v1 under the loader of v2": (lambda place: edit(place / "mlc-chat-config.json", generation="v1"), "generation v1"),
    "both said to be v1": (lambda place: (
        edit(place / "mlc-chat-config.json", generation="v1"),
        (place / "tensor-cache.json").rename(place / "ndarray-cache.json")), "v2 in the library and v1"),
    "a missing shard": (lambda place: (place / "params_shard_0.bin").unlink(), "params_shard_0.bin is missing"),
    "a flipped byte": (lambda place: flip(place / "params_shard_0.bin"), "params_shard_0.bin is damaged"),
    "a flipped byte that MD5 shows": (lambda place: (without_sums(place), flip(place / "params_shard_0.bin")),
                                      "is damaged .md5sum"),
    "a byte more": (lambda place: (place / "params_shard_0.bin").open("ab").write(b"x"), "bytes instead of"),
    "a cut shard": (lambda place: (place / "params_shard_0.bin").write_bytes(b"\0" * 100), "has 100 bytes instead of"),
    "another architecture": (lambda place: edit(place / "mlc-chat-config.json", model_type="qwen3"),
                             "not of one model"),
    "an unknown architecture": (lambda place: edit(place / "mlc-chat-config.json", model_type="gemma"),
                                "mlc-chat-config.json: architecture 'gemma'"),
    "another vocabulary": (lambda place: edit(place / "config.json", vocab_size=512), "vocabulary"),
    "another processor": (lambda place: edit(place / "mlc-chat-config.json", needs=["avx9000"]), "avx9000"),
    "another machine": (lambda place: edit(place / "mlc-chat-config.json", machine="m68k"), "m68k"),
    "a later layout": (lambda place: edit(place / "mlc-chat-config.json", version="9"), "version '9'"),
    "no config": (lambda place: (place / "mlc-chat-config.json").unlink(), "no mlc-chat-config.json"),
    "a cut library": (lambda place: os.truncate(place / "rt.so", 5000), "rt.so has 5,000 bytes instead of .*cut off"),
    "a library that is a pipe": (lambda place: to_pipe(place / "rt.so"), "rt.so is no file"),
    "a parameter without a dtype": (lambda place: of_parameter(place, {"shape": [1]}), "name, shape, dtype"),
    "a parameter that is a number": (lambda place: of_parameter(place, 5), "name, shape, dtype"),
    "a parameter nowhere": (lambda place: of_parameter(
        place, {"name": "n", "shape": [1], "dtype": "f", "byteOffset": "x", "nbytes": 4}), "name, shape, dtype"),
    "no library": (lambda place: (place / "rt.so").write_bytes(b"no"), "rt.so cannot be loaded"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_damaged_directory_is_refused(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, words = FAULTS[name]
    spoil(copy)
    with pytest.raises(ModelError, match=words):
        open_program(copy, EngineConfig())
    if name in ("a flipped byte", "v2 under the loader of v1"):
        assert main(["run", str(copy), "hello"]) == 2
        assert words in capsys.readouterr().err


def test_parameter_of_another_shape_is_refused(copy: Path) -> None:
    stored = json.loads((copy / "tensor-cache.json").read_text())
    stored["records"][0]["records"][0]["shape"] = [1]
    edit(copy / "tensor-cache.json", **stored)
    with pytest.raises(ModelError, match=r"parameter .* is float32 \[1\], but the library takes"):
        open_program(copy, EngineConfig())


@pytest.mark.parametrize("size", [1, 8, 1 << 20, (1 << 20) + 8, 3_000_001])
def test_sums_detect_wrong_bits(size: int) -> None:
    draw = np.random.default_rng(size)
    content = draw.integers(0, 256, size, np.uint8)
    expected = sums(content)
    for place in {0, size // 2, size - 1}:
        wrong = content.copy()
        wrong[place] ^= 1 << int(draw.integers(8))
        assert sums(wrong) != expected
    swapped = np.concatenate([content[8:16], content[:8], content[16:]])
    assert size < 16 or sums(swapped) != sums(content)


@pytest.mark.parametrize(("option", "value"), [("dtype", "bfloat16"), ("quant", "q8_0"), ("cache_dir", "/tmp/x"),
                                               ("speculate", "ngram"), ("max_context", 10_000), ("device", "cuda"),
                                               ("batch_invariant", True)])
def test_unsupported_options_are_refused(hybrid: Artifacts, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        load_any(str(hybrid[1]), EngineConfig(**{option: value}))


def test_default_device_is_the_cpu(hybrid: Artifacts) -> None:
    for device in ("auto", "cpu"):
        assert load_any(str(hybrid[1]), EngineConfig(device=device, threads=1)).options.device == "cpu", device


def test_long_prompts_are_refused(hybrid: Artifacts) -> None:
    engine = Engine(load_any(str(hybrid[1]), EngineConfig(threads=1)))
    with pytest.raises(RequestError, match="maximum context length is 256"):
        engine.add(greedy([1] * 256, 4))


SITES = {15: "ragged prompts", 16: "paged prompts", 17: "decoding", 20: "trees, paged", 21: "trees, ragged"}
"""Arguments of the paged cache's constructor that are attention kernels."""


@pytest.mark.parametrize(("given", "meant"), [("tir", "tirx"), ("tirx", "tirx"), ("flashinfer", "flashinfer")])
def test_older_kernel_names_are_accepted(given: str, meant: str) -> None:
    import tvm_ffi

    for site, name in SITES.items():
        kernels: list[Any] = [["tirx", len] for _ in range(28)]
        kernels[site] = tvm_ffi.convert([given, len])
        taken = accepting_older_names(lambda *arguments: arguments)(*kernels)
        assert [kernel[0] for kernel in taken] == ["tirx"] * site + [meant] + ["tirx"] * (27 - site), name


def test_unknown_kernel_names_are_refused() -> None:
    for site in SITES:
        kernels: list[Any] = [["tirx", len] for _ in range(28)]
        kernels[site] = ["cutlass", len]
        with pytest.raises(ModelError, match="attention backend 'cutlass' is not known, only tirx, flashinfer"):
            accepting_older_names(print)(*kernels)


@pytest.mark.slow
def test_library_with_older_names_runs(hybrid: Artifacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library with the kernel tags of older TVM versions."""
    from tvm.relax.frontend.nn.llm import kv_cache

    class Older:
        StringImm = staticmethod(lambda tag: kept.StringImm({"tirx": "tir"}.get(tag, tag)))

        def __getattr__(self, name: str) -> Any:
            return getattr(kept, name)

    kept = kv_cache.tvm.ir
    monkeypatch.setattr(kv_cache.tvm, "ir", Older())
    older = compiled(tmp_path / "older", hybrid[0])
    monkeypatch.undo()
    assert b"tir\0" in (older / "rt.so").read_bytes() or b"tir" in (older / "rt.so").read_bytes()
    assert_same_answers(session(hybrid[0]), session(older), count=5)


@pytest.mark.slow
def test_attention_only_model_is_generation_v1(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "model", ATTENTION, 0.2)
    made = compiled(tmp_path / "compiled", source, generation="v1", chunk=CHUNK)
    assert (made / "ndarray-cache.json").is_file() and not (made / "tensor-cache.json").exists()
    assert_same_answers(session(source), session(made), count=30)
    (made / "ndarray-cache.json").rename(made / "tensor-cache.json")
    with pytest.raises(ModelError, match="generation v1"):
        open_program(made, EngineConfig())


@pytest.mark.slow
def test_matrices_may_be_float16(hybrid: Artifacts, tmp_path: Path) -> None:
    """The logits are close to those of the unrounded weights."""
    made = compiled(tmp_path / "compiled", hybrid[0], dtype="float16")
    assert (made / "params_shard_0.bin").stat().st_size < 0.6 * (hybrid[1] / "params_shard_0.bin").stat().st_size
    native, half = session(hybrid[0]), session(made)
    worst = same_logits(native.prefill((1, 2, 3))[None], half.prefill((1, 2, 3))[None], tau=0.02)
    assert worst > 1e-6


@pytest.mark.slow
def test_the_embedded_model_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chat of three turns gives the engine's words and reuses as many tokens."""
    made = compiled(tmp_path / "compiled", None)
    assert main(["run", str(made), "What is the capital of France?", "--temperature", "0"]) == 0
    assert "Paris" in capsys.readouterr().out
    found = []
    for model in (LLM(dtype="float32", speculate="off", threads=1), LLM(str(made), threads=1)):
        messages, turns = list[dict[str, str]](), list[tuple[str, int, int]]()
        for question in ("What is the capital of France?", "And of Italy?", "What is 3 + 4?"):
            messages.append({"role": "user", "content": question})
            answer = model.chat(messages, SamplingParams(temperature=0.0, max_tokens=40))
            messages.append({"role": "assistant", "content": answer.text})
            turns.append((answer.text, answer.choices[0].usage.prompt_tokens, answer.choices[0].usage.cached_tokens))
        found.append(turns)
        model.close()
    assert found[0] == found[1] and found[0][0][2] == 0 < found[0][1][2] < found[0][2][2]


@pytest.mark.parametrize(("model", "target", "name"), [
    ("Qwen/Qwen3.5-0.8B", "llvm", "Qwen--Qwen3.5-0.8B--llvm--cpu"), ("tiny", "llvm", "tiny--llvm--cpu"),
    ("/models/some", "llvm -mcpu=x86-64-v3", "some--llvm_-mcpu=x86-64-v3--cpu")])
def test_default_output_directory(model: str, target: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder(model, target) == Path("/cache/deltic/compiled") / name


def test_missing_extra_is_reported(hybrid: Artifacts, monkeypatch: pytest.MonkeyPatch,
                                 capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("deltic.export.program.find_spec", lambda name: None)
    assert main(["compile", "tiny", "-o", str(tmp_path / "out")]) == 2
    assert "pip install 'deltic[tvm]'" in capsys.readouterr().err and not (tmp_path / "out").exists()
