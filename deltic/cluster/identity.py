"""Computes the identity of a model's files, to compare replicas on different machines when they start."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Final

NOT_SHARED: Final = (
    "prefill replicas hand prompts over through cache_dir, which is not the same usable directory for all replicas: "
    "name one that all of them can write to, such as one below /dev/shm on one machine")
_BLOCK, _BLOCKS = 64 << 10, 64
_KINDS = (".safetensors", ".gguf", ".bin", ".json", ".jinja", ".model")


def files_identity(path: Path) -> str:
    """Returns a hash of the names and sizes of a model's files, and of blocks that are spread over each file. The hash
    differs for another model, another revision or an incomplete copy. Reads at most 4 MiB of a file."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _KINDS)
    whole = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        whole.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for block in range(_BLOCKS):
                stream.seek(max(size - _BLOCK, 0) * block // (_BLOCKS - 1))
                whole.update(stream.read(_BLOCK))
                if size <= _BLOCK:
                    break
    return whole.hexdigest()
