"""The tiny model's shape, tokenizer and files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = 3072
HEAD = "mtp.safetensors"
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# Contractions, words with one leading character, single digits, punctuation runs, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def chat_template() -> str:
    return (HERE / "chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(corpus: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of at most VOCAB_SIZE tokens; the special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKUP])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(i): {"content": t.content, "special": t.special, "lstrip": False, "rstrip": False,
                 "single_word": False, "normalized": False}
        for i, t in sorted(tokenizer.get_added_tokens_decoder().items())
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "add_prefix_space": False,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "added_tokens_decoder": added,
        "chat_template": chat_template(),
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5TextConfig:
    """Eight layers: three Gated DeltaNet, then one gated attention, twice."""
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=32768,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        attn_output_gate=True,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        dtype="bfloat16",
    )


@torch.no_grad()
def build_model(config: Qwen3_5TextConfig) -> Qwen3_5ForCausalLM:
    """A fresh model in fp32 whose heads start with memories of ten to a thousand tokens."""
    model = Qwen3_5ForCausalLM(config).float()
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            mixer = layer.linear_attn
            nn.init.uniform_(mixer.A_log, 1.0, 4.0).log_()
            step = torch.empty_like(mixer.dt_bias).uniform_(-6.5, -3.5).exp()
            mixer.dt_bias.copy_(torch.log(torch.expm1(step)))
    return model


def save_model(model: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights, in bf16; a draft head of other weights goes."""
    (folder / HEAD).unlink(missing_ok=True)
    tokenizer = load_tokenizer(folder)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")],
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def save_head(head: nn.Module, folder: Path) -> None:
    """Write the draft head's weights beside the model's, in bf16, and name it in config.json."""
    tensors = {f"mtp.{name}": tensor.to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / HEAD, metadata={"format": "pt"})
    (folder / HEAD).chmod(0o644)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"mtp_num_hidden_layers": 1}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_head(head: nn.Module, folder: Path) -> None:
    """Read what `save_head` wrote, into a head of any dtype."""
    tensors = load_file(folder / HEAD)
    head.load_state_dict({name.removeprefix("mtp."): tensor for name, tensor in tensors.items()})
