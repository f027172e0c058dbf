"""Small random encoders with tokenizers of their own, as transformers and sentence-transformers would save them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = [f"w{number}" for number in range(150)]
SHAPES: dict[str, dict[str, Any]] = {
    "bert": {"vocab_size": 171, "hidden_size": 40, "intermediate_size": 52, "num_hidden_layers": 3,
             "num_attention_heads": 4, "max_position_embeddings": 61, "type_vocab_size": 2, "initializer_range": 0.2},
    "xlm-roberta": {"vocab_size": 163, "hidden_size": 48, "intermediate_size": 70, "num_hidden_layers": 2,
                    "num_attention_heads": 3, "max_position_embeddings": 73, "type_vocab_size": 1, "pad_token_id": 1,
                    "initializer_range": 0.2}}
CLASSES = {"bert": ("BertConfig", "BertModel", "BertForSequenceClassification"),
           "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel", "XLMRobertaForSequenceClassification")}
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
                 ) -> Any:
    """A random encoder, saved to the directory with its tokenizer; returns transformers' model."""
    import transformers

    config, plain, classifier = (getattr(transformers, name) for name in CLASSES[family])
    torch.manual_seed(seed)
    shape = config(**{**SHAPES[family], **changes, **({"num_labels": labels} if labels else {})},
                   attn_implementation="eager")
    model = (classifier if labels else plain)(shape).eval()
    with torch.no_grad():  # what is initialised to 0 or 1 would hide mistakes
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "LayerNorm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    if not safe:
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
    tokenizer(family).save(str(directory / "tokenizer.json"))
    return model


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


def save_m3(directory: Path, seed: int = 3, **changes: Any) -> tuple[Any, torch.nn.Linear, torch.nn.Linear]:
    """A small BGE-M3: encoder, sparse and colbert layers, in torch's pickles as the original has them."""
    model = save_encoder(directory, "xlm-roberta", seed=seed, **changes)
    save_recipe(directory)
    width = model.config.hidden_size
    layers = torch.nn.Linear(width, 1), torch.nn.Linear(width, width)
    for name, layer in zip(("sparse", "colbert"), layers, strict=True):
        torch.save(layer.state_dict(), directory / f"{name}_linear.pt")
    return model, *layers


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
