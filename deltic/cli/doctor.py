"""`deltic doctor`: checks the installation and suggests fixes. It writes nothing and uses no network."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deltic import __version__
from deltic.cli.output import cpu_name, gib, memory_mib, read_answer
from deltic.cli.parser import UsageError, as_typed, text
from deltic.config import EngineConfig, ModelConfig, available_cores, available_memory
from deltic.errors import ModelError

if TYPE_CHECKING:
    from deltic.embeddings.directory import StoredEncoder
    from deltic.loader.model_files import ModelFiles

State = Literal["ok", "warning", "problem"]
Fault = tuple[State, str]
"""A state and the advice for it."""
_MARKS: dict[State, str] = {"ok": "ok", "warning": "warn", "problem": "FAIL"}  # ordered from good to bad


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. fact: one line. advice: empty if the state is ok."""

    name: str
    state: State
    fact: str
    advice: str = ""

    @classmethod
    def of(cls, name: str, fact: str, *faults: Fault) -> Finding:
        """Returns a finding with the worst state among its faults."""
        states: list[State] = ["ok", *(state for state, _ in faults)]
        worst = max(states, key=list(_MARKS).index)
        return cls(name, worst, " ".join(fact.split()), "; ".join(advice for _, advice in faults))

    def lines(self, width: int) -> str:
        """Returns mark, name and fact, with the advice below. width: columns for the name."""
        advice = f"\n{'':{width + 8}}-> {self.advice}" if self.advice else ""
        return f"{_MARKS[self.state]:<4}  {self.name:<{width}}  {self.fact}{advice}"


Check = Callable[[argparse.Namespace], Finding | None]
"""A function named check_FINDING. It returns None if the check was not requested."""


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check the installation, and suggest fixes for a model that is slow or does not start."
    parser.add_argument("model", nargs="?", metavar="MODEL", type=text,
                        help="also check that this model exists and fits; it is neither loaded nor downloaded")
    parser.add_argument("--model", dest="named", type=text, metavar="MODEL", help="the same as MODEL")
    parser.add_argument("--deep", action="store_true",
                        help="load MODEL, or all models in a directory, ask each some questions and compare the "
                             "answers with known ones; prints a report to send back")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_doctor(args: argparse.Namespace) -> int:
    args.model = args.named or args.model
    if args.deep and args.model is None:
        raise UsageError("--deep loads a model: name it, or a directory of models")
    findings, width = list[Finding](), max(map(len, map(_name, CHECKS)))

    def add(finding: Finding | None) -> None:
        if finding is not None:
            findings.append(finding)
            if not args.json:
                print(finding.lines(width), flush=True)

    for check in CHECKS:
        if not (args.deep and check is check_model):  # --deep loads the model, or several models
            add(_guarded(check, args))
    report = None
    if args.deep:
        from deltic.cli.doctor_model import examine, models_in, report_of

        examined = []
        for path in models_in(args.model):
            examined.append(examine(path))
            add(Finding.of("model", examined[-1].fact, *(("problem", fault) for fault in examined[-1].faults)))
        report = report_of(examined, findings)
    counts = {f"{state}s": sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if args.json:
        deep = {} if report is None else {"report": report}
        found = {"ok": not counts["problems"], **counts, "findings": list(map(asdict, findings)), **deep}
        print(json.dumps(found, ensure_ascii=False))
    else:
        if report is not None:
            shown = json.dumps(report, ensure_ascii=False, indent=1)
            print(f"\nreport (please send it back; it has no paths and no texts of yours):\n{shown}")
        print("\n" + ", ".join(f"{name}: {count}" for name, count in counts.items()))
    return 1 if counts["problems"] else 0


def _guarded(check: Check, args: argparse.Namespace) -> Finding | None:
    try:
        return check(args)
    except Exception as error:
        fact = f"the check failed: {type(error).__name__}: {str(error)[:300]}"
        advice = f"see above; `pip check` names missing packages; else reinstall: {_reinstall()}"
        return Finding.of(_name(check), fact, ("problem", advice))


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_")


# Installation


_SOURCE = Path(__file__).parents[2]
_INSTALL_CUDA = "install a CUDA build of the same torch (https://pytorch.org/get-started), and models run on it"
_CHECK_DRIVER = ("check with nvidia-smi that the driver runs and is not older than that CUDA version; a container "
                 "needs access to the GPU (--gpus all)")
_CUDA_PACKAGES = ("torch", "triton", "nvidia", "cuda")
"""Names, or their first words, of the packages of torch's CUDA build and its dependencies."""
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_LITTLE_DISK = 5 << 30


def check_python(args: argparse.Namespace) -> Finding:
    return Finding.of("python", f"Python {platform.python_version()}, deltic {__version__}, {sys.platform} on "
                                f"{platform.machine()}, {cpu_name()}")


def check_torch(args: argparse.Namespace) -> Finding:
    """Checks that torch can be imported, and that it can use a GPU that exists."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding.of("torch", f"torch cannot be imported: {error}",
                          ("problem", "pip install --force-reinstall torch"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda = torch.version.cuda
    fact = f"torch {torch.__version__}, {f'CUDA {cuda}' if cuda else 'CPU'} build"
    if not count and _has_nvidia():
        return Finding.of("torch", f"{fact}, which cannot use this machine's NVIDIA GPU",
                          ("warning", _CHECK_DRIVER if cuda else _INSTALL_CUDA))
    if cuda and not count:
        return Finding.of("torch", f"{fact}, on a machine without an NVIDIA GPU", *_cuda_for_nothing(torch.__version__))
    from deltic.ops.capabilities import gpu_kernels

    found = [f"{torch.cuda.get_device_name(index)}, kernels {gpu_kernels(f'cuda:{index}')}" for index in range(count)]
    return Finding.of("torch", f"{fact}, {'; '.join(found) or 'no CUDA device'}")


def _cuda_for_nothing(version: str) -> Iterator[Fault]:
    """Yields advice to replace a CUDA build of torch, with the size of its files and of packages only it needs."""
    found = {dist.name: dist for dist in distributions() if dist.name.partition("-")[0] in _CUDA_PACKAGES}
    if "torch" not in found:  # torch was compiled on this machine
        return
    size = sum(file.size or 0 for dist in found.values() for file in dist.files or ())
    yield "warning", (f"to save most of {gib(size)} of disk: pip uninstall -y {' '.join(sorted(found))}; then "
                      f"pip install torch=={version.partition('+')[0]} --index-url {_CPU_INDEX}")


def _has_nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def check_kernels(args: argparse.Namespace) -> Finding:
    """Checks that the compiled kernels exist, can be loaded and are not older than their source."""
    from deltic.ops import native_kernels

    kernels = native_kernels()
    if kernels.error:
        state: State = "problem" if kernels.path.exists() else "warning"
        return Finding.of("kernels", f"not in use, so that decoding takes a third longer or more: {kernels.error}",
                          (state, f"install a C++ compiler such as g++, or name one in CXX, then: {_reinstall()}"))
    faults: list[Fault] = []
    if _is_stale(kernels.path):
        faults.append(("warning", f"the library is older than its source in csrc: {_reinstall()}"))
    if kernels.level == "portable" and platform.machine() in ("x86_64", "AMD64"):
        faults.append(("warning", "this processor has no AVX2: in a virtual machine, pass the host's processor through "
                                  "(CPU type host)"))
    return Finding.of("kernels", f"level {kernels.level}; library and C header in {kernels.path.parent}", *faults)


def _is_stale(library: Path) -> bool:
    sources = (_SOURCE / "csrc").glob("*.[ch]*")
    return any(source.stat().st_mtime > library.stat().st_mtime for source in sources)


def _reinstall() -> str:
    """Returns the command that compiles the kernels again."""
    if (_SOURCE / "csrc").is_dir():
        return f"pip install -e {_SOURCE}"
    return "pip install --force-reinstall --no-deps PATH (the directory or wheel it came from)"


def check_mlx(args: argparse.Namespace) -> Finding | None:
    """Checks that models use the GPU of a Mac."""
    from deltic.ops.capabilities import is_apple_silicon, mlx_facts

    if not is_apple_silicon():
        return None
    facts = mlx_facts()
    if isinstance(facts, str):
        return Finding.of("mlx", f"models run on the CPU: {facts}", ("warning", "pip install 'deltic[mlx]'"))
    return Finding.of("mlx", f"MLX {facts[0]} on {facts[1]}: the default device is mlx")


def check_operations(args: argparse.Namespace) -> Finding:
    """Lists the backend of each operation on the default device."""
    from deltic.ops import capabilities, explain, select

    names: dict[str, list[str]] = {}
    for name, backend in explain(select((), capabilities.find_device())).items():
        names.setdefault(backend, []).append(name)
    return Finding.of("operations", "; ".join(f"{backend}: {' '.join(served)}" for backend, served in names.items()))


def check_hub(args: argparse.Namespace) -> Finding:
    """Checks that models could be downloaded, without contacting the hub."""
    from huggingface_hub import constants

    place, faults = Path(constants.HF_HUB_CACHE).absolute(), list[Fault]()
    existing = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        faults.append(("warning", f"models cannot be downloaded to {place}: make it writable, or set HF_HOME"))
    elif free < _LITTLE_DISK:
        faults.append(("warning", "little room for models: make some, or set HF_HOME to a larger disk"))
    if constants.HF_HUB_OFFLINE:
        faults.append(("warning", "unset HF_HUB_OFFLINE to download models"))
    has_token = os.environ.get("HF_TOKEN") or os.path.isfile(constants.HF_TOKEN_PATH)
    return Finding.of("hub", f"{place}, {gib(free)} free, {'a' if has_token else 'no'} token"
                             f"{', offline' if constants.HF_HUB_OFFLINE else ''}", *faults)


# Machine


_LITTLE_MEMORY, _NO_MEMORY = 2 << 30, 1 << 29
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
_THREAD_PINS = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES", "OMP_WAIT_POLICY")
"""Environment variables that slow the threads down unless they are off."""


def check_threads(args: argparse.Namespace) -> Finding:
    cores, harmful = available_cores(), list[str]()
    for name in _THREAD_LIMITS:
        threads = os.environ.get(name, "").split(",")[0]
        if threads.isdigit() and int(threads) < cores:
            harmful.append(name)
    for name in _THREAD_PINS:
        if os.environ.get(name, "").strip().lower() not in ("", "0", "false", "disabled", "none"):
            harmful.append(name)
    values = "".join(f", {name}={os.environ[name]}" for name in harmful)
    return Finding.of("threads", f"{cores} cores to use, {os.cpu_count()} hardware threads{values}", *(
        ("warning", f"{name}: unset it (deltic takes the physical cores, or --threads)") for name in harmful))


def check_load(args: argparse.Namespace) -> Finding:
    average, total = os.getloadavg()[0], os.cpu_count() or 1
    fact = f"{average:.1f} on {total} hardware threads"
    if average <= total:
        return Finding.of("load", fact)
    return Finding.of("load", fact, ("warning", "other programs use the cores, so that timings will be bad: end them, "
                                                "or lower --threads"))


def check_memory(args: argparse.Namespace) -> Finding:
    free, faults = available_memory(), list[Fault]()
    if free < _LITTLE_MEMORY:
        faults.append(("problem" if free < _NO_MEMORY else "warning", "little memory is left: end other programs, "
                       "raise the container's limit, or use a smaller model"))
    return Finding.of("memory", f"{gib(free)} free of {gib(memory_mib() << 20)}", *faults)


# The model


_SHORT_CONTEXT = 4096
_NO_ROOM = "there is no room for it: use a smaller model or more memory"


def check_model(args: argparse.Namespace) -> Finding | None:
    """Checks that MODEL exists and fits into memory, from its config and the headers of its files."""
    if args.model is None:
        return None
    from deltic.embeddings.open import open_stored
    from deltic.loader.files import find_tensors
    from deltic.loader.hub import resolve
    from deltic.loader.model_files import open_model

    try:
        place = _local(args.model)
        if place is None:
            return _not_downloaded(args.model)
        if encoder := open_stored(resolve(place)):
            return _encoder(encoder)
        found = open_model(place)
        if found.gguf is None:
            find_tensors(found.path)
    except ModelError as error:
        return Finding.of("model", as_typed(str(error)),
                          ("problem", "fix it as described, or name another; deltic run completes an interrupted "
                                      "download"))
    room, faults = _room(found.config)
    head, unusable = _head(found)
    return Finding.of("model", f"{room}{head}", *faults, *unusable)


def _local(name: str) -> str | Path | None:
    """Returns the model on this machine, or None if it would have to be downloaded."""
    from deltic.loader.catalog import parse_repository, select

    found = parse_repository(name)
    if os.path.exists(os.path.expanduser(name)) or not found:
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        place = Path(snapshot_download(found.repository, revision=found.revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{name} is not a valid name for the hub: {error}") from error
    if not found.file:
        return place
    names = [path.relative_to(place).as_posix() for path in place.rglob("*")]
    return place / select(found.repository, names, found.file).file  # type: ignore[operator]


def _not_downloaded(name: str) -> Finding:
    from huggingface_hub import constants

    fault: Fault = ("warning", "deltic run, chat and serve will download it, if the hub has it")
    if constants.HF_HUB_OFFLINE:
        fault = ("problem", "unset HF_HUB_OFFLINE, or name a directory")
    return Finding.of("model", f"{name} is not a directory here and not downloaded", fault)


def _encoder(encoder: StoredEncoder) -> Finding:
    """Checks the memory for the weights as float32. Quantized weights may take less."""
    from deltic.embeddings.weights import expected_tensors

    config, free = encoder.config, available_memory()
    weights = 4 * sum(prod(shape) for shape in expected_tensors(config).values())
    fact = (f"{config.family}, for vectors or scores (deltic embed, rerank), weights {gib(weights)} as float32, "
            f"{gib(free)} of memory free, texts up to {config.max_length:,} tokens")
    return Finding.of("model", fact, ("warning", _NO_ROOM)) if weights > free else Finding.of("model", fact)


def _room(config: ModelConfig) -> tuple[str, list[Fault]]:
    """Checks the memory for the weights and a cache."""
    from deltic.cli.inspect import plan_cache, weight_bytes

    weights = weight_bytes(config, config.dtype)
    fact = f"{config.architecture}, weights {gib(weights)} as {config.dtype}, {gib(available_memory())} of memory free"
    planned = plan_cache(config, EngineConfig(device="cpu"))
    if planned is None:
        return fact, [("problem", _NO_ROOM)]
    plan, _ = planned
    short = plan.max_context < min(_SHORT_CONTEXT, config.max_position_embeddings)
    return (f"{fact}, context up to {plan.max_context:,} tokens",
            [("warning", "little room for conversations: free memory, or lower --max-batch")] if short else [])


def _head(model: ModelFiles) -> tuple[str, list[Fault]]:
    """Returns the most common type of the draft head's weights, and advice if the head cannot be used."""
    try:
        kinds = model.head_kinds()
    except ModelError as error:
        return "", [("warning", f"the draft head cannot be used, so that nothing is drafted: {as_typed(str(error))}; "
                                "fix it as described, or take it again with deltic mtp extract")]
    return f", draft head {max(kinds, key=kinds.__getitem__)}" if kinds else "", []


# An answer


_QUESTION, _ANSWER = "What is the capital of France?", "Paris"


def check_answer(args: argparse.Namespace) -> Finding:
    """Asks the embedded model a question with and without drafts, which must not change the answer."""
    from deltic.llm import LLM
    from deltic.params import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=32)
    question = [{"role": "user", "content": _QUESTION}]
    choices = []
    for speculate in ("off", "auto"):
        with LLM(memory="64MiB", speculate=speculate) as llm:
            stream, timing = read_answer(llm, lambda: llm.stream(question, sampling), lambda delta: None)
        assert stream.output is not None
        choices.append(stream.output.choices[0])
    plain, drafted = choices
    faults: list[Fault] = []
    if _ANSWER not in drafted.text:
        faults.append(("problem", "the embedded model answers wrongly: try deltic run --ops reference; if that is "
                                  f"right, a kernel is broken, else reinstall: {_reinstall()}"))
    same = drafted.tokens == plain.tokens
    if not same:
        faults.append(("problem", "drafts change the answer, which they must not: run models with --speculate off, and "
                                  f"reinstall: {_reinstall()}"))
    drafts = f"{drafted.usage.drafted_tokens} drafts, {'' if same else 'not '}the same without"
    return Finding.of("answer", f"{drafted.text.strip()!r} ({timing.tokens} tokens in "
                                f"{timing.end - timing.started:.2f} s; {drafts})", *faults)


CHECKS: tuple[Check, ...] = (check_python, check_torch, check_kernels, check_mlx, check_operations, check_threads,
                             check_load, check_memory, check_hub, check_model, check_answer)
