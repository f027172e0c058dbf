"""Python, torch, the compiled kernels, who serves the operations, and whether all of it answers a question."""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import shlex
import shutil
import sys
import warnings
from pathlib import Path

from deltic import __version__
from deltic.cli.doctor.findings import Fault, Finding, State

_OLDEST_PYTHON = (3, 11)
_SOURCE = Path(__file__).parents[3]
_OLD_DRIVER = ("check with nvidia-smi that the driver runs and is not older than that CUDA version; a container has to "
               "be given the GPU (--gpus all)")
_NO_CUDA = "install a CUDA build of the same torch (https://pytorch.org/get-started), and models run on it"
_LEVELS = ("no vector extensions", "AVX2", "AVX-512", "AVX-512 with VNNI", "AVX-512 with BF16 products")
"""What the kernels' levels mean."""
_QUESTION, _ANSWER, _ANSWER_TOKENS, _ANSWER_MEMORY = "What is the capital of France?", "Paris", 32, "64MiB"


def check_python(args: argparse.Namespace) -> Finding:
    old: list[Fault] = [("problem", f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer")]
    return Finding.of("python", f"Python {platform.python_version()}, deltic {__version__}, {sys.platform} on "
                                f"{platform.machine()}", old if sys.version_info < _OLDEST_PYTHON else [])


def check_torch(args: argparse.Namespace) -> Finding:
    wanted = _wanted_torch()
    install = f"'torch{wanted}'"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding.of("torch", f"torch cannot be imported: {error}",
                          [("problem", f"pip install --force-reinstall {install}")])
    other: list[Fault] = [("warning", f"deltic was tested with torch{wanted}: pip install {install}")]
    found, faults = _devices()
    return Finding.of("torch", f"torch {torch.__version__}, {found}",
                      faults + ([] if _is_within(torch.__version__, wanted) else other))


def check_kernels(args: argparse.Namespace) -> Finding:
    """The compiled kernels: there, loadable, not older than their source, and which of them this processor runs."""
    from deltic.ops.cpu import library

    path, loaded = Path(library.__file__).parent / "libdeltic.so", library.load()
    if isinstance(loaded, str):
        broken: State = "problem" if path.exists() else "warning"
        return Finding.of("kernels", f"not in use, so that decoding takes a third longer or more: {loaded}",
                          [(broken, f"{_compiler_advice()}: {reinstall()}")])
    faults: list[Fault] = []
    if _is_stale(path):
        faults.append(("warning", f"the library is older than its source in csrc: {reinstall()}"))
    level, slow = _level(loaded.deltic_best_level())
    faults += [("warning", slow)] if slow else []
    return Finding.of("kernels", f"{level}; library and C header in {path.parent}", faults)


def check_operations(args: argparse.Namespace) -> Finding:
    """Who serves each op where models run if nothing else is said, and why nobody faster."""
    from deltic.engine import options
    from deltic.ops import explain, select
    from deltic.ops.cpu import library

    device = options.found_device()
    served = explain(select((), device))
    groups: dict[str, list[str]] = {}
    for name, who in served.items():
        groups.setdefault(who, []).append(name)
    missing = device == "cpu" and isinstance(library.load(), str)
    text = "; ".join(f"{who}: {' '.join(names)}" for who, names in groups.items())
    return Finding.of("operations", text if device == "cpu" else f"on the GPU {text} (a model's own: deltic inspect)",
                      [("warning", "see kernels above")] if missing else [])


def check_answer(args: argparse.Namespace) -> Finding | None:
    """The embedded model answers a question whose answer it knows, and without drafts it answers the same."""
    if not args.run_model:
        return None
    from deltic.cli.answer import read_answer
    from deltic.llm import LLM
    from deltic.params import SamplingParams

    llm, plain = (LLM(memory=_ANSWER_MEMORY, speculate=drafts) for drafts in ("auto", "off"))
    sampling = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS)
    question = [{"role": "user", "content": _QUESTION}]
    stream, meter = read_answer(llm, lambda: llm.stream(question, sampling), lambda delta: None)
    alone, _ = read_answer(plain, lambda: plain.stream(question, sampling), lambda delta: None)
    found, wanted = (each.output.choices[0] if each.output else None for each in (stream, alone))
    given, rate = found.text.strip() if found else "", meter.tokens_per_second
    same = bool(found and wanted and found.tokens == wanted.tokens)
    speed = f"{meter.tokens} tokens in {meter.end - meter.started:.2f} s" + (f", {rate:.0f} tokens/s" if rate else "")
    drafts = f"{found.usage.drafted_tokens if found else 0} drafts, {'' if same else 'not '}the same without"
    wrong: Fault = ("problem", "the embedded model answers wrongly: try deltic run --ops ref; if that is right, a "
                               f"kernel is broken, else reinstall: {reinstall()}")
    changed: Fault = ("problem", "drafts change the answer, which they must not: run models with --speculate off, and "
                                 f"reinstall: {reinstall()}")
    faults = [wrong] * (_ANSWER not in given) + [changed] * (not same)
    return Finding.of("answer", f"{given!r} ({speed}; {drafts})", faults)


def reinstall() -> str:
    """The command that compiles the kernels again."""
    if (_SOURCE / "csrc").is_dir():
        return f"pip install -e {_SOURCE}"
    return f"pip install --force-reinstall --no-deps {_origin() or 'PATH (the directory or wheel it came from)'}"


def _origin() -> str | None:
    """The directory, file or address that the package was installed from, as pip wrote it down."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        said = json.loads(distribution("deltic").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        return None
    url = said.get("url") if isinstance(said, dict) else None
    return shlex.quote(url.removeprefix("file://")) if isinstance(url, str) else None


def _devices() -> tuple[str, list[Fault]]:
    """For what torch was built and on which GPUs it can run, and what keeps it from one."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    if not devices and _has_nvidia():
        return (f"{build}, which cannot use this machine's NVIDIA GPU",
                [("warning", _OLD_DRIVER if torch.version.cuda else _NO_CUDA)])
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(devices))
    return f"{build}, {names or 'no CUDA device'}", []


def _wanted_torch() -> str:
    """The versions that the package asks for, such as `>=2.9,<2.14`; empty if that is not known."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        required = requires("deltic") or []
    except PackageNotFoundError:
        return ""
    return next((found[1] for line in required if (found := re.match(r"torch\s*([<>=][^;]*)", line))), "").strip()


def _is_within(version: str, wanted: str) -> bool:
    """Whether a version is one of a range whose bounds are `>=`, `<` and `==`."""
    def numbers(text: str) -> list[int]:
        return list(map(int, re.findall(r"\d+", re.split(r"[+a-z]", text)[0])))

    compare = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
    return all(compare[sign](numbers(version), numbers(bound))
               for sign, bound in re.findall(r"(>=|<|==)\s*([\w.]+)", wanted))


def _has_nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def _compiler_advice() -> str:
    """What has to be done before the kernels can be compiled."""
    if os.environ.get("CXX"):
        return f"compile with $CXX ({os.environ['CXX']})"
    found = next(filter(shutil.which, ("g++", "clang++")), None)
    if found:
        return f"there is a compiler ({found}), compile with it"
    return "set CXX=c++ and compile" if shutil.which("c++") else "install a C++ compiler such as g++, then compile"


def _is_stale(path: Path) -> bool:
    """Whether the source, where there is one, is newer than the library."""
    sources = (_SOURCE / "csrc").glob("*.[ch]*")
    return any(source.stat().st_mtime > path.stat().st_mtime for source in sources)


def _level(best: int) -> tuple[str, str]:
    """The level at which the kernels run on this processor; and what to do if that is a slow one."""
    if best or platform.machine() not in ("x86_64", "AMD64"):
        return _LEVELS[best], ""
    return _LEVELS[0], ("this processor shows no AVX2: in a virtual machine, pass the host's processor through "
                        "(CPU type host)")
