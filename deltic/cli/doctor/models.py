"""The model that is to be run, by its config and its files' headers alone."""

from __future__ import annotations

import argparse
import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from deltic.cli.doctor.findings import Fault, Finding, gib
from deltic.cli.parser import as_typed
from deltic.config import EngineConfig, ModelConfig, available_memory
from deltic.errors import ConfigError, ModelError
from deltic.loader.catalog import REPOSITORY, repository_of
from deltic.loader.repository import select

if TYPE_CHECKING:
    from deltic.embeddings.directory import StoredEncoder
    from deltic.loader.model_files import ModelFiles

_SHORT_CONTEXT = 4096
_NO_ROOM = "there is no room for it: use a smaller model or more memory"


def check_model(args: argparse.Namespace) -> Finding | None:
    """Whether MODEL can be found, read and held, by its config and its files' headers alone."""
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
        return Finding.of("model", as_typed(str(error)), [
            ("problem", "mend it as said, or name another; deltic run completes an interrupted download")])
    room, faults = _room(found.config)
    head, unusable = _head(found)
    return Finding.of("model", f"{room}{head}", faults + unusable)


def _local(name: str) -> str | Path | None:
    """The model as it lies on this machine, None if it would have to be downloaded."""
    found = REPOSITORY.fullmatch(repository_of(name))
    if os.path.exists(os.path.expanduser(name)) or not found:
        return name
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        place = Path(snapshot_download(found[1], local_files_only=True))
        names = [path.relative_to(place).as_posix() for path in place.rglob("*")]
        return place / select(found[1], names, found[2]).file if found[2] else place  # type: ignore[operator]
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise ModelError(f"{name} is no name that the hub takes: {error}") from error


def _not_downloaded(name: str) -> Finding:
    from huggingface_hub import constants

    fault: Fault = (("problem", "unset HF_HUB_OFFLINE, or name a directory") if constants.HF_HUB_OFFLINE else
                    ("warning", "deltic run, chat and serve will download it, if the hub has it"))
    return Finding.of("model", f"{name} is no directory here and not downloaded", [fault])


def _encoder(encoder: StoredEncoder) -> Finding:
    """Whether the weights have room in memory as float32; what is quantized may take less."""
    from deltic.embeddings.weights import expected_tensors

    config, free = encoder.config, available_memory()
    weights = 4 * sum(prod(shape) for shape in expected_tensors(config).values())
    fact = (f"{config.family}, for vectors or scores (deltic embed, rerank), weights {gib(weights)} as float32, "
            f"{gib(free)} of memory free, texts up to {config.max_length:,} tokens")
    return Finding.of("model", fact, [("warning", _NO_ROOM)] if weights > free else [])


def _room(config: ModelConfig) -> tuple[str, list[Fault]]:
    """Whether the weights, and a cache beside them, have room in memory."""
    import torch

    from deltic.cache.memory_plan import MemoryNeeds, split_memory
    from deltic.cache.tensors import page_bytes, slot_bytes
    from deltic.cli.inspect import weight_bytes

    kind: torch.dtype = getattr(torch, config.dtype)
    weights, free = weight_bytes(config, config.dtype), available_memory()
    fact = f"{config.architecture}, weights {gib(weights)} as {config.dtype}, {gib(free)} of memory free"
    needs = MemoryNeeds(page_bytes(config, kind), slot_bytes(config, kind), config.max_position_embeddings,
                        EngineConfig().max_batch, row_bytes=4 * config.vocab_size)
    try:
        plan = split_memory(max(free - weights, 0) // 2, needs)
    except ConfigError:
        return fact, [("problem", _NO_ROOM)]
    short = plan.max_context < min(_SHORT_CONTEXT, config.max_position_embeddings)
    return (f"{fact}, context up to {plan.max_context:,} tokens",
            [("warning", "little room for conversations: free memory, or lower --max-batch")] if short else [])


def _head(model: ModelFiles) -> tuple[str, list[Fault]]:
    """The type that most of the draft head is stored in; and what to do if the head cannot be used."""
    try:
        kinds = model.head_kinds()
    except ModelError as error:
        return "", [("warning", f"the draft head cannot be used, so that nothing is drafted: {as_typed(str(error))}; "
                                "mend it as said, or take it anew with deltic mtp extract")]
    return f", draft head {max(kinds, key=kinds.__getitem__)}" if kinds else "", []
