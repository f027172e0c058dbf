"""The tiny model's shape, tokenizer and files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from network import SHAPE, Network
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from tower import TOWER, Tower, preprocessor_config, tower_config

HERE = Path(__file__).resolve().parent
VOCAB_SIZE = SHAPE.vocab
HEAD = "mtp.safetensors"
TOWER_PREFIX = "model.visual."
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE, VIDEO = VISION[2:]
UNUSED = (0xC0, 0xC1, 0xF5, 0xF6)  # bytes that no UTF-8 text has: their tokens are those of VISION
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
    return with_vision(tokenizer)


def with_vision(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the tokens of VISION in the places of bytes that no text has, so that it does not grow."""
    record = json.loads(tokenizer.to_str())
    vocabulary = record["model"]["vocab"]
    for byte, content in zip(UNUSED, VISION, strict=True):
        place = vocabulary.pop(chr(byte))
        vocabulary[content] = place
        record["added_tokens"].append({"id": place, "content": content, "special": True, "lstrip": False,
                                       "rstrip": False, "single_word": False, "normalized": False})  # fmt: skip
    record["added_tokens"].sort(key=lambda token: token["id"])
    return Tokenizer.from_str(json.dumps(record))


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


def config() -> dict[str, Any]:
    """config.json, as transformers reads it."""
    s = SHAPE
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": VOCAB_SIZE - len(MARKUP) - 1,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "initializer_range": 0.02,
        "intermediate_size": s.inner,
        "layer_types": list(s.layers),
        "linear_conv_kernel_dim": s.conv,
        "linear_key_head_dim": s.linear_dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_value_head_dim": s.linear_dim,
        "max_position_embeddings": 32768,
        "model_type": "qwen3_5_text",
        "num_attention_heads": s.heads,
        "num_hidden_layers": len(s.layers),
        "num_key_value_heads": s.kv_heads,
        "pad_token_id": VOCAB_SIZE - len(MARKUP) - len(CONTROL),
        "partial_rotary_factor": s.rotary_dim / s.head_dim,
        "rms_norm_eps": s.eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": s.rotary_dim / s.head_dim,
            "rope_theta": s.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
    }


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_tensors(module: nn.Module, path: Path, prefix: str = "") -> None:
    """The module's parameters in bf16."""
    tensors = {f"{prefix}{name}": t.detach().to("cpu", torch.bfloat16) for name, t in module.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def load_tensors(module: nn.Module, path: Path, prefix: str = "") -> None:
    """Read what `save_tensors` wrote, into a module of any dtype; the tower's tensors may lie beside them."""
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(TOWER_PREFIX)}
    module.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})


def save_model(network: Network, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights; a draft head and a tower of other weights go."""
    (folder / HEAD).unlink(missing_ok=True)
    record = config()
    pad, end = record["pad_token_id"], record["eos_token_id"]
    _write(folder / "config.json", record)
    _write(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad,
                                               "json_max_items": 8, "json_max_length": 120})
    save_tensors(network, folder / "model.safetensors")


def save_tower(tower: Tower, folder: Path) -> None:
    """Put the tower's tensors behind the model's, in bf16, and say in the configs what it is."""
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(TOWER_PREFIX)}
    for name, tensor in tower.state_dict().items():
        if name == "patch_embed.proj.weight":  # the frames of a picture are the same
            still = tensor.view(len(tensor), 3, 1, TOWER.patch, TOWER.patch) / TOWER.frames
            tensor = still.expand(-1, -1, TOWER.frames, -1, -1).contiguous()
        tensors[TOWER_PREFIX + name] = tensor.detach().to("cpu", torch.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: tokenizer.token_to_id(token) for name, token in zip(names, VISION, strict=True)}
    _write(folder / "config.json", record | ids | {"vision_config": tower_config()})
    _write(folder / "preprocessor_config.json", preprocessor_config())


def load_tower(folder: Path) -> Tower:
    """Read what `save_tower` wrote."""
    tower, prefix = Tower(), TOWER_PREFIX
    stored = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix(prefix): t.float() for name, t in stored.items() if name.startswith(prefix)}
    tensors["patch_embed.proj.weight"] = tensors["patch_embed.proj.weight"].sum(2).flatten(1)
    tower.load_state_dict(tensors)
    return tower


def load_model(folder: Path) -> Network:
    network = Network()
    load_tensors(network, folder / "model.safetensors")
    return network


def save_head(head: nn.Module, folder: Path) -> None:
    """Write the draft head's weights beside the model's, in bf16, and name it in config.json."""
    save_tensors(head, folder / HEAD, "mtp.")
    path = folder / "config.json"
    _write(path, json.loads(path.read_text(encoding="utf-8")) | {"mtp_num_hidden_layers": 1})


def load_head(head: nn.Module, folder: Path) -> None:
    """Read what `save_head` wrote, into a head of any dtype."""
    load_tensors(head, folder / HEAD, "mtp.")
