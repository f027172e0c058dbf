"""Reads LoRA adapters in the format of peft: `adapter_config.json` and `adapter_model.safetensors`, both untrusted."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from deltic.config import ExpertsConfig, ModelConfig
from deltic.errors import ModelError, show
from deltic.loader.disk import read_json
from deltic.loader.files import read_header
from deltic.loader.gguf.names import gguf_name
from deltic.loader.names import (
    EMBEDDING,
    HEAD,
    Shape,
    canonical,
    expected_rows,
    expected_tensors,
    is_stack,
    packed_parts,
    packed_rows,
    packed_shape,
    stack_of,
)
from deltic.loader.safetensors import read_stored
from deltic.loader.tensors import StoredTensor
from deltic.ops.adapters import Adapter, AdapterLayer, LowRank

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_RANK: Final = 512
"""Largest rank of an adapter that is served."""
_MAX_CONFIG: Final = 1 << 20
_MAX_PATTERNS: Final = 1000
_PREFIX: Final = "base_model.model."
_SUFFIX: Final = re.compile(r"(.*)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?|"
                            r"(.*)\.(lora_embedding_A|lora_embedding_B)(?:\.weight)?")
_NESTED: Final = re.compile(r"(?:\.base_layer)+$")
_ROWS_OF: Final = ("F32", "F16", "BF16")
_MERGE: Final = "merge it into the weights (deltic convert --lora)"
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the base model's weights."""
_VARIANTS: Final = ("use_qalora", "lora_bias", "use_bdlora", "arrow_config", "alora_invocation_tokens", "velora_config",
                    "kasa_config", "monteclora_config", "layer_replication", "megatron_config",
                    "trainable_token_indices", "fan_in_fan_out")
"""Keys of other kinds of adapters, which must be absent, false or null."""


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """Adds b a to the matrix of a canonical tensor, or of one expert in a stack: a [rank, columns], b [rows, rank] with
    the scale applied, float32. magnitude [rows]: the row norms that the sum gets (DoRA)."""

    name: str
    a: Tensor
    b: Tensor
    expert: int | None = None
    magnitude: Tensor | None = None


class _Factors(NamedTuple):
    """The tensors of a module. name: canonical name of the matrix or stack."""

    module: str
    name: str
    a: str
    b: str
    magnitude: str | None


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """The checked files of an adapter for a model. saved: stored names of wholly replaced modules by canonical name."""

    path: Path
    config: ModelConfig
    settings: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    factors: tuple[_Factors, ...]
    saved: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def dora(self) -> bool:
        return any(each.magnitude for each in self.factors)

    def deltas(self) -> Iterator[LowRankDelta]:
        """Yields the low-rank terms, module by module. Raises ModelError naming a tensor of a wrong shape or with
        values that are not finite."""
        shapes = expected_tensors(self.config)
        shapes.setdefault(HEAD, shapes[EMBEDDING])
        for factors in self.factors:
            yield from self._deltas(factors, shapes)

    def saved_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors that the adapter replaces (`modules_to_save`) by canonical name."""
        shapes = expected_tensors(self.config)
        for name, stored in self.saved.items():
            wanted = shapes.get(name)
            if wanted is None or self.tensors[stored].shape != wanted:
                raise self._wrong(stored, f"{list(wanted)}" if wanted else "nothing: the head is the embedding")
            yield name, self._read(stored)

    def _deltas(self, factors: _Factors, shapes: Mapping[str, Shape]) -> Iterator[LowRankDelta]:
        name = factors.name
        a, b = self._read(factors.a), self._read(factors.b)
        if name == EMBEDDING:  # its delta is stored transposed, because of the lookup
            a, b = b.T, a.T
        place = stack_of(name)
        if is_stack(name):
            yield from self._stack(factors, a, b, shapes)
            return
        stack, expert = place if place else (name, None)
        wanted = packed_shape(name, self.config) if packed_parts(name) else self._shape(factors, stack, shapes)[-2:]
        if expert is not None and expert >= shapes[stack][0]:
            raise self._wrong(factors.a, f"experts below {shapes[stack][0]}")
        self._check(factors, a, b, wanted)
        b = b * self._scale(factors, len(a))
        magnitude = self._magnitude(factors, wanted[0])
        if not packed_parts(name):
            yield LowRankDelta(stack, a, b, expert, magnitude)
            return
        rows = packed_rows(name, self.config)
        first, second = packed_parts(name)
        size = expected_rows(first, self.config)
        for part, own in ((first, rows[:size]), (second, rows[size:])):
            yield LowRankDelta(part, a, b[own], None, None if magnitude is None else magnitude[own])

    def _stack(self, factors: _Factors, a: Tensor, b: Tensor, shapes: Mapping[str, Shape]) -> Iterator[LowRankDelta]:
        """Yields the terms of all experts: a [experts * rank, in], b [out, rank * experts] with the experts innermost;
        older versions of peft swap in and out."""
        names = packed_parts(factors.name) or (factors.name,)
        count, inner, columns = self._shape(factors, names[0], shapes)
        rows = inner * len(names)
        if a.shape[0] % count or a.shape[0] != b.shape[1]:
            raise self._wrong(factors.a, f"{count} experts times the rank of its lora_B in the first place")
        turned = (a.shape[1], b.shape[0]) == (rows, columns) != (columns, rows)
        self._check(factors, a, b, (columns, rows) if turned else (rows, columns), count)
        rank = len(a) // count
        a, b = a.view(count, rank, -1), b.view(len(b), rank, count).permute(2, 0, 1)
        b = b * self._scale(factors, rank)
        if turned:
            a, b = b.transpose(1, 2), a.transpose(1, 2)
        for expert in range(count):
            for name, own in zip(names, b[expert].split(inner), strict=True):
                yield LowRankDelta(name, a[expert], own, expert)

    def _shape(self, factors: _Factors, name: str, shapes: Mapping[str, Shape]) -> Shape:
        found = shapes.get(name)
        if found is None:
            raise ModelError(f"tensor {factors.a[:200]!r} of {self.path} has no place in this model: the adapter "
                             "belongs to another one")
        return found

    def _check(self, factors: _Factors, a: Tensor, b: Tensor, wanted: Shape, times: int = 1) -> None:
        """Checks the shapes of a and b. wanted: rows and columns of the matrix. times: number of experts."""
        rows, columns = wanted
        if a.shape[1] != columns:
            raise self._wrong(factors.a, f"[rank, {columns}]")
        if b.shape[0] != rows or b.shape[1] != len(a):
            raise self._wrong(factors.b, f"[{rows}, {len(a)}]")
        if not times <= len(a) <= MAX_RANK * times:
            raise ModelError(f"tensor {factors.a[:200]!r} of {self.path} has rank {len(a) // times}; ranks from 1 to "
                             f"{MAX_RANK} can be read")

    def _wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(f"tensor {name[:200]!r} of {self.path} has shape {list(self.tensors[name].shape)}, and this "
                          f"model requires {wanted}: the adapter belongs to another one")

    def _read(self, name: str) -> Tensor:
        stored = self.tensors[name]
        found = read_stored(name, stored, torch.float32, torch.device("cpu"))
        if not bool(found.isfinite().all()):
            raise ModelError(f"tensor {name[:200]!r} of {self.path} has values that are not finite")
        return found

    def _magnitude(self, factors: _Factors, rows: int) -> Tensor | None:
        if factors.magnitude is None:
            return None
        found = self._read(factors.magnitude).flatten()
        if len(found) != rows:
            raise self._wrong(factors.magnitude, f"[{rows}]")
        return found

    def _scale(self, factors: _Factors, rank: int) -> float:
        alpha = self.settings["lora_alpha"]
        for pattern, own in (self.settings.get("alpha_pattern") or {}).items():
            if matches(pattern, _tail(factors.module)) or matches(pattern, _tail(factors.name)):
                alpha = own
                break
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)


def open_lora(path: str | Path, config: ModelConfig) -> LoraFiles:
    """Reads the config and the header of an adapter's directory. Raises ModelError naming the file, the key or the
    tensor that is absent, foreign or not supported."""
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{show(str(path))} is no directory with an adapter: name the one that has {CONFIG} and "
                         f"{WEIGHTS}")
    if not (directory / WEIGHTS).exists() and (directory / "adapter_model.bin").exists():
        raise ModelError(f"{directory} has adapter_model.bin, which could run code when it is read: save the adapter "
                         f"as {WEIGHTS} (peft: save_pretrained)")
    settings = _checked(read_json(directory / CONFIG, _MAX_CONFIG), directory / CONFIG)
    tensors = read_header(directory / WEIGHTS)
    grouped, saved = dict[str, dict[str, str]](), dict[str, str]()
    for name, stored in tensors.items():
        if stored.dtype not in _ROWS_OF or not stored.shape or not all(stored.shape):
            raise ModelError(f"tensor {name[:200]!r} of {directory} is {stored.dtype[:20]} {list(stored.shape)}: "
                             "F32, F16 and BF16 tensors that are not empty can be read")
        found = _SUFFIX.fullmatch(name)
        if found is None:
            whole = _saved_name(name, directory)
            if whole.split(".")[-2] in (settings.get("modules_to_save") or ()):
                saved[whole] = name
            elif stored.shape != (shape := (config.vocab_size, config.hidden_size)):  # else it is the base model's own
                raise ModelError(f"tensor {name[:200]!r} of {directory} has shape {list(stored.shape)}, and this model "
                                 f"requires {list(shape)}: the adapter is of a model with another vocabulary")
            continue
        module, part = found[1] or found[3] or "", found[2] or found[4]
        if len(stored.shape) != (1 if part == "lora_magnitude_vector" else 2):
            raise ModelError(f"tensor {name[:200]!r} of {directory} has {len(stored.shape)} dimensions: it must be a "
                             "matrix, or a vector of magnitudes")
        grouped.setdefault(module, {})[part.replace("embedding_", "")] = name
    factors = tuple(_factors(module, parts, directory, config, tensors) for module, parts in grouped.items())
    if not factors and not saved:
        raise ModelError(f"{directory / WEIGHTS} has no tensors")
    for name, count in Counter(each.name for each in factors).most_common(1):
        if count > 1:
            raise ModelError(f"{directory} has several adapters of {name!r}: one is supported")
    return LoraFiles(directory, config, settings, tensors, factors, saved)


def _checked(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {show(settings.get('peft_type'))}: adapters of type LORA can be read")
    for key in _VARIANTS:
        if settings.get(key):
            raise ModelError(f"{path}: {key} is {show(settings[key])}: plain LoRA, rsLoRA and DoRA can be read, so "
                             "merge the adapter with peft (merge_and_unload)")
    if not isinstance(settings.get("modules_to_save") or [], list):
        raise ModelError(f"{path}: modules_to_save must be a list of names")
    if settings.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias is {show(settings['bias'])}: adapters without biases ('none') can be read")
    start = settings.get("init_lora_weights", True)
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise ModelError(f"{path}: init_lora_weights is {show(start)}, which changes the base model, too: convert the "
                         "adapter to plain LoRA (peft: save_pretrained(path_initial_model_for_weight_conversion=...))")
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise ModelError(f"{path}: alpha_pattern must be an object of at most {_MAX_PATTERNS} entries")
    for key, alpha in (("lora_alpha", settings.get("lora_alpha")), *patterns.items()):
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            raise ModelError(f"{path}: {show(key)} is {show(alpha)}: it must be a number")
    for pattern in patterns:
        if not re.fullmatch(r"\^?[\w.*\\-]{1,300}", pattern):
            raise ModelError(f"{path}: the key {show(pattern)} of alpha_pattern cannot be read: write the name of a "
                             "module, or the end of one, with .* for any text")
    return settings


def matches(pattern: str, name: str) -> bool:
    """Returns True if a key of `alpha_pattern` matches a module. As a regular expression the key would have to match
    the whole name, or its end after a dot. `.*` matches any text; all other characters match themselves."""
    first, *others = pattern.removeprefix("^").replace("\\.", ".").split(".*")
    starts = [0] if pattern.startswith("^") else [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]
    return any(_matches_from(name, start, first, others) for start in starts if name.startswith(first, start))


def _matches_from(name: str, start: int, first: str, others: list[str]) -> bool:
    at = start + len(first)
    if not others:
        return at == len(name)
    *middle, last = others
    for piece in middle:
        found = name.find(piece, at)
        if found < 0:
            return False
        at = found + len(piece)
    return len(name) - len(last) >= at and name.endswith(last)


def _tail(name: str) -> str:
    """Returns the name of a module without the prefixes that wrappers add."""
    return _NESTED.sub("", name.removeprefix(_PREFIX)).removesuffix(".weight")


def _saved_name(name: str, directory: Path) -> str:
    """Returns the canonical name of a tensor that an adapter replaces as a whole."""
    plain = name.removeprefix(_PREFIX).replace(".base_layer", "")
    try:
        found = canonical(plain)
    except ModelError:
        found = None
    if found is None or found not in (EMBEDDING, HEAD):
        raise ModelError(f"tensor {name[:200]!r} of {directory} is not of an adapter that can be read: low-rank terms "
                         "(lora_A, lora_B) of the text model's linear layers can, and modules_to_save of the embedding "
                         "and lm_head when it is merged")
    return found


def _factors(module: str, parts: Mapping[str, str], directory: Path, config: ModelConfig,
             tensors: Mapping[str, StoredTensor]) -> _Factors:
    for part in ("lora_A", "lora_B"):
        if part not in parts:
            raise ModelError(f"tensor {next(iter(parts.values()))[:200]!r} of {directory} has no {part}; "
                             "save the adapter again")
    plain = _tail(module)
    try:
        name = (_expert_stack(plain, config.experts, config.hidden_size, tensors[parts["lora_A"]].shape,
                              tensors[parts["lora_B"]].shape) or canonical(f"{plain}.weight"))
    except ModelError as error:
        raise ModelError(f"tensor {parts['lora_A'][:200]!r} of {directory} belongs to no module of this model: "
                         "the adapter is of another model") from error
    if name is None:
        raise ModelError(f"tensor {parts['lora_A'][:200]!r} of {directory} is of the draft head or the vision tower: "
                         "adapters of the text model can be read")
    return _Factors(module, name, parts["lora_A"], parts["lora_B"], parts.get("lora_magnitude_vector"))


def _expert_stack(module: str, experts: ExpertsConfig | None, hidden: int, a: Shape, b: Shape) -> str | None:
    """Returns the canonical name of the stack whose experts a module's factors belong to. The tensors' names do not
    contain the name of the parameter, so only the shapes identify it."""
    if not module.endswith(".mlp.experts") or experts is None:
        return None
    size = experts.size
    for part, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
        if (a[1], b[0]) in ((columns, rows), (rows, columns)):
            return canonical(f"{module}.{part}")
    raise ModelError("its shapes fit neither gate_up_proj nor down_proj")


# Serving


def check_served(files: LoraFiles) -> None:
    """Raises ModelError for an adapter that can be merged but not served."""
    if files.dora:
        name = next(each.magnitude for each in files.factors if each.magnitude)
        raise ModelError(f"tensor {name[:200]!r} of {files.path}: an adapter with magnitudes (DoRA) is not served "
                         f"with its base model: {_MERGE}")
    if files.saved:
        name = next(iter(files.saved.values()))
        raise ModelError(f"tensor {name[:200]!r} of {files.path} replaces a whole matrix (modules_to_save): such an "
                         f"adapter is not served with its base model: {_MERGE}")
    if any(each.name == EMBEDDING for each in files.factors):
        raise ModelError(f"{files.path} has low-rank terms of the embedding: such an adapter is not served with its "
                         f"base model: {_MERGE}")


def read_adapter(files: LoraFiles, name: str, dtype: torch.dtype, device: torch.device, tiled: bool) -> Adapter:
    """Reads an adapter for serving. dtype: dtype of its values. tiled: True if the model's value heads are in the order
    of GGUF files. Raises ModelError naming the tensor that does not fit."""
    check_served(files)
    config = files.config
    products = [dict[str, list[LowRank]]() for _ in config.layer_types]
    experts = [dict[int, tuple[list[LowRank], list[LowRank]]]() for _ in config.layer_types]
    head, digest = list[LowRank](), blake2b(digest_size=16)
    for delta in files.deltas():
        a, b = _in_order(delta, config) if tiled else (delta.a, delta.b)
        layer, product, first = _place(delta.name, config)
        rounded = b.to(dtype)
        if not bool(rounded.isfinite().all()):
            raise ModelError(f"the terms of {delta.name!r} in {files.path} are too large for {dtype}")
        term = LowRank.of(a, rounded, first)
        digest.update(f"{delta.name} {delta.expert} {[*term.a.shape]} {dtype} {tiled};".encode())
        for numbers in (term.a, term.panels):
            digest.update(numbers.view(torch.uint8).numpy().data)
        term = term.to(device)
        if layer is None:
            head.append(term)
        elif delta.expert is None:
            products[layer].setdefault(product, []).append(term)
        else:
            experts[layer].setdefault(delta.expert, ([], []))[product == "down"].append(term)
    count = config.experts.count if config.experts else 0
    layers = tuple(
        AdapterLayer({product: tuple(terms) for product, terms in own.items()}, _all_experts(pairs, count))
        for own, pairs in zip(products, experts, strict=True))
    return Adapter(name, digest.hexdigest(), layers, tuple(head))


def _all_experts(found: Mapping[int, tuple[list[LowRank], list[LowRank]]], count: int
                 ) -> tuple[tuple[tuple[LowRank, ...], tuple[LowRank, ...]], ...]:
    if not found:
        return ()
    nothing: tuple[list[LowRank], list[LowRank]] = ([], [])
    pairs = [found.get(expert, nothing) for expert in range(count)]
    return tuple((tuple(gate_up), tuple(down)) for gate_up, down in pairs)


def _place(name: str, config: ModelConfig) -> tuple[int | None, str, int]:
    """Returns layer (None: the logits), product and first row of a canonical matrix."""
    if name == HEAD:
        return None, "", 0
    _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
    return int(layer), *_PLACES[rest](config)


def _rows(config: ModelConfig, *names: str) -> int:
    shapes = expected_tensors(config)
    found = next(index for index, kind in enumerate(config.layer_types)
                 if (kind == "linear_attention") == names[0].startswith("linear_attn."))
    return sum(shapes[f"model.layers.{found}.{name}.weight"][-2] for name in names)


def _behind(product: str, *names: str) -> Callable[[ModelConfig], tuple[str, int]]:
    return lambda config: (product, _rows(config, *names) if names else 0)


_LINEAR: Final = [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
_ATTENTION: Final = [f"self_attn.{part}_proj" for part in "qkv"]
_PLACES: Final[Mapping[str, Callable[[ModelConfig], tuple[str, int]]]] = {
    **{name: _behind("mix_in", *_LINEAR[:index]) for index, name in enumerate(_LINEAR)},
    **{name: _behind("mix_in", *_ATTENTION[:index]) for index, name in enumerate(_ATTENTION)},
    "linear_attn.out_proj": _behind("mix_out"),
    "self_attn.o_proj": _behind("mix_out"),
    "mlp.gate_proj": _behind("gate_up"),
    "mlp.up_proj": lambda config: ("gate_up", config.intermediate_size),
    "mlp.down_proj": _behind("down"),
    "mlp.gate": _behind("router"),
    "mlp.shared_expert_gate": lambda config: ("router", _experts(config).count),
    "mlp.shared_expert.gate_proj": _behind("shared_gate_up"),
    "mlp.shared_expert.up_proj": lambda config: ("shared_gate_up", _experts(config).shared_size),
    "mlp.shared_expert.down_proj": _behind("shared_down"),
    "mlp.experts.gate_proj": _behind("gate_up"),
    "mlp.experts.up_proj": lambda config: ("gate_up", _experts(config).size),
    "mlp.experts.down_proj": _behind("down"),
}
"""Product to which a canonical matrix belongs, and the row of the product at which the matrix begins."""


def _experts(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts


def _in_order(delta: LowRankDelta, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns a and b with the value heads in the order of GGUF files."""
    if ".linear_attn." not in delta.name:
        return delta.a, delta.b
    form = gguf_name(delta.name, config.architecture, config.layer_types)[1]
    return (form.tiled(delta.a, config), delta.b) if form.heads == 1 else (delta.a, form.tiled(delta.b, config))
