"""Decoders that embed or judge, through the engine, against transformers."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_models import WORDS, save_recipe, write
from starlette.testclient import TestClient
from support import transformers_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from deltic import Encoder
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.tensors import page_bytes, slot_bytes
from deltic.cli import main
from deltic.config import EngineConfig, Limits, ModelConfig
from deltic.embeddings.decoder import _AFTER, _BEFORE, _INSTRUCTION
from deltic.embeddings.open import is_encoder
from deltic.errors import ConfigError, ModelError, RequestError
from deltic.runner.memory import plan_memory
from deltic.server.app import create_encoder_app
from deltic.server.embeddings import EmbeddingService

TEXTS = ["w1", "w2 w3 w4 w5 w6", " ".join(WORDS[:60]), "w7 w8"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Tokenizer]:
    directory = tmp_path_factory.mktemp("qwen3")
    model = transformers_model(directory, family="qwen3")
    pieces = ["<unk>", "<|endoftext|>", "yes", "no", "<Instruct>:", "<Query>:", "<Document>:", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, [("<|endoftext|>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory, model, tokenizer


OPTIONS: dict[str, Any] = {"dtype": "float32", "memory": "8MiB", "threads": 1, "max_batch": 4}


@torch.no_grad()
def test_vectors_equal_transformers(saved: tuple[Path, Any, Tokenizer]) -> None:
    directory, model, tokenizer = saved
    save_recipe(directory, "lasttoken")
    with Encoder(directory, **OPTIONS) as encoder:
        found, asked = encoder.encode(TEXTS), encoder.encode(TEXTS, kind="query")
        short = encoder.encode(TEXTS, dimensions=16)
        assert encoder.dimension == 40
    for vectors, prompt in ((found, ""), (asked, "w9 w10 ")):
        for vector, text in zip(vectors, TEXTS, strict=True):
            ids = torch.tensor([tokenizer.encode(prompt + text).ids])
            wanted = torch.nn.functional.normalize(model.model(ids).last_hidden_state[0, -1], dim=0)
            np.testing.assert_allclose(vector, wanted, atol=1e-5)
    assert np.abs(np.linalg.norm(short, axis=1) - 1).max() < 1e-6


def test_instruction_is_prefilled_once(saved: tuple[Path, Any, Tokenizer]) -> None:
    directory, _, _ = saved
    with Encoder(directory, **OPTIONS) as encoder:
        instruction = " ".join(WORDS[100:140]) + " "
        encoder.encode("w1", prompt=instruction)
        engine = encoder.model._worker.engine  # type: ignore[attr-defined]
        before = engine.stats.prompt_tokens
        encoder.encode(TEXTS[:2], prompt=instruction)
        assert engine.stats.prompt_tokens - before < 20


@pytest.mark.parametrize("shares", [False, True])
def test_each_key_owner_prefills_its_instruction(
        saved: tuple[Path, Any, Tokenizer], tmp_path: Path, shares: bool) -> None:
    """Otherwise the response time would reveal what another client has embedded."""
    directory, vectors = tmp_path / "copy", list[Any]()
    shutil.copytree(saved[0], directory)
    save_recipe(directory, "lasttoken")
    write(directory / "config_sentence_transformers.json", {"prompts": {"query": " ".join(WORDS[:100]) + " "}})
    keys: dict[str, str | None] = {"first": "ann", "second": "ann", "third": "bob"}
    with Encoder(directory, **OPTIONS) as encoder, TestClient(create_encoder_app(
            [EmbeddingService("embedder", encoder)], Limits(), api_keys=keys, share_prefix_cache=shares)) as client:
        engine = encoder.model._worker.engine  # type: ignore[attr-defined]

        def read(key: str, salt: str | None = None) -> int:
            before = engine.stats.prompt_tokens
            body = {"input": "w1", "input_type": "query", "cache_salt": salt}
            answer = client.post("/v1/embeddings", headers={"x-api-key": key}, json=body)
            assert answer.status_code == 200, answer.text
            vectors.append(answer.json()["data"][0]["embedding"])
            return int(engine.stats.prompt_tokens - before)

        assert [read("first") > 100, read("second") > 100, read("third") > 100] == [True, False, not shares]
        assert [read("second", "salt") > 100, read("second", "salt") > 100] == [True, False]
    assert all(vector == vectors[0] for vector in vectors)


def test_unreferenced_decoder_is_freed(saved: tuple[Path, Any, Tokenizer]) -> None:
    """With both its threads."""
    encoder = Encoder(saved[0], **OPTIONS)
    encoder.encode("w1")
    worker = encoder.model._worker  # type: ignore[attr-defined]
    threads, engine = (encoder.batcher._thread, worker._thread), weakref.ref(worker.engine)
    del encoder, worker
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    gc.collect()
    assert engine() is None


def test_close_in_fork_keeps_the_engine(saved: tuple[Path, Any, Tokenizer], monkeypatch: pytest.MonkeyPatch
                                                   ) -> None:
    with Encoder(saved[0], **OPTIONS) as encoder:
        engine, closed = encoder.model._worker.engine, list[bool]()  # type: ignore[attr-defined]
        encoder.encode("w1")
        with monkeypatch.context() as patch:
            patch.setattr(type(engine), "close", lambda _: closed.append(True))
            patch.setattr(os, "getpid", lambda: 1)
            encoder.close()
        assert not closed and encoder.encode("w1").shape


def test_l8_unsupported_calls_are_named(saved: tuple[Path, Any, Tokenizer]) -> None:
    directory, _, _ = saved
    with pytest.raises(ConfigError, match=r"instruction: .* takes none"):
        Encoder(directory, task="embed", instruction="w1", **OPTIONS)
    with Encoder("tiny") as encoder:  # whose tokenizer puts nothing around a text
        with pytest.raises(RequestError, match="query is empty") as error:
            encoder.rank("", ["w1"])
        assert error.value.field == "query"
        with pytest.raises(RequestError, match=r"texts\[1\] is empty"):
            encoder.encode(["w1", ""])


@torch.no_grad()
@pytest.mark.parametrize("instruction", [None, "w90 w91"])
def test_reranker_scores_yes_against_no(saved: tuple[Path, Any, Tokenizer], instruction: str | None) -> None:
    directory, model, tokenizer = saved
    documents = ["w1 w2", "w3", " ".join(WORDS[:100])]
    with Encoder(directory, task="rerank", max_length=90, instruction=instruction, **OPTIONS) as encoder:
        found = encoder.score("w5 w6", documents)
        assert encoder.scores and [each.index for each in encoder.rank("w5 w6", documents)] == sorted(
            range(3), key=lambda index: -found[index])
    before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in (_BEFORE, _AFTER))
    for document, score in zip(documents, found, strict=True):
        text = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: w5 w6\n<Document>: {document}"
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:90 - len(before) - len(after)]
        logits = model(torch.tensor([[*before, *ids, *after]])).logits[0, -1]
        assert score == pytest.approx(logits[[3, 2]].softmax(0)[1].item(), abs=1e-5)


def test_request_instruction_replaces_the_encoders(saved: tuple[Path, Any, Tokenizer]) -> None:
    with Encoder(saved[0], task="rerank", instruction="w7", **OPTIONS) as encoder, Encoder(
            saved[0], task="rerank", instruction="w90 w91", **OPTIONS) as other:
        asked = encoder.pair_items("w5 w6", ["w1", "w2"], True, "w90 w91")
        assert asked == other.pair_items("w5 w6", ["w1", "w2"]) != encoder.pair_items("w5 w6", ["w1", "w2"])


def test_lower_case_follows_the_files(saved: tuple[Path, Any, Tokenizer], tmp_path: Path
                                                                ) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(saved[0] / name)
    save_recipe(tmp_path, "lasttoken", do_lower_case=True)
    with Encoder(tmp_path, **OPTIONS) as encoder:
        upper, lower = encoder.encode(["W1 W2", "w1 w2"])
        assert (upper == lower).all()


def test_unsupported_decoder_pooling_is_refused(saved: tuple[Path, Any, Tokenizer], tmp_path: Path) -> None:
    files = {file: file.read_bytes() for file in saved[0].iterdir() if file.is_file()}
    for file in files:
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "modules.json").unlink(missing_ok=True)
    (tmp_path / "sentence_bert_config.json").unlink(missing_ok=True)
    (tmp_path / "config_sentence_transformers.json").unlink(missing_ok=True)
    save_recipe(tmp_path, "mean_tokens")
    with pytest.raises(ModelError, match="decoders give the state of the last token"):
        Encoder(tmp_path, **OPTIONS)
    assert all(file.read_bytes() == content for file, content in files.items()), "what is shared was changed"


def test_gguf_pooling(saved: tuple[Path, Any, Tokenizer], tmp_path: Path) -> None:
    import gguf

    words = Tokenizer(models.BPE(vocab={"w": 0, **{str(digit): digit + 1 for digit in range(10)}, "w1": 11,
                                        "<|endoftext|>": 12}, merges=[("w", "1")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens(["<|endoftext|>"])
    words.post_processor = processors.TemplateProcessing("$A <|endoftext|>", None, [("<|endoftext|>", 12)])
    for file in saved[0].iterdir():
        if file.suffix == ".safetensors" or file.name in ("config.json", "generation_config.json"):
            (tmp_path / file.name).symlink_to(file)
    save_recipe(tmp_path, "lasttoken")
    words.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "model.gguf"
    assert main(["convert", str(tmp_path), str(path), "--type", "F32"]) == 0
    assert gguf.GGUFReader(path).fields["qwen3.pooling_type"].contents() == gguf.PoolingType.LAST
    assert is_encoder(path)
    with Encoder(tmp_path, **OPTIONS) as directory, Encoder(path, **OPTIONS) as file:
        for kind in (None, "query"):
            np.testing.assert_allclose(file.encode(["w1", "w12"], kind=kind),
                                       directory.encode(["w1", "w12"], kind=kind), atol=1e-6)


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3.5-0.8b"])
def test_chat_model_on_gpu_gets_the_remaining_memory(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding decoder reserves memory for one text and a step, not half of the card."""
    free = total = 139 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    config, options = ModelConfig.preset(shape), EngineConfig(device="cuda")

    def planned(vectors: bool) -> tuple[MemoryPlan, int]:
        plan, _ = plan_memory(config, options, torch.bfloat16, False, False, vectors)
        rows = 4 * config.vocab_size * (plan.rows or 0)
        return plan, plan.pages * page_bytes(config, torch.bfloat16) + plan.slots * slot_bytes(
            config, torch.bfloat16) + rows

    alone, _ = planned(vectors=False)
    texts, taken = planned(vectors=True)
    assert texts.max_context == config.max_position_embeddings and texts.max_batch == options.max_batch
    assert taken < free // 8 and not texts.warnings
    free -= taken
    beside, _ = planned(vectors=False)
    assert beside.pages > alone.pages * 0.85
    free = 1 << 30  # a card on which there is no more: a quarter, as of any model
    assert planned(vectors=True)[0].max_context < config.max_position_embeddings
