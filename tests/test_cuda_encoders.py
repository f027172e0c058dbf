"""Encoders on a GPU: what the CPU's float32 gives, for ragged batches, every output and every pooling."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoder_models import TEXTS, WORDS, edit_weights, save_encoder, save_m3, save_recipe

from deltic import LLM, Encoder, SamplingParams
from deltic.embeddings.types import Item
from deltic.errors import ConfigError
from deltic.ops.cuda.driver import record

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
FAMILIES = ("bert", "xlm-roberta")
LEAST = {"float32": 0.99999, "float16": 0.9999, "bfloat16": 0.995}
"""The cosine with float32 on a CPU; random weights amplify more than trained ones."""
MANY = [*TEXTS, *(" ".join(WORDS[start:start + 3 * start + 1]) for start in range(18))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("encoders")
    for family in FAMILIES:
        save_encoder(place / family, family, initializer_range=0.05)
    yield place
    torch.cuda.empty_cache()


def likeness(found: Any, wanted: Any) -> float:
    return float((found * wanted).sum(1).min())


@pytest.mark.parametrize("dtype", LEAST)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors(place: Path, family: str, dtype: str) -> None:
    with Encoder(place / family) as host, Encoder(place / family, device="cuda", dtype=dtype) as device:
        wanted, found = host.encode(MANY), device.encode(MANY)
        assert likeness(found, wanted) > LEAST[dtype]
        assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
        one = np.stack([device.encode(text) for text in MANY])
        assert likeness(one, found) > LEAST[dtype], "neighbours change no more than rounding"


@pytest.mark.parametrize("heads, hidden", [(1, 24), (3, 144), (2, 128), (1, 512)])
def test_heads_of_any_width(tmp_path: Path, heads: int, hidden: int) -> None:
    """24, 48 and 64 numbers, which flash attention takes, and 512, which it does not."""
    save_encoder(tmp_path, "bert", hidden_size=hidden, num_attention_heads=heads, intermediate_size=3 * hidden,
                 initializer_range=0.05)
    with Encoder(tmp_path) as host, Encoder(tmp_path, device="cuda", dtype="float16") as device:
        assert likeness(device.encode(MANY), host.encode(MANY)) > LEAST["float16"]


@pytest.mark.parametrize("pooling", ["mean_tokens", "max_tokens", "lasttoken", "mean_sqrt_len_tokens",
                                     "weightedmean_tokens"])
def test_poolings(place: Path, tmp_path: Path, pooling: str) -> None:
    for file in (place / "bert").iterdir():
        (tmp_path / file.name).symlink_to(file)
    save_recipe(tmp_path, pooling)
    with Encoder(tmp_path) as host, Encoder(tmp_path, device="cuda", dtype="float32") as device:
        assert likeness(device.encode(MANY), host.encode(MANY)) > LEAST["float32"]


def test_all_outputs_of_bge_m3(tmp_path: Path) -> None:
    save_m3(tmp_path, initializer_range=0.05)
    with Encoder(tmp_path) as host, Encoder(tmp_path, device="cuda", dtype="float16") as device:
        for wanted, found in zip(host.encode_all(MANY), device.encode_all(MANY), strict=True):
            np.testing.assert_allclose(found.dense, wanted.dense, atol=5e-3)
            np.testing.assert_allclose(found.colbert, wanted.colbert, atol=1e-2)
            for id in wanted.sparse.keys() | found.sparse.keys():
                assert found.sparse.get(id, 0) == pytest.approx(wanted.sparse.get(id, 0), abs=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores(tmp_path: Path, family: str) -> None:
    save_encoder(tmp_path, family, labels=1, initializer_range=0.05)
    with Encoder(tmp_path) as host, Encoder(tmp_path, device="cuda") as device:
        assert device.score("w1 w2", MANY) == pytest.approx(host.score("w1 w2", MANY), abs=2e-2)


def test_nan_fails_only_its_text(tmp_path: Path) -> None:
    save_encoder(tmp_path, "bert")
    edit_weights(tmp_path, lambda name, tensor: "word_embeddings" in name and tensor[6 + 20].fill_(torch.nan))  # w20
    with Encoder(tmp_path, device="cuda") as encoder:
        found = encoder.submit(encoder.text_items(["w1", "w20 w3", "w4"])).future.result()
        assert [bool(each.error) for each in found] == [False, True, False]


def segments() -> int:
    """How often torch asked the driver for a large segment; those of 2 MiB hold small tensors of any origin."""
    return int(torch.cuda.memory_stats()["segment.large_pool.allocated"])


def test_batch_memory_is_allocated_at_load(place: Path) -> None:
    """A chat model that is loaded later takes a share of what is left: nothing that runs asks for more."""
    torch.cuda.empty_cache()
    with Encoder(place / "bert", device="cuda", token_budget=4096) as encoder:
        taken = segments()
        encoder.submit([Item((2, 7, 3) * 20)] * 300).future.result()
        assert segments() == taken
        with LLM("tiny", device="cuda", memory="64MiB") as llm:
            assert len(llm.generate(["Hi"], SamplingParams(max_tokens=3))) == 1
            assert likeness(encoder.encode(MANY), encoder.encode(MANY)) > LEAST["bfloat16"]


def test_batch_memory_is_not_shared(place: Path) -> None:
    """What is loaded behind an encoder leaves the memory of its batches alone."""
    torch.cuda.empty_cache()
    with Encoder(place / "bert", device="cuda", token_budget=65536) as encoder:
        held = [torch.empty(1 << size, dtype=torch.uint8, device="cuda") for size in (25, 24, 23, 22, 21, 20) * 2]
        taken = segments()
        encoder.submit([Item((2, 7, 3) * 20)] * 2000).future.result()
        assert segments() == taken and len(held) == 12


@pytest.mark.parametrize("records", [False, True])
def test_unload_while_another_computes(place: Path, monkeypatch: pytest.MonkeyPatch, records: bool) -> None:
    """Or while a graph is recorded, where torch would end the process. Its memory is given back behind that."""
    others = [Encoder(place / "bert", device="cuda", dtype="float32")]

    def collect() -> None:
        torch.ones(5, device="cuda")
        reserved = torch.cuda.memory_reserved()
        others.clear()
        gc.collect()
        assert torch.cuda.memory_reserved() == reserved

    def outputs(*arguments: Any) -> dict[str, torch.Tensor]:
        collect()
        return plain(*arguments)

    with Encoder(place / "bert", device="cuda") as encoder:
        wanted = encoder.encode(MANY)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        if records:
            record(collect)
        else:
            plain = encoder.model._outputs
            monkeypatch.setattr(encoder.model, "_outputs", outputs)
        assert likeness(encoder.encode(MANY), wanted) > LEAST["bfloat16"]
        assert not others and torch.cuda.memory_reserved() < reserved


def test_batches_are_pipelined(place: Path) -> None:
    with Encoder(place / "bert", device="cuda", token_budget=256) as encoder:
        items = [Item((2, 7 + number % 90, 3) * (1 + number % 20)) for number in range(300)]
        wanted = np.stack([encoder.submit([item]).future.result()[0].dense for item in items])
        found = np.stack([each.dense for each in encoder.submit(items).future.result()])
        assert likeness(found, wanted) > LEAST["bfloat16"]


def test_unsupported_options_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="quant=q8_0 needs the compiled kernels"):
        Encoder(place / "bert", device="cuda", quant="q8_0")
