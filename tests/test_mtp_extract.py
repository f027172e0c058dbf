"""`deltic mtp extract`: a checkpoint's head alone, bit for bit, from a directory or, in ranges of bytes, the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socket import SHUT_RDWR
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hub_cases import LocalHub, local_hub
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from test_mtp_weights import save_shards, split

from deltic.cli import main
from deltic.config import ModelConfig
from deltic.errors import DelticError, ModelError
from deltic.loader import mtp_head, ranges
from deltic.loader.checkpoint import CheckpointFiles, directory_checkpoint, open_checkpoint
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.model_files import open_model
from deltic.loader.mtp_head import extract_head

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

    extract_head(CheckpointFiles(source, checkpoint.sizes, read), tmp_path / "h.safetensors", "x",
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
        extract_head(CheckpointFiles(source, checkpoint.sizes, read), tmp_path / "x.safetensors", "x")
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


@pytest.fixture
def hub(source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ranges, "_FIRST", 100)
    with local_hub(tmp_path / "cache", monkeypatch) as found:
        found.files |= {path.name: path.read_bytes() for path in source.iterdir()}
        yield found


def test_only_the_head_is_downloaded(hub: LocalHub, tmp_path: Path) -> None:
    for name in ("org/name", "org/name@main"):
        assert main(["mtp", "extract", name, "x.safetensors", "--force"]) == 0
        assert_extracted(tmp_path / "x.safetensors")
    assert main(["mtp", "extract", "org/name", "x.safetensors", "--revision", "main", "--force"]) == 0
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["source"] == "org/name@main"
    names = {name for name, _ in hub.delivered}
    assert "model-00001-of-00003.safetensors" not in names and "model-00002-of-00003.safetensors" in names
    head = sum(tensor.nbytes for tensor in HEAD.values())
    small = sum(len(hub.files[name]) for name in ("config.json", "model.safetensors.index.json"))
    headers = sum(int.from_bytes(hub.files[name][:8], "little") for name in names if name.endswith(".safetensors"))
    assert hub.bytes_delivered() <= 3 * (head + 2 * small + headers + len(names) * 100)


def test_a_head_beside_the_shards_on_the_hub(hub: LocalHub, tmp_path: Path) -> None:
    for name in [*hub.files]:
        if name.startswith("model"):
            del hub.files[name]
    hub.files |= {"model.safetensors": save(random_weights(CONFIG)), "mtp.safetensors": save(HEAD)}
    assert main(["mtp", "extract", "org/name", "x.safetensors"]) == 0
    assert_extracted(tmp_path / "x.safetensors")


def refuses(status: int, code: str = "") -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        if code:
            handler.send_header("X-Error-Code", code)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def hangs_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(SHUT_RDWR)


@pytest.mark.parametrize(("answer", "hint"), [
    (refuses(403, "GatedRepo"), "gated: accept its terms"), (refuses(404, "RevisionNotFound"), "no revision"),
    (refuses(401), "set HF_TOKEN"), (refuses(404), "check the spelling, and HF_ENDPOINT"),
    (refuses(503), "cannot be reached"), (hangs_up, "cannot be reached"), (refuses(418), "cannot be downloaded")])
@pytest.mark.parametrize("place", ["/api/models/org/name", "config.json", "model-00003-of-00003.safetensors"])
def test_refusals_name_a_remedy(hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str,
                                answer: Callable[[BaseHTTPRequestHandler], None], hint: str) -> None:
    hub.instead[place] = answer
    assert hint in fails(["extract", "org/name", "x.safetensors"], capsys)
    assert not (tmp_path / "x.safetensors").exists()


def test_directories_not_looked_up_on_the_hub(hub: LocalHub, source: Path, tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    source.rename(tmp_path / "org" / "name")
    assert open_checkpoint("org/name").place == Path("org/name") and not hub.headers
    with pytest.raises(ModelError, match="no directory"):
        open_checkpoint("a/b/c")
