"""`deltic doctor`: the findings of each check on a sound machine and on a broken one, without breaking this one."""

from __future__ import annotations

import builtins
import json
import os
import platform
import re
import shutil
import socket
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from encoder_models import save_encoder
from huggingface_hub import constants
from safetensors.torch import save_file

from deltic.cli import doctor, inspect, main
from deltic.llm import LLM
from deltic.loader.dummy import random_head
from deltic.loader.hub import resolve
from deltic.loader.model_files import open_model
from deltic.ops import NativeKernels
from deltic.ops.cuda.card import card_of

GIB = 1 << 30
HERE = Path(__file__)
MISSING = "the native kernels were not compiled: install g++, then reinstall deltic"


@pytest.fixture(autouse=True)
def sound(monkeypatch, tmp_path):
    """A machine without faults, whatever this one is like."""
    for name in (*doctor._THREAD_LIMITS, *doctor._THREAD_PINS, "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    free(monkeypatch, 16 * GIB)
    kernels(monkeypatch, level="bf16")
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GIB, used=0, free=50 * GIB))


def free(monkeypatch, size):
    for module in (doctor, inspect):
        monkeypatch.setattr(module, "available_memory", lambda: size)


def kernels(monkeypatch, path=HERE, **facts):
    """The state of the compiled library. This test stands for its file, which is newer than csrc/ in no checkout."""
    monkeypatch.setattr("deltic.ops.native_kernels", lambda: NativeKernels(path, **facts))
    monkeypatch.setattr(doctor, "_is_stale", lambda library: False)


def look(check, **given):
    """A check's finding; every finding that is not ok has advice."""
    finding = check(Namespace(**{"model": None, "json": False, **given}))
    assert f"check_{finding.name}" == check.__name__
    assert (finding.state == "ok") == (finding.advice == "") and finding.fact
    return finding


def problem(check, state, advice, **given):
    """A finding in this state that gives this advice."""
    finding = look(check, **given)
    assert finding.state == state and advice in finding.advice, finding
    return finding.fact


# The installation


def test_missing_packages_are_problems(monkeypatch):
    load = builtins.__import__

    def refuse(name, *rest):
        if name == "torch":
            raise ImportError(f"no {name}")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    fact = problem(doctor.check_torch, "problem", "pip install --force-reinstall torch")
    assert fact == "torch cannot be imported: no torch"


def test_gpus_are_named_and_an_unused_gpu_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "_has_nvidia", lambda: True)
    for built_for, advice in ((None, "CUDA build"), ("12.8", "nvidia-smi")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        problem(doctor.check_torch, "warning", advice)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - device.index, 0))
    card_of.cache_clear()
    try:
        fact = look(doctor.check_torch).fact
    finally:
        card_of.cache_clear()
    assert "Card 0, kernels for sm_90 (227 KiB a block, bulk copies, wgmma and mma.sync); Card 1, kernels" in fact
    assert fact.endswith("for sm_80 (163 KiB a block, copies of 16 bytes, mma.sync); we have not measured this card")


def test_a_cuda_build_without_a_gpu_is_a_warning_with_its_size(monkeypatch):
    def package(name, *sizes):
        return SimpleNamespace(name=name, files=[SimpleNamespace(size=size) for size in sizes])

    found = [package("torch", GIB, None), package("torchao", GIB), package("nvidia-cublas", GIB, GIB)]
    monkeypatch.setattr(doctor, "distributions", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    advice = ("to save most of 3.0 GiB of disk: pip uninstall -y nvidia-cublas torch; then pip install torch==2.13.0 "
              "--index-url https://download.pytorch.org/whl/cpu")
    assert "without an NVIDIA GPU" in problem(doctor.check_torch, "warning", advice)
    found.pop(0)
    assert look(doctor.check_torch).state == "ok", "torch was compiled here"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CPU build, no CUDA device" in look(doctor.check_torch).fact


def test_unusable_kernels(monkeypatch, tmp_path):
    kernels(monkeypatch, tmp_path / "libdeltic.so", error=MISSING)
    fact = problem(doctor.check_kernels, "warning", "pip install -e")
    assert MISSING in fact and "a third longer" in fact
    (tmp_path / "libdeltic.so").touch()
    kernels(monkeypatch, tmp_path / "libdeltic.so", error="the native kernels cannot be loaded: bad ELF")
    monkeypatch.setattr(doctor, "_SOURCE", tmp_path)
    fact = problem(doctor.check_kernels, "problem", "--no-deps PATH (the directory or wheel")
    assert "bad ELF" in fact


def test_stale_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_is_stale", lambda library: True)
    problem(doctor.check_kernels, "warning", "older than its source")
    monkeypatch.undo()
    monkeypatch.setattr(doctor, "_SOURCE", tmp_path)
    built, source = tmp_path / "libdeltic.so", tmp_path / "csrc" / "linear.cpp"
    built.touch()
    assert not doctor._is_stale(built)
    source.parent.mkdir()
    source.touch()
    os.utime(built, (1000, 1000))
    os.utime(source, (999, 999))
    assert not doctor._is_stale(built)
    os.utime(source, (1001, 1001))
    assert doctor._is_stale(built)


def test_kernels_without_vector_extensions(monkeypatch):
    kernels(monkeypatch, level="portable")
    assert problem(doctor.check_kernels, "warning", "this processor has no AVX2").startswith("level portable; ")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert look(doctor.check_kernels).state == "ok"


def test_operations_are_listed_by_backend(monkeypatch):
    monkeypatch.setattr("deltic.ops.explain", lambda ops: {"mlp": f"torch ({MISSING})", "head": f"torch ({MISSING})"})
    assert look(doctor.check_operations).fact == f"torch ({MISSING}): mlp head"


def test_operations_on_a_gpu(monkeypatch):
    monkeypatch.setattr("deltic.ops.capabilities.find_device", lambda: "cuda")
    assert "cuda: flush_delta_log sample mtp_step step vision" in look(doctor.check_operations).fact


def test_the_hub_check_shows_no_token(monkeypatch, tmp_path):
    assert "no token" in look(doctor.check_hub).fact
    (tmp_path / "token").write_text("hf_secret")
    assert "a token" in look(doctor.check_hub).fact
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "secret" not in repr(look(doctor.check_hub))


def test_a_hub_cache_that_cannot_be_used(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GIB, free=GIB))
    problem(doctor.check_hub, "warning", "little room")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert problem(doctor.check_hub, "warning", "set HF_HOME").endswith("offline")
    problem(doctor.check_hub, "warning", "HF_HUB_OFFLINE")


# The machine


def test_environment_variables_that_slow_threads_down(monkeypatch):
    for name, harmful, harmless in (
            ("OMP_NUM_THREADS", "1", "4"), ("OMP_NUM_THREADS", "2,1", "many"), ("MKL_NUM_THREADS", "3", ""),
            ("KMP_AFFINITY", "granularity=fine,compact", "disabled"), ("OMP_PROC_BIND", "close", "FALSE"),
            ("OMP_WAIT_POLICY", "active", "")):
        monkeypatch.setenv(name, harmless)
        assert look(doctor.check_threads).state == "ok", (name, harmless)
        monkeypatch.setenv(name, harmful)
        assert f"{name}={harmful}" in problem(doctor.check_threads, "warning", f"{name}: unset it")
        monkeypatch.delenv(name)


def test_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0, 0))
    problem(doctor.check_load, "warning", "other programs use the cores")


def test_little_memory(monkeypatch):
    for size, state in ((GIB // 4, "problem"), (GIB, "warning"), (4 * GIB, "ok")):
        free(monkeypatch, size)
        assert look(doctor.check_memory).state == state, size


# The model


def test_a_model_that_fits(monkeypatch):
    for name in ("tiny", str(resolve(None))):
        finding = look(doctor.check_model, model=name)
        assert finding.state == "ok" and "context up to 32,768 tokens" in finding.fact
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(resolve(None)))
    assert look(doctor.check_model, model="some/model").state == "ok"


def test_a_model_without_room(monkeypatch):
    for size, state in ((0, "problem"), (4 << 20, "problem"), (14 << 20, "warning")):
        free(monkeypatch, size)
        assert look(doctor.check_model, model="tiny").state == state, size


def test_an_encoder(monkeypatch, tmp_path):
    save_encoder(tmp_path / "bert", "bert")
    for size, state in ((16 * GIB, "ok"), (1 << 10, "warning")):
        free(monkeypatch, size)
        finding = look(doctor.check_model, model=str(tmp_path / "bert"))
        assert finding.state == state and finding.fact.startswith("bert, for vectors or scores (deltic embed, rerank)")


def test_models_that_cannot_be_found(tmp_path):
    shutil.copy(resolve(None) / "config.json", tmp_path)
    for name in ("/nowhere/at/all", "nothing", "a--b/c", str(tmp_path)):
        finding = look(doctor.check_model, model=name)
        assert finding.state == "problem" and name in finding.fact


@pytest.fixture
def headless(tmp_path):
    """A copy of the embedded model, without its draft head."""
    return shutil.copytree(resolve(None), tmp_path / "model", ignore=shutil.ignore_patterns("mtp.safetensors"))


def head_of(model, **options):
    return random_head(open_model(model).config, **options)


def test_the_type_of_the_draft_head_is_shown(headless):
    """Its norms are float32."""
    finding = look(doctor.check_model, model=str(headless))
    assert finding.state == "ok" and "draft head" not in finding.fact
    save_file(head_of(headless, dtype="float16"), headless / "mtp.safetensors")
    finding = look(doctor.check_model, model=str(headless))
    assert finding.state == "ok" and finding.fact.endswith("32,768 tokens, draft head F16")


def test_a_truncated_draft_head(headless):
    path = headless / "mtp.safetensors"
    whole = (resolve(None) / path.name).read_bytes()
    for size in (0, 20, 9000, -1):
        path.write_bytes(whole[:size])
        finding = look(doctor.check_model, model=str(headless))
        assert finding.state == "warning" and "32,768 tokens" in finding.fact and "draft head" not in finding.fact
        assert finding.advice.startswith(f"the draft head cannot be used, so that nothing is drafted: {path} ")
        assert "truncated or corrupt" in finding.advice
        assert finding.advice.endswith("; fix it as described, or take it again with deltic mtp extract")


def test_a_draft_head_without_a_tensor_in_a_model_without_room(monkeypatch, headless):
    head = head_of(headless)
    del head["mtp.fc.weight"]
    save_file(head, headless / "mtp.safetensors")
    free(monkeypatch, 0)
    finding = look(doctor.check_model, model=str(headless))
    assert finding.state == "problem" and finding.advice.startswith("there is no room")
    assert "1 tensors of the multi-token-prediction head are missing" in finding.advice
    assert "'mtp.fc.weight'" in finding.advice


def test_a_model_that_is_not_downloaded(monkeypatch):
    asked = []

    def snapshot(name, **options):
        from huggingface_hub.errors import LocalEntryNotFoundError

        asked.append((name, options))
        raise LocalEntryNotFoundError("not here")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert look(doctor.check_model, model="some/model").state == "warning"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert look(doctor.check_model, model="some/model").state == "problem"
    assert asked == [("some/model", {"revision": None, "local_files_only": True})] * 2


# An answer


def test_a_wrong_answer_is_a_problem(monkeypatch):
    stream = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda self, messages, sampling: stream(
        self, [{"role": "user", "content": "What is the capital of Spain?"}], sampling))
    finding = look(doctor.check_answer)
    assert finding.state == "problem" and "Madrid" in finding.fact and "--ops reference" in finding.advice
    assert "drafts, the same without" in finding.fact and "--speculate" not in finding.advice


def test_drafts_that_change_the_answer_are_a_problem(monkeypatch):
    stream = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda self, messages, sampling: stream(
        self, messages if self.runtime.mtp_runner else [{"role": "user", "content": "1+1="}], sampling))
    finding = look(doctor.check_answer)
    assert finding.state == "problem" and "drafts, not the same without" in finding.fact
    assert "Paris" in finding.fact and "--speculate off" in finding.advice


# The command


def test_a_sound_machine_as_lines(monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0, 0))
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert out.isascii() and not err
    lines = out.splitlines()
    assert lines[0].startswith("ok    python") and lines[-1] == "problems: 0, warnings: 1"
    warned = next(index for index, line in enumerate(lines) if line.startswith("warn  load"))
    assert lines[warned + 1].lstrip().startswith("-> other programs use the cores")
    assert not any(line.startswith("ok    model") for line in lines)
    assert re.search(r"[1-9]\d* drafts, the same without", out)


def test_nothing_is_written_or_asked_for_json(monkeypatch, capsys, tmp_path):
    def refuse(*given):
        raise AssertionError(given)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert main(["doctor", "tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["ok", "problems", "warnings", "findings"]
    assert (found["ok"], found["problems"], found["warnings"]) == (True, 0, 0)
    own = [check.__name__ for check in doctor.CHECKS if check is not doctor.check_mlx]  # which is for Macs
    assert [f"check_{finding['name']}" for finding in found["findings"]] == own
    assert all(list(finding) == ["name", "state", "fact", "advice"] for finding in found["findings"])
    assert not any(tmp_path.iterdir())


def test_a_check_that_fails(monkeypatch, capsys):
    def check_sanity(args):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", (check_sanity, doctor.check_load))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAIL  sanity  the check failed: RuntimeError: two lines"
    assert "-> see above; `pip check`" in lines[1] and lines[2].startswith("ok    load")
    assert lines[-1] == "problems: 1, warnings: 0"
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_wrong_arguments_are_refused_without_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["doctor", "--bogus"]) == 2 and "--bogus" in capsys.readouterr().err
