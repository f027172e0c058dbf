"""What comes out of a tier is looked at before it is let in: what cannot be right is a miss, and harms nobody (L8)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from reuse_cases import runtime_of, serve, usage_of
from support import greedy, numbers, odd_runtime, reference, same_tokens
from torch import Tensor

from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.item_validator import PoolItemValidator
from deltic.cache.offload.types import StoredItem, TierStoreError
from deltic.engine.engine import Engine
from deltic.params import PAGE

PROMPT = numbers(1, 100, 500)
OPENING = replace(greedy(PROMPT, 8), stable_prefixes=(40,))
NAN = float("nan")
Tensors = dict[str, Tensor]


def engine_over(*tiers: TierIndex) -> Engine:
    return Engine(runtime_of(odd_runtime(), batch=4, tiers=tiers))


def disk_engine(directory: Path) -> Engine:
    return engine_over(TierIndex(DiskStore(directory, "model", 1 << 24), threads=True))


def items_of(directory: Path) -> list[StoredItem]:
    return sorted(DiskStore(directory, "model", 1 << 24).scan(), key=lambda item: (item.kind, item.done))


def rewrite(directory: Path, item: StoredItem, change: Callable[[Tensors], None]) -> None:
    """Change an item's tensors; its file is well-formed, and its checksum right."""
    disk = DiskStore(directory, "model", 1 << 24)
    tensors = disk.read(item)
    change(tensors)
    disk.write(item, tensors)


def drop_row(tensors: Tensors) -> None:
    tensors["logits"] = tensors["logits"][:-1]


def add_dimension(tensors: Tensors) -> None:
    tensors["logits"] = tensors["logits"][None]


def halve(tensors: Tensors) -> None:
    tensors["logits"] = tensors["logits"].half()


def level(tensors: Tensors) -> None:
    tensors["logits"] = torch.zeros_like(tensors["logits"])


def sick(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = NAN
    return change


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def shorter(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:, :-1].clone())


def stranger(tensors: Tensors) -> None:
    tensors["more"] = torch.zeros(3)


def foreign_tokens(tensors: Tensors) -> None:
    tensors["tokens"][0] = 1 << 40


def negative_tokens(tensors: Tensors) -> None:
    tensors["tokens"][0] = -1


DAMAGE: dict[str, tuple[str, Callable[[Tensors], None]]] = {
    "logits: one too few": ("final", drop_row), "logits: a matrix": ("final", add_dimension),
    "logits: another dtype": ("final", halve), "logits: all equal": ("final", level),
    "logits: not a number": ("final", sick("logits")), "logits: none": ("final", without("logits")),
    "state: not a number": ("final", sick("recurrent")), "state: another shape": ("final", shorter("recurrent")),
    "state: a part is missing": ("final", without("conv")), "state: a part too many": ("final", stranger),
    "K/V: not a number": ("kv", sick("values")), "K/V: too short": ("kv", shorter("keys")),
    "K/V: no keys": ("kv", without("keys")), "K/V: no tokens": ("kv", without("tokens")),
    "tokens: too large": ("kv", foreign_tokens), "tokens: negative": ("kv", negative_tokens),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_invalid_items_miss_beside_healthy_neighbours(name: str, tmp_path: Path,
                                                                  caplog: pytest.LogCaptureFixture) -> None:
    kind, change = DAMAGE[name]
    caplog.set_level(logging.WARNING, "deltic")
    engine = disk_engine(tmp_path)
    serve(engine, OPENING)
    engine.close()
    item = next(item for item in items_of(tmp_path) if item.kind == kind)
    rewrite(tmp_path, item, change)
    engine = disk_engine(tmp_path)
    neighbours = [greedy(numbers(seed, 30 + seed, 500), 8, f"n{seed}") for seed in (2, 3)]
    found = serve(engine, neighbours[0], OPENING, neighbours[1])
    for request in (OPENING, *neighbours):
        same_tokens(reference(odd_runtime(), request.prompt, 8), found[(request.id, 0)].tokens)
    assert usage_of(found).cached_tokens in (0, 40), "what is damaged was used"
    refused = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert len(refused) == 1 and "read anew" in refused[0]
    engine.close()
    engine = disk_engine(tmp_path)
    assert usage_of(serve(engine, OPENING)).cached_tokens == 100, "it was not replaced by a sound one"
    engine.close()


def test_kept_logits_that_are_wrong_fail_their_own_request_alone() -> None:
    """Wherever they came from: the engine itself puts them beside those of others."""
    engine = engine_over()
    serve(engine, OPENING)
    checkpoint = engine.runtime.cache.tree.match(PROMPT).checkpoint
    assert checkpoint is not None and checkpoint.done == 100
    checkpoint.logits = torch.zeros(7)
    neighbour = greedy(numbers(2, 30, 500), 8, "n")
    found = serve(engine, neighbour, OPENING)
    same_tokens(reference(odd_runtime(), neighbour.prompt, 8), found[("n", 0)].tokens)
    assert found[("a", 0)].last.finish == "error" and "logits" in str(found[("a", 0)].last.error)
    engine.check()


def test_a_file_larger_than_its_item_can_be_takes_no_memory(tmp_path: Path) -> None:
    """A file full of holes takes no room on the disk either."""
    item = StoredItem("kv", "ab" * 16, "", 0, 20)
    disk = DiskStore(tmp_path, "model", 1 << 24)
    disk.write(item, {"keys": torch.zeros(1)})
    (path,) = tmp_path.rglob("*.safetensors")
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    validator = PoolItemValidator(odd_runtime().pools)
    with pytest.raises(TierStoreError, match="wrong length"):
        disk.read(item, validator.most(item))
    with CacheDirectory(tmp_path).transaction() as index:
        index.execute("UPDATE items SET size = ?", (1 << 40,))
    with pytest.raises(TierStoreError, match=r"at most .* can be right"):
        disk.read(item, validator.most(item))


SHAPES = st.lists(st.integers(0, 9), max_size=4)
VALUES = st.sampled_from((0.0, 1.5, -3e38, NAN, float("inf"), -float("inf")))


def tensors() -> st.SearchStrategy[Tensor]:
    def make(shape: list[int], dtype: torch.dtype, value: float) -> Tensor:
        return torch.full(shape, value if dtype.is_floating_point else int(min(max(value, -9), 9)) if value == value
                          else 0).to(dtype)
    return st.builds(make, SHAPES, st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.int64)), VALUES)


NAMES = st.sampled_from(("keys", "values", "tokens", "recurrent", "conv", "logits", "hidden", "x"))


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_items_never_break_the_validator(data: st.DataObject) -> None:
    """Sound items with tensors replaced, removed and added: refused, with a reason, or just like what was kept."""
    pools = odd_runtime().pools
    validator, kind = PoolItemValidator(pools), data.draw(st.sampled_from(("kv", "state", "final")))
    item = StoredItem(kind, "ab" * 16, "", 0, 5)
    sound = sound_item(item)
    assert validator.refuse(item, sound) == ""
    assert sum(tensor.numel() * tensor.itemsize for tensor in sound.values()) <= validator.most(item)
    changed = dict(sound)
    for name, tensor in data.draw(st.lists(st.tuples(NAMES, tensors() | st.none()), min_size=1, max_size=3)):
        if tensor is None:
            changed.pop(name, None)
        else:
            changed[name] = tensor
    if changed.keys() != sound.keys() or any(changed[name].shape != sound[name].shape for name in sound):
        assert validator.refuse(item, changed)
    else:
        validator.refuse(item, changed)


def sound_item(item: StoredItem) -> Tensors:
    pools = odd_runtime().pools
    if item.kind == "kv":
        length = item.done - item.start
        pools = zip(("keys", "values"), pools.page_tensors, strict=True)
        return {"tokens": torch.arange(length),
                **{name: torch.ones(len(pool), length, *pool.shape[3:]) for name, pool in pools}}
    state = {name: torch.ones_like(pool[:, 0]) for name, pool in pools.named_slots.items()}
    return state if item.kind == "state" else {**state, "logits": torch.arange(509).float()}


@given(st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_engine_over_damaged_files_answers_as_without(tmp_path_factory: pytest.TempPathFactory,
                                                         data: st.DataObject) -> None:
    """Bits, lengths and headers of any file: never a crash, a wait without end, or another token."""
    directory = tmp_path_factory.getbasetemp() / "validator"
    request, expected = greedy(PROMPT[:40], 3), reference(odd_runtime(), PROMPT[:40], 3)
    engine = disk_engine(directory)
    serve(engine, request)
    engine.close()
    files = sorted(directory.rglob("*.safetensors"))
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3)):
        whole = path.read_bytes()
        start = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(start, len(whole)))
        other = data.draw(st.sampled_from(files)).read_bytes()
        path.write_bytes(data.draw(st.sampled_from((
            whole[:start], whole[:start] + bytes(end - start) + whole[end:], whole[:start] + other[start:],
            other, whole[:8] + other[8:], (1 << 62).to_bytes(8, "little") + whole[8:], whole + whole[start:end]))))
    engine = disk_engine(directory)
    found = serve(engine, request)
    same_tokens(expected, found[("a", 0)].tokens)
    engine.close()


def test_short_states_may_have_unwritten_entries() -> None:
    """The convolution's ring is wider than the prefix is long."""
    item = StoredItem("state", "ab" * 16, "", 0, 2)
    tensors = sound_item(item)
    tensors["conv"][:, 2:] = NAN
    validator = PoolItemValidator(odd_runtime().pools)
    assert validator.refuse(item, tensors) == "" and "conv" in validator.refuse(replace(item, done=PAGE), tensors)
