"""`deltic mtp extract`: a checkpoint's head alone, bit for bit, from a directory or, in ranges of bytes, the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_hub import refusal
from test_mtp_weights import save_shards, split

from deltic.cli import main
from deltic.config import ModelConfig
from deltic.errors import DelticError, ModelError
from deltic.loader import mtp_head
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.model_files import open_model
from deltic.loader.mtp_head import directory_checkpoint, extract_head, open_checkpoint

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "vocab_size": 29, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 99, "eos_token_id": 3, "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}
CONFIG = ModelConfig.from_hf(TEXT)
HEAD = {name: tensor.to(torch.float32 if name.endswith("q_norm.weight") else torch.bfloat16)
        for name, tensor in random_head(CONFIG).items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in three shards, the head in two of them."""
    path = tmp_path / "model"
    path.mkdir()
    save_shards(path, split(random_weights(CONFIG, "bfloat16"), HEAD))
    (path / "config.json").write_text(json.dumps(TEXT))
    return path


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.is_file())


def assert_extracted(path: Path) -> None:
    found = load_file(path)
    assert found.keys() == HEAD.keys()
    for name, tensor in HEAD.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def fails(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["mtp", *argv]) == 2
    return capsys.readouterr().err


# A directory


def test_extract_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "head.safetensors"
    assert main(["mtp", "extract", str(source), str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"path": str(target), "bytes": target.stat().st_size, "tensors": {"BF16": 14, "F32": 1},
                     "weights": sum(tensor.numel() for tensor in HEAD.values())}
    assert_extracted(target)
    with safe_open(target, "pt") as file:
        metadata = file.metadata()
    assert metadata["kind"] == "multi-token-prediction head" and metadata["source"] == "model"
    assert json.loads(metadata["config"])["hidden_size"] == 12
    assert left_in(tmp_path) == ["head.safetensors"]
    assert int.from_bytes(target.read_bytes()[:8], "little") % 8 == 0
    assert main(["mtp", "extract", str(source), str(tmp_path)]) == 0
    assert "14 BF16, 1 F32" in capsys.readouterr().out
    assert (tmp_path / "mtp.safetensors").read_bytes() == target.read_bytes()


def test_extracted_head_beside_another_model(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file(random_weights(CONFIG), other / "model.safetensors")
    (other / "config.json").write_text(json.dumps({**TEXT, "mtp_num_hidden_layers": 0}))
    assert open_model(other).load_head("float32", "cpu") is None
    assert main(["mtp", "extract", str(source), str(other)]) == 0
    found = open_model(other).load_head("float32", "cpu")
    assert found is not None
    for name, tensor in HEAD.items():
        loaded = found[name]
        assert isinstance(loaded, torch.Tensor) and torch.equal(loaded, tensor.float()), name


def test_an_extracted_head_can_be_extracted_again(source: Path, tmp_path: Path) -> None:
    assert main(["mtp", "extract", str(source), str(tmp_path / "a.safetensors")]) == 0
    for path in source.glob("model*"):
        path.unlink()
    (tmp_path / "a.safetensors").rename(source / "mtp.safetensors")
    assert main(["mtp", "extract", str(source), str(tmp_path / "b.safetensors")]) == 0
    assert_extracted(tmp_path / "b.safetensors")


def test_a_head_in_a_folder_of_its_own_can_be_extracted(source: Path, tmp_path: Path) -> None:
    save_shards(source, {"model-00001-of-00003.safetensors": random_weights(CONFIG, "bfloat16")})
    for shard in source.glob("model-0000[23]*"):
        shard.unlink()
    (source / "mtp").mkdir()
    save_file(HEAD, source / "mtp" / "weights.safetensors")
    extract_head(directory_checkpoint(source), tmp_path / "mtp.safetensors", "x")
    assert_extracted(tmp_path / "mtp.safetensors")


def test_in_pieces_with_progress(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_head, "_PIECE", 100)
    checkpoint, reads, seen = directory_checkpoint(source), list[int](), list[tuple[int, int]]()

    def read(name: str, offset: int, count: int) -> bytes:
        reads.append(count)
        return checkpoint.read(name, offset, count)

    extract_head(mtp_head.CheckpointFiles(source, checkpoint.sizes, read), tmp_path / "h.safetensors", "x",
                 lambda done, total: seen.append((done, total)))
    assert_extracted(tmp_path / "h.safetensors")
    total = sum(tensor.nbytes for tensor in HEAD.values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > total / 100
    assert max(reads) < max((source / name).stat().st_size for name in left_in(source))


def test_extract_command_refusals(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mtp.safetensors"
    target.write_text("old")
    assert "exists; give --force to replace it" in fails(["extract", str(source), str(tmp_path)], capsys)
    assert target.read_text() == "old"
    assert main(["mtp", "extract", str(source), str(tmp_path), "--force"]) == 0
    assert_extracted(target)
    (tmp_path / "taken" / "mtp.safetensors").mkdir(parents=True)
    for argv, message in ((["extract", str(source), "x.bin"], "x.bin must end in .safetensors"),
                          (["extract", str(source), ""], "argument DST: is empty"),
                          (["extract", str(source), str(tmp_path / "taken"), "--force"], "is a directory; name a file"),
                          (["extract", str(source), str(tmp_path / "b.safetensors"), "--revision", "main"],
                           "leave out the revision (main)"),
                          (["extract", str(source), "/nowhere/x.safetensors"], "there is no directory '/nowhere'"),
                          (["unpack", str(source), "x.safetensors"], "invalid choice: 'unpack'"),
                          (["extract", "/nowhere", str(tmp_path / "x.safetensors")], "no directory '/nowhere'"),
                          (["extract", str(source)], "DST")):
        assert message in fails(argv, capsys)
    assert left_in(tmp_path) == ["mtp.safetensors"]


def test_the_source_is_not_overwritten(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = source / "model-00003-of-00003.safetensors"
    before = shard.read_bytes()
    message = "is the file that the head is read from; give another name"
    assert message in fails(["extract", str(source), str(shard), "--force"], capsys)
    assert shard.read_bytes() == before


def test_sources_without_a_usable_head(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["extract", str(source), str(tmp_path / "x.safetensors")]
    for name, changes, message in (
            ("a mixture", {"num_experts": 8}, "is a dense model"), ("two layers", {"mtp_num_hidden_layers": 2},
                                                                      "heads of one are supported"),
            ("another size", {"hidden_size": 20}, "mtp.fc.weight' has shape [12, 24]")):
        (source / "config.json").write_text(json.dumps({**TEXT, **changes}))
        assert message in fails(argv, capsys), name
    (source / "config.json").unlink()
    assert "config.json is absent" in fails(argv, capsys)
    (source / "config.json").write_text(json.dumps(TEXT))
    save_shards(source, {"model.safetensors": random_weights(CONFIG)})
    for path in source.glob("model-*"):
        path.unlink()
    assert "has no multi-token-prediction head (tensors mtp.*); take the original model" in fails(argv, capsys)
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF")
    assert "is a GGUF file; take the original model" in fails(["extract", str(gguf), argv[2]], capsys)
    assert left_in(tmp_path) == ["m.gguf"]


def test_truncated_source_leaves_no_file(source: Path, tmp_path: Path) -> None:
    checkpoint = directory_checkpoint(source)

    def read(name: str, offset: int, count: int) -> bytes:
        found = checkpoint.read(name, offset, count)
        return found[:-1] if count == HEAD["mtp.norm.weight"].nbytes else found

    with pytest.raises(ModelError, match=r"safetensors ended while it was read"):
        extract_head(mtp_head.CheckpointFiles(source, checkpoint.sizes, read), tmp_path / "x.safetensors", "x")
    assert left_in(tmp_path) == []


def test_a_full_disk_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=100))
    with pytest.raises(DelticError, match=r"x\.safetensors cannot be written: it needs 0\.01 MB.*make room"):
        extract_head(directory_checkpoint(source), tmp_path / "x.safetensors", "x")
    monkeypatch.undo()
    if Path("/dev/full").exists():
        monkeypatch.setattr("os.getpid", lambda: 77)
        (tmp_path / ".x.safetensors.77.part").symlink_to("/dev/full")
        with pytest.raises(DelticError, match=r"x\.safetensors cannot be written: No space left on device"):
            extract_head(directory_checkpoint(source), tmp_path / "x.safetensors", "x")
    assert left_in(tmp_path) == []


# The hub


@dataclass
class Hub:
    """A repository whose files lie in a directory. read: (file, bytes) of each access."""

    directory: Path
    read: list[tuple[str, int]] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    listing_error: Exception | None = None
    open_error: Exception | None = None
    read_error: Exception | None = None

    def model_info(self, repository: str, **options: Any) -> Any:
        self.asked.append((repository, options))
        if self.listing_error:
            raise self.listing_error
        return SimpleNamespace(sha="abc", siblings=[
            SimpleNamespace(rfilename=path.name, size=path.stat().st_size) for path in self.directory.iterdir()])

    def open(self, path: str, mode: str, **options: Any) -> Any:
        if self.open_error:
            raise self.open_error
        assert path.startswith("org/name/") and mode == "rb"
        assert options == {"revision": "abc", "cache_type": "none"}
        name, hub = path.removeprefix("org/name/"), self

        class File:
            def __init__(self) -> None:
                self.file = BytesIO((hub.directory / name).read_bytes())

            def seek(self, offset: int) -> None:
                self.file.seek(offset)

            def read(self, count: int) -> bytes:
                if hub.read_error:
                    raise hub.read_error
                hub.read.append((name, count))
                return self.file.read(count)

        return File()


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub(source)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda token=None: found)
    monkeypatch.chdir(tmp_path)
    yield found


def test_only_the_head_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    assert main(["mtp", "extract", "org/name", "x.safetensors", "--revision", "v1"]) == 0
    assert_extracted(tmp_path / "x.safetensors")
    assert hub.asked == [("org/name", {"revision": "v1", "files_metadata": True, "token": None})]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["source"] == "org/name@v1"
    assert "model-00001-of-00003.safetensors" not in {name for name, _ in hub.read}
    small = sum((hub.directory / name).stat().st_size for name in ("config.json", "model.safetensors.index.json"))
    shards = sum((hub.directory / f"model-0000{number}-of-00003.safetensors").stat().st_size for number in (2, 3))
    assert sum(count for _, count in hub.read) <= small + shards


def test_a_head_beside_the_shards_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    for path in hub.directory.glob("model*"):
        path.unlink()
    save_file(random_weights(CONFIG), hub.directory / "model.safetensors")
    save_file(HEAD, hub.directory / "mtp.safetensors")
    assert main(["mtp", "extract", "org/name", "x.safetensors"]) == 0
    assert_extracted(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("error", "hint"), [
    (refusal(errors.GatedRepoError, 403), "gated: accept its terms"),
    (refusal(errors.RevisionNotFoundError, 404), "no revision"),
    (refusal(errors.HfHubHTTPError, 401), "set HF_TOKEN"),
    (httpx2.ConnectError("no route"), "cannot be reached (no route); check the network"),
    (ConnectionResetError(104, "reset"), "cannot be reached"),
    (RuntimeError("transfer broke"), "cannot be downloaded: RuntimeError: transfer broke"),
])
@pytest.mark.parametrize("step", ["listing_error", "open_error", "read_error"])
def test_refusals_name_a_remedy(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str,
                                 error: Exception, hint: str) -> None:
    setattr(hub, step, error)
    assert hint in fails(["extract", "org/name", "x.safetensors"], capsys)
    assert left_in(tmp_path) == []


def test_directories_not_looked_up_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    hub.directory.rename(tmp_path / "org" / "name")
    assert open_checkpoint("org/name").place == Path("org/name") and not hub.asked
    with pytest.raises(ModelError, match="no directory"):
        open_checkpoint("a/b/c")
