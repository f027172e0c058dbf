"""What a checkpoint is: shapes and constants, read from a Hugging Face config.json or a preset."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from deltic.config.aliases import ARCHITECTURES, FORMATS, find
from deltic.config.reading import flag, integer, number, token_ids
from deltic.errors import ModelError, show

LayerType = Literal["linear_attention", "full_attention"]
DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: Final[Mapping[DType, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
_MTP: Final = "mtp_num_hidden_layers"
_MOST_EXPERTS: Final = 4096


def architecture(name: str) -> str:
    """Canonical architecture of a model type, class name or GGUF architecture, in any of its spellings.

    Raises ModelError for a family that deltic does not know.
    """
    found = find(ARCHITECTURES, name)
    if found is None:
        raise ModelError(f"architecture {show(name)} is not supported: deltic runs the Qwen3.5 family "
                         "(model_type qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_6, qwen3_8 or a Qwen3_5For... class), "
                         "Qwen3 with and without experts (qwen3, qwen3_moe), and dense Qwen2, Llama and Mistral "
                         "(qwen2, llama, mistral or a ...ForCausalLM class)")
    return found


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture does that its config.json leaves unsaid.

    mixers: kinds of layers that it may have.
    interval: of so many layers the last has full attention.
    gate: attention has an output gate.
    rotary: rotated share of a head.
    mrope: positions have three axes; else RopeConfig has no sections.
    norm_offset: what a norm weight of a checkpoint lacks to be the factor that the norm multiplies by (but for the norm
        inside of Gated DeltaNet layers, which is stored as the factor by all).
    rope_types: scalings of the rotary frequencies that it may have.
    qk_norm: the heads of queries and keys are normed.
    qkv_bias: their projections and that of values have biases.
    sparse: configs may leave out head_dim and num_key_value_heads, which then follow from the other sizes, and a
        rope_theta of 10000.
    window: a sliding_window counts unless it is null.
    experts: feed-forward layers are mixtures of experts; shared: with one that every token passes.
    normalised: the weights of a token's experts add up to 1 whatever a config says; else where it has norm_topk_prob.
    """

    mixers: tuple[LayerType, ...]
    interval: int
    gate: bool
    rotary: float
    mrope: bool
    norm_offset: float
    rope_types: tuple[str, ...] = ("default",)
    qk_norm: bool = True
    qkv_bias: bool = False
    sparse: bool = False
    window: bool = False
    experts: bool = False
    shared: bool = False
    normalised: bool = False


_SCALED: Final = ("default", "linear", "llama3")
_QWEN3_5: Final = Family(("linear_attention", "full_attention"), interval=4, gate=True, rotary=0.25, mrope=True,
                         norm_offset=1.0, rope_types=("default", "mrope"))
_QWEN3: Final = Family(("full_attention",), interval=1, gate=False, rotary=1.0, mrope=False, norm_offset=0.0)
FAMILIES: Final[Mapping[str, Family]] = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, experts=True, shared=True, normalised=True),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, experts=True),
    "qwen2": Family(("full_attention",), interval=1, gate=False, rotary=1.0, mrope=False, norm_offset=0.0,
                    rope_types=_SCALED, qk_norm=False, qkv_bias=True, sparse=True),
    "llama": Family(("full_attention",), interval=1, gate=False, rotary=1.0, mrope=False, norm_offset=0.0,
                    rope_types=_SCALED, qk_norm=False, sparse=True, window=True),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: theta, rotated dims per head, and how many frequencies follow time, height, width (empty:
    positions have one axis only). factors: what each of the rotary_dim / 2 frequencies is divided by (empty: by 1)."""

    theta: float
    rotary_dim: int
    mrope_section: tuple[int, ...]
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """Shape of the Gated DeltaNet layers."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ModelError(f"linear_num_value_heads ({self.num_value_heads}) must be a multiple of "
                             f"linear_num_key_heads ({self.num_key_heads})")

    @property
    def key_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Shape of feed-forward layers that are mixtures of experts.

    per_token: how many of the `count` experts a token passes. size: rows of an expert's gate. shared_size: those of the
    expert that every token passes, 0 where there is none. normalised: the weights of a token's experts add up to 1.
    """

    count: int
    per_token: int
    size: int
    shared_size: int = 0
    normalised: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ModelError(f"num_experts_per_tok ({self.per_token}) must be between 1 and num_experts ({self.count})")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the checkpoint is. Build it with `from_hf` or `preset`; impossible shapes raise ModelError.

    intermediate_size: rows of a layer's gate; 0 where layers have experts, which say their own.
    num_mtp_layers: layers of the multi-token-prediction head that the checkpoint announces, which are not among the
        num_hidden_layers and no part of the text model.
    qk_norm, qkv_bias: see Family.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_output_gate: bool
    rope: RopeConfig
    linear: LinearConfig | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: DType
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    num_mtp_layers: int = 0
    qk_norm: bool = True
    qkv_bias: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.architecture not in FAMILIES:
            raise ModelError(f"architecture {self.architecture!r} is not one of {', '.join(FAMILIES)}")
        if (self.experts is not None) != FAMILIES[self.architecture].experts:
            raise ModelError(f"architecture {self.architecture} has {'no ' if self.experts else ''}experts")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ModelError(f"layer_types names {len(self.layer_types)} layers, "
                             f"num_hidden_layers says {self.num_hidden_layers}: they must agree")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                             f"num_key_value_heads ({self.num_key_value_heads})")
        rotary = self.rope.rotary_dim
        if rotary % 2 or not 0 < rotary <= self.head_dim:
            raise ModelError(f"partial_rotary_factor must rotate an even number of dims, 2 to head_dim "
                             f"({self.head_dim}); it rotates {rotary}")
        if len(self.rope.factors) not in (0, rotary // 2):
            raise ModelError(f"{len(self.rope.factors)} factors are given for {rotary // 2} rotary frequencies")
        if self.linear_layers and self.linear is None:
            raise ModelError("layer_types has linear_attention layers, but the linear_... keys are absent")

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config.json, flat or with `text_config`.

        Raises ModelError naming the key that is absent, of the wrong type, absurd or unsupported.
        """
        text, name = _text_section(mapping)
        family = FAMILIES[name]
        _refuse_unsupported(text, family)
        _check_quantization(mapping, mapping.get("quantization_config") or text.get("quantization_config"))
        text = _with_defaults(text) if family.sparse else text
        kinds = _layer_types(text, family)
        head_dim = integer(text, "head_dim", 1, 4096)
        tied = mapping.get("tie_word_embeddings")
        return cls(
            architecture=name,
            vocab_size=integer(text, "vocab_size", 2, 1 << 24),
            hidden_size=integer(text, "hidden_size", 1, 1 << 17),
            intermediate_size=0 if family.experts else integer(text, "intermediate_size", 1, 1 << 20),
            num_hidden_layers=len(kinds),
            layer_types=kinds,
            num_attention_heads=integer(text, "num_attention_heads", 1, 4096),
            num_key_value_heads=integer(text, "num_key_value_heads", 1, 4096),
            head_dim=head_dim,
            attention_output_gate=flag(text, "attn_output_gate", family.gate),
            rope=_rope(text, head_dim, family),
            linear=_linear(text) if "linear_attention" in kinds else None,
            rms_norm_eps=number(text, "rms_norm_eps", 1e-12, 0.1),
            tie_word_embeddings=flag(text if tied is None else mapping, "tie_word_embeddings", False),
            max_position_embeddings=integer(text, "max_position_embeddings", 1, 1 << 31),
            dtype=_dtype(text),
            eos_token_ids=token_ids(text, "eos_token_id"),
            bos_token_id=next(iter(token_ids(text, "bos_token_id")), None),
            pad_token_id=next(iter(token_ids(text, "pad_token_id")), None),
            num_mtp_layers=integer({**text, _MTP: text.get(_MTP) or 0}, _MTP, 0, 64),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            experts=_experts(text, family) if family.experts else None,
        )

    @classmethod
    def preset(cls, name: str, layers: int | None = None) -> ModelConfig:
        """A public shape by name (`qwen3.5-0.8b`, also `Qwen/Qwen3.5-0.8B`), or only its first `layers`."""
        from deltic.config.presets import PRESETS

        key = name.rsplit("/", 1)[-1].lower()
        config = PRESETS.get(key) or PRESETS.get(f"qwen3.5-{key}")
        if config is None:
            raise ModelError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        if layers is None:
            return config
        if not 1 <= layers <= config.num_hidden_layers:
            raise ModelError(f"preset {key} has {config.num_hidden_layers} layers; {layers} cannot be kept")
        return replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])

    @property
    def norm_offset(self) -> float:
        """What is added to the norm weights of a checkpoint: see Family."""
        return FAMILIES[self.architecture].norm_offset

    @property
    def key_dim(self) -> int:
        return self.linear.key_dim if self.linear else 0

    @property
    def value_dim(self) -> int:
        return self.linear.value_dim if self.linear else 0

    @property
    def conv_dim(self) -> int:
        return self.linear.conv_dim if self.linear else 0

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with softmax attention."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def parameter_count(self) -> int:
        """Parameters of the text model; a tied head counts once."""
        return self._parameters(active=False)

    @property
    def active_parameter_count(self) -> int:
        """Parameters that a token is computed with, the embedding counted whole: all, but for experts that it does not
        pass."""
        return self._parameters(active=True)

    def _parameters(self, active: bool) -> int:
        hidden, dim = self.hidden_size, self.head_dim
        query = self.num_attention_heads * (3 if self.attention_output_gate else 2)
        attention = hidden * dim * (query + 2 * self.num_key_value_heads) + (2 * dim if self.qk_norm else 0)
        attention += dim * (self.num_attention_heads + 2 * self.num_key_value_heads) if self.qkv_bias else 0
        shared = hidden * _feed_forward_rows(self, active) + 2 * hidden
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * hidden
        return (embeddings + hidden + shared * self.num_hidden_layers
                + attention * len(self.attention_layers) + _linear_parameters(self) * len(self.linear_layers))


def _feed_forward_rows(config: ModelConfig, active: bool) -> int:
    """Parameters of a layer's feed-forward for each of the hidden state's numbers."""
    experts = config.experts
    if experts is None:
        return 3 * config.intermediate_size
    routed = 3 * experts.size * (experts.per_token if active else experts.count)
    return routed + experts.count + (3 * experts.shared_size + 1 if experts.shared_size else 0)


def _linear_parameters(config: ModelConfig) -> int:
    linear = config.linear
    if linear is None:
        return 0
    rows = linear.conv_dim + 2 * linear.value_dim + 2 * linear.num_value_heads
    return (config.hidden_size * rows + linear.conv_dim * linear.conv_kernel
            + 2 * linear.num_value_heads + linear.value_head_dim)


def _text_section(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The text model's keys over the outer ones, which count where it has none, or null; and its architecture."""
    if not isinstance(mapping, Mapping):
        raise ModelError("config.json must hold one JSON object")
    nested = mapping.get("text_config", {})
    if not isinstance(nested, Mapping):
        raise ModelError("text_config must be an object")
    text = {**mapping, **{key: value for key, value in nested.items() if value is not None or key not in mapping}}
    classes = mapping.get("architectures") or []
    if not isinstance(classes, list):
        raise ModelError("architectures must be a list of class names")
    named = (mapping.get("model_type"), nested.get("model_type"), *classes)
    names = [show(name) if not isinstance(name, str) else name for name in named if name is not None]
    if not names:
        raise ModelError("model_type is absent; is this a Hugging Face model directory?")
    found = {architecture(name) for name in names}
    if len(found) > 1:
        raise ModelError(f"config.json names several architectures: {', '.join(names)}")
    name = found.pop()
    if name not in FAMILIES:
        raise ModelError(f"{names[0]} is a mixture-of-experts model of a kind that is not supported, only "
                         f"{' and '.join(_MIXTURES)}; choose one of these or a dense model")
    if "sliding_window" not in text and any(each.lower().startswith("mistral") for each in names):
        raise ModelError("sliding_window is absent, which means 4096 to a Mistral, and is not supported; write null "
                         "into config.json if the model was made without one")
    if not FAMILIES[name].experts and any(text.get(key) for key in ("num_experts", "num_local_experts")):
        raise ModelError(f"config.json says num_experts, but {names[0]} is a dense model; mixtures of experts are "
                         f"{' and '.join(_MIXTURES)}")
    return text, name


_MIXTURES: Final = tuple(name for name, family in FAMILIES.items() if family.experts)
_ONLY: Final[Mapping[str, Any]] = {
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "mlp_only_layers": [],
    "use_sliding_window": False}


def _experts(text: Mapping[str, Any], family: Family) -> ExpertsConfig:
    """num_local_experts: another spelling of num_experts."""
    key = "num_local_experts" if "num_experts" not in text and "num_local_experts" in text else "num_experts"
    return ExpertsConfig(
        integer(text, key, 1, _MOST_EXPERTS), integer(text, "num_experts_per_tok", 1, _MOST_EXPERTS),
        integer(text, "moe_intermediate_size", 1, 1 << 20),
        integer(text, "shared_expert_intermediate_size", 1, 1 << 20) if family.shared else 0,
        # transformers' Qwen3_5MoeTopKRouter, with which the weights were made, does not look at norm_topk_prob
        flag(text, "norm_topk_prob", False) or family.normalised)


def _refuse_unsupported(text: Mapping[str, Any], family: Family) -> None:
    window = {"sliding_window": None} if family.window else {}
    every_layer = {"decoder_sparse_step": 1} if family.experts else {}
    for key, value in {**_ONLY, **window, **every_layer}.items():
        if text.get(key, value) != value:
            raise ModelError(f"{key} {show(text[key])} is not supported, only {value!r}")


_INSTEAD: Final = ("take the unquantized checkpoint (`quant='q4_k'` quantizes it while it is loaded), or a GGUF "
                   "file of the model")


def _check_quantization(mapping: Mapping[str, Any], given: object) -> None:
    """Raise ModelError unless weights are unquantized, or float8 as `weights.files.with_scales` knows it."""
    if not given:
        if isinstance(mlx := mapping.get("quantization"), Mapping) and "group_size" in mlx:
            raise ModelError(f"quantization: this is a quantized MLX model, which is not read; {_INSTEAD}")
        return
    said = given if isinstance(given, Mapping) else {}
    method = said.get("quant_method")
    if method != "fp8":
        raise ModelError(f"quantization_config: quant_method {show(method)} is not read, only fp8 in blocks of 128; "
                         f"{_INSTEAD}")
    known = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    for key, value in known.items():
        if said.get(key, value if key == "fmt" else None) != value:
            raise ModelError(f"quantization_config: {key} {show(said.get(key))} is not supported, only {value!r}; use "
                             "the unquantized checkpoint")


def _with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    """With what configs of sparse families leave out."""
    heads, given = integer(text, "num_attention_heads", 1, 4096), {k: v for k, v in text.items() if v is not None}
    return {"num_key_value_heads": heads, "head_dim": integer(text, "hidden_size", 1, 1 << 17) // heads,
            "rope_theta": 1e4, **given}


def _layer_types(text: Mapping[str, Any], family: Family) -> tuple[LayerType, ...]:
    count = integer(text, "num_hidden_layers", 1, 1024)
    given = text.get("layer_types")
    if given is None:
        interval = integer({"full_attention_interval": family.interval, **text}, "full_attention_interval", 1, 1024)
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(count))
    if not isinstance(given, list | tuple):
        raise ModelError(f"layer_types must be a list, not {show(given)}")
    for kind in given:
        if kind not in family.mixers:
            raise ModelError(f"layer_types may hold {' and '.join(family.mixers)}, not {show(kind)}")
    if len(given) != count:
        raise ModelError(f"layer_types names {len(given)} layers, num_hidden_layers says {count}")
    return tuple(given)


def _rope(text: Mapping[str, Any], head_dim: int, family: Family) -> RopeConfig:
    """Newer configs keep everything in rope_parameters; older ones spread it over the top level and rope_scaling, which
    transformers takes in place of rope_parameters where a config has both."""
    older = {key: text[key] for key in ("rope_theta", "partial_rotary_factor") if key in text}
    newer, scaling = (_rope_object(text, key) for key in ("rope_parameters", "rope_scaling"))
    rope = {"partial_rotary_factor": family.rotary, **older, **(scaling or newer)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in family.rope_types:
        raise ModelError(f"rope_type {show(kind)} is not supported, only {' and '.join(family.rope_types)}")
    for key in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        # a default in place of what the other one says is hardly what the weights were made with
        if key in newer and newer[key] != rope.get(key):
            raise ModelError(f"{key} of rope_parameters is not that of rope_scaling, which takes its place: keep one "
                             "of the two objects")
    if not flag(rope, "mrope_interleaved", True):
        raise ModelError("mrope_interleaved false is not supported, only true")
    rotary = int(head_dim * number(rope, "partial_rotary_factor", 0.0 if family.mrope else 1.0, 1.0))
    sections = _mrope_section(rope, rotary // 2) if family.mrope else ()
    theta = number(rope, "rope_theta", 1.0, 1e12)
    if kind == "llama3":
        return RopeConfig(theta, rotary, sections, _llama3_factors(rope, theta, rotary))
    linear = (number(rope, "factor", 1.0, 1e6),) * (rotary // 2) if kind == "linear" else ()
    return RopeConfig(theta, rotary, sections, linear)


def _rope_object(text: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    given = text.get(key) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{key} must be an object, not {show(given)}")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(f"{key} that differs between kinds of layers is not supported")
    return given


def _llama3_factors(rope: Mapping[str, Any], theta: float, rotary: int) -> tuple[float, ...]:
    """Wavelengths beyond the context that the model was first trained on are stretched by `factor`, short ones stay,
    and between the two the stretch is blended (transformers, modeling_rope_utils.py)."""
    factor, low, high = (number(rope, key, 1e-3, 1e6) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = integer(rope, "original_max_position_embeddings", 1, 1 << 31)
    if low >= high:
        raise ModelError(f"low_freq_factor ({low:g}) must be below high_freq_factor ({high:g})")
    turns = (context / (2 * math.pi * theta ** (index / rotary)) for index in range(0, rotary, 2))
    kept = (min(max((turn - low) / (high - low), 0.0), 1.0) for turn in turns)
    return tuple(1 / ((1 - share) / factor + share) for share in kept)


def _mrope_section(rope: Mapping[str, Any], frequencies: int) -> tuple[int, ...]:
    """Sections clipped to the frequencies that exist, as the interleaved layout applies them."""
    given = rope.get("mrope_section", [11, 11, 10])
    counts = given if isinstance(given, list | tuple) else []
    if len(counts) != 3 or any(type(count) is not int or count < 0 for count in counts):
        raise ModelError(f"mrope_section must be three counts, not {show(given)}")
    height, width = (len(range(axis, min(3 * counts[axis], frequencies), 3)) for axis in (1, 2))
    return (frequencies - height - width, height, width)


def _linear(text: Mapping[str, Any]) -> LinearConfig:
    return LinearConfig(
        num_key_heads=integer(text, "linear_num_key_heads", 1, 4096),
        num_value_heads=integer(text, "linear_num_value_heads", 1, 4096),
        key_head_dim=integer(text, "linear_key_head_dim", 1, 4096),
        value_head_dim=integer(text, "linear_value_head_dim", 1, 4096),
        conv_kernel=integer(text, "linear_conv_kernel_dim", 2, 32),
    )


def _dtype(text: Mapping[str, Any]) -> DType:
    value = text.get("dtype") or text.get("torch_dtype") or "float32"
    found = find(FORMATS, str(value).removeprefix("torch."))
    if found is None:
        raise ModelError(f"dtype {show(value)} is not supported, only {', '.join(DTYPE_BYTES)}")
    return found
