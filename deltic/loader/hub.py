"""From what a user calls a model to its files: a directory, the embedded demo, a hub repository."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal

from torch import Tensor

from deltic.config import DType, GenerationDefaults, ModelConfig
from deltic.config.vision import ImageConfig, Vision, VisionConfig
from deltic.errors import ConfigError, ModelError, show
from deltic.loader.catalog import REPOSITORY, repository_of, similar
from deltic.loader.checksums import check_files
from deltic.loader.config_files import MAX_CONFIG, of_file, preprocessors, read_shape
from deltic.loader.files import InMemory, Source, find_tensors, read_json
from deltic.loader.fp8 import Float8
from deltic.loader.gguf.bundled import bundled_tower
from deltic.loader.gguf.config import config_from_gguf, generation_from_gguf
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import GgufSource, load_gguf_head, load_packed, plan_gguf_head, read_file
from deltic.loader.gguf.mmproj import beside, load_mmproj, read_mmproj, vision_from_gguf
from deltic.loader.gguf.tokenizer import TokenizerTexts, tokenizer_from_gguf
from deltic.loader.in_memory import PLACE, in_memory
from deltic.loader.layout import has_weights, is_gguf, refuse, refuse_pointer
from deltic.loader.mtp_head import CheckpointFiles, directory_checkpoint, find_head, head_in_memory, load_stored_head
from deltic.loader.repository import Selection, is_model, select
from deltic.loader.safetensors import Progress, read_directory, read_directory_float8
from deltic.loader.stored import experts_in_directory, experts_in_gguf
from deltic.loader.vision import load_tower, plan_tower
from deltic.loader.writing import size_of
from deltic.ops.quantized import PackedForm
from deltic.ops.stored import StoredExpert
from deltic.ops.types import Block, Weight

EMBEDDED: Final = "tiny"
ACCEPTED: Final = ("a GGUF file, a directory with config.json and safetensors files, a Hugging Face name such as "
                   f"Qwen/Qwen3.5-0.8B (short: qwen3.5:0.8b), or {EMBEDDED!r}, the embedded demo model")

_FILES: Final = (".gguf", ".pte")
"""Models that are one file: weights, and programs, which `artifacts` opens."""
_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk: where it lies, and what its files say.

    gguf: the open file, where it is one.
    vision: what it sees with, if it does. mmproj: the file that this lies in, where `gguf` is one.
    weights: the tensors, where they are in memory instead.
    """

    path: Path
    config: ModelConfig
    generation: GenerationDefaults
    gguf: GgufFile | None = None
    vision: Vision | None = None
    mmproj: GgufFile | None = None
    weights: InMemory | None = None

    @property
    def place(self) -> Path | None:
        """Its directory or file, if it has one."""
        return None if self.path == PLACE else self.path

    @property
    def _stored(self) -> Path | InMemory:
        return self.weights or self.path

    def load(self, dtype: DType | Literal["auto"], device: str, progress: Progress | None) -> dict[str, Tensor]:
        """The weights under our names, as `load_directory` gives them."""
        return dict(self.tensors(dtype, device, progress))

    def tensors(self, dtype: DType | Literal["auto"], device: str, progress: Progress | None, experts: bool = True
                ) -> Iterator[tuple[str, Tensor]]:
        """What `load` gives, one after another in the files' order. experts: theirs too."""
        if self.gguf is not None:
            return read_file(self.gguf, self.config, dtype, device, progress)
        return read_directory(self._stored, self.config, dtype, device, progress, experts)

    def float8_tensors(self, dtype: DType, device: str, progress: Progress | None, experts: bool = True
                       ) -> Iterator[tuple[str, Tensor | Float8]]:
        """As `tensors`, where weights that are stored in float8 stay so."""
        if self.gguf is not None:
            return read_file(self.gguf, self.config, dtype, device, progress)
        return read_directory_float8(self._stored, self.config, dtype, device, progress, experts)

    def load_packed(self, progress: Progress | None, form: PackedForm | None = None, experts: bool = True
                    ) -> dict[str, Weight]:
        """The weights of a GGUF file under our names, as they are in it (`gguf.load.load_packed`)."""
        assert self.gguf is not None
        return load_packed(self.gguf, self.config, progress, form, experts)

    def stored_experts(self, dtype: DType) -> list[list[StoredExpert]]:
        """Where the experts of each layer lie, for a model that computes with numbers of `dtype`."""
        if self.gguf is not None:
            return experts_in_gguf(self.gguf, self.config)
        return experts_in_directory(self.path, self.config, dtype)

    def load_head(self, dtype: DType | Literal["auto"], device: str, packed: bool = False) -> dict[str, Weight] | None:
        """The multi-token-prediction head under our names (`names.expected_head`, and what there is of
        `names.optional_head`), None if there is none: like `load` or, with `packed`, like `load_packed`.

        Raises ModelError naming the tensor that is missing, unknown, doubled, or of another shape or type, and for
        heads of several layers.
        """
        kept: DType = self.config.dtype if dtype == "auto" else dtype
        sources = self.gguf_head()
        if sources:
            return load_gguf_head(sources, self.config, kept, device, packed)
        return {**load_stored_head(self.stored_head(), self.config, kept, device)} or None

    def load_tower(self, dtype: DType | Literal["auto"], device: str, form: PackedForm | None = None
                   ) -> dict[str, Block] | None:
        """The vision tower under our names (`vision.expected_tower`); None if there is none. form: keeps quantized
        matrices as they are."""
        if self.vision is None:
            return None
        kept: DType = self.config.dtype if dtype == "auto" else dtype
        if self.mmproj is not None:
            return load_mmproj(self.mmproj, self.vision.tower, kept, device, form)
        return {**load_tower(plan_tower(self._stored, self.vision.tower), kept, device)}

    def read_tower(self, name: str) -> Tensor:
        """One tensor of the vision tower, which there must be, by our name, in float32."""
        assert self.vision is not None
        if self.mmproj is not None:
            return read_mmproj(self.mmproj, self.vision.tower, name)
        return load_tower({name: plan_tower(self._stored, self.vision.tower)[name]}, "float32", "cpu")[name]

    def gguf_head(self) -> list[GgufSource]:
        """Sources of the head's tensors in a GGUF file; empty if there are none."""
        return [] if self.gguf is None else plan_gguf_head(self.gguf, self.config)

    def stored_head(self) -> dict[str, Source]:
        """The head's tensors in the directory's safetensors files, for a GGUF file in those beside it."""
        if self.weights is not None:
            return head_in_memory(self.weights, self.config)
        directory = self.path if self.gguf is None else self.path.parent
        return find_head(directory_checkpoint(directory), self.config)

    def weight_files(self, head: bool) -> tuple[Path, ...]:
        """The files that the weights come from; head: those of the draft head too."""
        if self.gguf is not None:
            own = self.gguf.paths
        else:
            own = tuple(part.path for stored in find_tensors(self.path).values()
                        for part in (stored, stored.scales) if part)
        beside = self.stored_head().values() if head and not self.gguf_head() else ()
        more = tuple(part.path for stored in beside for part in stored.parts)
        return tuple(dict.fromkeys((*own, *more, *(self.mmproj.paths if self.mmproj else ()))))

    def head_kinds(self) -> dict[str, int]:
        """Bytes of the head by stored type; empty if there is none. Raises ModelError as `load_head` does."""
        stored = [(part.stored.type.name, part.stored.nbytes) for part in self.gguf_head()]
        stored = stored or [(tensor.dtype, tensor.nbytes) for tensor in self.stored_head().values()]
        return {kind: sum(size for other, size in stored if other == kind) for kind, _ in stored}

    def tokenizer(self) -> TokenizerTexts | None:
        """The tokenizer, where it is no file of the directory. ModelError if it cannot be used."""
        if self.gguf is None:
            return None
        with of_file(self.path):
            return tokenizer_from_gguf(self.gguf.metadata)


def open_model(
    model: str | Path | None, revision: str | None = None, token: str | None = None, progress: bool = True,
    mmproj: str | None = None, config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> ModelFiles:
    """Find a model (see `resolve`) and read its config.json and generation_config.json, or its GGUF file's metadata.

    mmproj: the GGUF file of its vision tower; None: that beside its own, if there is one.
    config: what stands in for config.json: another such file, what one holds, or a shape.
    weights: stand in for the tensors of the files, all of them. A model of no name then has no files at all.
    Raises ModelError naming the file and key that cannot be used.
    """
    given = None if weights is None else in_memory(weights)
    directory = PLACE if given and model is None else resolve(model, revision, token, progress)
    single = directory if directory.is_file() else None if given else only_gguf(directory)
    if single is not None:
        if config is not None or given:
            name = "config" if given is None else "weights"
            raise ConfigError(f"{name} is for models of safetensors files: {single} is a GGUF file, which says itself "
                              f"what it is; leave out {name}", name)
        gguf = GgufFile.open(single)
        config = config_from_gguf(gguf)
        seen = _gguf_vision(gguf, config, mmproj)
        return ModelFiles(single, config, generation_from_gguf(gguf, config), gguf, *seen)
    if mmproj is not None:
        raise ModelError(f"{mmproj} cannot be used: {directory} is no GGUF file, and has its vision tower itself if it "
                         "sees")
    tensors = given or directory
    if not given and not has_weights(directory):
        refuse(directory)
    shape, mapping = read_shape(directory, config)
    if not isinstance(config, ModelConfig) and not shape.tie_word_embeddings and _head_is_implied(tensors, mapping):
        shape = replace(shape, tie_word_embeddings=True)
    vision = _vision(directory, tensors, mapping, shape)
    return ModelFiles(directory, shape, _generation(directory, shape), None, vision, None, given)


def only_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no other weights: parts of one model count as one. Some repositories of
    GGUF files have a config.json too."""
    if has_weights(directory):
        return None
    models = [path for path in sorted(directory.iterdir()) if is_model(path.name) and not path.is_dir()]
    if len(models) > 1:
        raise ModelError(f"{directory} has several GGUF files: name one of {', '.join(path.name for path in models)}")
    return models[0] if models else None


def _head_is_implied(tensors: Path | InMemory, mapping: Mapping[str, Any]) -> bool:
    """A checkpoint without a head is tied, unless its config denies it."""
    if "tie_word_embeddings" in {**mapping, **mapping.get("text_config", {})}:
        return False
    return not any(name.endswith("lm_head.weight") for name in find_tensors(tensors))


def _vision(directory: Path, tensors: Path | InMemory, mapping: Mapping[str, Any], config: ModelConfig
            ) -> Vision | None:
    """The tower that the config announces, if its tensors are there."""
    try:
        with of_file(directory / "config.json"):
            tower = VisionConfig.from_hf(mapping, config.hidden_size)
        if tower is None or not plan_tower(tensors, tower):
            return None
        said = preprocessors(directory)
        both = directory / "processor_config.json"
        with of_file(both if both.is_file() else directory / "preprocessor_config.json"):
            return Vision(tower, ImageConfig.from_hf(*said))
    except ModelError as error:
        logger.warning("the vision tower cannot be used, so that pictures are refused: %s", error)
        return None


def _gguf_vision(gguf: GgufFile, config: ModelConfig, mmproj: str | None
                 ) -> tuple[Vision, GgufFile] | tuple[None, None]:
    """The tower in the file that is given, in the text model's own or beside it, and that file."""
    try:
        file = None if mmproj else bundled_tower(gguf)
        path = Path(mmproj).expanduser() if mmproj else None if file else beside(gguf.paths[0])
        if path is not None:
            file = GgufFile.open(path)
        return (None, None) if file is None else (vision_from_gguf(file, gguf, config), file)
    except ModelError as error:
        if mmproj:
            raise
        logger.warning("the vision tower cannot be used, so that pictures are refused: %s", error)
        return None, None


def _generation(directory: Path, config: ModelConfig) -> GenerationDefaults:
    path = directory / "generation_config.json"
    mapping = read_json(path, MAX_CONFIG) if path.exists() else {}
    with of_file(path):
        return GenerationDefaults.from_hf(mapping, config.eos_token_ids)


def resolve(
    model: str | Path | None, revision: str | None = None, token: str | None = None, progress: bool = True
) -> Path:
    """The directory or GGUF file of a model: its own path, the embedded one (`tiny` or None), or what was downloaded of
    a repository: `org/name`, or `org/name:Q4_K_M` for one of its GGUF files.

    Downloads resume, use HF_TOKEN unless `token` is given, start only if the disk has room, and are hashed once.
    Raises ModelError saying what to do: nothing there, gated, unauthorised, offline, no room, damaged.
    """
    if not isinstance(model, str | Path | None):
        raise ModelError(f"a model is {ACCEPTED}, not {show(model)}")
    if not isinstance(revision, str | None):
        raise ConfigError(f"revision must be text, not {show(revision)}", "revision")
    name = EMBEDDED if model is None else str(model)
    path = _embedded() if name == EMBEDDED else _on_disk(name)
    if path is not None:
        if revision is not None:
            raise ModelError(f"{name} is on this machine as it is: leave out the revision ({revision}), which is for "
                             "models of the Hugging Face hub")
        return path
    found = None if isinstance(model, Path) else REPOSITORY.fullmatch(repository_of(name))
    if found is None:
        kind = "file" if Path(name).suffix.lower() in (*_FILES, ".safetensors") else "directory"
        raise ModelError(f"there is no {kind} {show(name)}{_meant(name)}; a model is {ACCEPTED}")
    return _download(found[1], found[2], revision, token, progress)


def _meant(name: str) -> str:
    """Names that are like this one, for a message."""
    found = similar(name)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _on_disk(name: str) -> Path | None:
    """The directory or file of this name, if there is one."""
    if not name:
        raise ModelError(f"the model's name is empty; a model is {ACCEPTED}")
    with suppress(OSError, RuntimeError):  # a name too long for a path, a home that does not exist
        path = Path(name).expanduser()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in _FILES) or is_gguf(path):
            return path
        if path.exists():
            refuse_pointer(path)
            kind = "a file" if path.is_file() else "neither a file nor a directory"
            raise ModelError(f"{name} is {kind}; a model is {ACCEPTED}")
    return None


def open_checkpoint(model: str, revision: str | None = None, token: str | None = None) -> CheckpointFiles:
    """The files of a directory, or of a repository on the hub, of which only those bytes are downloaded that are read.

    Raises ModelError as `resolve` does.
    """
    model = model if Path(model).exists() else repository_of(model)
    found = REPOSITORY.fullmatch(model)
    if found and found[2]:
        raise ModelError(f"{model} is a GGUF file; take the original model, a directory or a Hugging Face name")
    if model == EMBEDDED or Path(model).exists() or not found:
        path = resolve(model, revision, token)
        if path.is_file():
            raise ModelError(f"{path} is a GGUF file; take the original model, a directory or a Hugging Face name")
        return directory_checkpoint(path)
    return _remote_checkpoint(model, revision, token)


def _remote_checkpoint(repository: str, revision: str | None, token: str | None) -> CheckpointFiles:
    from huggingface_hub import HfApi, HfFileSystem

    with _explained(repository, revision):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, token=token)
    system = HfFileSystem(token=token)

    @cache
    def opened(name: str) -> Any:
        return system.open(f"{repository}/{name}", "rb", revision=info.sha, cache_type="none")

    def read(name: str, offset: int, count: int) -> bytes:
        with _explained(repository, revision):
            file = opened(name)
            file.seek(offset)
            found: bytes = file.read(count)
            return found

    return CheckpointFiles(Path(repository), {file.rfilename: file.size or 0 for file in info.siblings or []}, read)


@contextmanager
def _explained(repository: str, revision: str | None) -> Iterator[None]:
    """Whatever the client raises, its own errors, its transport's or the system's, becomes a ModelError."""
    try:
        yield
    except Exception as error:
        if not _is_offline(error):
            raise ModelError(_explain(repository, revision, error)) from error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"{repository} cannot be read: the Hugging Face hub cannot be reached ({reason}); check the "
                         "network, unset HF_HUB_OFFLINE, or name a directory") from error


def _embedded() -> Path:
    path = Path(str(files("deltic"))) / "models" / EMBEDDED
    if not (path / "config.json").is_file():
        raise ModelError(f"the embedded model is absent from {path}; reinstall deltic")
    return path


def _download(repository: str, wanted: str | None, revision: str | None, token: str | None, progress: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined, unused-ignore]

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, token=token)
        chosen = select(repository, [file.rfilename for file in info.siblings or []], wanted)
        _check_room(repository, _missing_sizes(repository, info, chosen))
        bar = None if progress else _quiet_bar()
        path = Path(snapshot_download(repository, revision=revision, token=token, allow_patterns=[*chosen.patterns],
                                      ignore_patterns=[*chosen.skipped], tqdm_class=bar))
        if path.name != info.sha:  # it has moved on meanwhile
            info = HfApi().model_info(repository, revision=path.name, files_metadata=True, token=token)
        check_files(repository, path, _digests(info, chosen), bar or tqdm)
        return path / chosen.file if chosen.file else path
    except ModelError:
        raise
    except Exception as error:  # the client raises its own errors, its transport's and the system's
        if not _is_offline(error):
            raise ModelError(_explain(repository, revision, error)) from error
        return _cached(repository, wanted, revision, error)


def _digests(info: Any, chosen: Selection) -> dict[str, str]:
    """Of each file that is downloaded: the SHA-256 of large ones, else git's name of the blob."""
    found = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in info.siblings or []}
    return {name: digest for name, digest in found.items() if digest and chosen.has(name)}


def _missing_sizes(repository: str, info: Any, chosen: Selection) -> dict[str, int]:
    """Bytes of each file that is wanted and not in the cache yet."""
    from huggingface_hub import try_to_load_from_cache

    return {file.rfilename: file.size or 0 for file in info.siblings or [] if chosen.has(file.rfilename)
            and not isinstance(try_to_load_from_cache(repository, file.rfilename, revision=info.sha), str)}


def _check_room(repository: str, sizes: Mapping[str, int]) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (place, *place.absolute().parents) if path.exists())
    needed, free = sum(sizes.values()), shutil.disk_usage(existing).free
    if needed > free:
        raise ModelError(f"{repository} needs {size_of(needed)}, but {place} has {size_of(free)} free; "
                         "make room, or set HF_HOME to a larger disk")


def _quiet_bar() -> Any:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined, unused-ignore]

    class Quiet(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]

    return Quiet


def _is_offline(error: Exception) -> bool:
    """No answer from the hub, as opposed to a refusal."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500
    if isinstance(error, errors.HTTPError):  # type: ignore[attr-defined, unused-ignore]
        return True
    return isinstance(error, OSError) and error.errno not in _DISK_ERRORS


def _cached(repository: str, wanted: str | None, revision: str | None, cause: Exception) -> Path:
    from huggingface_hub import snapshot_download

    def snapshot(chosen: Selection) -> Path:
        """Where it is; an error if the hub has said of files with such names that are not here."""
        return Path(snapshot_download(repository, revision=revision, allow_patterns=[*chosen.patterns],
                                      ignore_patterns=[*chosen.skipped], local_files_only=True))

    try:
        path = snapshot(Selection(("",)))
        chosen = select(repository, [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()],
                        wanted)
        snapshot(chosen)
    except Exception as error:
        reason = str(cause).strip().split("\n")[0]
        raise ModelError(f"{repository} is not downloaded, and the Hugging Face hub cannot be reached "
                         f"({reason}); check the network, unset HF_HUB_OFFLINE, or name {ACCEPTED}"
                         ) from error
    logger.warning("the Hugging Face hub cannot be reached; using the downloaded copy of %s", repository)
    return path / chosen.file if chosen.file else path


def _explain(repository: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    page = f"https://huggingface.co/{repository}"
    if isinstance(error, errors.GatedRepoError):
        return f"{repository} is gated: accept its terms at {page}, then set HF_TOKEN to your token"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision!r}; see {page} for its branches and tags"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (f"{repository} is neither a directory here nor a repository on the Hugging Face hub that "
                f"you may see{_meant(repository)}; check the spelling, or set HF_TOKEN if it is private")
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the Hugging Face hub refuses access to {repository}: set HF_TOKEN to one that may read it"
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return f"cannot write to {constants.HF_HUB_CACHE}: {error.strerror}; make room or set HF_HOME"
    return f"{repository} cannot be downloaded: {type(error).__name__}: {str(error)[:300]}"
