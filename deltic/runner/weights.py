"""Reads a model's weights in the form that the kernels of a device use: plain, packed as in a GGUF file, or quantized
at load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from deltic.cache.offload.identity import FileMark, Identity, ModelIdentity, machine_facts
from deltic.config import DTYPE_BYTES, DType, EngineConfig, GenerationDefaults, ModelConfig
from deltic.config.families import FAMILIES
from deltic.errors import ConfigError, ModelError
from deltic.loader.formats import mlx
from deltic.loader.formats.fp8 import FLOAT8, Float8
from deltic.loader.gguf.affine import affine_rows
from deltic.loader.gguf.blocks import BY_NAME, BlockType
from deltic.loader.gguf.load import (
    down_units,
    is_quantized,
    packed_sizes,
    plan_gguf,
    unserved_experts,
    wants_packing,
)
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.model_files import ModelFiles
from deltic.loader.names import EMBEDDING, HEAD, expected_tensors, is_stack, packed_parts, tensor_dtype
from deltic.loader.quantize import FP8, STORED, quantize_parts, quantize_tower, quantized_bytes, quantized_units
from deltic.loader.safetensors import KeptForms, Progress, read_stored
from deltic.loader.tensors import Source
from deltic.loader.vision import expected_tower
from deltic.model.draft_vocabulary import Tokens, draftable
from deltic.model.tensor_parallel import WeightSplitter, check_degree, splits
from deltic.model.vision_tower import build_tower
from deltic.ops import Ops, select
from deltic.ops.capabilities import device_kind, verifies_drafts
from deltic.ops.cpu import missing, packs
from deltic.ops.cuda import quantized
from deltic.ops.cuda.expert_offload import PinnedExpertStore, pinned_form
from deltic.ops.cuda.layer_offload import host_layer_form
from deltic.ops.cuda.quantized_moe import knows_packed
from deltic.ops.memory import Arena
from deltic.ops.parts import Part, Split
from deltic.ops.quantized import PLAIN_TYPES, PackedForm, QTensor, host_form, pack_rows
from deltic.ops.slices import slice_unit
from deltic.ops.types import Weight
from deltic.params import Auto, Draft, Mtp
from deltic.runner.expert_offload import beside_card, check_experts, plain_store
from deltic.runner.image_embeds import Encode
from deltic.runner.layer_offload import LayerPlan, check_host_memory, has_second_form, matrices_of
from deltic.runner.memory import free_on_card
from deltic.runner.packed_file import PackedFile
from deltic.vision.images import Pixels, patches_of

log = logging.getLogger("deltic")
_FREE_SHARE = 0.85
"""Fraction of a GPU's free memory that weights may fill, which leaves room for the cache and a step."""


class RandomWeights(Protocol):
    """A source of random tensors. head: True if it also has a draft head."""

    @property
    def head(self) -> bool: ...

    def tensors(self, config: ModelConfig, dtype: DType, device: str, head: bool = False
                ) -> Iterator[tuple[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose weights have not been read yet. Either `files` or `random` has the weights."""

    name: str
    config: ModelConfig
    generation: GenerationDefaults
    files: ModelFiles | None = None
    random: RandomWeights | None = None


class WeightReader:
    """Reads the weights of one model, split into a part for each device.

    dtype: dtype of plain weights and activations.
    packed: the matrices stay as in a GGUF file. tiled: the file's value heads are not grouped by key heads.
    drafts: the model drafts for another one.
    """

    def __init__(self, source: OpenedModel, options: EngineConfig, ops: Ops, dtype: DType, drafts: bool = False,
                 progress: Progress | None = None) -> None:
        """Raises ConfigError for options that do not suit the weights. Does not read weights."""
        self.source, self.options, self.ops, self.dtype, self.drafts = source, options, ops, dtype, drafts
        self._progress = progress
        files = source.files
        check_packed(files, options, drafts)
        self.packed = files is not None and keeps_packed(files, options, dtype)
        self.tiled = self.packed and not FAMILIES[source.config.architecture].gguf_grouped
        self._float8 = files is not None and keeps_float8(files, options, dtype)
        self._stored = stored_types(files, options, dtype) if files else {}
        self._scheme = STORED if self._float8 or self._stored else options.quant
        quantizes = self._scheme != "none"
        self._quantizes = quantizes and not (drafts and self.packed)
        check_degree(source.config, options.shards, self.packed or quantizes, self.tiled)
        if options.shards > 1 and options.on_gpu:
            check_gpus(source.config, options, dtype, self.packed or quantizes)
        self._marks, self._marked = self._mark_files() if files and files.weights is None else ([], 0)
        in_files = files if files and not files.weights else None
        check_experts(in_files, source.config, options, dtype, self.packed or quantizes)
        self._here = beside_card(options) or not options.offloads_experts
        self._forms = forms_of(options, dtype)
        self._units = self._slice_units() if options.shards > 1 else {}
        self._split = WeightSplitter(source.config, options.shards, self.tiled, self._units, bool(options.on_gpu)).over(
            options.devices)

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of the text model's weights on a GPU, by name."""
        files = self.source.files
        if files and files.gguf and self.packed:
            return packed_sizes(files.gguf, self.source.config, quantized.packed_bytes)
        if files and self._scheme == STORED:
            float8 = files.float8_names() if self._float8 else set[str]()
            return _stored_sizes(self.source.config, self.dtype, float8, self._stored, True)
        return weight_sizes(self.source.config, self.dtype, self._scheme)

    def shard_bytes(self) -> int:
        """Returns the bytes of the text model's weights on the device with the most."""
        return largest_part(self.sizes(), self.source.config, self._split)

    def tower_bytes(self) -> int:
        """Returns the bytes of the vision tower, if it will be read."""
        files, options = self.source.files, self.options
        if files is None or files.vision is None or self.drafts or not options.vision:
            return 0
        return 2 * sum(map(prod, expected_tower(files.vision.tower).values()))

    def head_copies(self, head: Mapping[str, Weight] | None) -> int:
        """Returns an estimate of the bytes of a draft head on a GPU besides its weights: copied rows of the logits
        matrix and joined projections."""
        if head is None:
            return 0
        sizes, base, size = self.sizes(), self.options.draft_vocab, self.source.config.vocab_size
        copied = sizes.get(HEAD, sizes[EMBEDDING]) * 9 * base // (8 * size) if 9 * base < 8 * size else 0
        joined = [tensor.nbytes for name, tensor in head.items()
                  if isinstance(tensor, Tensor) and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
        return copied + sum(joined)

    def identity(self, head: bool) -> Identity:
        """Returns the identity of the loaded weights. head: True if they include a draft head."""
        facts = {"random": self.source.random, "config": self.source.config, "dtype": self.dtype,
                 "packed": self.packed, "quant": self._scheme, "head": head}
        return Identity(facts, self._marks)

    def model_identity(self, head: bool) -> ModelIdentity | None:
        """Returns the identity of the model for stores outside of this process; None if the weights are not in files.
        head: True if they include a draft head."""
        made, files = self.identity(head), self.source.files
        if files and files.weights is not None:
            return None
        facts = {name: fact for name, fact in made.facts.items() if name not in ("dtype", "head")}
        return ModelIdentity(made, Identity(facts, self._marks[:self._marked]))

    def read(self, layers: LayerPlan) -> tuple[list[dict[str, Weight]], PinnedExpertStore | None]:
        """Returns each device's part of the weights, and the store with the plain experts if they are offloaded from a
        GPU. layers: the plan of feed-forwards that stay in host memory."""
        self._forms = [self._placed_form(form, layers) for form in self._forms]
        files, config, options = self.source.files, self.source.config, self.options
        if self._quantizes:
            return self._quantize(), None
        if files and self.packed:
            return files.load_packed(self._forms, self._split, self._progress, self._here), None
        store = plain_store(config, options) if beside_card(options) and options.quant == "none" else None
        found: list[dict[str, Weight]] = [{} for _ in self._forms]
        for device, name, tensor in self._plain(pack=self._stored_form()):
            assert not isinstance(tensor, Float8)
            if not isinstance(tensor, Tensor):
                found[device][name] = tensor
            elif not (store and store.take(name, tensor)):
                found[device][name] = self._forms[device].put(name, tensor)
        return found, store

    def _stored_form(self) -> Callable[[str, Source], Weight | None] | None:
        """Returns a function that reads weights of safetensors directly in the form of the device, without another form
        in memory; None if there is none."""
        single = not self.options.on_gpu and self.options.shards == 1
        if single and packs(self.ops) and self._scheme in ("none", STORED):
            return self._packed_vocabulary
        if device_kind(self.options.device) != "mlx" or self.options.packed_weights == "off":
            return None
        from deltic.runner.mlx_weights import StoredMatrices

        return StoredMatrices(getattr(torch, self.dtype)).read

    def _packed_vocabulary(self, name: str, source: Source) -> QTensor | None:
        """Packs an embedding or logits matrix piece by piece, because one can have half of a small model's bytes."""
        if name not in (EMBEDDING, HEAD) or name in self._stored:
            return None
        dtype = getattr(torch, self.dtype)
        type, number = PLAIN_TYPES[dtype]
        rows, columns = source.shape
        width = columns * dtype.itemsize

        def read(start: int, count: int) -> Tensor:
            part = Part((slice(start // width, (start + count) // width),))
            return read_stored(name, source, dtype, torch.device("cpu"), part).view(torch.uint8)

        return pack_rows(type, number, rows, columns, width, read, Arena())

    def _placed_form(self, form: PackedForm, layers: LayerPlan) -> PackedForm:
        """Returns the form of a device's matrices, with another form for matrices that stay in host memory."""
        if not layers.layers:
            return form
        check_host_memory(layers)
        packs = self._quantizes or self.packed
        host = host_layer_form(form.device, packs and has_second_form(self.options, layers))
        return replace(form, placed={name: host for index in layers.layers for name in matrices_of(index)})

    def read_head(self) -> list[dict[str, Weight]] | None:
        """Returns each device's part of the draft head if the options want it and the model has one."""
        files, random, speculation = self.source.files, self.source.random, self.options.speculation
        if not isinstance(speculation, Auto | Mtp):
            return None
        if isinstance(speculation, Auto) and not verifies_drafts(self.options.device, self.dtype):
            return None
        found: list[dict[str, Weight]] = [{} for _ in self._forms]
        if random and random.head:
            whole = random.tensors(self.source.config, self.dtype, self.options.devices[0], head=True)
            for device, name, tensor in self._split.cut(whole):
                found[device][name] = tensor
        elif files:
            packs = self.packed and not self.options.on_gpu
            try:
                self._units |= down_units(files.gguf_head(), self._forms[0]) if packs else {}
                found = files.head_parts(self.dtype, self._split, self._forms if packs else ())
            except ModelError as error:
                if isinstance(speculation, Mtp):
                    raise
                log.warning("the draft head cannot be used, so that nothing is drafted: %s", error)
                return None
        if not found[0] and isinstance(speculation, Mtp):
            remedy = "use" if random else "put one beside it (deltic mtp extract), or use"
            raise ConfigError(f"speculate={self.options.speculate}: this model has no draft head (tensors `mtp.*`): "
                              f"{remedy} speculate=ngram, draft:MODEL or off", "speculate")
        return found if found[0] else None

    def draft_vocabulary(self, texts: TokenizerTexts | None, most: int | None = None) -> list[int] | None:
        """Returns the tokens that can be drafted; None: all. texts: the tokenizer, if it is not a file. most: maximum
        size of the base vocabulary; None: that of the options."""
        files, count, size = self.source.files, self.options.draft_vocab, self.source.config.vocab_size
        count = count if most is None else min(count or most, most)
        if files is None or not 0 < count < size:
            return draftable(count, size)
        text = texts.tokenizer if texts else ""
        with suppress(OSError, UnicodeDecodeError):
            text = text or (files.path / "tokenizer.json").read_text(encoding="utf-8")
        return draftable(count, size, Tokens.of(text), files.generation.eos_token_ids)

    def read_tower(self) -> Encode | None:
        """Returns the function that computes image embeddings; None without a vision tower or if options disable it."""
        files, options = self.source.files, self.options
        if files is None or self.drafts or not options.vision:
            return None
        packs = not options.on_gpu and not missing()  # on a GPU torch runs the tower and needs plain numbers
        form = host_form() if packs and options.packed_weights != "off" else None
        weights, vision = files.load_tower(self.dtype, options.devices[0], form), files.vision
        if weights is None or vision is None:
            return None
        if packs and options.quant != "none":
            weights = quantize_tower(weights)
        tower = build_tower(vision.tower, weights, self._tower_ops(), getattr(torch, self.dtype))

        def encode(pixels: Pixels) -> Generator[None, None, Tensor]:
            patches = torch.from_numpy(patches_of(pixels, vision.pictures, vision.tower)).to(options.devices[0])
            return tower.encode(patches, [pixels.grid])

        return encode

    def _tower_ops(self) -> Ops:
        """Returns the ops of the vision tower: the model's ops, or CPU ops if the model's do not support towers."""
        options = self.options
        if device_kind(options.device) != "mlx":
            return self.ops
        return select((), "cpu", options.cpu_level, options.threads_for(self.source.config.parameter_count))

    def _plain(self, float8: bool = False, pack: Callable[[str, Source], Weight | None] | None = None
               ) -> Iterator[tuple[int, str, Any]]:
        """Yields device, name and content of weights. float8: weights stored in float8 stay so. Weights in formats that
        the kernels multiply stay, too. pack: as in `read_parts`."""
        source = self.source
        if source.random:
            return self._split.cut(source.random.tensors(source.config, self.dtype, self.options.devices[0]))
        assert source.files
        return source.files.parts(self.dtype, self._split, self._progress, self._here,
                                  KeptForms(float8, self._stored, pack))

    def _slice_units(self) -> dict[str, int]:
        """Returns the slice unit, in columns, of each packed `down` matrix of a feed-forward, by name."""
        files, config, form = self.source.files, self.source.config, self._forms[0]
        if files and files.gguf and self.packed:
            return down_units(plan_gguf(files.gguf, config), form)
        found = quantized_units(config, self._scheme, form) if self._quantizes else {}
        if files and self._scheme == STORED:
            found = {name: found[name] for name in found.keys() & files.float8_names()} if self._float8 else {}
            shapes = expected_tensors(config)
            found |= {name: slice_unit(type.name, shapes[name][-1]) for name, type in self._stored.items()
                      if name.endswith(".down_proj.weight") and not is_stack(name)}
        return found

    def _quantize(self) -> list[dict[str, Weight]]:
        """Returns the weights, quantized (or kept in float8) one by one, so that memory stays near the result's size.
        Reads them from the file of an earlier start if there is one."""
        config, options, dtype = self.source.config, self.options, self.dtype
        reason = not_packed(options, config, dtype)
        if self.packed:
            reason = "the weights are quantized already; leave it out, or load the unquantized model"
        if reason:
            raise ConfigError(f"quant={options.quant} is not possible: {reason}", "quant")
        if slow := dequantized_in_steps(options, config):
            log.warning("quant=%s: %s", options.quant, slow)
        stored = self._packed_file()
        found = stored.read() if stored else None
        if found is None:
            float8 = self._float8 or self._scheme == FP8
            found = quantize_parts(self._plain(float8, self._stored_form()), self._scheme, config, self._forms)
            if stored:
                stored.write(found)
        return found

    def _packed_file(self) -> PackedFile | None:
        """Returns the file of packed weights; None if unused. A GPU packs on the device, which takes no time."""
        options = self.options
        if options.aot_dir is None or options.on_gpu:
            return None
        facts = {"random": self.source.random, "config": self.source.config, "dtype": self.dtype,
                 "quant": options.quant, "tp": options.shards}
        return PackedFile(options.aot_dir, machine_facts(options, self.ops), Identity(facts, self._marks))

    def _mark_files(self) -> tuple[list[FileMark], int]:
        """Marks the files of the weights and, for the answer records of a tier, of the tokenizer; then the files
        with only a draft head. Returns the marks and the number of those before the latter."""
        files = self.source.files
        assert files
        found, head = files.weight_files(False), tuple[Path, ...]()
        if isinstance(self.options.speculation, Auto | Mtp):
            with suppress(ModelError):  # `read_head` reports it
                head = files.weight_files(True)
        tokenizer = files.path / "tokenizer.json"
        found = (*found, *([tokenizer] if tokenizer.is_file() else []))
        return [FileMark.of(path) for path in dict.fromkeys((*found, *head))], len(found)


def weight_sizes(config: ModelConfig, dtype: DType, scheme: str) -> dict[str, int]:
    """Returns the bytes of each weight on a GPU. scheme: as in `quantize_tensors`, or `none`."""
    plain = {name: prod(shape) * DTYPE_BYTES[tensor_dtype(name, dtype)]
             for name, shape in expected_tensors(config).items()}
    return plain if scheme == "none" else quantized_bytes(config, scheme, plain, quantized.packed_bytes)


def check_gpus(config: ModelConfig, options: EngineConfig, dtype: DType, packed: bool) -> None:
    """Raises ConfigError if a model cannot be split over GPUs. packed: True if its matrices are quantized."""
    if dtype != "bfloat16":
        raise ConfigError(f"tp={options.tp} is not possible on GPUs with dtype {dtype}, which torch serves: use "
                          "dtype=bfloat16, or tp=1", "tp")
    if packed and config.experts:
        raise ConfigError(f"tp={options.tp} is not possible on GPUs with quantized experts: use tp=1, or weights in "
                          "bfloat16 (packed_weights='off' makes them from a quantized file)", "tp")


def largest_part(sizes: Mapping[str, int], config: ModelConfig, split: Split) -> int:
    """Returns the bytes of weights on the device with the most. sizes: bytes of whole weights, by name."""
    shapes, found = expected_tensors(config), [0] * len(split.devices)
    for name, nbytes in sizes.items():
        for device, part in split.own(name, shapes[name]):
            found[device] += nbytes * prod(part.shape(shapes[name])) // prod(shapes[name])
    return max(found)


def forms_of(options: EngineConfig, dtype: DType) -> list[PackedForm]:
    """Returns the form of quantized matrices on each device. dtype: dtype of activations."""
    if device_kind(options.device) == "mlx":
        from deltic.ops.mlx.quantized import packed_form as mlx_form

        return [mlx_form(getattr(torch, dtype), affine_rows)]
    return [packed_form(options, device) for device in options.devices]


def packed_form(options: EngineConfig, device: str) -> PackedForm:
    """Returns the form of quantized matrices that the kernels of one of the devices read."""
    if not options.on_gpu:
        return host_form()
    if options.offloads_experts:
        return pinned_form(torch.device(device))
    return quantized.tiles_form(device)


def not_packed(options: EngineConfig, config: ModelConfig, dtype: DType) -> str | None:
    """Returns the reason why matrices cannot stay quantized; None if they can."""
    if device_kind(options.device) == "mlx":
        return None
    if not options.on_gpu:
        return missing().get("step")
    if dtype != "bfloat16":
        return f"on a GPU only with dtype bfloat16, not {dtype}"
    return _experts_not_packed(options, config) if config.experts else None


def dequantized_in_steps(options: EngineConfig, config: ModelConfig) -> str | None:
    """Returns the reason why torch dequantizes each matrix in every step on a GPU; None if it does not."""
    if not options.on_gpu or config.experts:
        return None
    if why := _kernels_missing(options):
        return f"{why}: torch dequantizes each matrix in every step"
    return None


def keeps_packed(files: ModelFiles, options: EngineConfig, dtype: DType) -> bool:
    """Returns True if the weights stay in the form of a GGUF file. If only torch could compute with them on a GPU, they
    are dequantized at load, provided that they fit its memory."""
    if files.gguf is None or options.packed_weights == "off":
        return False
    config, on = files.config, options.packed_weights == "on"
    reason = not_packed(options, config, dtype)
    form = forms_of(options, dtype)[0]
    if reason is None and options.on_gpu and (types := unserved_experts(files.gguf, form)):
        reason = f"on a GPU the kernels know no experts of type {', '.join(types)}"
    if reason and on:
        raise ConfigError(f"packed_weights=on is not possible: {reason}", "packed_weights")
    # with `quant`, only weights that are quantized already stay packed
    wanted = is_quantized(files.gguf) if options.quant != "none" else wants_packing(files.gguf)
    if reason or not (on or wanted):
        return False
    slow = dequantized_in_steps(options, config)
    if slow and not on and _plain_weights_fit(options, config):
        log.info("the weights become %s when they are loaded, as %s", dtype, slow)
        return False
    if slow:
        log.warning("%s; the CPU (device=cpu) may be faster", slow)
    return True


def keeps_float8(files: ModelFiles, options: EngineConfig, dtype: DType) -> bool:
    """Returns True if float8 matrices of safetensors stay as they are, which needs a GPU with kernels for them."""
    if not options.on_gpu or options.quant != "none" or options.packed_weights == "off" or options.offloads_experts:
        return False
    return (not not_packed(options, files.config, dtype) and not _kernels_missing(options) and files.has_float8)


def packed_storages(files: ModelFiles, options: EngineConfig, dtype: DType) -> set[tuple[str, int]]:
    """Returns the storages of matrices that stay as they are stored: pairs of GGUF type or format name, and columns."""
    if files.gguf is not None:
        form = packed_form(options, options.device) if keeps_packed(files, options, dtype) else None
        found = {(tensor.type, tensor.shape[-1]) for tensor in files.gguf.tensors.values()}
        return {(type.name, columns) for type, columns in found
                if form and type.weights > 1 and form.serves(type.name, columns)}
    stored = files.storages()
    if device_kind(options.device) == "mlx":
        names = {format.name for format in mlx.FORMATS} if options.packed_weights != "off" else set[str]()
        return {storage for storage in stored.values() if storage[0] in names}
    float8 = keeps_float8(files, options, dtype)
    blocks = stored_types(files, options, dtype)
    return {storage for name, storage in stored.items() if name in blocks or (float8 and storage[0] == FLOAT8)}


def served_sizes(files: ModelFiles, options: EngineConfig, dtype: DType) -> dict[str, int]:
    """Returns the bytes of the text model's weights in memory, by name."""
    config, on_gpu = files.config, bool(options.on_gpu)
    if files.gguf and keeps_packed(files, options, dtype):
        return packed_sizes(files.gguf, config, quantized.packed_bytes if on_gpu else _bytes_in_file)
    plain = weight_sizes(config, dtype, "none")
    float8 = files.float8_names() if keeps_float8(files, options, dtype) else set[str]()
    stored = stored_types(files, options, dtype)
    if float8 or stored:
        return _stored_sizes(config, dtype, float8, stored, on_gpu)
    if options.quant == "none":
        return plain
    return quantized_bytes(config, options.quant, plain, quantized.packed_bytes if on_gpu else None)


def _stored_sizes(config: ModelConfig, dtype: DType, float8: Collection[str], stored: Mapping[str, BlockType],
                  on_gpu: bool) -> dict[str, int]:
    """Returns the bytes of weights, by name, if some stay as they are stored. float8: names of weights in float8.
    stored: block types of weights in blocks."""
    shapes, kept = expected_tensors(config), {part for name in float8 for part in packed_parts(name) or (name,)}
    found, sizes = weight_sizes(config, dtype, "none"), weight_sizes(config, dtype, STORED)
    found |= {name: sizes[name] for name in sizes.keys() & kept}
    for name in shapes.keys() & stored.keys():
        *matrices, columns = shapes[name]
        rows, type = prod(matrices), stored[name]
        packed = quantized.packed_bytes(type.name, rows, columns) if on_gpu else type.size(rows * columns)
        found[name] = packed or found[name]
    return found


def _bytes_in_file(type: str, rows: int, columns: int) -> int:
    return BY_NAME[type].size(rows * columns)
def stored_types(files: ModelFiles, options: EngineConfig, dtype: DType) -> dict[str, BlockType]:
    """Returns the block types, by canonical name, of weights that stay as they are stored in safetensors because the
    kernels multiply them."""
    if options.quant != "none" or options.packed_weights == "off" or options.offloads_experts:
        return {}
    if files.gguf is not None or device_kind(options.device) == "mlx":
        return {}
    if dtype == "float32":  # float32 asks for products that are not rounded
        return {}
    if not_packed(options, files.config, dtype) or (options.on_gpu and _kernels_missing(options)):
        return {}
    if not splits(files.config, options.shards, packed=True):
        return {}
    return files.block_types(packed_form(options, options.device))


def check_packed(files: ModelFiles | None, options: EngineConfig, drafts: bool) -> None:
    """Raises ConfigError if `packed_weights` is on for weights that are not quantized. With a draft model the option
    may be meant for either model."""
    shared = drafts or isinstance(options.speculation, Draft)
    if options.packed_weights == "on" and not shared and (files is None or files.gguf is None):
        raise ConfigError("packed_weights=on is for GGUF files, whose weights may be quantized: leave it out, or "
                          "quantize the model while it is loaded (`quant='q8_0'`)", "packed_weights")


def _plain_weights_fit(options: EngineConfig, config: ModelConfig) -> bool:
    """Returns True if the GPU has room for the weights in bfloat16."""
    return 2 * config.parameter_count <= options.shards * _FREE_SHARE * free_on_card(options)


def _kernels_missing(options: EngineConfig) -> str | None:
    """Returns the reason why deltic's kernels do not serve the model on this GPU, regardless of its sizes."""
    if options.ops:
        return "with `ops` torch serves the model on a GPU"
    return None


def _experts_not_packed(options: EngineConfig, config: ModelConfig) -> str | None:
    """Returns the reason why the experts cannot stay quantized on a GPU; None if they can."""
    experts = config.experts
    assert experts
    if why := _kernels_missing(options):
        return f"only the kernels compute with quantized experts, and {why}"
    if options.expert_compute == "host":
        return "the host computes experts of bfloat16 only; leave out expert_compute"
    if not knows_packed(config.hidden_size, experts.size, experts.count, experts.per_token, experts.shared_size):
        return "on a GPU the kernels do not know quantized experts of these sizes"
    return None
