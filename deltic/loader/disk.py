"""Files on disk: recognises models by names and first bytes, reads JSON, writes atomically."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from deltic.errors import DelticError, ModelError, show

_GGUF: Final = b"GGUF"
_POINTER: Final = b"version https://git-lfs"
_OTHER_FORMATS: Final[Mapping[str, str]] = {
    "params.json": "is in the original format of its authors (params.json): take the Hugging Face format, with "
                   "config.json and model.safetensors",
    "model_index.json": "is a diffusers pipeline, which generates pictures: it has no language model to serve",
    "weights.npz": "is an MLX model (weights.npz): take the original checkpoint, or a GGUF file",
    "*.onnx": "is an ONNX model: take the original checkpoint, or a GGUF file",
    "onnx/*.onnx": "has only ONNX weights: take the original checkpoint, or a GGUF file",
    "*.mlpackage": "is a Core ML model: take the original checkpoint, or a GGUF file",
    "openvino_model.xml": "is an OpenVINO model: take the original checkpoint, or a GGUF file",
    "mlc-chat-config.json": "has only the parameters of an mlc-llm model and no library: compile one with deltic "
                            "compile, or take the original checkpoint"}
"""Models of other tools, by a typical file."""
_MAX_LISTED: Final = 3
MAX_INDEX: Final = 64 << 20
DOWNLOAD_AGAIN: Final = "the file is truncated or corrupt, download it again"


def is_gguf(path: Path) -> bool:
    """Returns True if a file starts like a GGUF file, whatever its name: Ollama's blobs have no suffix."""
    return _begins(path, _GGUF)


def has_weights(directory: Path) -> bool:
    """Returns True if a directory has weights of a model, not counting GGUF files, draft heads and adapters."""
    weights = [*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin"),
               *directory.glob("*.safetensors.index.json")]
    return any(not path.name.startswith(("mtp", "adapter_")) for path in weights)


def refuse(directory: Path) -> None:
    """Raises ModelError with cause and remedy if a directory is recognised as something that cannot be loaded."""
    for check in (_refuse_adapter, _refuse_tower, _refuse_other_formats, _refuse_folders):
        check(directory)


def is_pointer(content: bytes) -> bool:
    """Returns True if a file's content starts like a git-lfs pointer."""
    return len(content) >= len(_GGUF) and content.startswith(_POINTER[:len(content)])


def pointer_error(path: Path) -> ModelError:
    return ModelError(f"{path} is a git-lfs pointer and not the file itself: run `git lfs pull` in {path.parent}, or "
                      "download the file")


def refuse_pointer(path: Path) -> None:
    """Raises ModelError if a file is a git-lfs pointer."""
    if _begins(path, _POINTER):
        raise pointer_error(path)


def _begins(path: Path, mark: bytes) -> bool:
    with suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(mark)) == mark
    return False


def _refuse_adapter(directory: Path) -> None:
    path = directory / "adapter_config.json"
    if not path.is_file() or (directory / "config.json").is_file():
        return
    base = None
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise ModelError(f"{directory} is an adapter (LoRA) and no model: serve it with its base model"
                     f"{f' {show(base)}' if base else ''} (deltic serve MODEL --lora name={directory}), or merge it "
                     "(deltic convert MODEL merged.gguf --lora ...)")


def _refuse_tower(directory: Path) -> None:
    if tower := next(directory.glob("*mmproj*.gguf"), None):
        raise ModelError(f"{directory} has a vision tower ({tower.name}) and no model: put the model's own GGUF file "
                         "beside it")


def _refuse_other_formats(directory: Path) -> None:
    for pattern, message in _OTHER_FORMATS.items():
        if next(directory.glob(pattern), None):
            raise ModelError(f"{directory} {message}")


def _refuse_folders(directory: Path) -> None:
    """Refuses a directory whose folders contain models: training checkpoints, or snapshots of the hub's cache."""
    configs = [*directory.glob("*/config.json"), *directory.glob("*/*/config.json")]
    files = [*directory.glob("*/*.gguf"), *directory.glob("*/*/*.gguf")]
    models = sorted({*files, *(path.parent for path in configs if has_weights(path.parent))})
    if models:
        raise ModelError(f"{directory} holds no model itself, but its folders do: name "
                         + " or ".join(str(path) for path in models[-_MAX_LISTED:]))


# Reading


def open_plain(path: Path) -> BinaryIO:
    """Opens a file for reading. Raises OSError for anything but a regular file, such as a pipe, which could block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def read_json(path: Path, limit: int = MAX_INDEX) -> dict[str, Any]:
    """Reads a JSON object of at most `limit` bytes. Raises ModelError naming the file."""
    try:
        with open_plain(path) as file:
            text = file.read(limit + 1)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is absent; {path.parent} is not a complete model directory") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > limit:
        raise ModelError(f"{path} is larger than {limit} bytes, the limit for such a file")
    return parse_json(text, path)


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """Parses a JSON object that came from `path`. Raises ModelError naming the path."""
    if is_pointer(text):
        raise pointer_error(path)
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} does not hold valid JSON ({error}); {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; {DOWNLOAD_AGAIN}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {name[:200]!r} occurs twice")
    return found


# Writing


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that is renamed to `path` on success. OSErrors become DelticErrors that name `path`."""
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with explained(path):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextmanager
def replacing_files(folder: Path, old: Callable[[Path], Iterable[Path]]) -> Iterator[Path]:
    """Creates a temporary directory. On success its files are moved to `folder`, where they replace the files that
    `old` finds. OSErrors become DelticErrors that name `folder`."""
    place = folder.resolve()
    absent = [parent for parent in place.parents if not parent.exists()]
    made = place.with_name(f".{place.name[:200]}.{os.getpid()}.part")
    try:
        with explained(folder):
            made.mkdir(parents=True)
            yield made
            place.mkdir(exist_ok=True)
            new = {path: place / path.name for path in made.iterdir()}
            for path in {*old(place), *new.values()}:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            for path, target in new.items():
                path.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        for parent in absent:
            with suppress(OSError):
                parent.rmdir()


def check_room(path: Path, size: int, advice: str) -> None:
    """Raises DelticError with `advice` if the disk has no room for a file of `size` bytes."""
    with explained(path):
        free = shutil.disk_usage(next(place for place in path.absolute().parents if place.exists())).free
    if size > free:
        raise DelticError(f"{path} cannot be written: it needs {size_of(size)}, but its disk has {size_of(free)} "
                          f"free; {advice}")


def size_of(count: int) -> str:
    """Formats a number of bytes for messages."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns OSErrors into DelticErrors that name this path."""
    try:
        yield
    except OSError as error:
        raise DelticError(f"{path} cannot be written: {error.strerror or error}") from error
