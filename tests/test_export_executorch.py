"""ExecuTorch programs: equal to the engine, sequences kept apart, damaged programs refused."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from export_cases import ATTENTION, assert_same_answers, checkpoint, exported, session
from support import TAU, numbers, odd_shape

from deltic import LLM, RandomModel, SamplingParams, Session
from deltic.cli import main
from deltic.config import EngineConfig, GenerationDefaults
from deltic.config.model import ExpertsConfig
from deltic.errors import DelticError, ModelError
from deltic.export.program import generation_config, hf_config, write_json
from deltic.loader.dummy import random_weights
from deltic.loader.hub import resolve
from deltic.ops.cpu import missing

pytest.importorskip("executorch", reason="the extra deltic[executorch] is not installed")

from deltic.export.executorch import export as export_module
from deltic.export.executorch import library, runtime
from deltic.export.executorch.export import ExportForm, check, export
from deltic.export.executorch.library import BindingCalls, LibraryCalls, ProgramCalls
from deltic.export.executorch.network import Operators, QuantizedTable, Table
from deltic.export.executorch.runtime import sidecar_of

ROOT = Path(__file__).parents[1]
SHAPE = odd_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), max_position_embeddings=96)
MODEL = RandomModel(shape=SHAPE, initializer_range=0.1)
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


NATIVE = pytest.param("deltic", marks=pytest.mark.skipif(bool(missing()) or not shutil.which("g++"),
                                                         reason="needs g++ and the kernels"))
OPERATORS = [NATIVE, pytest.param("executorch", marks=pytest.mark.slow)]
"""An export over ExecuTorch's operators takes four times as long."""


def program_of(path: Path, model: RandomModel, form: ExportForm) -> Path:
    """A program of random weights, with its words but for a tokenizer."""
    assert model.shape
    weights = random_weights(model.shape, "float32", model.seed, initializer_range=model.initializer_range)
    export(model.shape, GenerationDefaults(), weights, path, form)
    sidecar_of(path).mkdir()
    write_json(sidecar_of(path) / "config.json", hf_config(model.shape))
    write_json(sidecar_of(path) / "generation_config.json", generation_config(GenerationDefaults()))
    return path


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Operators], Path]:
    """A model of two layers over these operators, which takes up to 16 tokens a call."""
    @cache
    def exported(operators: Operators) -> Path:
        return program_of(
            tmp_path_factory.mktemp(operators) / "small.pte", MODEL, ExportForm("fp32", 96, 16, operators)
        )

    return exported


@pytest.fixture(scope="module")
def small(programs: Callable[[Operators], Path]) -> Path:
    """Over the operators that are exported faster."""
    return programs("executorch" if missing() or not shutil.which("g++") else "deltic")


@pytest.fixture(scope="module")
def plain(programs: Callable[[Operators], Path]) -> Path:
    """Over ExecuTorch's own operators."""
    return programs("executorch")


@pytest.fixture(params=OPERATORS)
def either(request: pytest.FixtureRequest, programs: Callable[[Operators], Path]) -> Path:
    return programs(request.param)


def opened(path: Path) -> runtime.ExecutorchProgram:
    return runtime.open_program(path, EngineConfig(threads=1))


def fed(program: runtime.ExecutorchProgram, slot: int, ids: Sequence[int], chunk: int) -> np.ndarray[Any, Any]:
    """Logits after the last of the ids, which come in chunks."""
    for start in range(0, len(ids), chunk):
        found = program.feed(slot, ids[start:start + chunk])
    return found.copy()


# Numbers


def test_program_equals_engine(either: Path) -> None:
    assert_same_answers(Session(MODEL, threads=1, memory="8MiB"), session(either), count=40)


def test_logits_are_independent_of_chunks_and_earlier_sequences(either: Path) -> None:
    program, ids = opened(either), numbers(3, 80, 509)
    program.start(0)
    alone = fed(program, 0, ids, 1)
    for chunk in (7, 16, 50):
        program.start(1)
        fed(program, 1, numbers(chunk, 40, 509), 11)
        program.start(2)
        assert abs(fed(program, 2, ids, chunk) - alone).max() < TAU
    assert sorted(program.slots) == [0, 1, 2] and program.position(2) == 80


def test_program_resets_at_position_0(either: Path) -> None:
    """For runners that clear nothing."""
    program, ids = opened(either), numbers(8, 20, 509)
    program.start(0)
    wanted = fed(program, 0, ids, 20)
    fed(program, 0, numbers(9, 40, 509), 8)
    program._position = 0
    assert (fed(program, 0, ids, 20) == wanted).all()


def runs_beside(calls: ProgramCalls, rounds: int) -> bool:
    """Returns whether another thread runs while this one is in the program; the interpreter switches on its own only
    after a minute."""
    begun, ran, kept = threading.Event(), list[bool](), sys.getswitchinterval()
    other = threading.Thread(target=lambda: ran.append(begun.wait()))
    other.start()
    sys.setswitchinterval(60)
    try:
        begun.set()
        for _ in range(rounds):
            calls.run([1] * 16, 0)
            if ran:
                return True
        return False
    finally:
        sys.setswitchinterval(kept)
        other.join()


@pytest.mark.skipif(bool(missing()) or not shutil.which("g++"), reason="needs g++ and the kernels")
def test_program_releases_the_gil(small: Path) -> None:
    """A library called with the GIL held is the counterexample."""
    assert runs_beside(opened(small)._calls, 5000)
    assert not runs_beside(LibraryCalls(ctypes.PyDLL(str(library.library_path())), small, 509), 20)


def test_programs_run_in_parallel_threads(either: Path) -> None:
    """Equal up to rounding: torch splits products by the thread's own thread count."""
    def answers(program: runtime.ExecutorchProgram, seed: int) -> np.ndarray[Any, Any]:
        found = []
        for _ in range(12):
            program.start(0)
            found.append(fed(program, 0, numbers(seed, 40, 509), 7))
        return np.stack(found)

    programs = [opened(either), opened(either)]
    alone = [answers(program, seed) for seed, program in enumerate(programs)]
    with ThreadPoolExecutor(2) as pool:
        beside = [*pool.map(answers, programs, range(2))]
    assert all(abs(one - other).max() < TAU / 10 for one, other in zip(alone, beside, strict=True))


@pytest.mark.slow
def test_python_bindings_equal_library_calls(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, ids = opened(plain), numbers(8, 40, 509)
    program.start(0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    bound = opened(plain)
    assert isinstance(bound._calls, BindingCalls)
    bound.start(0)
    assert (fed(bound, 0, ids, 16) == fed(program, 0, ids, 16)).all()


def test_copied_sequence_is_bit_equal(either: Path) -> None:
    program, ids = opened(either), numbers(4, 30, 509)
    program.start(0)
    fed(program, 0, ids, 30)
    program.copy(0, 1)
    first = fed(program, 0, ids[:9], 1)
    program.start(2)
    fed(program, 2, ids[::-1], 5)
    second = fed(program, 1, ids[:9], 1)
    assert (first == second).all(), "the copy went on as the original did"
    program.copy(1, 0)
    assert program.position(0) == program.position(1) == 39
    program.drop(1)
    assert 1 not in program.slots and abs(first).max() > 0.1


def test_prefix_reuse_equals_engine(small: Path) -> None:
    """Three turns, each continuing the last one: the prefix is not computed again."""
    def turns(model: Any) -> list[tuple[int, list[int]]]:
        llm, prompt, found = LLM(model, dtype="auto", threads=1, memory="8MiB"), list(numbers(5, 20, 509)), []
        for turn in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
            choice = llm.generate([prompt], params)[0].choices[0]
            found.append((choice.usage.cached_tokens, list(choice.tokens)))
            prompt += [*choice.tokens, *numbers(10 + turn, 5, 509)]
        return found

    own, ours = turns(MODEL), turns(str(without_tokenizer(small)))
    assert ours == own and ours[2][0] > ours[1][0] > 15


def without_tokenizer(path: Path) -> Path:
    """Adds the smallest tokenizer: the tests use token ids."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "deltic" / "models" / "tiny" / name, sidecar_of(path) / name)
    return path


def test_static_program_is_fed_single_tokens(small: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    program, ids = opened(small), numbers(6, 20, 509)
    program.start(0)
    wanted = fed(program, 0, ids, 1)
    calls, real, given = program._calls, program._calls.run, list[int]()

    def single(tokens: Sequence[int], position: int) -> Any:
        given.append(len(tokens))
        if len(tokens) > 1:
            raise RuntimeError("static shapes")
        return real(tokens, position)

    monkeypatch.setattr(calls, "run", single)
    program._proven = False
    program.start(1)
    assert (fed(program, 1, ids, 20) == wanted).all() and given == [16] + [1] * 20

    def broken(tokens: Sequence[int], position: int) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(calls, "run", broken)
    with pytest.raises(ModelError, match=r"fails at position 0: broken"):
        program.start(2)
        program.feed(2, [1])


def test_resolve_accepts_program_path(small: Path) -> None:
    assert resolve(small) == resolve(str(small)) == small


def test_session_accepts_str_and_path(small: Path) -> None:
    """In the program's own dtype by default."""
    for path in (small, str(small)):
        session = Session(path, memory="16MiB")
        assert session.prefill([1, 2, 3]).shape == (session.vocab_size,)


@pytest.mark.slow
@pytest.mark.parametrize("operators", [NATIVE, "executorch"])
def test_attention_only_model_equals_engine(operators: Operators, tmp_path: Path) -> None:
    """A Qwen3, which has no states: three prompts."""
    source = checkpoint(tmp_path / "model", ATTENTION, 0.2)
    made = exported(tmp_path / "made.pte", source, max_context=128, chunk=16, operators=operators)
    assert_same_answers(session(source), session(made), count=40)


MIXTURE = replace(SHAPE, architecture="qwen3_5_moe", intermediate_size=0, experts=ExpertsConfig(6, 2, 20, 28))


@pytest.mark.slow
@pytest.mark.parametrize("operators", [NATIVE, "executorch"])
def test_mixture_of_experts_equals_engine(operators: Operators, tmp_path: Path) -> None:
    """One token a call, with the expert that every token passes."""
    model = RandomModel(shape=MIXTURE, initializer_range=0.1)
    made = program_of(tmp_path / "made.pte", model, ExportForm("fp32", 96, 1, operators))
    assert_same_answers(Session(model, threads=1, memory="8MiB"), session(made), count=30)
    with pytest.raises(ModelError, match="give --static"):
        check(MIXTURE, ExportForm())


def test_quantized_experts_are_within_half_a_step(tmp_path: Path) -> None:
    """Matrices of int8, a scale for each row."""
    matrices = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([2, 0])
    error = (QuantizedTable(matrices)(chosen) - Table(matrices)(chosen)).abs()
    assert (error <= matrices[chosen].abs().amax(-1, keepdim=True) / 127 / 2 + 1e-6).all() and error.max() > 0


# Refusals


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def scrambled(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(2000)
        file.write(np.random.default_rng(0).bytes(3000))


def with_vocabulary(path: Path, size: int) -> None:
    write_json(sidecar_of(path) / "config.json", hf_config(replace(SHAPE, vocab_size=size)))


@pytest.mark.parametrize(("damage", "message"), [
    (cut, "it is cut off"),
    (lambda path: path.write_bytes(b"not a program at all, but long enough to be one"), "is no ExecuTorch program"),
    (scrambled, "cannot be loaded"), (lambda path: path.write_bytes(b""), "is no ExecuTorch program"),
    (lambda path: shutil.rmtree(sidecar_of(path)), "comes with a directory"),
    (lambda path: with_vocabulary(path, 510), "get_vocab_size 509"),
    (lambda path: (sidecar_of(path) / "config.json").unlink(), "there is no config.json"),
])
def test_damaged_program_is_refused(small: Path, tmp_path: Path, damage: Callable[[Path], None],
                                                          message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.pte"
    shutil.copyfile(small, path)
    shutil.copytree(sidecar_of(small), sidecar_of(path))
    damage(path)
    assert main(["run", str(path), "hello"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_missing_operator_library_is_reported(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_OPERATORS", "executorch.nothing_of_the_kind")
    with pytest.raises(ModelError, match=r"operator library of executorch.nothing_of_the_kind is not there"):
        opened(plain)


def test_program_without_its_operators_is_refused(
        programs: Callable[[Operators], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(library, "KERNELS", tmp_path / "libdeltic.so")
    assert main(["run", str(programs("deltic")), "hello"]) == 2
    assert "operators for ExecuTorch need its compiled kernels" in capsys.readouterr().err


def test_context_is_limited_to_the_exported_one(small: Path) -> None:
    llm = LLM(str(without_tokenizer(small)), threads=1, memory="8MiB")
    assert llm.engine.max_context == 96
    with pytest.raises(DelticError, match="96"):
        llm.generate([list(numbers(7, 97, 509))], GREEDY)
    program = opened(small)
    program.start(0)
    with pytest.raises(ModelError, match="exported for 96 tokens"):
        fed(program, 0, numbers(7, 97, 509), 97)
    with pytest.raises(DelticError, match="max_context"):
        LLM(str(small), threads=1, max_context=97)


def test_impossible_export_is_refused_early() -> None:
    with pytest.raises(ModelError, match="reads 96 tokens at most"):
        check(SHAPE, ExportForm("fp32", 97))


@pytest.mark.parametrize("there", [False, True])
def test_failed_export_keeps_existing_files(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def kept() -> dict[str, str]:
        return {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}

    if there:
        (tmp_path / "m.files").mkdir()
        for name in ("m.pte", "m.files/config.json", "m.files/chat_template.jinja", "m.files/notes.txt"):
            (tmp_path / name).write_text("old")
    before, argv = kept(), ["export", "tiny", "-o", str(tmp_path / "m.pte"), "--force"]
    monkeypatch.setattr(export_module, "export", full)
    assert main(argv) == 2 and "cannot be written: No space left" in capsys.readouterr().err
    assert kept() == before and len([*tmp_path.iterdir()]) == (2 if there else 0)
    monkeypatch.setattr(export_module, "export", lambda config, defaults, weights, path, *rest: path.write_text("new"))
    assert main(argv) == 0
    assert {name for name, text in kept().items() if text == "old"} == ({"m.files/notes.txt"} if there else set())


def test_full_disk_is_reported_before_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(export_module, "export", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert main(["export", "tiny", "-o", str(tmp_path / "m.pte")]) == 2
    assert "m.pte cannot be written: it needs 18" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_existing_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.files").write_text("mine")
    (tmp_path / "n.files").mkdir()
    (tmp_path / "n.files" / "config.json").write_text("mine")
    for name, message in (("m", "m.files is a file"), ("n", "n.files/config.json exists; give --force")):
        assert main(["export", "tiny", "-o", str(tmp_path / f"{name}.pte")]) == 2
        assert message in capsys.readouterr().err


def test_missing_extra_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("deltic.export.program.find_spec", lambda name: None)
    assert main(["export", "tiny", "-o", str(tmp_path / "model.pte")]) == 2
    assert "pip install 'deltic[executorch]'" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("words", "message"), [
    (["-o", "model.gguf"], "must end in .pte"), (["-o", "nowhere/model.pte"], "there is no directory"),
])
def test_invalid_output_path_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "tiny", *words]) == 2
    assert message in capsys.readouterr().err


# The embedded model, and a true shape


def deltic(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", "deltic", *map(str, words)], capture_output=True, text=True,
                          timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Programs of the embedded model."""
    folder = tmp_path_factory.mktemp("embedded")
    for name, words in {"dynamic": (), "static": ("--static",), "8da4w": ("--type", "8da4w"),
                        "deltic": ("--operators", "deltic")}.items():
        deltic("export", "tiny", "-o", folder / f"{name}.pte", "--max-context", 2048, *words)
    return {path.stem: path for path in folder.glob("*.pte")}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dynamic", "static", "deltic"])
def test_the_embedded_model_answers(embedded: dict[str, Path], form: str) -> None:
    assert deltic("run", embedded[form], QUESTION).strip() == ANSWER


@pytest.mark.slow
def test_conversation_reuse_equals_engine(embedded: dict[str, Path]) -> None:
    def cached(model: Any, **options: Any) -> list[tuple[int, int, str]]:
        llm, messages, found = LLM(model, threads=1, memory="64MiB", max_context=2048, **options), list[Any](), []
        for text in (QUESTION, "What language do they speak there?", "Name another city there."):
            messages.append({"role": "user", "content": text})
            output = llm.chat(messages, GREEDY)
            usage = output.choices[0].usage
            found.append((usage.prompt_tokens, usage.cached_tokens, output.text))
            messages.append({"role": "assistant", "content": output.text})
        return found

    own, ours = cached(None, dtype="float32", speculate="off"), cached(str(embedded["dynamic"]))
    assert ours == own and ours[2][1] > ours[1][1] > 0


@pytest.mark.slow
def test_quantized_embedded_model_keeps_accuracy(embedded: dict[str, Path]) -> None:
    sys.path.insert(0, str(ROOT / "examples" / "tiny"))
    from data import heldout_set
    from evaluate import score

    def right(model: Any) -> float:
        llm = LLM(model, threads=1, memory="64MiB", max_context=2048, **({} if model else {"speculate": "off"}))

        def answer(samples: Sequence[Any]) -> list[str]:
            return [raw_answer(llm, sample) for sample in samples]

        scored = score(answer, heldout_set(1, 4))
        return sum(wanted == given for _, wanted, given in scored) / len(scored)

    own, quantized = right(None), right(str(embedded["8da4w"]))
    print(f"held-out prompts: engine {own:.1%}, 8da4w {quantized:.1%}")
    assert quantized >= 0.9


def raw_answer(llm: LLM, sample: Any) -> str:
    """What the model writes after the sample's prompt, as its evaluation has it."""
    output = llm.chat(sample.messages, SamplingParams(temperature=0.0, max_tokens=200), tools=sample.tools or None,
                      thinking=sample.thinking)
    choice = output.choices[0]
    return llm.chat_processor.tokenizer.decode(choice.tokens, skip_special=False).partition("<|im_end|>")[0]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_cpp_runner_needs_no_python(embedded: dict[str, Path], tmp_path: Path) -> None:
    import executorch

    place, source = Path(executorch.__path__[0]), ROOT / "examples" / "executorch"
    command = (source / "build.sh").read_text(encoding="utf-8")
    assert "python" not in command.lower()
    subprocess.run(["sh", source / "build.sh", place, tmp_path / "runner", library.library_path()], check=True,
                   timeout=600)
    linked = subprocess.run(["ldd", tmp_path / "runner"], capture_output=True, text=True, check=True).stdout
    names = " ".join(line.split()[0] for line in linked.splitlines())
    assert "libexecutorch.so" in names and "python" not in names and "libtorch" not in names
    for form in ("dynamic", "static", "8da4w", "deltic"):
        done = subprocess.run([tmp_path / "runner", embedded[form], QUESTION], capture_output=True, text=True,
                              timeout=60, check=False)
        assert done.returncode == 0 and done.stdout.strip() == ANSWER, done.stderr
    broken = tmp_path / "broken.pte"
    broken.write_bytes(b"nothing")
    shutil.copytree(sidecar_of(embedded["dynamic"]), sidecar_of(broken))
    done = subprocess.run([tmp_path / "runner", broken, QUESTION], capture_output=True, text=True, timeout=60,
                          check=False)
    assert done.returncode == 2 and "runner: error" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dynamic", "static", "8da4w", "deltic"])
def test_executorch_text_runner_writes_the_same_text(embedded: dict[str, Path], form: str) -> None:
    """Its C++ TextLLMRunner, which apps use, with the tokenizer of the directory beside the program. In an own process,
    because the runner logs to stderr."""
    processor = LLM(speculate="off", threads=1).chat_processor
    prompt = processor.tokenizer.decode(processor.chat([{"role": "user", "content": QUESTION}]).request.prompt,
                                        skip_special=False)
    code = ("import ctypes, importlib, sys, torch\n"
            "path, tokenizer, prompt, *libraries = sys.argv[1:]\n"
            "importlib.import_module('executorch.extension.pybindings._C')\n"
            "for library in libraries: torch.ops.load_library(library)\n"
            "from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner\n"
            "runner, written = TextLLMRunner(path, tokenizer), []\n"
            "for _ in range(2):\n"
            "    runner.generate(prompt, GenerationConfig(echo=False, max_new_tokens=40, temperature=0.0),\n"
            "                    written.append)\n"
            "    runner.reset()\n"
            "print('<answers>' + ''.join(written))\n")
    libraries = [library.library_path()] if form == "deltic" else runtime.llama_operators()
    done = subprocess.run([sys.executable, "-c", code, embedded[form], sidecar_of(embedded[form]) / "tokenizer.json",
                           prompt, *libraries], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rpartition("<answers>")[2].strip() == f"{ANSWER}<|im_end|>" * 2
