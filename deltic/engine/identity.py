"""What a tier that outlives the process goes by: everything on which the bits of a kept state depend.

Two processes may exchange what they keep only if all of it is equal. Most is known at once. The weights' files have to
be read whole, which is done in the background, and once: their digests are remembered beside the tier.
"""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch

from deltic import __version__
from deltic.cache.offload.item_folder import open_regular, write_whole
from deltic.cache.tensors import STATE_LAYOUT
from deltic.config import EngineConfig
from deltic.errors import ModelError
from deltic.loader.fingerprint import FileMark, hash_file, sample_file
from deltic.ops import Ops, explain
from deltic.ops.cpu.library import LEVELS
from deltic.ops.cpu.library import load as load_library
from deltic.threads import lower_priority

T = TypeVar("T")

_AT_ONCE = 0.3
"""Seconds that a start may take longer for it: small files are hashed by then."""
_MOST, _LARGEST = 1000, 4 << 20
"""Files whose digests are remembered, and bytes that these notes may take."""


def machine_facts(options: EngineConfig, ops: Ops) -> dict[str, object]:
    """What computes: versions, kernels, the instructions they use. The number of threads changes no bit, and is no
    part of it."""
    library = load_library()
    cpu: dict[str, object] = {"library": library}
    if not isinstance(library, str):
        best = LEVELS[library.deltic_best_level()]
        cpu = {"library": blake2b(Path(library._name).read_bytes(), digest_size=16).hexdigest(), "best": best,
               "level": best if options.cpu_level == "auto" else options.cpu_level}
    facts: dict[str, object] = {
        "deltic": __version__, "layout": STATE_LAYOUT, "ops": explain(ops), "cpu": cpu,
        "stepwise": options.debug_layers, "machine": platform.machine(), "libc": platform.libc_ver(),
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_float32_matmul_precision()]}
    if options.device.startswith("cuda"):
        device = torch.device(options.device)
        facts["cuda"] = [torch.version.cuda, torch.cuda.get_device_name(device)]
    return facts


def computes(facts: Mapping[str, Any]) -> str:
    """In a few words, for people: who computes."""
    if "cuda" in facts:
        return f"torch on {facts['cuda'][1]}"
    ops = facts["ops"]
    return f"cpu kernels ({facts['cpu']['level']})" if ops["step"] == "cpu" else f"{ops['mlp'].partition(' ')[0]} ops"


@dataclass(frozen=True, slots=True)
class Identity:
    """facts: what is known at once. marks: the files of the model, marked before they were loaded."""

    facts: Mapping[str, object]
    marks: Sequence[FileMark] = ()

    def digest(self, memory: Memory, stopped: Callable[[], bool]) -> str:
        """32 hexadecimal digits. ModelError if a file is another than was marked; CancelledError once `stopped` says
        so."""
        files = [memory.digest(mark, stopped) for mark in self.marks]
        text = json.dumps({**self.facts, "files": files}, sort_keys=True, default=repr)
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def known(self, memory: Memory) -> bool:
        """Whether nothing has to be hashed."""
        return all(memory.find(mark) for mark in self.marks)


class Memory:
    """Digests of files by their marks, in a file. What cannot be read or written is not remembered."""

    def __init__(self, path: Path) -> None:
        self._path, self._found = path, dict[FileMark, str | None]()
        self._known: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
            known = json.loads(file.read(_LARGEST))
            self._known = known if isinstance(known, dict) else {}

    def digest(self, mark: FileMark, stopped: Callable[[], bool]) -> str:
        """The digest of a marked file, hashed if need be; errors as `hash_file`."""
        found = self.find(mark)
        if found is None:
            found = hash_file(mark, stopped)
            self._keep(mark, found)
        mark.check()
        return found

    def find(self, mark: FileMark) -> str | None:
        """The digest that is remembered, if it is the same file still."""
        if mark not in self._found:
            self._found[mark] = self._recall(mark)
        return self._found[mark]

    def _recall(self, mark: FileMark) -> str | None:
        match self._known.get(mark.path):
            case {"mark": known, "sample": sample, "digest": str(digest)} if known == asdict(mark):
                with suppress(ModelError):
                    return digest if sample == sample_file(mark) else None
        return None

    def _keep(self, mark: FileMark, digest: str) -> None:
        if not mark.settled:
            return
        self._known.pop(mark.path, None)
        self._known[mark.path] = {"mark": asdict(mark), "sample": sample_file(mark), "digest": digest}
        with suppress(OSError):
            write_whole(self._path, [json.dumps(dict(list(self._known.items())[-_MOST:])).encode()])


def open_under(identity: Identity, memory: Memory, make: Callable[[str], T]) -> tuple[Future[T], Callable[[], None]]:
    """What `make` opens under the identity's digest: at once if that is known, else in the background. Also a function
    that ends the background work, where nobody waits for it any more."""
    stop = threading.Event()

    def work() -> T:
        return make(identity.digest(memory, stop.is_set))

    if identity.known(memory):
        found: Future[T] = Future()
        try:
            found.set_result(work())
        except Exception as error:
            found.set_exception(error)
        return found, stop.set
    pool = ThreadPoolExecutor(1, "deltic-identity", lower_priority, (19,))
    found = pool.submit(work)
    pool.shutdown(wait=False)
    wait([found], _AT_ONCE)
    return found, stop.set
