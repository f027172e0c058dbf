"""`deltic doctor`: is the installation sound, and if not, what to do. Nothing is written, and no network is used."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from deltic import __version__
from deltic.cli.machine import cpu_name, memory_mib
from deltic.cli.parser import text
from deltic.config import EngineConfig, ModelConfig, available_cores, available_memory
from deltic.errors import ConfigError, ModelError

HELP = "Check the installation, and say what to do where a model is slow or does not start."

State = Literal["ok", "warning", "problem"]
Fault = tuple[State, str]
"""How bad it is, and what to do about it."""

_MARKS: dict[State, str] = {"ok": "ok", "warning": "warn", "problem": "FAIL"}  # from good to bad
_OLDEST_PYTHON = (3, 11)
_SOURCE = Path(__file__).parents[2]
_OLD_DRIVER = ("check with nvidia-smi that the driver runs and is not older than that CUDA version; a container has to "
               "be given the GPU (--gpus all)")
_NO_CUDA = "install a CUDA build of the same torch (https://pytorch.org/get-started), then use --device cuda"
_LEVELS = ("no vector extensions", "AVX2", "AVX-512", "AVX-512 with VNNI", "AVX-512 with BF16 products")
"""What the kernels' levels mean."""
_FEATURES = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 VNNI": "avx512_vnni", "AVX-512 BF16": "avx512_bf16",
             "AMX BF16": "amx_bf16"}
_GIB, _MIB = 1 << 30, 1 << 20
_LITTLE_MEMORY, _NO_MEMORY, _MUCH_SWAP, _LITTLE_DISK = 2 * _GIB, _GIB // 2, _GIB // 4, 5 * _GIB
_SHORT_CONTEXT = 4096
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_QUESTION, _ANSWER, _ANSWER_TOKENS = "What is the capital of France?", "Paris", 32


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. fact: one line; advice: what to do, empty if all is well."""

    name: str
    state: State
    fact: str
    advice: str = ""


Check = Callable[[argparse.Namespace], Finding | None]
"""None: the check was not asked for. Its function is named after the finding."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", type=text,
                        help="also check that this model can be found and fits; it is neither loaded nor downloaded")
    parser.add_argument("--cache-dir", type=text, metavar="DIR", help="also check this directory for conversations")
    parser.add_argument("--no-run", dest="run_model", action="store_false",
                        help="do not let the embedded model answer a question")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    findings = []
    for check in CHECKS:
        finding = _guarded(check, args)
        if finding is not None:
            findings.append(finding)
            if not args.json:
                print(_lines(finding), flush=True)
    count = {f"{state}s": sum(finding.state == state for finding in findings) for state in ("problem", "warning")}
    if args.json:
        print(json.dumps({"ok": not count["problems"], **count, "findings": list(map(asdict, findings))},
                         ensure_ascii=False))
    else:
        print("\n" + ", ".join(f"{name}: {number}" for name, number in count.items()))
    return 1 if count["problems"] else 0


def _guarded(check: Check, args: argparse.Namespace) -> Finding | None:
    try:
        return check(args)
    except Exception as error:  # whatever is broken here is what the user wants to know
        reason = " ".join(str(error).split())[:300]
        return _finding(check.__name__.removeprefix("check_"), f"the check failed: {type(error).__name__}: {reason}",
                        [("problem", f"see above; `pip check` names missing packages; else reinstall: {_reinstall()}")])


def _lines(finding: Finding) -> str:
    """The mark, the name and the fact; below them the advice."""
    width = max(len(check.__name__) for check in CHECKS) - len("check_")
    advice = f"\n{'':{width + 8}}-> {finding.advice}" if finding.advice else ""
    return f"{_MARKS[finding.state]:<4}  {finding.name.replace('_', ' '):<{width}}  {finding.fact}{advice}"


def _finding(name: str, fact: str, faults: Sequence[Fault] = ()) -> Finding:
    """As bad as the worst of its faults."""
    states: list[State] = ["ok", *(state for state, _ in faults)]
    return Finding(name, max(states, key=list(_MARKS).index), " ".join(fact.split()),
                   "; ".join(advice for _, advice in faults))


# The installation


def check_python(args: argparse.Namespace) -> Finding:
    old: list[Fault] = [("problem", f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer")]
    return _finding("python", f"Python {platform.python_version()}, deltic {__version__}, {sys.platform} on "
                              f"{platform.machine()}", old if sys.version_info < _OLDEST_PYTHON else [])


def check_torch(args: argparse.Namespace) -> Finding:
    wanted = _wanted_torch()
    install = f"torch=={wanted}" if wanted else "torch"
    try:
        import torch
    except (ImportError, OSError) as error:
        return _finding("torch", f"torch cannot be imported: {error}",
                        [("problem", f"pip install --force-reinstall {install}")])
    other: list[Fault] = [("warning", f"deltic is made for torch {wanted}: pip install {install}")]
    found, faults = _devices()
    return _finding("torch", f"torch {torch.__version__}, {found}",
                    faults + (other if wanted not in (None, torch.__version__.split("+")[0]) else []))


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


def check_kernels(args: argparse.Namespace) -> Finding:
    """The compiled kernels: there, loadable, not older than their source, and which of them this processor runs."""
    from deltic.ops.cpu import library

    path, loaded = Path(library.__file__).parent / "libdeltic.so", library.load()
    if isinstance(loaded, str):
        broken: State = "problem" if path.exists() else "warning"
        return _finding("kernels", f"not in use, so that decoding takes a third longer or more: {loaded}",
                        [(broken, f"{_compiler_advice()}: {_reinstall()}")])
    faults: list[Fault] = []
    if _is_stale(path):
        faults.append(("warning", f"the library is older than its source in csrc: {_reinstall()}"))
    level, slow = _level(loaded.deltic_best_level())
    faults += [("warning", slow)] if slow else []
    return _finding("kernels", f"{level}; library and C header in {path.parent}", faults)


def check_processor(args: argparse.Namespace) -> Finding:
    flags = _cpu_flags()
    known = [name for name, flag in _FEATURES.items() if flag in flags]
    return _finding("processor", f"{cpu_name()} ({', '.join(known) or 'no vector extensions that deltic knows'})")


def check_operations(args: argparse.Namespace) -> Finding:
    """Who serves each op, and why nobody faster."""
    from deltic.ops import explain, select
    from deltic.ops.cpu import library

    served = explain(select())
    groups: dict[str, list[str]] = {}
    for name, who in served.items():
        groups.setdefault(who, []).append(name)
    missing = isinstance(library.load(), str)
    return _finding("operations", "; ".join(f"{who}: {' '.join(names)}" for who, names in groups.items()),
                    [("warning", "see kernels above")] if missing else [])


def _wanted_torch() -> str | None:
    """The version that the package asks for; None if it is not installed or takes several."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        required = requires("deltic") or []
    except PackageNotFoundError:
        return None
    return next((found[1] for line in required if (found := re.match(r"torch==([\w.]+)", line))), None)


def _has_nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def _reinstall() -> str:
    """The command that compiles the kernels again."""
    if (_SOURCE / "csrc").is_dir():
        return f"pip install -e {_SOURCE}"
    return "pip install --force-reinstall --no-deps deltic"


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


def _cpu_flags() -> frozenset[str]:
    found = re.search(r"^(?:flags|Features)\s*:(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _level(best: int) -> tuple[str, str]:
    """The level at which the kernels run on this processor; and what to do if that is a slow one."""
    if best or platform.machine() not in ("x86_64", "AMD64"):
        return _LEVELS[best], ""
    return _LEVELS[0], ("this processor shows no AVX2: in a virtual machine, pass the host's processor through "
                        "(CPU type host)")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# The machine


def _is_fewer(value: str, cores: int) -> bool:
    return value.split(",")[0].isdigit() and int(value.split(",")[0]) < cores


def _is_on(value: str, cores: int) -> bool:
    return value.strip().lower() not in ("", "0", "false", "disabled", "none")


_THREAD_ADVICE = "unset it (deltic takes the physical cores; --threads says otherwise)"
_PIN_ADVICE = "unset it: pinned threads wait wherever another process has their core"
_HARMFUL: dict[str, tuple[Callable[[str, int], bool], str]] = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT"), (_is_fewer, _THREAD_ADVICE)),
    **dict.fromkeys(("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"), (_is_on, _PIN_ADVICE)),
    "OMP_WAIT_POLICY": (_is_on, "unset it: active threads spin where others have work, passive ones wake up late"),
}
"""Environment variables: when a value (beside so many cores) does harm, and what to do."""


def check_threads(args: argparse.Namespace) -> Finding:
    import torch

    cores, total = available_cores(), os.cpu_count() or 1
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    harmful = {name: advice for name, (harms, advice) in _HARMFUL.items()
               if name in os.environ and harms(os.environ[name], cores)}
    values = "".join(f", {name}={os.environ[name]}" for name in harmful)
    return _finding("threads", f"{cores} cores to use ({given} of {total} hardware threads by affinity), torch starts "
                               f"with {torch.get_num_threads()}{values}",
                    [("warning", f"{name}: {advice}") for name, advice in harmful.items()])


def check_load(args: argparse.Namespace) -> Finding:
    average, total = os.getloadavg()[0], os.cpu_count() or 1
    busy: list[Fault] = [("warning", "others use the cores, so that timings will be bad: end them, or lower --threads")]
    return _finding("load", f"{average:.1f} on {total} hardware threads", busy if average > total else [])


def check_memory(args: argparse.Namespace) -> Finding:
    free, limit, swapped = available_memory(), _memory_limit(), _swap_used()
    faults: list[Fault] = []
    if free < _LITTLE_MEMORY:
        faults.append(("problem" if free < _NO_MEMORY else "warning", "little memory is left: end other programs, "
                       "raise the container's limit, or use a smaller model"))
    if swapped > _MUCH_SWAP:
        faults.append(("warning", "memory was moved to swap, which is slow: end other programs"))
    limited = f", limited to {_gib(limit)} by the container" if limit else ""
    swap = f", {_gib(swapped)} in swap" if swapped else ""
    return _finding("memory", f"{_gib(free)} free of {_gib(memory_mib() << 20)}{limited}{swap}", faults)


def _memory_limit() -> int | None:
    """What the container's cgroup allows, if less than there is."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(name).strip()
        if limit.isdigit() and int(limit) < memory_mib() << 20:
            return int(limit)
    return None


def _swap_used() -> int:
    found = dict(re.findall(r"^(Swap\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE))
    return (int(found.get("SwapTotal", 0)) - int(found.get("SwapFree", 0))) << 10


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"


# Models and directories


def check_hub(args: argparse.Namespace) -> Finding:
    """Whether models could be downloaded, as far as can be said without asking the hub."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return _finding("hub", "huggingface_hub is not installed",
                        [("problem", "pip install huggingface_hub; until then, give models as directories")])
    place, faults = Path(constants.HF_HUB_CACHE), list[Fault]()
    free = shutil.disk_usage(_existing(place)).free
    if not _writable(_existing(place)):
        faults.append(("warning", f"models cannot be downloaded to {place}: make it writable, or set HF_HOME"))
    elif free < _LITTLE_DISK:
        faults.append(("warning", "little room for models: make some, or set HF_HOME to a larger disk"))
    if constants.HF_HUB_OFFLINE:
        faults.append(("warning", "unset HF_HUB_OFFLINE to download models"))
    token = bool(os.environ.get("HF_TOKEN")) or os.path.isfile(constants.HF_TOKEN_PATH)
    return _finding("hub", f"{place}, {_gib(free)} free, {'a' if token else 'no'} token"
                           f"{', offline' if constants.HF_HUB_OFFLINE else ''}", faults)


def check_cache_dir(args: argparse.Namespace) -> Finding | None:
    """Whether conversations can be kept in --cache-dir, and by whom they can be read."""
    if args.cache_dir is None:
        return None
    from deltic.cache.folder import root_of

    root = root_of(args.cache_dir).absolute()
    existing = _existing(root)
    if root.is_symlink() or not existing.is_dir():
        return _finding("cache_dir", f"{existing} is {'a link' if root.is_symlink() else 'no directory'}",
                        [("problem", "name another directory")])
    if not _writable(existing):
        return _finding("cache_dir", f"{existing} is not writable for this user",
                        [("problem", "name a directory that you own and may write to")])
    if existing != root:
        return _finding("cache_dir", f"nothing kept yet, {_gib(shutil.disk_usage(existing).free)} free",
                        _disk_faults(existing))
    return _kept(root)


def _kept(root: Path) -> Finding:
    """What is in a cache directory that is in use."""
    from deltic.cache.folder import files, folders

    models = folders(root)
    sizes = [(folder / found.path, found.size) for folder in models for found in files(folder)]
    foreign = sum(_owner(path) != os.geteuid() for path in (root, *models, *dict(sizes)))
    faults = _disk_faults(root)
    if foreign:
        faults.append(("problem", f"{foreign} files or folders belong to other users: name a directory of your own"))
    if stat.S_IMODE(root.stat().st_mode) & 0o077:
        faults.append(("warning", f"others may read the conversations: chmod 700 {root}"))
    total = sum(size for _, size in sizes)
    return _finding("cache_dir", f"{total / _MIB:,.1f} MiB in {len(sizes)} files of {len(models)} models kept, "
                                 f"{_gib(shutil.disk_usage(root).free)} free", faults)


def check_model(args: argparse.Namespace) -> Finding | None:
    """Whether MODEL can be found, read and held, by its config and its files' headers alone."""
    if args.model is None:
        return None
    from deltic.weights.files import find_tensors
    from deltic.weights.hub import open_model

    try:
        place = _local(args.model)
        if place is None:
            return _not_downloaded(args.model)
        found = open_model(place)
        if found.gguf is None:
            find_tensors(found.path)
    except ModelError as error:
        return _finding("model", str(error), [("problem", "mend it as said, or name another; deltic run completes "
                                               "an interrupted download")])
    return _room(found.config)


def _local(name: str) -> str | Path | None:
    """The model as it lies on this machine, None if it would have to be downloaded."""
    if os.path.exists(os.path.expanduser(name)) or not _HUB_NAME.fullmatch(name):
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{name} is no name that the hub takes: {error}") from error


def _not_downloaded(name: str) -> Finding:
    from huggingface_hub import constants

    fault: Fault = (("problem", "unset HF_HUB_OFFLINE, or name a directory") if constants.HF_HUB_OFFLINE else
                    ("warning", "deltic run, chat and serve will download it, if the hub has it"))
    return _finding("model", f"{name} is no directory here and not downloaded", [fault])


def _room(config: ModelConfig) -> Finding:
    """Whether the weights, and a cache beside them, have room in memory."""
    import torch

    from deltic.cache.policy import MemoryNeeds, split_memory
    from deltic.cache.storage import page_bytes, slot_bytes
    from deltic.cli.inspect import weight_bytes

    kind: torch.dtype = getattr(torch, config.dtype)
    weights, free = weight_bytes(config, config.dtype), available_memory()
    fact = f"{config.architecture}, weights {_gib(weights)} as {config.dtype}, {_gib(free)} of memory free"
    needs = MemoryNeeds(page_bytes(config, kind), slot_bytes(config, kind), config.max_position_embeddings,
                        EngineConfig().max_batch)
    try:
        plan = split_memory(max(free - weights, 0) // 2, needs)
    except ConfigError:
        return _finding("model", fact, [("problem", "there is no room for it: use a smaller model or more memory")])
    short = plan.max_context < min(_SHORT_CONTEXT, config.max_position_embeddings)
    return _finding("model", f"{fact}, context up to {plan.max_context:,} tokens",
                    [("warning", "little room for conversations: free memory, or lower --max-batch")] if short else [])


def _existing(path: Path) -> Path:
    """The path itself, or the closest folder above it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))


def _writable(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK | os.X_OK)


def _disk_faults(path: Path) -> list[Fault]:
    from deltic.cache.folder import check_room

    try:
        check_room(path, 0)
    except OSError:
        return [("warning", "the disk is nearly full, so that nothing more is kept: make room")]
    return []


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # another process may just have deleted it
        return os.geteuid()


# The whole


def check_answer(args: argparse.Namespace) -> Finding | None:
    """The embedded model answers a question whose answer it knows."""
    if not args.run_model:
        return None
    from deltic.cli.answer import play
    from deltic.engine.llm import LLM
    from deltic.types import SamplingParams

    llm, sampling = LLM(), SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS)
    question = [{"role": "user", "content": _QUESTION}]
    stream, meter = play(llm, lambda: llm.stream(question, sampling), lambda delta: None)
    given, rate = stream.output.text.strip() if stream.output else "", meter.tokens_per_second
    speed = f"{meter.tokens} tokens in {meter.end - meter.started:.2f} s" + (f", {rate:.0f} tokens/s" if rate else "")
    wrong: list[Fault] = [("problem", "the embedded model answers wrongly: try deltic run --ops ref; if that is right, "
                                      f"a kernel is broken, else reinstall: {_reinstall()}")]
    return _finding("answer", f"{given!r} ({speed})", [] if _ANSWER in given else wrong)


CHECKS: tuple[Check, ...] = (
    check_python, check_torch, check_processor, check_kernels, check_operations, check_threads, check_load,
    check_memory, check_hub, check_cache_dir, check_model, check_answer)
