"""The tiers of a model's cache: host memory, and a directory with the notes beside it."""

from __future__ import annotations

import logging

import torch

from deltic.cache.offload.deferred_open import DeferredDisk, DeferredRecords
from deltic.cache.offload.device_copies import DeviceToHostCopy
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.item_folder import WEIGHTS, open_root
from deltic.cache.offload.pinned_memory import PinnedMemory
from deltic.config import EngineConfig, available_memory
from deltic.engine.identity import Identity, Memory, computes, machine_facts, open_under
from deltic.errors import DelticError
from deltic.ops import Ops

log = logging.getLogger("deltic")

Notes = DiskRecords | DeferredRecords | None
_SPARE = 8
"""Of the tier's bytes this part more are pinned: what is given up leaves room in pieces."""


def open_tiers(name: str, options: EngineConfig, ops: Ops, made: Identity,
               dtype: torch.dtype) -> tuple[list[TierIndex], Notes]:
    """The tiers that the options ask for, fastest first, and the notes beside them. name: the model's, for people.
    made: what its weights were made of. dtype: of its K/V."""
    tiers, notes, host = list[TierIndex](), None, options.host_memory_bytes
    if host is None and options.device.startswith("cuda"):
        host = available_memory() // 4
    if host:
        on_gpu = options.device.startswith("cuda")
        pinned = PinnedMemory(host + host // _SPARE) if on_gpu else None
        tiers.append(TierIndex(HostStore(host), threads=on_gpu, outgoing=DeviceToHostCopy(pinned)))
    if options.cache_dir:
        kv = str(dtype).removeprefix("torch.")
        facts = {**made.facts, **machine_facts(options, ops), "kv": kv, "state": options.state_dtype}
        states = "" if options.state_dtype == "float32" else f"states of {options.state_dtype}, "
        about = f"{kv}, {states}{computes(facts)}"
        try:
            tier, notes = _on_disk(name, Identity(facts, made.marks), about, options)
            tiers.append(tier)
        except (DelticError, OSError) as error:
            log.warning("nothing is kept on disk: %s", error)
    return tiers, notes


def _on_disk(name: str, identity: Identity, about: str,
             options: EngineConfig) -> tuple[TierIndex, DiskRecords | DeferredRecords]:
    """They open when it is known which model it is, which for large files that are new is later."""
    directory, budget = str(options.cache_dir), int(options.cache_disk_gb * 1e9)
    opening, abandon = open_under(
        identity, Memory(open_root(directory) / WEIGHTS),
        lambda digest: (DiskStore(directory, digest, budget, name, about), DiskRecords(directory, digest)))
    if opening.done():
        disk, notes = opening.result()
        return TierIndex(disk, threads=True, outgoing=DeviceToHostCopy()), notes
    log.info("the weights' files are new and are being hashed; until then nothing is found in %s", directory)
    late = TierIndex(DeferredDisk(opening, budget, abandon), threads=True, late=True, outgoing=DeviceToHostCopy())
    return late, DeferredRecords(opening)
