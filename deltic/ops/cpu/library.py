"""Loads the library of compiled kernels (csrc/deltic.h) once, and defines its structs."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from deltic.errors import ConfigError
from deltic.ops.adapters import PRODUCTS, Adapter, LowRanks
from deltic.ops.kv import INT4, INT8
from deltic.ops.memory import Arena
from deltic.ops.quantized import PANEL
from deltic.ops.slices import SLICES
from deltic.ops.types import PAGE, RING, Batch

Result = TypeVar("Result")

_COMPILED = {"deltic_abi": 19, "deltic_page": PAGE, "deltic_ring": RING, "deltic_panel": PANEL, "deltic_slices": SLICES}
"""Constants that the library must return, so that Python and C++ agree on memory layouts."""
_NO_MEMORY, _READ_FAILED = -1, -3
_ARM_LEVELS = ("portable", "dotprod", "i8mm")
_X86_LEVELS = ("portable", "avx2", "avx512", "vnni", "bf16", "amx")
LEVELS = _ARM_LEVELS if platform.machine() in ("aarch64", "arm64") else _X86_LEVELS
"""Instruction levels of this machine's architecture, indexed by number."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
KV_KINDS = {**KINDS, INT4: 1000, INT8: 1005}
"""Type numbers of K/V dtypes."""
def _members(kind: Any, names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, kind) for name in names.split())


class MatrixStruct(Structure):
    """`deltic_matrix`."""

    _fields_ = (("type", c_int64), ("rows", c_int64), ("columns", c_int64), ("data", c_void_p))


class LinearWeight(Structure):
    """`deltic_weight`."""

    _fields_ = (("count", c_int64), ("parts", MatrixStruct * 4), ("slices", c_int64), ("runs", c_int64))


class LowRankStruct(Structure):
    """`deltic_low_rank`."""

    _fields_ = (*_members(c_void_p, "a b"), *_members(c_int64, "type rank columns first rows"))


class LowRanksStruct(Structure):
    """`deltic_low_ranks`."""

    _fields_ = (("count", c_int64), ("parts", POINTER(LowRankStruct)))


class AdapterLayerStruct(Structure):
    """`deltic_adapter_layer`."""

    _fields_ = (("products", LowRanksStruct * len(PRODUCTS)), ("experts", POINTER(LowRanksStruct)))


class AdapterStruct(Structure):
    """`deltic_adapter`."""

    _fields_ = (("layers", POINTER(AdapterLayerStruct)), ("head", LowRanksStruct))


class StepBatch(Structure):
    """`deltic_batch`."""

    _fields_ = (
        *_members(c_int64, "rows tokens logits emits table given"),
        *_members(c_void_p, "ids positions starts done pages store source target base ring append emit_row emit_length "
                            "emit_slot logit_tokens given_tokens given_rows"),
        ("adapters", c_int64), ("adapter", c_void_p), ("adapter_list", c_void_p),
    )


class GdnLayer(Structure):
    """`deltic_gdn_layer`."""

    _fields_ = (
        *_members(LinearWeight, "in_proj out_proj"),
        *_members(c_void_p, "conv decay dt_bias norm"),
        *_members(c_int64, "key_heads value_heads key_dim value_dim kernel tiled"),
        ("eps", c_float),
    )


class States(Structure):
    """`deltic_states`."""

    _fields_ = (
        *_members(c_void_p, "recurrent conv"), *_members(c_int64, "places type"),
        *_members(c_void_p, "inputs keys updates decays"), *_members(c_int64, "slots units"),
    )


class AttentionLayer(Structure):
    """`deltic_attention_layer`."""

    _fields_ = (
        *_members(LinearWeight, "qkv o_proj"), *_members(c_void_p, "q_norm k_norm bias"),
        *_members(c_int64, "heads kv_heads head_dim rotary_dim gate"), ("eps", c_float),
    )


class Kv(Structure):
    """`deltic_kv`."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("type", c_int64), ("pages", c_int64))


class Expert(Structure):
    """`deltic_expert`."""

    _fields_ = (("gate_up", LinearWeight), ("down", LinearWeight))


class MoeLayer(Structure):
    """`deltic_moe_layer`."""

    _fields_ = (("router", LinearWeight), ("expert", POINTER(Expert)),
                *_members(c_int64, "experts per_token first own slices shared normalised"),
                ("store", c_void_p), ("stored", c_int64), ("next", c_void_p))


class Extent(Structure):
    """`deltic_extent`."""

    _fields_ = (("file", c_int64), ("offset", c_int64))


class StoredLayer(Structure):
    """`deltic_stored_layer`."""

    _fields_ = (("slots", c_int64), ("rows", c_int64), ("columns", c_int64), ("types", c_int64 * 3),
                ("extents", POINTER(Extent)))


class ExpertCounts(Structure):
    """`deltic_expert_counts`."""

    _fields_ = _members(c_int64, "bytes promotions refreshes waited reading predicted useful")


class BesideModel(Structure):
    """`deltic_beside_model`."""

    _fields_ = (*_members(c_int64, "hidden size experts layers most"), *_members(c_void_p, "weights packed"))


class MailboxStruct(Structure):
    """`deltic_mailbox`."""

    _fields_ = _members(c_void_p, "request answer counts experts shares factors input sums")


class ModelLayer(Structure):
    """`deltic_layer`."""

    _fields_ = (
        *_members(c_void_p, "input_norm post_norm"),
        ("gdn", POINTER(GdnLayer)), ("states", POINTER(States)),
        ("attention", POINTER(AttentionLayer)), ("kv", POINTER(Kv)), ("gate_up", LinearWeight), ("down", LinearWeight),
        ("moe", POINTER(MoeLayer)),
    )


class ModelStruct(Structure):
    """`deltic_model`."""

    _fields_ = (
        ("hidden", c_int64), ("layers", c_int64), ("layer", POINTER(ModelLayer)), ("embedding", MatrixStruct),
        ("head", LinearWeight), ("norm", c_void_p), ("frequencies", c_void_p), ("axes", c_void_p),
        ("rotary_dim", c_int64), ("eps", c_float), ("attention_factor", c_float),
    )


class MtpStruct(Structure):
    """`deltic_mtp`."""

    _fields_ = (("model", ModelStruct), ("fc", LinearWeight), ("kv", LinearWeight), ("norm_embedding", c_void_p),
                ("norm_hidden", c_void_p), ("tokens", c_void_p))


class LayerNormStruct(Structure):
    """`deltic_layer_norm`."""

    _fields_ = (("scale", c_void_p), ("shift", c_void_p))


class EncoderModelLayer(Structure):
    """`deltic_encoder_layer`."""

    _fields_ = (*_members(LinearWeight, "qkv out up down"),
                *_members(c_void_p, "qkv_bias out_bias up_bias down_bias"),
                ("attention_norm", LayerNormStruct), ("output_norm", LayerNormStruct))


class EncoderModel(Structure):
    """`deltic_encoder`."""

    _fields_ = (("hidden", c_int64), ("heads", c_int64), ("layers", c_int64), ("layer", POINTER(EncoderModelLayer)),
                ("norm", LayerNormStruct), ("eps", c_float))


class VisionPart(Structure):
    """`deltic_vision_part`."""

    _fields_ = (("cosines", c_void_p), ("sines", c_void_p),
                *_members(c_int64, "first_head end_head first end narrow"))


class Drawing(Structure):
    """`deltic_drawing`."""

    _fields_ = (*_members(c_void_p, "temperatures top_k top_p min_p keys"),
                ("filtered", c_int64), ("tokens", c_void_p))


_P, _I = c_void_p, c_int64
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "deltic_best_level": (c_int, []),
    "deltic_pool_new": (_P, [c_int, c_int]),
    "deltic_pool_free": (None, [_P]),
    "deltic_packed_bytes": (_I, [_I, _I, _I]),
    "deltic_pack": (None, [_I, _P, _I, _I, _I, _P]),
    "deltic_unpack_rows": (None, [POINTER(MatrixStruct), _P, _I, _P]),
    "deltic_copy_rows": (None, [POINTER(MatrixStruct), _P, _I, POINTER(MatrixStruct), _P]),
    "deltic_quantize": (c_int, [_I, _P, _I, _I, _P]),
    "deltic_linear": (c_int, [_P, _P, _I, POINTER(LinearWeight), _P]),
    "deltic_gdn": (c_int, [_P, POINTER(GdnLayer), POINTER(States), POINTER(StepBatch), _P, _P]),
    "deltic_attention": (c_int, [_P, POINTER(AttentionLayer), POINTER(Kv), POINTER(StepBatch), _P, _P, _P, _P]),
    "deltic_fold_ring": (c_int, [_P, POINTER(GdnLayer), POINTER(States), _I, _I, _I, _I, _I, _I]),
    "deltic_store_kv": (c_int, [_P, POINTER(AttentionLayer), POINTER(LinearWeight), POINTER(Kv), POINTER(StepBatch), _P,
                                _P, _P]),
    "deltic_add_norm": (None, [_P, _P, _P, _P, _P, _P, _I, _I, c_float]),
    "deltic_mlp": (c_int, [_P, _P, _I, POINTER(LinearWeight), POINTER(LinearWeight), _P]),
    "deltic_moe": (c_int, [_P, _P, _I, POINTER(MoeLayer), _P]),
    "deltic_expert_store_new": (_P, [POINTER(StoredLayer), _I, _I, _P, _I, c_int, _I]),
    "deltic_expert_store_free": (None, [_P]),
    "deltic_expert_store_fill": (c_int, [_P, _I, _P, _I]),
    "deltic_expert_store_failure": (_I, [_P, _P]),
    "deltic_expert_store_scores": (_P, [_P, _I]),
    "deltic_expert_store_count": (None, [_P, POINTER(ExpertCounts), _P, _P]),
    "deltic_beside_new": (_P, [POINTER(BesideModel), POINTER(MailboxStruct), c_int, c_int]),
    "deltic_beside_free": (None, [_P]),
    "deltic_beside_wake": (None, [_P]),
    "deltic_beside_count": (None, [_P, _P, _P]),
    "deltic_top": (c_int, [_P, _P, _I, _I, _I, _P, _P, _P, _P, _P]),
    "deltic_adjust": (c_int, [_P, _P, _I, _P, _P]),
    "deltic_draw": (c_int, [_P, _P, _I, _I, _I, _P, _P, _P, POINTER(Drawing), _P]),
    "deltic_forward": (c_int, [_P, POINTER(ModelStruct), POINTER(StepBatch), _P, _P]),
    "deltic_mtp_follow": (c_int, [_P, POINTER(MtpStruct), POINTER(StepBatch), _P, _P]),
    "deltic_encode": (c_int, [_P, POINTER(EncoderModel), _P, _I, _P]),
    "deltic_vision_project": (c_int, [_P, POINTER(EncoderModel), _I, _P, _I, _P]),
    "deltic_vision_attend": (c_int, [_P, POINTER(EncoderModel), _I, _P, _I, POINTER(VisionPart), _P]),
    "deltic_vision_finish": (c_int, [_P, POINTER(EncoderModel), _I, _P, _I, _P]),
    "deltic_mtp_draft": (c_int, [_P, POINTER(MtpStruct), POINTER(StepBatch), _P, _I, _P, POINTER(Drawing), _P]),
}


@cache
def load() -> ctypes.CDLL | str:
    """Returns the library, or the reason why it is unusable. Raises ConfigError if its version is wrong."""
    path = Path(__file__).parent / "libdeltic.so"
    if not path.exists():
        return "the native kernels were not compiled: install g++, then reinstall deltic"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native kernels cannot be loaded: {error}"
    _check_compiled(library, path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _check_compiled(library: ctypes.CDLL, path: Path) -> None:
    for name, wanted in _COMPILED.items():
        function = getattr(library, name, None)
        found = function() if function else None
        if found != wanted:
            raise ConfigError(f"{path} was compiled from other sources than these: {name} is {found} instead of "
                              f"{wanted}; rebuild it (pip install --force-reinstall --no-deps deltic, or pip install "
                              "-e . in a checkout)")


def library() -> ctypes.CDLL:
    """Returns the library. It must be usable."""
    loaded = load()
    assert not isinstance(loaded, str), loaded
    return loaded


class ThreadPool:
    """The threads of one model's ops, their instruction level, and the arena of its packed weights.

    The threads start with the first call and end with this object. They do not end at exit, when other threads may
    still compute, nor in a forked process, which does not have them.
    """

    def __init__(self, level: int, threads: int) -> None:
        self.level, self.threads, self.arena = level, threads, Arena()
        self._address, self._turn = 0, threading.Lock()
        self.unread: Callable[[], Exception] | None = None
        """Returns the error for weights that could not be read from files."""

    def call(self, kernel: Any, *arguments: object) -> None:
        """Runs a kernel, one at a time: calls from other Python threads wait.

        Raises MemoryError if memory ran out, the error of `unread` if files could not be read, and ValueError, before
        it computes anything, if a batch points outside of the views or is inconsistent.
        """
        with self._turn:
            status = kernel(self._address or self._start(), *arguments)
        if status == _READ_FAILED and self.unread:
            raise self.unread()
        if status:
            raise _error(status)

    def _start(self) -> int:
        made: int | None = library().deltic_pool_new(self.threads, self.level)
        if not made:
            raise MemoryError("no memory for the threads of the CPU kernels")
        weakref.finalize(self, _free, made, os.getpid()).atexit = False
        self._address = made
        return made


def _error(status: int) -> Exception:
    if status == _NO_MEMORY:
        return MemoryError("the CPU kernels found no memory for their intermediate results: lower `token_budget`")
    return ValueError("a batch points outside of the cache or contradicts itself: one model was stepped from two "
                      "places that do not know of each other, or the scheduler is broken")


def _free(address: int, process: int) -> None:
    if os.getpid() == process:
        library().deltic_pool_free(address)


def made_once(kept: dict[Any, Any] | None, key: object, make: Callable[[], Result]) -> Result:
    """Returns the result of `make`. With a cache `kept`, calls `make` only once per key."""
    if kept is None:
        return make()
    if key not in kept:
        kept[key] = make()
    made: Result = kept[key]
    return made


def step_batch(batch: Batch) -> Any:
    """Returns the batch's struct by reference. It is made once per batch and borrows the batch's tensors."""
    return made_once(batch.memo if batch.kept is None else batch.kept, step_batch, lambda: _struct(batch))[0]


def _struct(batch: Batch) -> tuple[Any, StepBatch, list[Any]]:
    layout = batch.layout
    tensors = (batch.ids, batch.positions, batch.starts, batch.done, batch.pages, batch.store, batch.source,
               batch.target, batch.base, batch.delta_log, batch.append, batch.emit_row, batch.emit_length,
               batch.emit_slot, batch.logit_tokens)
    embeds = (batch.input_embeds.tokens, batch.input_embeds.rows) if batch.input_embeds else ()
    borrowed: list[Any] = [tensor.contiguous() for tensor in (*tensors, *embeds)]
    struct = StepBatch(layout.rows, layout.tokens, layout.logits, layout.checkpoints, batch.pages.shape[1],
                       len(embeds[0]) if embeds else 0, *(tensor.data_ptr() for tensor in borrowed))
    if batch.adapters:
        numbers, adapters = batch.adapters.numbers.contiguous(), batch.adapters.adapters
        pointers = (c_void_p * len(adapters))(*(ctypes.addressof(_native_adapter(each)) for each in adapters))
        struct.adapters, struct.adapter = len(adapters), address(numbers)
        struct.adapter_list = ctypes.addressof(pointers)
        borrowed += [numbers, adapters, pointers]
    return byref(struct), struct, borrowed


def _native_adapter(adapter: Adapter) -> AdapterStruct:
    """Returns the adapter's struct. It is made once and borrows the adapter's tensors."""
    made: AdapterStruct = made_once(adapter.kept, AdapterStruct, lambda: _adapter_struct(adapter))
    return made


def _adapter_struct(adapter: Adapter) -> AdapterStruct:
    layers = (AdapterLayerStruct * len(adapter.layers))()
    for struct, layer in zip(layers, adapter.layers, strict=True):
        struct.products = (LowRanksStruct * len(PRODUCTS))(*(_low_ranks(layer.products.get(name, ()))
                                                             for name in PRODUCTS))
        if layer.experts:
            both = [_low_ranks(ranks) for expert in layer.experts for ranks in expert]
            struct.experts = (LowRanksStruct * len(both))(*both)
    return AdapterStruct(layers, _low_ranks(adapter.head))


def _low_ranks(ranks: LowRanks) -> LowRanksStruct:
    parts = [LowRankStruct(address(part.a), address(part.panels), KINDS[part.a.dtype], *part.a.shape, part.first,
                           part.rows) for part in ranks]
    return LowRanksStruct(len(parts), (LowRankStruct * len(parts))(*parts) if parts else None)


def address(tensor: Tensor | None) -> int | None:
    """Returns the address of a contiguous tensor's data."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
