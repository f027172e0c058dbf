"""`deltic doctor`: what each check says of a sound machine and of a broken one, without breaking this one."""

from __future__ import annotations

import builtins
import errno
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from encoder_models import save_encoder
from huggingface_hub import constants
from packaging.specifiers import SpecifierSet
from safetensors.torch import save_file

from deltic.cache.offload.directory import make_private, root_of
from deltic.cli import doctor, doctor_checks, doctor_model, main
from deltic.llm import LLM
from deltic.loader.dummy import random_head
from deltic.loader.hub import resolve
from deltic.loader.model_files import open_model
from deltic.ops.cpu import library

ZEN4 = "flags\t\t: fpu avx2 bmi1 bmi2 f16c fma movbe avx512f avx512bw avx512cd avx512dq avx512vl avx512_bf16\n"
GIB = 1 << 30
REAL = library.load()
MISSING = "the native kernels were not compiled: install g++, then reinstall deltic"


@pytest.fixture(autouse=True)
def sound(monkeypatch, tmp_path):
    """A machine where all is well, whatever this one is like."""
    for name in (*doctor_checks._THREAD_LIMITS, *doctor_checks._HARMFUL_IF_ON, "HF_TOKEN", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    for room in (doctor_checks, doctor_model):
        monkeypatch.setattr(room, "available_memory", lambda: 16 * GIB)
    monkeypatch.setattr(doctor_checks, "memory_mib", lambda: 32 << 10)
    monkeypatch.setattr(doctor_checks, "available_cores", lambda: 4)
    monkeypatch.setattr(doctor_checks, "_has_nvidia", lambda: False)
    monkeypatch.setattr(doctor_checks, "_is_stale", lambda path: False)
    monkeypatch.setattr(doctor_checks, "_wanted_torch", SpecifierSet)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(library, "load", lambda: Kernels(4))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GIB, used=0, free=50 * GIB))
    files(monkeypatch, {"/proc/cpuinfo": ZEN4})


class Kernels:
    """The compiled kernels, on a processor of another level."""

    def __init__(self, best):
        self.deltic_best_level = lambda: best

    def __getattr__(self, name):
        return getattr(REAL, name)


def files(monkeypatch, contents):
    """What the system says of itself."""
    monkeypatch.setattr(doctor_checks, "read_system", lambda path: contents.get(path, ""))


def without(monkeypatch, package):
    """As if the package were not installed."""
    load = builtins.__import__

    def refuse(name, *rest):
        if name == package:
            raise ImportError(f"no {name}")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)


def arguments(**given):
    return Namespace(**{"model": None, "cache_dir": None, "run_model": True, "json": False, **given})


def look(check, **given):
    """A check's finding; every finding that is not ok says what to do."""
    finding = check(arguments(**given))
    assert f"check_{finding.name}" == check.__name__
    assert (finding.state == "ok") == (finding.advice == "") and finding.fact
    return finding


@pytest.mark.parametrize("check", [check for check in doctor.CHECKS
                                   if check not in (doctor_model.check_model, doctor_checks.check_cache_dir)])
def test_a_sound_machine(check):
    assert look(check).state == "ok"


# The installation


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_OLDEST_PYTHON", (9, 1))
    finding = look(doctor_checks.check_python)
    assert finding.state == "problem" and "Python 9.1 or newer" in finding.advice


def test_no_torch(monkeypatch):
    without(monkeypatch, "torch")
    finding = look(doctor_checks.check_torch)
    assert finding.state == "problem" and finding.fact == "torch cannot be imported: no torch"
    assert "pip install --force-reinstall 'torch" in finding.advice


def test_another_torch(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_wanted_torch", lambda: SpecifierSet("<2,>=1.4"))
    finding = look(doctor_checks.check_torch)
    assert finding.state == "warning" and "pip install 'torch<2,>=1.4'" in finding.advice


@pytest.mark.parametrize(("built_for", "advice"), [(None, "CUDA build"), ("12.8", "nvidia-smi")])
def test_a_gpu_that_torch_does_not_use(monkeypatch, built_for, advice):
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert look(doctor_checks.check_torch).state == "ok"
    monkeypatch.setattr(doctor_checks, "_has_nvidia", lambda: True)
    finding = look(doctor_checks.check_torch)
    assert finding.state == "warning" and advice in finding.advice


def test_a_gpu_in_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(doctor_checks, "_has_nvidia", lambda: True)
    assert look(doctor_checks.check_torch).fact.endswith("Card 0, Card 1")


@pytest.mark.parametrize(("compilers", "advice"), [
    ((), "install a C++ compiler"), (("c++",), "set CXX=c++"), (("c++", "clang++"), "there is a compiler (clang++)"),
])
def test_kernels_that_were_not_compiled(monkeypatch, compilers, advice):
    monkeypatch.setattr(library, "load", lambda: MISSING)
    monkeypatch.setattr(library, "__file__", "/nowhere/library.py")
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    finding = look(doctor_checks.check_kernels)
    assert finding.state == "warning" and MISSING in finding.fact and "a third longer" in finding.fact
    assert advice in finding.advice and "pip install -e" in finding.advice


def test_kernels_that_cannot_be_loaded(monkeypatch, tmp_path):
    (tmp_path / "libdeltic.so").touch()
    monkeypatch.setattr(library, "load", lambda: "the native kernels cannot be loaded: bad ELF")
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    monkeypatch.setattr(doctor_checks, "_SOURCE", tmp_path)
    monkeypatch.setenv("CXX", "my-compiler")
    finding = look(doctor_checks.check_kernels)
    assert finding.state == "problem" and "bad ELF" in finding.fact and "my-compiler" in finding.advice
    command = finding.advice.rpartition("pip install --force-reinstall --no-deps ")[2]
    assert command.startswith("PATH (the directory or wheel")


def test_stale_kernels(monkeypatch):
    monkeypatch.setattr(doctor_checks, "_is_stale", lambda path: True)
    finding = look(doctor_checks.check_kernels)
    assert finding.state == "warning" and "older than its source" in finding.advice


def test_a_library_older_than_its_source_is_stale(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(doctor_checks, "_SOURCE", tmp_path)
    built, source = tmp_path / "libdeltic.so", tmp_path / "csrc" / "linear.cpp"
    built.touch()
    assert not doctor_checks._is_stale(built)
    source.parent.mkdir()
    source.touch()
    os.utime(built, (1000, 1000))
    os.utime(source, (999, 999))
    assert not doctor_checks._is_stale(built)
    os.utime(source, (1001, 1001))
    assert doctor_checks._is_stale(built)


@pytest.mark.parametrize(("best", "level", "state"), [
    (4, "AVX-512 with BF16 products", "ok"), (1, "AVX2", "ok"), (0, "no vector extensions", "warning"),
])
def test_the_level_of_the_kernels(monkeypatch, best, level, state):
    monkeypatch.setattr(library, "load", lambda: Kernels(best))
    finding = look(doctor_checks.check_kernels)
    assert finding.state == state and finding.fact.startswith(f"{level}; library and C header in ")


def test_another_processor_needs_no_advice(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: Kernels(0))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert look(doctor_checks.check_kernels).state == "ok"


def test_operations_without_kernels(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: MISSING)
    monkeypatch.setattr("deltic.ops.explain", lambda ops: {"mlp": f"torch ({MISSING})", "head": f"torch ({MISSING})"})
    finding = look(doctor_checks.check_operations)
    assert finding.state == "warning" and finding.fact == f"torch ({MISSING}): mlp head"


def test_operations_on_a_gpu(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: MISSING)
    monkeypatch.setattr("deltic.ops.capabilities.find_device", lambda: "cuda")
    finding = look(doctor_checks.check_operations)
    assert finding.state == "ok" and "on the GPU " in finding.fact
    assert "cuda: flush_delta_log sample mtp_step step vision" in finding.fact


def test_the_required_versions_of_torch(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["numpy>=1", "torch<2.14,>=2.9; extra == 'a'"])
    assert doctor_checks._wanted_torch() == SpecifierSet(">=2.9,<2.14")
    monkeypatch.setattr("importlib.metadata.requires", lambda name: None)
    assert doctor_checks._wanted_torch() == SpecifierSet()


# The machine


def test_the_processor(monkeypatch):
    assert "(AVX2, AVX-512, AVX-512 BF16)" in look(doctor_checks.check_processor).fact
    files(monkeypatch, {})
    assert "no vector extensions" in look(doctor_checks.check_processor).fact


@pytest.mark.parametrize(("name", "harmful", "harmless"), [
    ("OMP_NUM_THREADS", "1", "4"), ("OMP_NUM_THREADS", "2,1", "many"), ("MKL_NUM_THREADS", "3", ""),
    ("KMP_AFFINITY", "granularity=fine,compact", "disabled"), ("OMP_PROC_BIND", "close", "FALSE"),
    ("OMP_WAIT_POLICY", "active", ""),
])
def test_harmful_variables(monkeypatch, name, harmful, harmless):
    monkeypatch.setenv(name, harmless)
    assert look(doctor_checks.check_threads).state == "ok"
    monkeypatch.setenv(name, harmful)
    finding = look(doctor_checks.check_threads)
    assert finding.state == "warning" and f"{name}={harmful}" in finding.fact and f"{name}: unset it" in finding.advice


def test_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0, 0))
    assert look(doctor_checks.check_load).state == "warning"


@pytest.mark.parametrize(("free", "state"), [(GIB // 4, "problem"), (GIB, "warning"), (4 * GIB, "ok")])
def test_little_memory(monkeypatch, free, state):
    monkeypatch.setattr(doctor_checks, "available_memory", lambda: free)
    assert look(doctor_checks.check_memory).state == state


def test_limits_and_swap(monkeypatch):
    meminfo = "MemTotal: 1 kB\nSwapTotal:  {} kB\nSwapFree:   1000 kB\n"
    files(monkeypatch, {"/sys/fs/cgroup/memory.max": f"{8 * GIB}\n", "/proc/meminfo": meminfo.format(1000)})
    assert look(doctor_checks.check_memory).fact == "16.0 GiB free of 32.0 GiB, limited to 8.0 GiB by the container"
    files(monkeypatch, {"/sys/fs/cgroup/memory.max": "max\n", "/proc/meminfo": meminfo.format(1000 + (2 << 20))})
    finding = look(doctor_checks.check_memory)
    assert finding.state == "warning" and finding.fact.endswith("32.0 GiB, 2.0 GiB in swap")


# The hub


def test_the_hub_check_shows_no_token(monkeypatch, tmp_path):
    assert "no token" in look(doctor_checks.check_hub).fact
    (tmp_path / "token").write_text("hf_secret")
    assert "a token" in look(doctor_checks.check_hub).fact
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "secret" not in repr(look(doctor_checks.check_hub))


def test_the_hub_offline_and_unwritable(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = look(doctor_checks.check_hub)
    assert finding.state == "warning" and finding.fact.endswith("offline")
    assert "set HF_HOME" in finding.advice and "HF_HUB_OFFLINE" in finding.advice


def test_the_hub_without_room(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GIB, free=GIB))
    assert "little room" in look(doctor_checks.check_hub).advice


def test_no_hub_client(monkeypatch):
    without(monkeypatch, "huggingface_hub")
    finding = look(doctor_checks.check_hub)
    assert finding.state == "problem" and "pip install huggingface_hub" in finding.advice


# The cache directory


@pytest.fixture
def kept(tmp_path):
    """A directory that is in use."""
    make_private(root_of(tmp_path))
    (root_of(tmp_path) / "ab-ab-0.kv.safetensors").write_bytes(bytes(1 << 20))
    return tmp_path


def test_a_cache_directory_in_use(kept):
    finding = look(doctor_checks.check_cache_dir, cache_dir=str(kept))
    assert finding.state == "ok" and finding.fact == "1.0 MiB in 1 files kept, 50.0 GiB free"
    assert doctor_checks.check_cache_dir(arguments()) is None


def test_a_cache_directory_to_be_made(tmp_path):
    finding = look(doctor_checks.check_cache_dir, cache_dir=str(tmp_path / "a" / "b"))
    assert finding.state == "ok" and "nothing kept yet" in finding.fact
    assert not any(tmp_path.iterdir())


def test_a_cache_directory_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = look(doctor_checks.check_cache_dir, cache_dir=str(tmp_path))
    assert finding.state == "problem" and "not writable" in finding.fact


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the system has no /proc")
def test_a_cache_directory_where_nothing_can_be_made():
    """The permissions alone would not tell."""
    finding = look(doctor_checks.check_cache_dir, cache_dir="/proc/deltic-cache")
    assert finding.state == "problem" and finding.fact.startswith("/proc is not writable for this user: No such file")


def test_a_full_disk_is_found_by_writing(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left" in look(doctor_checks.check_cache_dir, cache_dir=str(tmp_path)).fact
    assert not any(tmp_path.iterdir())


def test_a_cache_directory_that_can_only_be_read(monkeypatch, kept):
    monkeypatch.setattr(doctor_checks, "_write_error", lambda path: "Read-only file system")
    finding = look(doctor_checks.check_cache_dir, cache_dir=str(kept))
    assert finding.state == "warning" and "1 files kept" in finding.fact and "is used" in finding.advice


def test_a_cache_directory_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    assert "not a directory" in look(doctor_checks.check_cache_dir, cache_dir=str(tmp_path / "file")).fact
    (tmp_path / "deltic-prefixes").symlink_to(tmp_path)
    assert "a link" in look(doctor_checks.check_cache_dir, cache_dir=str(tmp_path)).fact


def test_a_cache_directory_that_others_can_read(kept):
    root_of(kept).chmod(0o755)
    finding = look(doctor_checks.check_cache_dir, cache_dir=str(kept))
    assert finding.state == "warning" and "chmod 700" in finding.advice


def test_a_cache_directory_with_files_of_others(monkeypatch, kept):
    monkeypatch.setattr(doctor_checks, "_owner", lambda path: os.geteuid() + path.name.endswith(".safetensors"))
    finding = look(doctor_checks.check_cache_dir, cache_dir=str(kept))
    assert finding.state == "problem" and finding.advice.startswith("1 files or folders")


def test_a_full_disk(monkeypatch, kept):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100 * GIB, free=1))
    assert "nearly full" in look(doctor_checks.check_cache_dir, cache_dir=str(kept)).advice


def test_the_owner_of_a_file(tmp_path):
    assert doctor_checks._owner(tmp_path) == doctor_checks._owner(tmp_path / "gone") == os.geteuid()


# The model


@pytest.mark.parametrize("name", ["tiny", str(resolve(None))])
def test_a_model_that_fits(name):
    finding = look(doctor_model.check_model, model=name)
    assert finding.state == "ok" and "context up to 32,768 tokens" in finding.fact
    assert doctor_model.check_model(arguments()) is None


@pytest.mark.parametrize(("free", "state"), [(0, "problem"), (4 << 20, "problem"), (14 << 20, "warning")])
def test_a_model_without_room(monkeypatch, free, state):
    monkeypatch.setattr(doctor_model, "available_memory", lambda: free)
    assert look(doctor_model.check_model, model="tiny").state == state


@pytest.mark.parametrize(("free", "state"), [(16 * GIB, "ok"), (1 << 10, "warning")])
def test_an_encoder(monkeypatch, tmp_path, free, state):
    save_encoder(tmp_path / "bert", "bert")
    monkeypatch.setattr(doctor_model, "available_memory", lambda: free)
    finding = look(doctor_model.check_model, model=str(tmp_path / "bert"))
    assert finding.state == state and finding.fact.startswith("bert, for vectors or scores (deltic embed, rerank)")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nothing", "a--b/c"])
def test_an_unknown_model(name):
    finding = look(doctor_model.check_model, model=name)
    assert finding.state == "problem" and name in finding.fact


def test_a_model_without_weights(tmp_path):
    shutil.copy(resolve(None) / "config.json", tmp_path)
    finding = look(doctor_model.check_model, model=str(tmp_path))
    assert finding.state == "problem" and str(tmp_path) in finding.fact


@pytest.fixture
def headless(tmp_path):
    """A copy of the embedded model, without its draft head."""
    return shutil.copytree(resolve(None), tmp_path / "model", ignore=shutil.ignore_patterns("mtp.safetensors"))


def head_of(model, **options):
    return random_head(open_model(model).config, **options)


def test_the_draft_head_has_its_most_common_type(headless):
    """Its norms are float32."""
    finding = look(doctor_model.check_model, model=str(headless))
    assert finding.state == "ok" and "draft head" not in finding.fact
    save_file(head_of(headless, dtype="float16"), headless / "mtp.safetensors")
    finding = look(doctor_model.check_model, model=str(headless))
    assert finding.state == "ok" and finding.fact.endswith("32,768 tokens, draft head F16")


@pytest.mark.parametrize("size", [0, 20, 9000, -1])
def test_a_truncated_draft_head(headless, size):
    path = headless / "mtp.safetensors"
    path.write_bytes((resolve(None) / path.name).read_bytes()[:size])
    finding = look(doctor_model.check_model, model=str(headless))
    assert finding.state == "warning" and "32,768 tokens" in finding.fact and "draft head" not in finding.fact
    assert finding.advice.startswith(f"the draft head cannot be used, so that nothing is drafted: {path} ")
    assert "truncated or corrupt" in finding.advice
    assert finding.advice.endswith("; fix it as described, or take it again with deltic mtp extract")


def test_a_draft_head_without_a_tensor_in_a_model_without_room(monkeypatch, headless):
    head = head_of(headless)
    del head["mtp.fc.weight"]
    save_file(head, headless / "mtp.safetensors")
    monkeypatch.setattr(doctor_model, "available_memory", lambda: 0)
    finding = look(doctor_model.check_model, model=str(headless))
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
    assert look(doctor_model.check_model, model="some/model").state == "warning"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert look(doctor_model.check_model, model="some/model").state == "problem"
    assert asked == [("some/model", {"local_files_only": True})] * 2


def test_a_downloaded_model(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: str(resolve(None)))
    assert look(doctor_model.check_model, model="some/model").state == "ok"


# The whole


def test_another_answer(monkeypatch):
    stream = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda self, messages, sampling: stream(
        self, [{"role": "user", "content": "What is the capital of Spain?"}], sampling))
    finding = look(doctor_checks.check_answer)
    assert finding.state == "problem" and "Madrid" in finding.fact and "--ops reference" in finding.advice
    assert "drafts, the same without" in finding.fact and "--speculate" not in finding.advice
    assert doctor_checks.check_answer(arguments(run_model=False)) is None


def test_drafts_that_change_the_answer(monkeypatch):
    stream = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda self, messages, sampling: stream(
        self, messages if self.runtime.mtp_runner else [{"role": "user", "content": "1+1="}], sampling))
    finding = look(doctor_checks.check_answer)
    assert finding.state == "problem" and "drafts, not the same without" in finding.fact
    assert "Paris" in finding.fact and "--speculate off" in finding.advice


def test_drafts_that_change_nothing():
    finding = look(doctor_checks.check_answer)
    assert finding.state == "ok" and re.search(r"[1-9]\d* drafts, the same without", finding.fact)


def test_lines(monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0, 0))
    assert main(["doctor", "--no-run"]) == 0
    out, err = capsys.readouterr()
    assert out.isascii() and not err
    lines = out.splitlines()
    assert lines[0].startswith("ok    python") and lines[-1] == "problems: 0, warnings: 1"
    warned = next(index for index, line in enumerate(lines) if line.startswith("warn  load"))
    assert lines[warned + 1].lstrip().startswith("-> others use the cores")
    assert not any(line.startswith(("ok    answer", "ok    model", "ok    cache dir")) for line in lines)


def test_json(capsys, tmp_path):
    assert main(["doctor", "tiny", "--cache-dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["ok", "problems", "warnings", "findings"]
    assert (found["ok"], found["problems"], found["warnings"]) == (True, 0, 0)
    assert [f"check_{finding['name']}" for finding in found["findings"]] == [c.__name__ for c in doctor.CHECKS]
    assert all(list(finding) == ["name", "state", "fact", "advice"] for finding in found["findings"])


def test_a_check_that_fails(monkeypatch, capsys):
    def check_sanity(args):
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "CHECKS", (check_sanity, doctor_checks.check_load))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FAIL  sanity  the check failed: RuntimeError: two lines"
    assert "-> see above; `pip check`" in lines[1] and lines[2].startswith("ok    load")
    assert lines[-1] == "problems: 1, warnings: 0"
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_nothing_is_written_or_asked(monkeypatch, tmp_path):
    def refuse(*given):
        raise AssertionError(given)

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert main(["doctor", "some/model", "--cache-dir", str(tmp_path / "conversations")]) == 0
    assert not any(tmp_path.iterdir())


def test_torch_comes_after_the_arguments():
    code = ("import sys; from deltic.cli import main; main(['doctor', '--bogus']);"
            "assert 'torch' not in sys.modules and 'deltic.cli.doctor' in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and "--bogus" in done.stderr
