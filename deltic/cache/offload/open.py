"""Opens the tiers of a model's cache: host memory and disk."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.host import DeviceToHostCopy, HostStore, PinnedMemory
from deltic.cache.offload.identity import FileDigests, Identity, machine_facts
from deltic.cache.offload.index import TierIndex
from deltic.config import EngineConfig, available_memory
from deltic.errors import DelticError
from deltic.ops import Ops
from deltic.ops.capabilities import backend_summary, device_capabilities
from deltic.ops.kv import name_of

log = logging.getLogger("deltic")

_SPARE = 8
"""One part in this many of the tier's size is pinned in addition, because evictions fragment the memory."""


def open_tiers(name: str, options: EngineConfig, ops: Ops, made: Identity,
               dtype: torch.dtype) -> tuple[list[TierIndex], DiskRecords | None]:
    """Opens the tiers that the options ask for, fastest first, and the answer records on disk.

    name: name of the model, for messages. made: identity of the weights. dtype: dtype of the K/V.
    """
    tiers = list[TierIndex]()
    own_memory = device_capabilities(options.device).own_memory
    host = options.host_memory_bytes
    if host is None and own_memory:
        host = available_memory() // 4
    if host:
        pinned = PinnedMemory(host + host // _SPARE) if own_memory else None
        tiers.append(TierIndex(HostStore(host), threads=own_memory, copier=DeviceToHostCopy(pinned)))
    if not options.cache_dir:
        return tiers, None
    try:
        disk, records = _open_disk(name, options, ops, made, dtype)
    except (DelticError, OSError) as error:
        log.warning("nothing is kept on disk: %s", error)
        return tiers, None
    return [*tiers, disk], records


def whole_identity(made: Identity, options: EngineConfig, ops: Ops, dtype: torch.dtype) -> Identity:
    """Returns the identity of a model's items. made: identity of the weights. dtype: dtype of the K/V."""
    return Identity({**made.facts, **machine_facts(options, ops), "kv": name_of(dtype), "state": options.state_dtype},
                    made.marks)


def describe_backend(facts: Mapping[str, Any]) -> str:
    """Returns a description of how items are computed, for people. facts: the facts of a `whole_identity`."""
    states = "" if facts["state"] == "float32" else f"states of {facts['state']}, "
    return f"{facts['kv']}, {states}{backend_summary(facts)}"


def _open_disk(name: str, options: EngineConfig, ops: Ops, made: Identity,
               dtype: torch.dtype) -> tuple[TierIndex, DiskRecords]:
    identity = whole_identity(made, options, ops, dtype)
    directory = CacheDirectory(str(options.cache_dir))
    model, abandon = identity.start_digest(FileDigests(directory))
    if not model.done():
        log.info("the weights' files are new and are being hashed; until then nothing is found in %s", directory.root)
    about = describe_backend(identity.facts)
    store = DiskStore(directory, model, int(options.cache_disk_gb * 1e9), name, about, abandon)
    return TierIndex(store, threads=True, copier=DeviceToHostCopy()), DiskRecords(directory, model)
