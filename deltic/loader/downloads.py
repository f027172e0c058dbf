"""Lists and deletes models in the Hugging Face hub's cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltic.errors import ModelError


@dataclass(frozen=True, slots=True)
class Revision:
    """A downloaded commit. refs: branches and tags by which it was downloaded."""

    commit: str
    refs: tuple[str, ...]
    bytes: int
    path: Path

    @property
    def name(self) -> str:
        return self.refs[0] if self.refs else self.commit[:12]

    def is_called(self, name: str) -> bool:
        """Matches a branch, a tag, or the start of the commit."""
        return name in self.refs or (len(name) >= 7 and self.commit.startswith(name))


@dataclass(frozen=True, slots=True)
class Download:
    """A downloaded repository.

    bytes: size on disk; revisions may share files.
    used: Unix time of the last use.
    """

    name: str
    bytes: int
    used: float
    revisions: tuple[Revision, ...]


def place() -> Path:
    """Returns the hub's cache directory."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_below(directory: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def downloads() -> list[Download]:
    """Lists the models, last used first. Raises ModelError if the cache cannot be read."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir(place())
    except CacheNotFound:
        return []
    except (OSError, ValueError) as error:
        raise ModelError(f"{place()} cannot be read: {error}") from error
    models = [repository for repository in found.repos if repository.repo_type == "model"]
    return [Download(model.repo_id, model.size_on_disk, model.last_accessed, _revisions(model))
            for model in sorted(models, key=lambda model: -model.last_accessed)]


def _revisions(model: Any) -> tuple[Revision, ...]:
    newest_first = sorted(model.revisions, key=lambda revision: -revision.last_modified)
    return tuple(Revision(each.commit_hash, tuple(sorted(each.refs)), each.size_on_disk, each.snapshot_path)
                 for each in newest_first)


def delete(revisions: Iterable[Revision]) -> int:
    """Deletes revisions, and repositories without revisions. Returns the freed bytes."""
    from huggingface_hub import scan_cache_dir

    strategy = scan_cache_dir(place()).delete_revisions(*(revision.commit for revision in revisions))
    strategy.execute()
    left = next((path for path in (*strategy.repos, *strategy.snapshots) if path.exists()), None)
    if left:
        raise ModelError(f"{left} cannot be deleted: check its owner and permissions")
    return strategy.expected_freed_size
