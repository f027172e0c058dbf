"""What is kept on disk serves those only who would have computed the very same bits."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support import every, numbers, odd_shape

from deltic import LLM, RandomModel, SamplingParams
from deltic.cache.offload import identity
from deltic.cache.offload.directory import CacheDirectory, ModelLabel
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.identity import FileMark, hash_file
from deltic.cache.offload.types import StoredItem
from deltic.chat.history_store import AnswerLog, AnswerRecord, ids_digest
from deltic.cli import main
from deltic.errors import ModelError
from deltic.loader.files import find_tensors
from deltic.loader.hub import resolve
from deltic.ops.cpu.library import LEVELS, load

PROMPT = list(numbers(1, 100, 500))
OTHER = list(numbers(2, 60, 500))
Answer = tuple[int, tuple[int, ...]]
BEST = 0 if isinstance(library := load(), str) else library.deltic_best_level()


def models_of(directory: Path) -> list[ModelLabel]:
    return CacheDirectory(directory).models()


def open_llm(model: Any, directory: Path | None, **options: Any) -> LLM:
    given = {"dtype": "float32", "memory": "16MiB", "threads": 1, "speculate": "off", **options}
    return LLM(model, cache_dir=None if directory is None else str(directory), **given)


def ask(llm: LLM, prompt: list[int] = PROMPT) -> Answer:
    """How much of the prompt was known, and the answer."""
    choice = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[0].choices[0]
    return choice.usage.cached_tokens, choice.tokens


def answer(model: Any, directory: Path | None, **options: Any) -> Answer:
    """That of a process of its own, which knows its model: on a busy machine that may take a while."""
    llm, tries = open_llm(model, directory, **options), 0
    for tier in llm.runtime.cache.tiers:
        while not tier._there and not tier._closed and (tries := tries + 1) < 3000:
            time.sleep(0.01)
            tier._settle()
    found = ask(llm)
    llm.close()
    return found


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A copy of the embedded model, with its draft head."""
    return Path(shutil.copytree(str(resolve(None)), tmp_path / "model"))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files need not have lain for a while to be known again."""
    monkeypatch.setattr(identity, "_SETTLED", -1)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed."""
    found: list[str] = []

    def counting(mark: FileMark, stopped: Callable[[], bool]) -> str:
        found.append(Path(mark.path).name)
        return hash_file(mark, stopped)
    monkeypatch.setattr(identity, "hash_file", counting)
    return found


def flip(path: Path, place: int) -> None:
    """Change one bit, as an editor that keeps the time of the last change."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


# Models


def test_one_changed_weight_changes_the_identity(tiny: Path, kept: Path,
                                                                            settled: None) -> None:
    first = answer(tiny, kept)
    assert answer(tiny, kept) == (100, first[1])
    stored = next(tensor for name, tensor in find_tensors(tiny).items() if "embed_tokens" in name)
    flip(stored.path, stored.offset + stored.nbytes // 3 + 1)
    changed = answer(tiny, kept)
    assert changed == answer(tiny, None), "it resumed what the other model had kept"
    assert answer(tiny, kept) == (100, changed[1])
    assert len(models_of(kept)) == 2


def test_one_changed_gguf_weight_changes_the_identity(tmp_path: Path, kept: Path, settled: None) -> None:
    path = tmp_path / "model.gguf"
    assert main(["convert", "tiny", str(path), "--type", "Q8_0"]) == 0
    first = answer(path, kept)
    assert answer(path, kept) == (100, first[1])
    flip(path, path.stat().st_size - 5)
    assert answer(path, kept)[0] == 0


def test_the_same_files_elsewhere_are_the_same_model(tiny: Path, kept: Path, tmp_path: Path) -> None:
    answer(tiny, kept)
    other = Path(shutil.copytree(tiny, tmp_path / "elsewhere"))
    (tmp_path / "link").symlink_to(other)
    assert answer(other, kept)[0] == answer(tmp_path / "link", kept)[0] == 100


def test_draft_head_is_part_of_the_identity(tiny: Path, kept: Path) -> None:
    """Its K/V lies among the model's."""
    assert [answer(tiny, kept, speculate=how)[0] for how in ("off", "mtp", "off", "mtp")] == [0, 0, 100, 100]
    flip(tiny / "mtp.safetensors", (tiny / "mtp.safetensors").stat().st_size - 9)
    assert [answer(tiny, kept, speculate=how)[0] for how in ("off", "mtp")] == [100, 0]


def test_another_tokenizer_reads_no_notes(tiny: Path, kept: Path) -> None:
    """They tell how a conversation was made of ids."""
    answer(tiny, kept)
    with (tiny / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert answer(tiny, kept)[0] == 0


def test_config_is_a_part_of_the_model(tiny: Path, kept: Path) -> None:
    answer(tiny, kept)
    config = json.loads((tiny / "config.json").read_text())
    config["rms_norm_eps"] = 2e-6
    (tiny / "config.json").write_text(json.dumps(config))
    assert answer(tiny, kept)[0] == 0


RANDOM = RandomModel(shape=odd_shape(), initializer_range=0.1)


@pytest.mark.parametrize("change", every(2, [
    {"model": replace(RANDOM, seed=1)}, {"model": replace(RANDOM, initializer_range=0.1001)},
    {"model": replace(RANDOM, shape=odd_shape(rms_norm_eps=1e-5))}, {"ops": ("reference",)}, {"ops": ("mlp=torch",)},
    {"debug_layers": True}, {"dtype": "bfloat16"}]), ids=str)
def test_options_that_change_bits_change_the_identity(change: dict[str, Any], kept: Path) -> None:
    options = {"model": RANDOM, **change}
    model = options.pop("model")
    first = answer(RANDOM, kept)
    other = answer(model, kept, **options)
    assert other[0] == 0 and len(models_of(kept)) == 2
    assert answer(RANDOM, kept) == (100, first[1]) and answer(model, kept, **options) == (100, other[1])


@pytest.mark.skipif(BEST < 1, reason="this processor has one level only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_level_of_instructions_is_told_apart(dtype: str, kept: Path) -> None:
    lower, best = LEVELS[BEST - 1], LEVELS[BEST]
    first = answer(None, kept, cpu_level=lower, dtype=dtype)
    assert answer(None, kept, dtype=dtype) == answer(None, None, dtype=dtype)
    assert answer(None, kept, cpu_level=lower, dtype=dtype) == (100, first[1])
    assert answer(None, kept, cpu_level=best, dtype=dtype)[0] == 100, "it is what auto chooses"
    labels = {(model.label, model.about) for model in models_of(kept)}
    assert labels == {("tiny", f"{dtype}, cpu kernels ({level})") for level in (lower, best)}


def test_thread_count_is_not_part_of_the_identity(tmp_path: Path) -> None:
    content = []
    for threads in (1, 2, 3):
        directory = tmp_path / str(threads)
        answer(None, directory, threads=threads)
        content.append({path.name: path.read_bytes() for path in directory.rglob("*.safetensors")})
    assert len(content[0]) > 1 and content[0] == content[1] == content[2]


def test_quantized_weights_are_told_apart(kept: Path, tiny: Path) -> None:
    answer(tiny, kept)
    if BEST:
        assert [answer(tiny, kept, quant=kind)[0] for kind in ("q8_0", "q4_k", "q8_0")] == [0, 0, 100]


# Hashing


def test_a_file_is_hashed_once(tiny: Path, kept: Path, settled: None, hashed: list[str]) -> None:
    assert [answer(tiny, kept)[0] for _ in range(3)] == [0, 100, 100]
    assert hashed == ["model.safetensors", "tokenizer.json"]
    os.utime(tiny / "model.safetensors")
    assert answer(tiny, kept)[0] == 100 and hashed[2:] == ["model.safetensors"]


def test_a_file_that_was_just_written_is_hashed_again(
        tiny: Path, kept: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another change might not show in its times."""
    monkeypatch.setattr(identity, "_SETTLED", 3600 * 10**9)
    answer(tiny, kept)
    answer(tiny, kept)
    assert len(hashed) == 4 and not remembered(kept)


def test_without_a_directory_nothing_is_hashed(tiny: Path, hashed: list[str]) -> None:
    answer(tiny, None)
    assert not hashed


def remembered(directory: Path) -> list[Any]:
    with CacheDirectory(directory).read() as index:
        return index.execute("SELECT * FROM digests").fetchall()


def test_a_disk_image_with_equal_times_is_told_apart_by_samples(tmp_path: Path, settled: None) -> None:
    path, directory = tmp_path / "weights", CacheDirectory(tmp_path)
    path.write_bytes(bytes(100_000))
    digest = identity.FileDigests(directory).digest(FileMark.of(path), lambda: False)
    path.write_bytes(bytes(50_000) + b"1" * 50_000)
    with directory.transaction() as index:
        index.execute("UPDATE digests SET mark = ?", (json.dumps(astuple(FileMark.of(path))),))
    assert identity.FileDigests(directory).digest(FileMark.of(path), lambda: False) != digest


def test_invalid_digests(tmp_path: Path, settled: None) -> None:
    path, directory = tmp_path / "weights", CacheDirectory(tmp_path)
    path.write_bytes(b"content")
    with directory.transaction() as index:
        index.execute("INSERT INTO digests VALUES (?, 5, NULL, '')", (str(path),))
    first = identity.FileDigests(directory).digest(FileMark.of(path), lambda: False)
    assert identity.FileDigests(directory).find(FileMark.of(path)) == first
    assert first == hash_file(FileMark.of(path), lambda: False)


def test_a_bounded_number_of_digests_is_remembered(tmp_path: Path, settled: None,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_REMEMBERED", 3)
    for number in range(5):
        (tmp_path / str(number)).write_bytes(b"content")
        identity.FileDigests(CacheDirectory(tmp_path)).digest(FileMark.of(tmp_path / str(number)), lambda: False)
    assert [Path(row[0]).name for row in remembered(tmp_path)] == ["2", "3", "4"]


@given(st.binary(max_size=400), st.data())
@settings(max_examples=60)
def test_every_byte_counts(tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "hashed"

    def digest(content: bytes) -> str:
        path.write_bytes(content)
        return hash_file(FileMark.of(path), lambda: False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(identity, "_PIECE", 64)
        patched.setattr(identity, "_AT_ONCE", data.draw(st.sampled_from([0, 200])))
        first = digest(content)
        assert digest(content) == first
        place = data.draw(st.integers(0, len(content)))
        added = data.draw(st.binary(max_size=3))
        other = content[:place] + added + content[place + data.draw(st.integers(0, 2)):]
        assert (digest(other) == first) == (other == content)


def test_a_file_that_changes_while_it_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(100))
    mark = FileMark.of(path)
    path.write_bytes(bytes(101))
    with pytest.raises(ModelError, match="was changed after it had been loaded"):
        hash_file(mark, lambda: False)
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        hash_file(mark, lambda: False)


# In the background


class Gate:
    """Hashing that does not end before it may."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Event()

    def __call__(self, mark: FileMark, stopped: Callable[[], bool]) -> str:
        self.entered.set()
        while not self.open.wait(0.005):
            if stopped():
                raise CancelledError
        return hash_file(mark, stopped)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate()
    monkeypatch.setattr(identity, "hash_file", found)
    monkeypatch.setattr(identity, "_AT_ONCE", 0)
    monkeypatch.setattr(identity, "_SETTLED", 1 << 62)  # no digest is remembered
    yield found
    found.open.set()


def await_tier(llm: LLM) -> None:
    (tier,) = llm.runtime.cache.tiers
    end = time.monotonic() + 30
    while not tier._there and time.monotonic() < end:
        tier._settle()
        time.sleep(0.002)
    assert tier._there


def test_start_does_not_wait_for_hashing(tiny: Path, kept: Path, gate: Gate) -> None:
    """Until the model is known nothing is found; what is kept meanwhile is not lost, and nothing is mixed up."""
    expected = answer(tiny, None)
    llm = open_llm(tiny, kept)
    assert gate.entered.wait(10) and ask(llm) == expected
    llm.engine.check()
    assert not models_of(kept)
    gate.open.set()
    llm.close()
    assert len(models_of(kept)) == 1
    llm = open_llm(tiny, kept)
    await_tier(llm)
    assert ask(llm) == (100, expected[1])
    llm.close()


def test_items_found_once_the_identity_is_known(tiny: Path, kept: Path, gate: Gate) -> None:
    gate.open.set()
    expected = answer(tiny, kept)
    gate.open.clear()
    llm = open_llm(tiny, kept)
    assert ask(llm) == (0, expected[1]) and ask(llm, OTHER)[0] == 0
    gate.open.set()
    await_tier(llm)
    llm.engine.check()
    llm.runtime.cache.clear()
    assert ask(llm) == (100, expected[1])
    llm.close()
    llm = open_llm(tiny, kept)
    await_tier(llm)
    assert ask(llm, OTHER)[0] == 60
    llm.close()


def test_closing_does_not_wait_where_nothing_is_to_be_kept(tiny: Path, kept: Path, gate: Gate) -> None:
    llm = open_llm(tiny, kept)
    llm.close()
    assert not gate.open.is_set() and not models_of(kept)


def test_files_that_change_while_they_are_loaded_keep_nothing(tiny: Path, kept: Path, gate: Gate,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    """What was loaded and what would be hashed are not the same."""
    caplog.set_level(logging.WARNING, "deltic")
    llm = open_llm(tiny, kept)
    expected = ask(llm)
    os.utime(tiny / "model.safetensors")
    gate.open.set()
    (tier,) = llm.runtime.cache.tiers
    end = time.monotonic() + 30
    while not tier._closed and time.monotonic() < end:
        tier._settle()
        time.sleep(0.002)
    assert ask(llm)[1] == expected[1]
    llm.close()
    assert "was changed after it had been loaded" in caplog.text and not models_of(kept)


def test_a_directory_that_cannot_be_used_is_known_before_anything_is_hashed(tiny: Path, gate: Gate,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    llm = open_llm(tiny, Path("/proc/nothing"))
    assert "nothing is kept on disk" in caplog.text and not gate.entered.is_set()
    llm.close()


def test_records_wait_for_the_identity(tmp_path: Path) -> None:
    model: Future[str] = Future()
    notes = DiskRecords(tmp_path, model)
    assert not notes.ready
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(lambda: notes.claim("ab") and notes.put("ab", b"text"))
        time.sleep(0.05)
        assert not written.done()
        model.set_result("model")
        written.result(10)
    assert notes.ready and notes.get("ab") == b"text" and notes.get("ef") is None and not notes.claim("ab")
    assert DiskRecords(tmp_path, "model").get("ab") == b"text"


def test_only_reads_and_writes_wait_for_the_digest(tmp_path: Path) -> None:
    """Such as a prefix that is offered twice meanwhile."""
    model: Future[str] = Future()
    disk, item = DiskStore(tmp_path, model, 1 << 20), StoredItem("kv", "ab" * 16, "", 0, 3)
    for known in (False, True):
        disk.touch(item)
        disk.delete(item)
        disk.close()
        assert disk.ready == known
        if not known:
            model.set_exception(ModelError("no"))


def test_notes_that_never_come(tmp_path: Path) -> None:
    model: Future[str] = Future()
    notes = DiskRecords(tmp_path, model)
    model.set_exception(ModelError("no"))
    notes.put("ab", b"text")
    assert notes.ready and not notes.claim("ab") and notes.get("ab") is None


def test_notes_of_others_are_not_overlooked_while_they_are_unknown(tmp_path: Path) -> None:
    """What memory alone knows might have rivals on disk."""
    model: Future[str] = Future()
    book = AnswerLog(DiskRecords(tmp_path, model), 100)
    note = AnswerRecord("Paris.", "", (), array("i", [1, 2]), ids_digest(array("i", [1, 2])))
    book.put("ab", note)
    assert book.find("ab") == []
    model.set_result("model")
    book.flush()
    assert book.find("ab") == [note]
