"""Makes compiled models for tests, and compares their answers with the engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from support import DECIDED, numbers, odd_shape, same_logits, stepwise_logits
from torch import Tensor

from deltic import Session
from deltic.config import ModelConfig, RopeConfig
from deltic.export.program import hf_config, kind_of
from deltic.loader.dummy import random_weights
from deltic.loader.model_files import open_model

SHAPE = odd_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), max_position_embeddings=256)
ATTENTION = odd_shape(architecture="qwen3", num_hidden_layers=2, layer_types=("full_attention",) * 2, linear=None,
                      attention_output_gate=False, rope=RopeConfig(1e4, 14, ()), max_position_embeddings=256)
CHUNK = 24


def checkpoint(folder: Path, shape: ModelConfig, spread: float) -> Path:
    """Writes a directory with random float32 weights, without a tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape)), encoding="utf-8")
    save_file(random_weights(shape, "float32", initializer_range=spread, seed=2), folder / "model.safetensors")
    return folder


def compiled(folder: Path, source: Path | None, **options: object) -> Path:
    """Compiles a model with TVM. source None: the embedded model."""
    from deltic.export.tvm.compiler import compile_model

    folder.mkdir(parents=True)
    compile_model(open_model(source), folder, **options)  # type: ignore[arg-type]
    return folder


def exported(path: Path, source: Path | None, **form: object) -> Path:
    """Exports a model for ExecuTorch. source None: the embedded model."""
    from deltic.export.executorch.export import ExportForm, export_files

    path.parent.mkdir(parents=True, exist_ok=True)
    export_files(open_model(source), path, ExportForm(**form))  # type: ignore[arg-type]
    return path


def session(path: Path | None, memory: str = "16MiB") -> Session:
    """Opens a session over a model or a compiled one. path None: the embedded model."""
    engine = path is None or not kind_of(path)
    return Session(None if path is None else str(path), "float32" if engine else "auto", memory=memory, threads=1,
                   max_batch=2)


def forced(one: Session, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
    """Returns the logits after a prompt and after each token of an answer."""
    one.reset()
    return torch.stack([one.prefill(prompt).clone(), *(row.clone() for row in stepwise_logits(one, answer))])


def assert_same_answers(engine: Session, made: Session, count: int) -> None:
    """Forces the same `count` tokens on both after each of three prompts.

    The logits differ by at most tau, and the choices are equal where the engine's best two are 2 tau apart (95 % of the
    positions). Halfway the other session diverges and is restored. At the end it returns to the prompt's end and
    prefills the whole answer.
    """
    middle, wanted, found = count // 2, list[Tensor](), list[Tensor]()
    for prompt in (numbers(seed, length, engine.vocab_size) for seed, length in ((1, 3), (2, CHUNK), (3, 53))):
        answer = numbers(len(prompt), count, engine.vocab_size)
        wanted.append(forced(engine, prompt, answer))
        made.reset()
        found.append(made.prefill(prompt)[None].clone())
        begin = made.snapshot()
        found.append(stepwise_logits(made, answer[:middle]))
        halfway = made.snapshot()
        made.commit(numbers(9, 7, engine.vocab_size))
        made.restore(halfway)
        found.append(stepwise_logits(made, answer[middle:]))
        made.restore(begin)
        same_logits(wanted[-1][-1:], made.prefill(answer)[None])
        made.drop(halfway)
        made.drop(begin)
    same_logits(torch.cat(wanted), torch.cat(found), decided=DECIDED)
