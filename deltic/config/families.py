"""Supported architectures: names, pre-tokenizer, and properties that a config.json does not contain.

Pre-tokenizers normalise and split text before byte-level BPE models merge it. The patterns are from transformers
(tokenization_qwen2.py, tokenization_qwen3_5.py) and from the tokenizer.json of Llama 3, SmolLM2 and Mistral Nemo.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from deltic.config.reading import find, plain
from deltic.errors import ModelError, show

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture that its config.json does not contain.

    gguf: its name in GGUF files.
    aliases: further model types, without punctuation.
    splitter: pre-tokenizer of all its models; None: models have different pre-tokenizers.
    mixers: allowed kinds of layers.
    interval: every interval-th layer has full attention.
    gate: attention has an output gate.
    rotary: fraction of a head's dimensions that is rotated.
    mrope: positions have three axes; else RopeConfig has no sections.
    norm_offset: added to a checkpoint's norm weights to get the scale. Not added to the norm inside Gated DeltaNet
        layers, where the weight is the scale in every family.
    rope_types: supported scaling types of the rotary frequencies.
    qk_norm: queries and keys are normalised per head.
    qkv_bias: the projections of queries, keys and values have biases.
    sparse: configs may omit head_dim and num_key_value_heads (derived from other sizes) and a rope_theta of 10000.
    fixed: (key of config.json, only supported value) pairs, in addition to the pairs of all families.
    experts: feed-forward layers are mixtures of experts.
    shared: layers also have one expert that every token uses.
    normalised: the weights of a token's experts always add up to 1; otherwise only with norm_topk_prob.
    gguf_second_norm: name in GGUF files of the norm before the feed-forward layer.
    gguf_interleaved: the rows of queries and keys in GGUF files are in the order of rotated pairs.
    gguf_grouped: value heads in GGUF files are grouped by key heads as in checkpoints, and some projections packed.
    """

    gguf: str
    splitter: str | None
    mixers: tuple[LayerType, ...]
    interval: int
    gate: bool
    rotary: float
    mrope: bool
    norm_offset: float
    aliases: tuple[str, ...] = ()
    rope_types: tuple[str, ...] = ("default", "yarn")
    qk_norm: bool = True
    qkv_bias: bool = False
    sparse: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()
    experts: bool = False
    shared: bool = False
    normalised: bool = False
    gguf_second_norm: str = "ffn_norm.weight"
    gguf_interleaved: bool = False
    gguf_grouped: bool = False


_QWEN3_5: Final = Family("qwen35", "qwen35", ("linear_attention", "full_attention"), interval=4, gate=True,
                         rotary=0.25, mrope=True, norm_offset=1.0, aliases=("qwen36", "qwen38"),
                         rope_types=("default", "mrope", "yarn"), gguf_second_norm="post_attention_norm.weight")
_QWEN3: Final = Family("qwen3", "qwen2", ("full_attention",), interval=1, gate=False, rotary=1.0, mrope=False,
                       norm_offset=0.0)
_QWEN2: Final = replace(_QWEN3, gguf="qwen2", rope_types=("default", "linear", "llama3", "yarn"), qk_norm=False,
                        qkv_bias=True, sparse=True)
FAMILIES: Final[Mapping[str, Family]] = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, gguf="qwen35moe", aliases=("qwen36moe", "qwen38moe"),
                           fixed=(("decoder_sparse_step", 1),), experts=True, shared=True, normalised=True),
    "qwen3_next": replace(_QWEN3_5, gguf="qwen3next", splitter="qwen2", mrope=False, aliases=(),
                          rope_types=("default", "yarn"), fixed=(("decoder_sparse_step", 1),), experts=True,
                          shared=True, gguf_grouped=True),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, gguf="qwen3moe", fixed=(("decoder_sparse_step", 1),), experts=True),
    "qwen2": _QWEN2,
    # Mistral is the same except for sliding windows, which are rejected
    "llama": replace(_QWEN2, gguf="llama", aliases=("mistral",), splitter=None, qkv_bias=False, gguf_interleaved=True,
                     fixed=(("sliding_window", None),)),
}
"""Families by canonical name, which is the model type of Hugging Face."""
MIXTURES: Final = tuple(name for name, family in FAMILIES.items() if family.experts)
_REFUSED: Final = ("qwen2_moe", "mixtral")
"""Unsupported kinds of mixtures of experts."""


def _spellings() -> dict[str, str]:
    found = dict[str, str]()
    for name in (*FAMILIES, *_REFUSED):
        family = FAMILIES.get(name)
        forms = ["", "model", "forcausallm"]
        if family and family.mrope:
            forms += ["text", "textmodel", "forconditionalgeneration"]
        for base in (plain(name), *(family.aliases if family else ())):
            found |= {base + form: name for form in forms}
    return found


ARCHITECTURES: Final[Mapping[str, str]] = _spellings()
"""Model types, class names and GGUF architectures, without punctuation -> canonical name."""


def architecture(name: str) -> str:
    """Returns the canonical architecture of a model type, class name or GGUF architecture.

    Raises ModelError for an unknown family.
    """
    found = find(ARCHITECTURES, name)
    if found is None:
        known = ", ".join(dict.fromkeys((*FAMILIES, *(alias for each in FAMILIES.values() for alias in each.aliases))))
        raise ModelError(f"architecture {show(name)} is not supported, only {known}, and classes such as "
                         "Qwen3_5ForCausalLM")
    return found


# Pre-tokenizers


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NFC: Final = {"type": "NFC"}
GPT2: Final[dict[str, Any]] = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@dataclass(frozen=True, slots=True)
class Splitter:
    """A pre-tokenizer.

    cuts: pre-tokenizers in the format of tokenizer.json, applied in order.
    whole: a piece that equals a token is not split by merges (ignore_merges).
    bos: a raw prompt starts with a bos token by default.
    """

    cuts: Sequence[Mapping[str, Any]]
    normalizer: Mapping[str, str] | None = None
    whole: bool = False
    bos: bool = False


def _regex(pattern: str) -> list[dict[str, Any]]:
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {**GPT2, "use_regex": False}]


_QWEN2_SPLITTER: Final = Splitter(_regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"), _NFC)
_QWEN35: Final = Splitter(_regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"),
    _NFC)
_LLAMA3: Final = Splitter(_regex(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"),
    whole=True, bos=True)
_TEKKEN: Final = Splitter(_regex(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"), whole=True, bos=True)
SPLITTERS: Final[Mapping[str, Splitter]] = {
    "qwen2": _QWEN2_SPLITTER,
    "qwen35": _QWEN35,
    "llama-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "gpt-2": Splitter([GPT2]),
    "smollm": Splitter([{"type": "Digits", "individual_digits": True}, GPT2]),
    "deepseek-r1-qwen": _QWEN2_SPLITTER,
}
"""Pre-tokenizers by tokenizer.ggml.pre of GGUF files."""


def splitter_of(architecture: str) -> Splitter | None:
    """Returns the pre-tokenizer common to all models of an architecture (qwen35moe, qwen3_5_text), if there is one."""
    for name, family in FAMILIES.items():
        if family.splitter and plain(architecture).startswith((plain(name), *family.aliases)):
            return SPLITTERS[family.splitter]
    return None
