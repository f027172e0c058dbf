"""Small random encoders with tokenizers of their own, as transformers and sentence-transformers would save them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from deltic.embeddings.weights import EncoderConfig, expected_tensors

WORDS = [f"w{number}" for number in range(150)]
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {"vocab_size": 171, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 3,
             "num_attention_heads": 4, "max_position_embeddings": 61, "type_vocab_size": 2, "initializer_range": 0.2},
    "xlm-roberta": {"vocab_size": 163, "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2,
                    "num_attention_heads": 3, "max_position_embeddings": 73, "type_vocab_size": 1, "pad_token_id": 1,
                    "initializer_range": 0.2}}
CLASSES = {"bert": ("BertModel", "BertForSequenceClassification"),
           "xlm-roberta": ("XLMRobertaModel", "XLMRobertaForSequenceClassification")}
PREFIXES = {"bert": "bert.", "xlm-roberta": "roberta."}
TEXTS = ["w1", "w2 w3 w4", "", " ".join(WORDS[:37]), "w5 unknown w6", " ".join(WORDS[40:50]), "w7 w7 w7 w8"]


def tokenizer(family: str) -> Tokenizer:
    """Words, each a token, behind the special tokens of the family."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"] if family == "bert" else ["<s>", "<pad>", "</s>", "<unk>"]
    start, end, unknown = (special[2], special[3], special[1]) if family == "bert" else (special[0], special[2],
                                                                                        special[3])
    vocabulary = {word: index for index, word in enumerate([*special, "yes", "no", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(special)
    pair = f"{start} $A {end} $B:1 {end}:1" if family == "bert" else f"{start} $A {end} {end} $B {end}"
    made.post_processor = processors.TemplateProcessing(
        f"{start} $A {end}", pair, [(text, vocabulary[text]) for text in (start, end)])
    made.enable_truncation(16)  # as many files have it: to be forgotten
    made.enable_padding(length=16)
    return made


def save_encoder(directory: Path, family: str, labels: int = 0, seed: int = 0, safe: bool = True, **changes: Any
                 ) -> None:
    """Saves a random encoder with its tokenizer, as transformers does. No tensor has the values of an initialiser."""
    mapping = {"model_type": family, "layer_norm_eps": 1e-12, **SHAPES[family], **changes,
               "architectures": [CLASSES[family][1 if labels else 0]],
               **({"id2label": {str(label): f"LABEL_{label}" for label in range(labels)}} if labels else {})}
    write(directory / "config.json", mapping)
    shapes = expected_tensors(EncoderConfig.from_hf(mapping))
    if not labels:  # transformers has it, and deltic ignores it
        width = mapping["hidden_size"]
        shapes |= {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)}
    drawn, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        scale = mapping["initializer_range"] if len(shape) > 1 else 0.2
        prefix = PREFIXES[family] if labels and name.startswith(("embeddings", "encoder", "pooler")) else ""
        tensors[prefix + name] = scale * torch.randn(shape, generator=drawn) + name.endswith("LayerNorm.weight")
    if safe:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    else:
        torch.save(tensors, directory / "pytorch_model.bin")
    tokenizer(family).save(str(directory / "tokenizer.json"))


def transformers_model(directory: Path) -> Any:
    """Loads a saved encoder with transformers."""
    import transformers

    name, = json.loads((directory / "config.json").read_text(encoding="utf-8"))["architectures"]
    model, report = getattr(transformers, name).from_pretrained(directory, attn_implementation="eager",
                                                                output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def edit_weights(directory: Path, change: Callable[[str, torch.Tensor], object]) -> None:
    """Changes the saved tensors in place."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        change(name, tensor)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def save_recipe(directory: Path, pooling: str = "cls_token", normalize: bool = True, **more: Any) -> None:
    """The files of sentence-transformers. more: sentence_bert_config.json."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    write(directory / "modules.json", [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
         "type": f"sentence_transformers.models.{kind}"} for index, kind in enumerate(modules)])
    write(directory / "1_Pooling" / "config.json", {f"pooling_mode_{pooling}": True})
    write(directory / "sentence_bert_config.json", more)
    write(directory / "config_sentence_transformers.json",
          {"prompts": {"query": "w9 w10 ", "document": "w11 "}, "default_prompt_name": None})


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def save_m3(directory: Path, seed: int = 3, **changes: Any) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Saves a small BGE-M3, and its sparse and colbert layers in torch's pickles, as the original has them."""
    save_encoder(directory, "xlm-roberta", seed=seed, **changes)
    save_recipe(directory)
    width = changes.get("hidden_size", SHAPES["xlm-roberta"]["hidden_size"])
    layers = torch.nn.Linear(width, 1), torch.nn.Linear(width, width)
    for name, layer in zip(("sparse", "colbert"), layers, strict=True):
        torch.save(layer.state_dict(), directory / f"{name}_linear.pt")
    return layers


@torch.no_grad()
def padded_hidden(model: Any, rows: Sequence[Sequence[int]], kinds: Sequence[Sequence[int]] | None = None
                  ) -> list[torch.Tensor]:
    """States of each row by transformers, in one padded batch."""
    pad = model.config.pad_token_id or 0
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    extra = {} if kinds is None else {"token_type_ids": torch.tensor(
        [[*kind, *[0] * (longest - len(kind))] for kind in kinds])}
    states = model(input_ids=ids, attention_mask=mask, **extra).last_hidden_state
    return [state[:len(row)] for state, row in zip(states, rows, strict=True)]


@cache
def encoded(family: str, texts: tuple[str, ...]) -> list[list[int]]:
    """Ids of whole texts with special tokens."""
    plain = tokenizer(family)
    plain.no_truncation()
    plain.no_padding()
    return [plain.encode(text).ids for text in texts]
