"""Writes prefixes to files, and reads and checks them against the pools that they are restored to."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deltic.cache.offload.directory import ITEM_SUFFIX, check_room, read_regular, write_whole
from deltic.cache.offload.disk import LARGEST_HEADER, decode, encode
from deltic.cache.offload.state_manifest import (
    FORMAT,
    MANIFEST_SUFFIX,
    VERSION,
    ItemFile,
    Manifest,
    SavedAnswer,
    SavedState,
    StateError,
    StateModel,
    digest_of,
)
from deltic.cache.offload.state_stores import StateDirectory
from deltic.cache.offload.types import Kind, LoadedPrefix, StoredItem, Tensors, TierStoreError
from deltic.ops.kv import FP8, PACKED, name_of, rounded

if TYPE_CHECKING:
    from deltic.cache.offload.item_validator import PoolItemValidator

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, FP8)
_WIDEST: Final = 4
"""The tensors of a file take at most this many times the bytes of the same tensors in the pools' dtypes."""


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """The part of a prefix between two boundaries, on the host. run: token ids and K/V, in the form of an item.
    state: the state at the end, with logits if they are known."""

    start: int
    done: int
    run: Tensors
    state: Tensors


def write_state(store: StateDirectory, model: StateModel, parts: Sequence[PrefixPart], name: str,
                answer: SavedAnswer | None = None, most: int | None = None) -> SavedState:
    """Writes a prefix and returns its description. Keeps items that exist already. answer: the answer at the end of the
    prefix. most: maximum size of the directory in bytes. Raises StateError if it would be larger, FullError if the disk
    is full."""
    files = list[tuple[ItemFile, list[bytes | memoryview]]]()
    for part in parts:
        state: Kind = "final" if "logits" in part.state else "state"
        items: tuple[tuple[Kind, Tensors], ...] = (("kv", part.run), (state, part.state))
        for kind, tensors in items:
            pieces = encode(tensors)
            files.append((ItemFile(kind=kind, start=part.start, done=part.done, size=sum(map(len, pieces)),
                                   sha256=digest_of(pieces)), pieces))
    tokens = [token for part in parts for token in part.run["tokens"].tolist()]
    dtypes = {key: name_of(tensor.dtype) for part in parts for tensors in (part.run, part.state)
              for key, tensor in tensors.items()}
    manifest = Manifest(format=FORMAT, version=VERSION, name=name, created=int(time.time()), model=model, dtypes=dtypes,
                        tokens=tokens, boundaries=[part.done for part in parts], items=[file for file, _ in files],
                        answer=answer if answer and answer.tokens <= len(tokens) else None)
    data = manifest.encoded()
    id = sha256(data).hexdigest()
    store.create()
    if most is not None:
        _check_budget(store, manifest.size + len(data), most)
    for file, pieces in files:
        if not _is_there(store, file):
            check_room(store.root, file.size)
            write_whole(store.path(file.sha256 + ITEM_SUFFIX), pieces)
    write_whole(store.path(id + MANIFEST_SUFFIX), [data])
    return SavedState.of(id, manifest, True)


def _check_budget(store: StateDirectory, size: int, most: int) -> None:
    used = sum(store.size(name) or 0 for name in store.names())
    if used + size > most:
        raise StateError(f"the directory of states has {used:,} bytes, and this state {size:,}: together more than "
                         f"{most:,} (max_states_mib); delete some")


def _is_there(store: StateDirectory, file: ItemFile) -> bool:
    """Returns True if the file of an item exists with the right content."""
    name = file.sha256 + ITEM_SUFFIX
    return store.size(name) == file.size and digest_of(store.pieces(name)) == file.sha256


def read_state(store: StateDirectory, id: str, model: StateModel, validator: PoolItemValidator, longest: int
               ) -> tuple[list[LoadedPrefix], SavedState, SavedAnswer | None]:
    """Returns the prefixes up to each boundary, ascending, in the dtypes of the pools; their description; and the
    answer at the end, if known. longest: maximum number of tokens. Raises StateError, and changes nothing, if any file
    is wrong or does not fit the model."""
    manifest, _ = store.manifest(id)
    if manifest.model.weights != model.weights:
        raise StateError(f"the saved state {id} is of another model: {manifest.model.name} ({manifest.model.about}), "
                         f"and this one is {model.name} ({model.about})")
    if len(manifest.tokens) > longest:
        raise StateError(f"the saved state {id} has {len(manifest.tokens):,} tokens, and the context holds "
                         f"{longest:,}: raise `max_context`")
    if "hidden" in validator.pools.named_slots and "hidden" not in manifest.dtypes:
        raise StateError(f"the saved state {id} was written without the draft head that this model has: load the model "
                         "without it (`speculate='off'`)")
    tokens = array("q", manifest.tokens)
    runs = list[tuple[int, Tensors]]()
    prefixes = list[LoadedPrefix]()
    for item, file in manifest.stored_items():
        tensors = _read_item(store, item, file, validator)
        if item.kind == "kv":
            found = tensors.pop("tokens")
            if array("q", found.tolist()) != tokens[item.start:item.done]:
                raise StateError(f"the file {file.sha256} has other tokens than its manifest")
            runs.append((item.start, tensors))
            continue
        logits = tensors.pop("logits", None)
        logits = None if logits is None else logits.clone()  # a copy outlives the buffer of the other tensors
        prefixes.append(LoadedPrefix(tokens[:item.done], tuple(runs), tensors, logits))
    return prefixes, SavedState.of(id, manifest, manifest.model.identity == model.identity), manifest.answer


def _read_item(store: StateDirectory, item: StoredItem, file: ItemFile, validator: PoolItemValidator
               ) -> dict[str, Tensor]:
    name, most = file.sha256 + ITEM_SUFFIX, _WIDEST * validator.most(item) + LARGEST_HEADER
    try:
        if file.size > most:
            raise TierStoreError(f"has {file.size:,} bytes, and at most {most:,} can be right")
        data = read_regular(store.path(name), file.size)
        if sha256(data).hexdigest() != file.sha256:
            raise TierStoreError("was changed: it does not have the hash that it is named by")
        found = decode(data)
        length, header, *content = encode(found)
        if not data.startswith(bytes(length) + bytes(header)) or sum(map(len, content)) != len(data) - len(
                length) - len(header):
            raise TierStoreError("has a header that deltic does not write")
        tensors = _converted(found, validator)
        reason = validator.refuse(item, tensors)
    except TierStoreError as error:
        raise StateError(f"the file {name} {error}") from error
    except OSError as error:
        raise StateError(f"the file {name} cannot be read: {error.strerror}") from error
    if reason:
        raise StateError(f"the file {name} does not fit this model: {reason}")
    return tensors


def _converted(tensors: Mapping[str, Tensor], validator: PoolItemValidator) -> dict[str, Tensor]:
    """Returns the tensors of an item in the dtypes of the pools. Drops the tensors that only a draft head needs if the
    pools have none."""
    pages, slots = validator.pools.named_pages, validator.pools.named_slots
    return {name: _fitted(tensor, pages.get(name), slots.get(name)) for name, tensor in tensors.items()
            if name != "hidden" or name in slots}


def _fitted(tensor: Tensor, page: Tensor | None, slot: Tensor | None) -> Tensor:
    pool = page if page is not None else slot
    if pool is None:
        return tensor
    if page is not None and tensor.dim() and len(tensor) == len(page) + 1:
        tensor = tensor[:-1]  # the last layer belongs to a draft head
    if page is not None and tensor.dtype != pool.dtype and PACKED & {tensor.dtype, pool.dtype}:
        raise TierStoreError(f"has K/V in {name_of(tensor.dtype)}, and the model has it in {name_of(pool.dtype)}: int8 "
                             "and int4 are not converted (kv_dtype)")
    wide = tensor.dtype != pool.dtype and {tensor.dtype, pool.dtype} <= {*_FLOATS}
    return rounded(tensor.float(), pool.dtype) if wide else tensor


