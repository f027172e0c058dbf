"""`deltic compile` and `deltic convert` check their arguments before the work, and leave no incomplete files."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deltic.embeddings.compiled  # noqa: F401  before `parse_target` is replaced
from deltic.cli import main
from deltic.errors import ConfigError, DelticError
from deltic.export.tvm import compiler
from deltic.loader import model_files, vision
from deltic.loader.gguf import convert
from deltic.loader.model_files import ModelFiles


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """A compiler that writes its files, and raises the error in the list if there is one."""
    errors: list[BaseException] = []

    def compile_model(files: ModelFiles, folder: Path, **options: Any) -> compiler.Compiled:
        for name in ("config.json", "rt.so", "params_shard_0.bin"):
            (folder / name).write_text("new")
        if errors:
            raise errors[0]
        return compiler.Compiled(1, 2)

    monkeypatch.setattr("deltic.cli.convert.require_extra", lambda extra: None)
    monkeypatch.setattr(compiler, "compile_model", compile_model)
    monkeypatch.setattr(compiler, "parse_target", lambda text: SimpleNamespace(library="rt.so", device="cpu"))
    return errors


@pytest.mark.parametrize(("error", "said"), [
    (ConfigError("target 'foo' is not supported", "target"), "target 'foo'"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "out cannot be written: No space left on device")])
def test_a_failed_compile_can_be_repeated(error: BaseException, said: str, compiling: list[BaseException],
                                          tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiling.append(error)
    argv = ["compile", "tiny", "-o", str(tmp_path / "out")]
    assert main(argv) == 2 and said in capsys.readouterr().err and not list(tmp_path.iterdir())
    compiling.clear()
    assert main(argv) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and len(list((tmp_path / "out").iterdir())) == 3


def test_old_files_are_replaced(compiling: list[BaseException], tmp_path: Path) -> None:
    for name in ("rt.so", "params_shard_9.bin", "notes.txt"):
        (tmp_path / name).write_text("old")
    argv = ["compile", "tiny", "-o", str(tmp_path), "--force"]
    compiling.append(ConfigError("no", "target"))
    assert main(argv) == 2 and {path.read_text() for path in tmp_path.iterdir()} == {"old"}
    compiling.clear()
    assert main(argv) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "rt.so": "new", "params_shard_0.bin": "new", "config.json": "new", "notes.txt": "old"}


def test_a_failed_compile_leaves_no_directory(compiling: list[BaseException], tmp_path: Path) -> None:
    compiling.append(ConfigError("no", "target"))
    argv = ["compile", "tiny", "-o", str(tmp_path / "new" / "newer" / "out")]
    assert main(argv) == 2 and not list(tmp_path.iterdir())
    compiling.clear()
    assert main(argv) == 0 and [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_wrong_output_is_refused_before_the_work(compiling: list[BaseException], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    compiling.append(AssertionError("it was compiled"))
    for number, make in enumerate((os.mkfifo, Path.touch, lambda path: path.symlink_to("nowhere"))):
        make(path := tmp_path / str(number))
        assert main(["compile", "tiny", "-o", str(path)]) == 2
        assert f"{path} is not a directory" in capsys.readouterr().err


def test_templates_of_an_older_model_do_not_stay(compiling: list[BaseException], tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    write = compiler.compile_model

    def with_templates(files: ModelFiles, folder: Path, **options: Any) -> compiler.Compiled:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "new.jinja").write_text("new")
        return write(files, folder, **options)

    monkeypatch.setattr(compiler, "compile_model", with_templates)
    for name in ("rt.so", "chat_template.jinja", "additional_chat_templates/old.jinja"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("old")
    assert main(["compile", "tiny", "-o", str(tmp_path), "--force"]) == 0
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        "config.json", "rt.so", "params_shard_0.bin", "additional_chat_templates/new.jinja"}


def test_missing_disk_space_is_reported_before_the_work(compiling: list[BaseException], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compiling.append(AssertionError("it was compiled"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert main(["compile", "tiny", "-o", str(tmp_path / "new" / "out")]) == 2
    assert "out cannot be written: it needs 18" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_target_is_checked_before_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tvm", reason="the extra deltic[tvm] is not installed")
    for target, message in (
            ("foo", "target 'foo' is not supported"), ("", "only llvm"),
            ("llvm foo", "'foo' must be of the form -mcpu=NAME"), ("llvm -foo=1", "is not one that TVM knows"),
            ("llvm -mcpu=foo", "LLVM knows no processor 'foo'")):
        assert main(["compile", "no/such/model", "--target", target, "-o", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err and not list(tmp_path.iterdir()), target


@pytest.mark.parametrize("there", [False, True])
def test_a_model_and_its_vision_tower_are_written_together(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    def full(path: Path, *rest: Any) -> int:
        raise DelticError(f"{path} cannot be written: its disk is full")

    def written(path: Path, *rest: Any) -> int:
        return path.write_text("tower")

    model, tower = tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    seeing = replace(model_files.open_model("tiny"), vision=SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(model_files, "open_model", lambda source, revision: seeing)
    monkeypatch.setattr(vision, "write_mmproj", full)
    assert main(["convert", "tiny", str(model)]) == 2 and "mmproj-m.gguf cannot" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    if there:
        tower.write_text("old")
    monkeypatch.setattr(vision, "write_mmproj", written)
    monkeypatch.setattr(convert, "convert", lambda files, tokenizer, name, path, *rest: full(path))
    assert main(["convert", "tiny", str(model), "--force"]) == 2 and "/m.gguf cannot" in capsys.readouterr().err
    assert not model.exists() and tower.exists() == there
