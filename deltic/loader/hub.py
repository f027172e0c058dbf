"""Finds a model by name: a path, the embedded model, or a repository of the Hugging Face hub, which is downloaded.

Also lists and deletes downloads.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from deltic.errors import ConfigError, ModelError, show
from deltic.loader.catalog import Selection, parse_repository, select, similar
from deltic.loader.disk import is_gguf, refuse_pointer, size_of

EMBEDDED: Final = "tiny"
ACCEPTED: Final = ("a GGUF file, a directory with config.json and safetensors files, a Hugging Face name such as "
                   f"Qwen/Qwen3.5-0.8B (short: qwen3.5:0.8b), or {EMBEDDED!r}, the embedded demo model")
_SINGLE_FILES: Final = (".gguf", ".pte")
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})
_VERIFIED: Final = ".deltic-checked"
"""File in a repository's cache folder that lists the verified commits."""

logger = logging.getLogger(__name__)


def resolve(
    model: str | Path | None, revision: str | None = None, token: str | None = None, progress: bool = True
) -> Path:
    """Returns the directory or GGUF file of a model: a path, the embedded model (`tiny` or None), or a downloaded
    repository: `org/name`, `org/name@v1` for a branch, tag or commit, `org/name:Q4_K_M` for one of its GGUF files.

    Downloads resume, use HF_TOKEN unless `token` is given, need enough free space, and are verified. Raises ModelError
    with a remedy if the model is absent, gated, unauthorised, offline or damaged, or if the disk has no space.
    """
    if not isinstance(model, str | Path | None):
        raise ModelError(f"a model is {ACCEPTED}, not {show(model)}")
    if not isinstance(revision, str | None):
        raise ConfigError(f"revision must be text, not {show(revision)}", "revision")
    name = EMBEDDED if model is None else str(model)
    path = local_path(name)
    if path is not None:
        if revision is not None:
            raise ModelError(f"{name} is a local model: leave out the revision ({revision}), which is for models of "
                             "the Hugging Face hub")
        return path
    found = None if isinstance(model, Path) else parse_repository(name, revision)
    if found is None:
        kind = "file" if Path(name).suffix.lower() in (*_SINGLE_FILES, ".safetensors") else "directory"
        raise ModelError(f"there is no {kind} {show(name)}{_suggestion(name)}; a model is {ACCEPTED}")
    return _download(found.repository, found.file, found.revision, token, progress)


def _suggestion(name: str) -> str:
    found = similar(name)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _embedded() -> Path:
    path = Path(str(files("deltic"))) / "models" / EMBEDDED
    if not (path / "config.json").is_file():
        raise ModelError(f"the embedded model is absent from {path}; reinstall deltic")
    return path


def local_path(name: str) -> Path | None:
    """Returns the path of the model's directory or file, if it exists."""
    if name == EMBEDDED:
        return _embedded()
    if not name:
        raise ModelError(f"the model's name is empty; a model is {ACCEPTED}")
    with suppress(OSError, RuntimeError):  # a name too long for a path, a home that does not exist
        path = Path(name).expanduser()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in _SINGLE_FILES) or is_gguf(path):
            return path
        if path.exists():
            refuse_pointer(path)
            kind = "a file" if path.is_file() else "neither a file nor a directory"
            raise ModelError(f"{name} is {kind}; a model is {ACCEPTED}")
    return None


# Downloading


def _download(repository: str, wanted: str | None, revision: str | None, token: str | None, progress: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, token=token)
        chosen = select(repository, [file.rfilename for file in info.siblings or []], wanted)
        missing = _missing_sizes(repository, info, chosen)
        _check_room(repository, sum(missing.values()))
        path = Path(snapshot_download(
            repository, revision=revision, token=token, allow_patterns=[*chosen.patterns],
            ignore_patterns=[*chosen.skipped], tqdm_class=None if progress else _quiet_bar()))
    except ModelError:
        raise
    except Exception as error:  # errors of the client, its transport and the system
        if not is_offline(error):
            raise ModelError(_explain(repository, revision, error)) from error
        return cached(repository, wanted, revision, error)
    with explained_errors(repository, revision):
        _verify(repository, path, token, bool(missing))
    return path / chosen.file if chosen.file else path


def _missing_sizes(repository: str, info: Any, chosen: Selection) -> dict[str, int]:
    """Returns the bytes of each selected file that is not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    wanted = [file for file in info.siblings or [] if chosen.has(file.rfilename)]
    return {file.rfilename: file.size or 0 for file in wanted
            if not isinstance(try_to_load_from_cache(repository, file.rfilename, revision=info.sha), str)}


def _check_room(repository: str, needed: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(f"{repository} needs {size_of(needed)}, but {place} has {size_of(free)} free; "
                         "make room, or set HF_HOME to a larger disk")


def _verify(repository: str, snapshot: Path, token: str | None, changed: bool) -> None:
    """Compares the files of a snapshot with the hub's checksums, unless it is unchanged since it was verified.

    Deletes damaged files, so that the next download replaces them, and raises ModelError.
    """
    from huggingface_hub import HfApi

    marks = snapshot.parents[1] / _VERIFIED
    with suppress(OSError):
        if not changed and snapshot.name in marks.read_text("ascii", "replace").splitlines():
            return
    found = HfApi().verify_repo_checksums(repository, revision=snapshot.name, token=token)
    damaged = []
    for each in found.mismatches:
        failure = _delete(snapshot / each["path"])
        damaged.append(f"{each['path']} ({each['algorithm']} {each['actual'][:12]}..., not "
                       f"{each['expected'][:12]}...){failure}")
    if damaged:
        raise ModelError(f"the download of {repository} is damaged: {', '.join(damaged)}. Damaged files are not used; "
                         f"`deltic pull {repository}` fetches them again")
    with suppress(OSError), marks.open("a", encoding="ascii") as file:
        file.write(f"{snapshot.name}\n")


def _delete(link: Path) -> str:
    """Deletes a file of the cache and its link. Returns a message if the deletion fails."""
    try:
        link.resolve().unlink()
        link.unlink(missing_ok=True)
    except OSError as error:
        return f", which cannot be deleted: {error}"
    return ""


def _quiet_bar() -> Any:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined, unused-ignore]

    class Quiet(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]

    return Quiet


def cached(repository: str, wanted: str | None, revision: str | None, cause: Exception) -> Path:
    """Returns an earlier download, without network access."""
    from huggingface_hub import snapshot_download

    def snapshot(chosen: Selection) -> Path:
        """Returns the snapshot's path. Raises if a file that the hub listed and the patterns select is absent."""
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*chosen.patterns],
                                      ignore_patterns=[*chosen.skipped], local_files_only=True))

    try:
        path = snapshot(Selection(("",)))
        names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
        chosen = select(repository, names, wanted)
        snapshot(chosen)
    except Exception as error:
        raise ModelError(f"{repository} is not downloaded, and the Hugging Face hub cannot be reached "
                         f"({_first_line(cause)}); check the network, unset HF_HUB_OFFLINE, or name {ACCEPTED}"
                         ) from error
    logger.warning("the Hugging Face hub cannot be reached; using the downloaded copy of %s", repository)
    return path / chosen.file if chosen.file else path


# Errors


@contextmanager
def explained_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turns all errors of the client, its transport and the system into ModelErrors."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        if not is_offline(error):
            raise ModelError(_explain(repository, revision, error)) from error
        raise ModelError(f"{repository} cannot be read: the Hugging Face hub cannot be reached ({_first_line(error)}); "
                         "check the network, unset HF_HUB_OFFLINE, or name a directory") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def is_offline(error: Exception) -> bool:
    """Returns True if the hub did not respond; False if it refused the request."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    if isinstance(error, errors.HTTPError):  # type: ignore[attr-defined, unused-ignore]
        return True
    return isinstance(error, OSError) and error.errno not in _DISK_ERRORS


def _explain(repository: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms at {page}, then set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r}; see {page} for its branches and tags"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (f"{repository} is neither a directory here nor a repository on the Hugging Face hub that you "
                f"can see{_suggestion(repository)}; check the spelling, or set HF_TOKEN if it is private")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the Hugging Face hub refuses access to {repository}: set HF_TOKEN to one with read access"
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 404:
        return f"there is no {str(error.response.request.url)[:300]}: check the spelling, and HF_ENDPOINT"
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return f"cannot write to {constants.HF_HUB_CACHE}: {error.strerror}; make room or set HF_HOME"
    return f"{repository} cannot be downloaded: {type(error).__name__}: {str(error)[:300]}"


# Listing and deleting


@dataclass(frozen=True, slots=True)
class Revision:
    """A downloaded commit. refs: branches and tags under which it was downloaded."""

    commit: str
    refs: tuple[str, ...]
    bytes: int
    path: Path

    @property
    def name(self) -> str:
        return self.refs[0] if self.refs else self.commit[:12]

    def is_called(self, name: str) -> bool:
        """Returns True for the name of a branch or tag of this commit, or for the start of the commit's hash."""
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
    """Returns the path of the hub's cache directory."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_below(directory: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(directory.resolve())


def downloads() -> list[Download]:
    """Lists the downloaded models, last used first. Raises ModelError if the cache cannot be read."""
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
