"""The directories that models and conversations are kept in."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import tempfile
from pathlib import Path

from deltic.cli.doctor.findings import GIB, Fault, Finding, gib

_LITTLE_DISK, _MIB = 5 * GIB, 1 << 20


def check_hub(args: argparse.Namespace) -> Finding:
    """Whether models could be downloaded, as far as can be said without asking the hub."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return Finding.of("hub", "huggingface_hub is not installed",
                          [("problem", "pip install huggingface_hub; until then, give models as directories")])
    place, faults = Path(constants.HF_HUB_CACHE), list[Fault]()
    free = shutil.disk_usage(_existing(place)).free
    if _refusal(_existing(place)):
        faults.append(("warning", f"models cannot be downloaded to {place}: make it writable, or set HF_HOME"))
    elif free < _LITTLE_DISK:
        faults.append(("warning", "little room for models: make some, or set HF_HOME to a larger disk"))
    if constants.HF_HUB_OFFLINE:
        faults.append(("warning", "unset HF_HUB_OFFLINE to download models"))
    token = bool(os.environ.get("HF_TOKEN")) or os.path.isfile(constants.HF_TOKEN_PATH)
    return Finding.of("hub", f"{place}, {gib(free)} free, {'a' if token else 'no'} token"
                             f"{', offline' if constants.HF_HUB_OFFLINE else ''}", faults)


def check_cache_dir(args: argparse.Namespace) -> Finding | None:
    """Whether conversations can be kept in --cache-dir, and by whom they can be read."""
    if args.cache_dir is None:
        return None
    from deltic.cache.offload.directory import root_of

    root = root_of(args.cache_dir).absolute()
    existing = _existing(root)
    if root.is_symlink() or not existing.is_dir():
        return Finding.of("cache_dir", f"{existing} is {'a link' if root.is_symlink() else 'no directory'}",
                          [("problem", "name another directory")])
    refusal = _refusal(existing)
    if refusal and (existing != root or not os.access(root, os.R_OK | os.X_OK)):
        return Finding.of("cache_dir", f"{existing} is not writable for this user: {refusal}",
                          [("problem", "name a directory that you own and may write to")])
    if existing != root:
        return Finding.of("cache_dir", f"nothing kept yet, {gib(shutil.disk_usage(existing).free)} free",
                          _disk_faults(existing))
    return _kept(root, refusal)


def _kept(root: Path, refusal: str) -> Finding:
    """What is in a cache directory that is in use. refusal: why nothing can be written to it, if so."""
    found = [entry for entry in os.scandir(root) if entry.is_file(follow_symlinks=False)]
    foreign = sum(_owner(path) != os.geteuid() for path in (root, *map(Path, found)))
    faults = _disk_faults(root)
    if refusal:
        faults.append(("warning", f"it is not writable ({refusal}): what is kept is used, and nothing is added; make "
                                  "it writable, or name another directory"))
    if foreign:
        faults.append(("problem", f"{foreign} files or folders belong to other users: name a directory of your own"))
    if stat.S_IMODE(root.stat().st_mode) & 0o077:
        faults.append(("warning", f"others may read the conversations: chmod 700 {root}"))
    total = sum(_size(entry) for entry in found)
    return Finding.of("cache_dir", f"{total / _MIB:,.1f} MiB in {len(found)} files kept, "
                                   f"{gib(shutil.disk_usage(root).free)} free", faults)


def _existing(path: Path) -> Path:
    """The path itself, or the closest folder above it that is there."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))


def _refusal(path: Path) -> str:
    """Why nothing can be made and written in a folder, found out by trying; empty if it can. Nothing stays of it."""
    try:
        with tempfile.TemporaryDirectory(prefix=".deltic-doctor-", dir=path) as place:
            (Path(place) / "file").write_bytes(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(path, os.R_OK | os.W_OK | os.X_OK) else "Permission denied"


def _disk_faults(path: Path) -> list[Fault]:
    from deltic.cache.offload.directory import check_room

    try:
        check_room(path, 0)
    except OSError:
        return [("warning", "the disk is nearly full, so that nothing more is kept: make room")]
    return []


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # another process may just have deleted it
        return 0


def _owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # another process may just have deleted it
        return os.geteuid()
