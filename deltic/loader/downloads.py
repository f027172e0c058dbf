"""What was downloaded from the hub, and how to be rid of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from deltic.errors import ModelError


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit of a repository. refs: branches and tags that were asked for and meant it."""

    commit: str
    refs: tuple[str, ...]
    bytes: int
    path: Path

    @property
    def name(self) -> str:
        return self.refs[0] if self.refs else self.commit[:12]

    def is_called(self, name: str) -> bool:
        """By branch, tag, or the beginning of the commit."""
        return name in self.refs or (len(name) >= 7 and self.commit.startswith(name))


@dataclass(frozen=True, slots=True)
class Download:
    """A repository. bytes: on the disk; its revisions may share files. used: when last, as seconds since 1970."""

    name: str
    bytes: int
    used: float
    revisions: tuple[Revision, ...]


def place() -> Path:
    """The hub's cache directory."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_below(directory: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def downloads() -> list[Download]:
    """All models, last used first. ModelError if the directory cannot be read."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(place())
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise ModelError(f"{place()} cannot be read: {error}") from error
    models = [repository for repository in found.repos if repository.repo_type == "model"]
    return [Download(model.repo_id, model.size_on_disk, model.last_accessed, tuple(
        Revision(revision.commit_hash, tuple(sorted(revision.refs)), revision.size_on_disk, revision.snapshot_path)
        for revision in sorted(model.revisions, key=lambda revision: -revision.last_modified)))
        for model in sorted(models, key=lambda model: -model.last_accessed)]


def delete(revisions: Iterable[Revision]) -> int:
    """Delete revisions, with their repository if none is left; returns how many bytes that frees."""
    from huggingface_hub import scan_cache_dir

    strategy = scan_cache_dir(place()).delete_revisions(*(revision.commit for revision in revisions))
    strategy.execute()
    left = next((path for path in (*strategy.repos, *strategy.snapshots) if path.exists()), None)
    if left:
        raise ModelError(f"{left} cannot be deleted: who owns it?")
    return strategy.expected_freed_size
