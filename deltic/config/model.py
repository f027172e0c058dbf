"""The shape of a checkpoint, read from a Hugging Face config.json, and the shapes of public models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from deltic.config.families import FAMILIES, MIXTURES, Family, LayerType, architecture
from deltic.config.quantization import read_quantization
from deltic.config.reading import FORMATS, find, flag, integer, number, token_ids
from deltic.config.rope import RopeConfig, read_rope, scale_rope
from deltic.errors import ConfigError, ModelError, show

DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: Final[Mapping[DType, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
_MTP: Final = "mtp_num_hidden_layers"
_MAX_EXPERTS: Final = 4096
_MAX_WIDTH: Final = 1 << 17
_MAX_INNER: Final = 1 << 20


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
        """Number of channels of the short convolution: queries, keys, values."""
        return 2 * self.key_dim + self.value_dim


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Shape of mixture-of-experts layers.

    per_token: number of experts, out of `count`, that a token uses.
    size: intermediate size of an expert.
    shared_size: intermediate size of the shared expert; 0: there is none.
    normalised: the weights of a token's experts add up to 1.
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
    """Shape of a checkpoint, from `from_hf` or `preset`. Invalid shapes raise ModelError.

    intermediate_size: 0 if layers have experts.
    num_mtp_layers: number of layers of the multi-token-prediction head, which num_hidden_layers does not include.
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
            raise ModelError(f"layer_types names {len(self.layer_types)} layers, but num_hidden_layers is "
                             f"{self.num_hidden_layers}: they must agree")
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
        """Reads a Hugging Face config.json, flat or with `text_config`.

        Raises ModelError naming the key that is missing, of the wrong type, out of range or unsupported.
        """
        text, name = _text_section(mapping)
        family = FAMILIES[name]
        _refuse_unsupported(text, family)
        read_quantization(mapping)
        if family.sparse:
            text = _with_defaults(text)
        layer_types = _layer_types(text, family)
        head_dim = integer(text, "head_dim", 1, 4096)
        rope = read_rope(text, head_dim, family)
        context = integer(text, "max_position_embeddings", 1, 1 << 31)
        tied = text if mapping.get("tie_word_embeddings") is None else mapping
        return cls(
            architecture=name,
            vocab_size=integer(text, "vocab_size", 2, 1 << 24),
            hidden_size=integer(text, "hidden_size", 1, _MAX_WIDTH),
            intermediate_size=0 if family.experts else integer(text, "intermediate_size", 1, _MAX_INNER),
            num_hidden_layers=len(layer_types),
            layer_types=layer_types,
            num_attention_heads=integer(text, "num_attention_heads", 1, 4096),
            num_key_value_heads=integer(text, "num_key_value_heads", 1, 4096),
            head_dim=head_dim,
            attention_output_gate=flag(text, "attn_output_gate", family.gate),
            rope=rope,
            linear=_linear(text) if "linear_attention" in layer_types else None,
            rms_norm_eps=number(text, "rms_norm_eps", 1e-12, 0.1),
            tie_word_embeddings=flag(tied, "tie_word_embeddings", False),
            max_position_embeddings=max(context, rope.yarn.context if rope.yarn else 0),
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
        """Returns a public shape by name (`qwen3.5-0.8b`, `qwen3.5:0.8b`, `Qwen/Qwen3.5-0.8B`). layers: keeps only the
        first layers."""
        key = name.rsplit("/", 1)[-1].lower().replace(":", "-")
        config = PRESETS.get(key) or PRESETS.get(f"qwen3.5-{key}")
        if config is None:
            raise ModelError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        if layers is None:
            return config
        if not 1 <= layers <= config.num_hidden_layers:
            raise ModelError(f"preset {key} has {config.num_hidden_layers} layers; {layers} cannot be kept")
        return replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])

    def with_rope_scaling(self, text: str | None) -> ModelConfig:
        """Returns the model with its rotary embedding scaled by the option `EngineConfig.rope_scaling`.

        Raises ConfigError.
        """
        if text is None:
            return self
        rope, context = scale_rope(self.rope, self.max_position_embeddings, text)
        return replace(self, rope=rope, max_position_embeddings=context)

    @property
    def norm_offset(self) -> float:
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
        """Number of parameters of the text model; a tied head counts once."""
        experts = self.experts.count if self.experts else 0
        return self._parameters(experts)

    @property
    def active_parameter_count(self) -> int:
        """Number of parameters used for one token: all except the parameters of experts that it does not use."""
        experts = self.experts.per_token if self.experts else 0
        return self._parameters(experts)

    def _parameters(self, experts: int) -> int:
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        final_norm = self.hidden_size
        layer = self.hidden_size * _feed_forward_rows(self, experts) + 2 * self.hidden_size
        return (embeddings + final_norm + layer * self.num_hidden_layers
                + _attention_parameters(self) * len(self.attention_layers)
                + _linear_parameters(self) * len(self.linear_layers))


def shard_config(config: ModelConfig, shards: int) -> ModelConfig:
    """Returns the model's shape with only the heads of one of `shards` devices; other sizes stay the same. If there are
    more devices than K/V heads, several devices have the same K/V head. Raises ConfigError if heads cannot be split."""
    linear, heads, kv_heads = config.linear, config.num_attention_heads, config.num_key_value_heads
    if config.attention_layers or config.num_mtp_layers:
        _check_split("attention", heads, shards)
        if kv_heads % shards and shards % kv_heads:
            raise ConfigError(f"tp={shards} cannot split this model's {kv_heads} K/V heads: choose a divisor of their "
                              "number, or a multiple", "tp")
        config = replace(config, num_attention_heads=heads // shards, num_key_value_heads=max(kv_heads // shards, 1))
    if linear is not None:
        _check_split("key", linear.num_key_heads, shards)
        config = replace(config, linear=replace(linear, num_key_heads=linear.num_key_heads // shards,
                                                num_value_heads=linear.num_value_heads // shards))
    return config


def _check_split(kind: str, heads: int, shards: int) -> None:
    if heads % shards:
        raise ConfigError(f"tp={shards} cannot split this model's {heads} {kind} heads: choose a divisor of their "
                          "number", "tp")


def _feed_forward_rows(config: ModelConfig, count: int) -> int:
    """Returns the feed-forward parameters of a layer, with `count` experts, divided by hidden_size."""
    experts = config.experts
    if experts is None:
        return 3 * config.intermediate_size
    shared = 3 * experts.shared_size + 1 if experts.shared_size else 0
    router = experts.count
    return 3 * experts.size * count + router + shared


def _attention_parameters(config: ModelConfig) -> int:
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    query_rows = 2 * queries if config.attention_output_gate else queries
    count = config.hidden_size * (query_rows + 2 * keys + queries)
    if config.qk_norm:
        count += 2 * config.head_dim
    if config.qkv_bias:
        count += queries + 2 * keys
    return count


def _linear_parameters(config: ModelConfig) -> int:
    linear = config.linear
    if linear is None:
        return 0
    rows = linear.conv_dim + 2 * linear.value_dim + 2 * linear.num_value_heads
    return (config.hidden_size * rows + linear.conv_dim * linear.conv_kernel
            + 2 * linear.num_value_heads + linear.value_head_dim)


def _text_section(mapping: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the keys of the text model, completed with the outer keys, and its architecture."""
    if not isinstance(mapping, Mapping):
        raise ModelError("config.json must hold one JSON object")
    nested = mapping.get("text_config", {})
    if not isinstance(nested, Mapping):
        raise ModelError("text_config must be an object")
    text = {**mapping, **{key: value for key, value in nested.items() if value is not None or key not in mapping}}
    names = _architecture_names(mapping, nested)
    found = {architecture(name) for name in names}
    if len(found) > 1:
        raise ModelError(f"config.json names several architectures: {', '.join(names)}")
    name = found.pop()
    if name not in FAMILIES:
        raise ModelError(f"{names[0]} is a mixture-of-experts model of a kind that is not supported, only "
                         f"{' and '.join(MIXTURES)}; choose one of these or a dense model")
    if "sliding_window" not in text and any(each.lower().startswith("mistral") for each in names):
        raise ModelError("sliding_window is absent, which means 4096 for a Mistral, and is not supported; write null "
                         "into config.json if the model was trained without one")
    if not FAMILIES[name].experts and any(text.get(key) for key in ("num_experts", "num_local_experts")):
        raise ModelError(f"config.json has num_experts, but {names[0]} is a dense model; mixtures of experts are "
                         f"{' and '.join(MIXTURES)}")
    return text, name


def _architecture_names(mapping: Mapping[str, Any], nested: Mapping[str, Any]) -> list[str]:
    classes = mapping.get("architectures") or []
    if not isinstance(classes, list):
        raise ModelError("architectures must be a list of class names")
    given = (mapping.get("model_type"), nested.get("model_type"), *classes)
    names = [name if isinstance(name, str) else show(name) for name in given if name is not None]
    if not names:
        raise ModelError("model_type is absent; is this a Hugging Face model directory?")
    return names


def _experts(text: Mapping[str, Any], family: Family) -> ExpertsConfig:
    key = "num_local_experts" if "num_experts" not in text and "num_local_experts" in text else "num_experts"
    return ExpertsConfig(
        count=integer(text, key, 1, _MAX_EXPERTS),
        per_token=integer(text, "num_experts_per_tok", 1, _MAX_EXPERTS),
        size=integer(text, "moe_intermediate_size", 1, _MAX_INNER),
        shared_size=integer(text, "shared_expert_intermediate_size", 1, _MAX_INNER) if family.shared else 0,
        # transformers' Qwen3_5MoeTopKRouter ignores norm_topk_prob
        normalised=flag(text, "norm_topk_prob", False) or family.normalised)


def _refuse_unsupported(text: Mapping[str, Any], family: Family) -> None:
    common = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "mlp_only_layers": [],
              "use_sliding_window": False}
    for key, value in {**common, **dict(family.fixed)}.items():
        if text.get(key, value) != value:
            raise ModelError(f"{key} {show(text[key])} is not supported, only {value!r}")


def _with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the keys that configs of sparse families may omit."""
    heads = integer(text, "num_attention_heads", 1, 4096)
    head_dim = integer(text, "hidden_size", 1, _MAX_WIDTH) // heads
    given = {key: value for key, value in text.items() if value is not None}
    return {"num_key_value_heads": heads, "head_dim": head_dim, "rope_theta": 1e4, **given}


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
        raise ModelError(f"layer_types names {len(given)} layers, but num_hidden_layers is {count}")
    return tuple(given)


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


# Public models


def _qwen3_5(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], value_heads: int, tied: bool
) -> ModelConfig:
    pattern: tuple[LayerType, ...] = ("linear_attention",) * 3 + ("full_attention",)
    return ModelConfig(
        architecture="qwen3_5", vocab_size=248320, hidden_size=hidden, intermediate_size=ffn,
        num_hidden_layers=layers, layer_types=pattern * (layers // 4), num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=256, attention_output_gate=True,
        rope=RopeConfig(1e7, 64, (11, 11, 10)), linear=LinearConfig(16, value_heads, 128, 128, 4),
        rms_norm_eps=1e-6, tie_word_embeddings=tied, max_position_embeddings=262144, dtype="bfloat16",
        eos_token_ids=(248046, 248044), num_mtp_layers=1)


def _qwen3(hidden: int, ffn: int, layers: int, heads: tuple[int, int], tied: bool) -> ModelConfig:
    pattern: tuple[LayerType, ...] = ("full_attention",)
    return ModelConfig(
        architecture="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        layer_types=pattern * layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=128, attention_output_gate=False, rope=RopeConfig(1e6, 128, ()), linear=None, rms_norm_eps=1e-6,
        tie_word_embeddings=tied, max_position_embeddings=40960, dtype="bfloat16", eos_token_ids=(151645, 151643))


def _with_experts(dense: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    return replace(dense, architecture=dense.architecture + "_moe", intermediate_size=0, experts=experts)


_QWEN3_NEXT: Final = replace(
    _qwen3_5(2048, 0, 48, (16, 2), 32, tied=False), architecture="qwen3_next", vocab_size=151936,
    rope=RopeConfig(1e7, 64, ()), experts=ExpertsConfig(512, 10, 512, 512), eos_token_ids=(151645,), num_mtp_layers=0,
    bos_token_id=151643)

PRESETS: Final[Mapping[str, ModelConfig]] = {
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, (16, 4), 32, tied=False),
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, (24, 4), 48, tied=False),
    "qwen3.5-35b-a3b": _with_experts(_qwen3_5(2048, 0, 40, (16, 2), 32, tied=False), ExpertsConfig(256, 8, 512, 512)),
    "qwen3.5-122b-a10b": _with_experts(
        _qwen3_5(3072, 0, 48, (32, 2), 64, tied=False), ExpertsConfig(256, 8, 1024, 1024)),
    "qwen3.5-397b-a17b": _with_experts(
        _qwen3_5(4096, 0, 60, (32, 2), 64, tied=False), ExpertsConfig(512, 10, 1024, 1024)),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, (16, 8), tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, (32, 8), tied=False),
    "qwen3-next-80b-a3b": _QWEN3_NEXT,
    "qwen3-30b-a3b": _with_experts(_qwen3(2048, 0, 48, (32, 4), tied=False), ExpertsConfig(128, 8, 768)),
}
