"""The checks of `deltic doctor`: installation, machine, directories, and an answer of the embedded model."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from deltic import __version__
from deltic.cli.machine import cpu_name, memory_mib, read_system
from deltic.cli.output import gib, mib
from deltic.config import available_cores, available_memory

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

State = Literal["ok", "warning", "problem"]
Fault = tuple[State, str]
"""A state and advice."""

_GIB = 1 << 30
_MARKS: dict[State, str] = {"ok": "ok", "warning": "warn", "problem": "FAIL"}  # from good to bad


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. fact: one line. advice: empty if the state is ok."""

    name: str
    state: State
    fact: str
    advice: str = ""

    @classmethod
    def of(cls, name: str, fact: str, faults: Sequence[Fault] = ()) -> Finding:
        """A finding with the worst state of its faults."""
        states: list[State] = ["ok", *(state for state, _ in faults)]
        worst = max(states, key=list(_MARKS).index)
        return cls(name, worst, " ".join(fact.split()), "; ".join(advice for _, advice in faults))

    def lines(self, width: int) -> str:
        """Mark, name and fact, and the advice below. width: columns of the name."""
        advice = f"\n{'':{width + 8}}-> {self.advice}" if self.advice else ""
        return f"{_MARKS[self.state]:<4}  {self.name.replace('_', ' '):<{width}}  {self.fact}{advice}"


Check = Callable[[argparse.Namespace], Finding | None]
"""Named check_FINDING. Returns None if the check was not asked for."""


# Python and torch


_OLDEST_PYTHON = (3, 11)
_SOURCE = Path(__file__).parents[2]
_CHECK_DRIVER = ("check with nvidia-smi that the driver runs and is not older than that CUDA version; a container "
                 "needs access to the GPU (--gpus all)")
_INSTALL_CUDA = "install a CUDA build of the same torch (https://pytorch.org/get-started), and models run on it"


def check_python(args: argparse.Namespace) -> Finding:
    faults: list[Fault] = []
    if sys.version_info < _OLDEST_PYTHON:
        faults.append(("problem", f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer"))
    return Finding.of("python", f"Python {platform.python_version()}, deltic {__version__}, {sys.platform} on "
                                f"{platform.machine()}", faults)


def check_torch(args: argparse.Namespace) -> Finding:
    wanted = _wanted_torch()
    install = f"'torch{wanted}'"
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding.of("torch", f"torch cannot be imported: {error}",
                          [("problem", f"pip install --force-reinstall {install}")])
    devices, faults = _devices()
    if not wanted.contains(torch.__version__, prereleases=True):
        faults.append(("warning", f"deltic was tested with torch{wanted}: pip install {install}"))
    return Finding.of("torch", f"torch {torch.__version__}, {devices}", faults)


def _devices() -> tuple[str, list[Fault]]:
    """The build of torch and its GPUs, and why it cannot use a GPU that exists."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    if not count and _has_nvidia():
        return (f"{build}, which cannot use this machine's NVIDIA GPU",
                [("warning", _CHECK_DRIVER if torch.version.cuda else _INSTALL_CUDA)])
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return f"{build}, {names or 'no CUDA device'}", []


def _has_nvidia() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def _wanted_torch() -> SpecifierSet:
    """The versions of torch that the package requires."""
    from importlib.metadata import PackageNotFoundError, requires

    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        required = map(Requirement, requires("deltic") or [])
    except PackageNotFoundError:
        required = map(Requirement, [])
    return next((one.specifier for one in required if one.name == "torch"), SpecifierSet())


def reinstall() -> str:
    """The command that compiles the kernels again."""
    if (_SOURCE / "csrc").is_dir():
        return f"pip install -e {_SOURCE}"
    return "pip install --force-reinstall --no-deps PATH (the directory or wheel it came from)"


# Kernels


_LEVELS = ("no vector extensions", "AVX2", "AVX-512", "AVX-512 with VNNI", "AVX-512 with BF16 products")
"""The names of the kernels' levels."""


def check_kernels(args: argparse.Namespace) -> Finding:
    """Checks that the compiled kernels exist, can be loaded and are not older than their source."""
    from deltic.ops.cpu import library

    path, loaded = Path(library.__file__).parent / "libdeltic.so", library.load()
    if isinstance(loaded, str):
        state: State = "problem" if path.exists() else "warning"
        return Finding.of("kernels", f"not in use, so that decoding takes a third longer or more: {loaded}",
                          [(state, f"{_compiler_advice()}: {reinstall()}")])
    faults: list[Fault] = []
    if _is_stale(path):
        faults.append(("warning", f"the library is older than its source in csrc: {reinstall()}"))
    level = loaded.deltic_best_level()
    if not level and platform.machine() in ("x86_64", "AMD64"):
        faults.append(("warning", "this processor has no AVX2: in a virtual machine, pass the host's processor through "
                                  "(CPU type host)"))
    return Finding.of("kernels", f"{_LEVELS[level]}; library and C header in {path.parent}", faults)


def check_operations(args: argparse.Namespace) -> Finding:
    """Lists the backend of each operation on the default device."""
    from deltic.ops import capabilities, explain, select
    from deltic.ops.cpu import library

    device = capabilities.find_device()
    names: dict[str, list[str]] = {}
    for name, backend in explain(select((), device)).items():
        names.setdefault(backend, []).append(name)
    fact = "; ".join(f"{backend}: {' '.join(served)}" for backend, served in names.items())
    if device != "cpu":
        return Finding.of("operations", f"on the GPU {fact} (a model's own: deltic inspect)")
    missing = isinstance(library.load(), str)
    return Finding.of("operations", fact, [("warning", "see kernels above")] if missing else [])


def _compiler_advice() -> str:
    if os.environ.get("CXX"):
        return f"compile with $CXX ({os.environ['CXX']})"
    found = next(filter(shutil.which, ("g++", "clang++")), None)
    if found:
        return f"there is a compiler ({found}), compile with it"
    return "set CXX=c++ and compile" if shutil.which("c++") else "install a C++ compiler such as g++, then compile"


def _is_stale(path: Path) -> bool:
    """True if the source exists and is newer than the library."""
    sources = (_SOURCE / "csrc").glob("*.[ch]*")
    return any(source.stat().st_mtime > path.stat().st_mtime for source in sources)


# The machine


_FEATURES = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 VNNI": "avx512_vnni", "AVX-512 BF16": "avx512_bf16",
             "AMX BF16": "amx_bf16"}
_LITTLE_MEMORY, _NO_MEMORY, _MUCH_SWAP = 2 * _GIB, _GIB // 2, _GIB // 4
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")
_UNSET_LIMIT = "unset it (deltic takes the physical cores, or --threads)"
_UNSET_PIN = "unset it: pinned threads wait wherever another process has their core"
_HARMFUL_IF_ON = {
    **dict.fromkeys(("KMP_AFFINITY", "GOMP_CPU_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"), _UNSET_PIN),
    "OMP_WAIT_POLICY": "unset it: active threads spin where others have work, passive ones wake up late",
}
"""Environment variables that do harm unless they are off, and advice."""


def check_processor(args: argparse.Namespace) -> Finding:
    found = re.search(r"^(?:flags|Features)\s*:(.+)$", read_system("/proc/cpuinfo"), re.MULTILINE)
    flags = found[1].split() if found else []
    known = [name for name, flag in _FEATURES.items() if flag in flags]
    return Finding.of("processor", f"{cpu_name()} ({', '.join(known) or 'no vector extensions that deltic knows'})")


def check_threads(args: argparse.Namespace) -> Finding:
    import torch

    cores, total = available_cores(), os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    harmful = _harmful_variables(cores)
    values = "".join(f", {name}={os.environ[name]}" for name in harmful)
    return Finding.of("threads", f"{cores} cores to use ({usable} of {total} hardware threads by affinity), torch "
                                 f"starts with {torch.get_num_threads()}{values}",
                      [("warning", f"{name}: {advice}") for name, advice in harmful.items()])


def _harmful_variables(cores: int) -> dict[str, str]:
    found = {}
    for name in _THREAD_LIMITS:
        threads = os.environ.get(name, "").split(",")[0]
        if threads.isdigit() and int(threads) < cores:
            found[name] = _UNSET_LIMIT
    for name, advice in _HARMFUL_IF_ON.items():
        if os.environ.get(name, "").strip().lower() not in ("", "0", "false", "disabled", "none"):
            found[name] = advice
    return found


def check_load(args: argparse.Namespace) -> Finding:
    average, total = os.getloadavg()[0], os.cpu_count() or 1
    busy: list[Fault] = [("warning", "others use the cores, so that timings will be bad: end them, or lower --threads")]
    return Finding.of("load", f"{average:.1f} on {total} hardware threads", busy if average > total else [])


def check_memory(args: argparse.Namespace) -> Finding:
    free, limit, swapped = available_memory(), _container_limit(), _used_swap()
    faults: list[Fault] = []
    if free < _LITTLE_MEMORY:
        faults.append(("problem" if free < _NO_MEMORY else "warning", "little memory is left: end other programs, "
                       "raise the container's limit, or use a smaller model"))
    if swapped > _MUCH_SWAP:
        faults.append(("warning", "memory was moved to swap, which is slow: end other programs"))
    fact = f"{gib(free)} free of {gib(memory_mib() << 20)}"
    if limit:
        fact += f", limited to {gib(limit)} by the container"
    if swapped:
        fact += f", {gib(swapped)} in swap"
    return Finding.of("memory", fact, faults)


def _container_limit() -> int | None:
    """The limit of the container's cgroup, if it is below the machine's memory."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = read_system(name).strip()
        if limit.isdigit() and int(limit) < memory_mib() << 20:
            return int(limit)
    return None


def _used_swap() -> int:
    found = dict(re.findall(r"^(Swap\w+):\s+(\d+) kB", read_system("/proc/meminfo"), re.MULTILINE))
    return (int(found.get("SwapTotal", 0)) - int(found.get("SwapFree", 0))) << 10


# Directories


_LITTLE_DISK = 5 * _GIB


def check_hub(args: argparse.Namespace) -> Finding:
    """Checks that models could be downloaded, without asking the hub."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return Finding.of("hub", "huggingface_hub is not installed",
                          [("problem", "pip install huggingface_hub; until then, give models as directories")])
    place, faults = Path(constants.HF_HUB_CACHE), list[Fault]()
    existing = _existing(place)
    free = shutil.disk_usage(existing).free
    if _write_error(existing):
        faults.append(("warning", f"models cannot be downloaded to {place}: make it writable, or set HF_HOME"))
    elif free < _LITTLE_DISK:
        faults.append(("warning", "little room for models: make some, or set HF_HOME to a larger disk"))
    if constants.HF_HUB_OFFLINE:
        faults.append(("warning", "unset HF_HUB_OFFLINE to download models"))
    has_token = os.environ.get("HF_TOKEN") or os.path.isfile(constants.HF_TOKEN_PATH)
    return Finding.of("hub", f"{place}, {gib(free)} free, {'a' if has_token else 'no'} token"
                             f"{', offline' if constants.HF_HUB_OFFLINE else ''}", faults)


def check_cache_dir(args: argparse.Namespace) -> Finding | None:
    """Checks that --cache-dir can be used, and by its owner alone."""
    if args.cache_dir is None:
        return None
    from deltic.cache.offload.directory import root_of

    root = root_of(args.cache_dir).absolute()
    existing = _existing(root)
    if root.is_symlink() or not existing.is_dir():
        kind = "a link" if root.is_symlink() else "not a directory"
        return Finding.of("cache_dir", f"{existing} is {kind}", [("problem", "name another directory")])
    error = _write_error(existing)
    if error and (existing != root or not os.access(root, os.R_OK | os.X_OK)):
        return Finding.of("cache_dir", f"{existing} is not writable for this user: {error}",
                          [("problem", "name a directory that you own and may write to")])
    if existing != root:
        return Finding.of("cache_dir", f"nothing kept yet, {gib(shutil.disk_usage(existing).free)} free",
                          _disk_faults(existing))
    return _cache_in_use(root, error)


def _cache_in_use(root: Path, write_error: str) -> Finding:
    files = [entry for entry in os.scandir(root) if entry.is_file(follow_symlinks=False)]
    size = sum(_size(entry) for entry in files)
    foreign = sum(_owner(path) != os.geteuid() for path in (root, *map(Path, files)))
    faults = _disk_faults(root)
    if write_error:
        faults.append(("warning", f"it is not writable ({write_error}): what is kept is used, and nothing is added; "
                                  "make it writable, or name another directory"))
    if foreign:
        faults.append(("problem", f"{foreign} files or folders belong to other users: name a directory of your own"))
    if stat.S_IMODE(root.stat().st_mode) & 0o077:
        faults.append(("warning", f"others may read the conversations: chmod 700 {root}"))
    return Finding.of("cache_dir", f"{mib(size)} in {len(files)} files kept, "
                                   f"{gib(shutil.disk_usage(root).free)} free", faults)


def _existing(path: Path) -> Path:
    """The path or the closest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))


def _write_error(path: Path) -> str:
    """Tries to write into a folder and returns the error, or nothing. The permissions alone may not tell."""
    try:
        with tempfile.TemporaryDirectory(prefix=".deltic-doctor-", dir=path) as place:
            (Path(place) / "file").write_bytes(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(path, os.R_OK | os.W_OK | os.X_OK) else "Permission denied"


def _disk_faults(path: Path) -> list[Fault]:
    from deltic.cache.offload.directory import check_room

    try:
        check_room(path, 0)
    except OSError:
        return [("warning", "the disk is nearly full, so that nothing more is kept: make room")]
    return []


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # another process may just have deleted it
        return 0


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # deleted by another process in between
        return os.geteuid()


# An answer


_QUESTION, _ANSWER = "What is the capital of France?", "Paris"


def check_answer(args: argparse.Namespace) -> Finding | None:
    """Asks the embedded model a question with and without drafts, which must not change the answer."""
    if not args.run_model:
        return None
    from deltic.cli.output import read_answer
    from deltic.llm import LLM
    from deltic.params import SamplingParams

    llm, plain = (LLM(memory="64MiB", speculate=drafts) for drafts in ("auto", "off"))
    sampling = SamplingParams(temperature=0, max_tokens=32)
    question = [{"role": "user", "content": _QUESTION}]
    stream, timing = read_answer(llm, lambda: llm.stream(question, sampling), lambda delta: None)
    alone, _ = read_answer(plain, lambda: plain.stream(question, sampling), lambda delta: None)
    assert stream.output and alone.output
    found, wanted = stream.output.choices[0], alone.output.choices[0]
    faults: list[Fault] = []
    if _ANSWER not in found.text:
        faults.append(("problem", "the embedded model answers wrongly: try deltic run --ops reference; if that is "
                                  f"right, a kernel is broken, else reinstall: {reinstall()}"))
    same = found.tokens == wanted.tokens
    if not same:
        faults.append(("problem", "drafts change the answer, which they must not: run models with --speculate off, and "
                                  f"reinstall: {reinstall()}"))
    rate = timing.tokens_per_second
    speed = f"{timing.tokens} tokens in {timing.end - timing.started:.2f} s"
    if rate:
        speed += f", {rate:.0f} tokens/s"
    drafts = f"{found.usage.drafted_tokens} drafts, {'' if same else 'not '}the same without"
    return Finding.of("answer", f"{found.text.strip()!r} ({speed}; {drafts})", faults)
