"""Saves prefixes of a model's cache to files, and loads them. They are copied out of the pools as for a tier."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.offload.host import DeviceToHostCopy
from deltic.cache.offload.identity import FileDigests, Identity
from deltic.cache.offload.open import describe_backend, whole_identity
from deltic.cache.offload.state_files import PrefixPart, read_state, write_state
from deltic.cache.offload.state_manifest import (
    LARGEST_RECORD,
    SavedAnswer,
    SavedState,
    StateError,
    StateModel,
)
from deltic.cache.offload.state_stores import StateDirectory
from deltic.cache.offload.tiers import LoadRequest, StoreRequest
from deltic.cache.offload.types import LoadedPrefix, PrefixSource
from deltic.cache.operations import StoreItem
from deltic.cache.radix_tree import Checkpoint
from deltic.cache.tensors import STATE_LAYOUT
from deltic.config import EngineConfig
from deltic.errors import ConfigError, RequestError
from deltic.params import PAGE, EngineRequest
from deltic.runner.model_runner import Model, ModelRunner

if TYPE_CHECKING:
    from deltic.engine.worker import Worker

_MOST_SAVED: Final = 8
"""Number of positions in a saved prefix: its end, and earlier positions at which prompts are likely to diverge."""


@dataclass(frozen=True, slots=True)
class KeptPosition:
    """A position in the pools. logits: the logits of its last token, if known."""

    done: int
    pages: tuple[int, ...]
    slot: int
    logits: Any = None


class KnownAnswer(Protocol):
    """The record of an answer. ids: prompt and answer."""

    @property
    def key(self) -> str: ...

    @property
    def ids(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> bytes: ...


class AnswerKeeper(Protocol):
    """Keeps records of answers."""

    def keep_answer(self, key: str, ids: Sequence[int], data: bytes) -> None:
        """Adds a record, unless it is damaged."""


class StateFiles:
    """Writes prefixes of one model to directories, and reads them. Thread-safe."""

    def __init__(self, runtime: Model, answers: AnswerKeeper | None = None) -> None:
        """answers: keeps records of answers for later prompts."""
        self._runtime, self._answers = runtime, answers
        self._lock = Lock()
        self._model: StateModel | None = None

    @property
    def model(self) -> StateModel:
        """The model as manifests name it. The first call reads the files of the weights, unless the cache directory has
        their digests. Raises ConfigError for a model that is not identified by its files."""
        with self._lock:
            self._model = self._model or _state_model(self._runtime)
        return self._model

    def save_sequence(self, owner: SequenceCache, directory: str | Path, name: str) -> SavedState:
        """Saves all tokens of a sequence. Call it while no step of the sequence is in flight."""
        cache, model = self._runtime.cache, self.model  # may raise, so it comes before anything is copied
        if owner.unflushed:
            cache.states.flush(owner)
        here = KeptPosition(owner.done, tuple(owner.pages[:-(-owner.done // PAGE)]), owner.slot)
        parts = copy_out(cache, array("q", owner.tokens), [here])
        cache.operations.flush()
        return write_state(StateDirectory(directory), model, parts.on_host(), name)

    def load_sequence(self, directory: str | Path, id: str | None) -> tuple[SequenceCache, SavedState]:
        """Returns a sequence at the end of a saved prefix, without checkpoints. Raises RequestError if there is no
        room."""
        prefixes, saved, _ = self.read(directory, id)
        cache, owner = self._runtime.cache, copy_in(self._runtime.cache, prefixes[-1], prefixes[-1].tokens)
        if owner is None:
            raise RequestError("no room for the saved state: drop snapshots, or raise max_batch or memory")
        cache.operations.flush()
        cache.slots.release(owner.checkpoint_slots.values())
        owner.checkpoint_slots = {}
        return owner, saved

    def read(self, directory: str | Path, id: str | None
             ) -> tuple[list[LoadedPrefix], SavedState, SavedAnswer | None]:
        """Works like `read_state`. id: the id of a state or its beginning; None: the only state."""
        store = StateDirectory(directory)
        validator: Any = self._runtime.cache.pools.item_validator
        return read_state(store, store.find(id), self.model, validator, self._runtime.memory.max_context)

    def keeps(self, worker: Worker, request: EngineRequest) -> bool:
        """True if the cache has the state at the very end of a request's prompt, so that it can be saved as it is."""
        def found(engine: Any) -> bool:
            with engine.resting_cache() as cache:
                return cache.tree.at(engine.keys_of(request)) is not None
        return worker.execute(found)

    def save(self, worker: Worker, request: EngineRequest, directory: str | Path, name: str = "",
             answer: KnownAnswer | None = None, most: int | None = None) -> SavedState:
        """Saves the longest prefix of a request's prompt that the cache has. answer: the last answer in it. most: upper
        bound in bytes for the whole directory. Raises StateError if the cache has no prefix."""
        if request.adapter:
            raise StateError("states of adapters cannot be saved: name the base model")
        if any(key != id for key, id in zip(getattr(request.prompt, "keys", ()), request.ids, strict=False)):
            raise StateError("a prompt with pictures cannot be saved: save what comes before them")
        model = self.model  # this may take long, so it comes before the call of the engine
        copies = worker.execute(partial(_copy_out, request=request))
        return write_state(StateDirectory(directory), model, copies(), name, _portable(answer), most)

    def load(self, worker: Worker, directory: str | Path, id: str | None = None, salt: str = "") -> SavedState:
        """Puts a saved prefix into the cache, for requests with this salt. Raises StateError with the reason if this is
        not possible."""
        prefixes, saved, answer = self.read(directory, id)
        for loaded in prefixes:
            # tiers skip new items while many wait to be written
            wait(worker.execute(partial(_copy_in, loaded=loaded, salt=salt)))
        if answer and self._answers and not salt:  # the record's key is for requests without a salt
            with suppress(ValueError):
                data = b64decode(answer.data, validate=True)
                self._answers.keep_answer(answer.key, prefixes[-1].tokens[:answer.tokens], data)
        return saved


def _portable(answer: KnownAnswer | None) -> SavedAnswer | None:
    """Returns an answer in the form of manifests; None if there is no answer, or a very large one."""
    if answer is None or len(answer.data) > LARGEST_RECORD:
        return None
    return SavedAnswer(key=answer.key, tokens=len(answer.ids), data=b64encode(answer.data).decode())


def _state_model(runtime: Model) -> StateModel:
    if not isinstance(runtime, ModelRunner) or runtime.identity is None:
        raise ConfigError("states are saved for models that lie in files, by which they are known again: this one is "
                          "compiled, or was given as tensors")
    options, dtype = runtime.options, runtime.pools.shards[0].keys.dtype
    made, weights = runtime.identity.made, runtime.identity.weights
    whole = whole_identity(made, options, runtime.decoder.ops, dtype)
    if made.facts["random"]:  # random weights differ by dtype and device
        weights = whole
    weights = Identity({**weights.facts, "layout": STATE_LAYOUT}, weights.marks)
    digests = FileDigests(_directory_of(options))
    never = bool  # returns False
    name = Path(runtime.name).name if Path(runtime.name).exists() else runtime.name
    return StateModel(name=name[-500:], weights=weights.digest(digests, never),
                      identity=whole.digest(digests, never), about=describe_backend(whole.facts)[:500])


def _directory_of(options: EngineConfig) -> CacheDirectory | None:
    """Returns the cache directory, which stores digests of files; None if there is none."""
    try:
        return CacheDirectory(options.cache_dir) if options.cache_dir else None
    except ConfigError:  # the tier has logged a warning
        return None


# from the pools


class _CopiedParts:
    """Copies prefixes from the pools as a tier does, in ascending order of their lengths."""

    def __init__(self) -> None:
        self._copier = DeviceToHostCopy()
        self._copies = list[tuple[int, int, Callable[[], Any], Callable[[], Any]]]()
        self.done = 0

    def offer(self, source: PrefixSource) -> None:
        done = len(source.tokens)
        self._copies.append((self.done, done, self._copier(source.run(self.done)), self._copier(source.state())))
        self.done = done

    def on_host(self) -> list[PrefixPart]:
        """Waits for the copies, and returns them."""
        return [PrefixPart(start, done, run(), state()) for start, done, run, state in self._copies]


def copy_out(cache: HybridCache, tokens: array[int], positions: Sequence[KeptPosition]) -> _CopiedParts:
    """Queues copies of a prefix at these ascending positions. They are made when the operations are carried out."""
    parts = _CopiedParts()
    for position in positions:
        request = StoreRequest(tokens[:position.done], position.logits, (parts,))
        cache.operations.append(StoreItem(cache.pools.hold(request), position.pages, position.slot))
    return parts


def _copy_out(engine: Any, request: EngineRequest) -> Callable[[], list[PrefixPart]]:
    with engine.resting_cache() as cache:
        keys = engine.keys_of(request)
        deepest = cache.tree.at(keys) or cache.tree.match(keys).checkpoint
        if deepest is None:
            raise StateError("nothing of this prompt is kept in the cache: raise `memory`, and leave prefix_cache on")
        positions = [KeptPosition(one.done, tuple(cache.tree.path(one)), one.slot, one.logits)
                     for one in _worth_saving(deepest)]
        parts = copy_out(cache, array("q", request.ids), positions)
    if parts.done < deepest.done:
        raise StateError("the prefix could not be copied out of the cache: the log says why")
    return parts.on_host


def _worth_saving(deepest: Checkpoint) -> list[Checkpoint]:
    """Returns a position and the earlier ones at which prompts are likely to resume, in ascending order. Skips
    positions that are less than a page apart: processing the tokens between them is cheaper than a state."""
    found, one = [deepest], deepest.parent
    while one is not None and len(found) < _MOST_SAVED:
        if (one.likely_resume or one.pinned) and found[-1].done - one.done >= PAGE:
            found.append(one)
        one = one.parent
    return found[::-1]


# to the pools


class _Files:
    """Stands for the tier of sequences that start from a file."""

    def __init__(self) -> None:
        self.name, self.hits, self.hit_tokens = "file", 0, 0


def copy_in(cache: HybridCache, loaded: LoadedPrefix, keys: array[int]) -> SequenceCache | None:
    """Returns a sequence cache at the end of a prefix from a file, or of a longer prefix that the cache has; None if it
    lacks pages or slots. keys: the keys of the prefix's tokens."""
    source: Any = _Files()
    return cache.admit(keys, load=LoadRequest(keys, 0, (), loaded=replace(loaded, tokens=keys), tier=source))


def _copy_in(engine: Any, loaded: LoadedPrefix, salt: str) -> list[Future[int]]:
    """Makes a checkpoint of a prefix, which also goes to the tiers. Returns the tiers' pending writes."""
    with engine.resting_cache() as cache:
        if not cache.reuse:
            raise ConfigError("a saved state goes to the prefix cache, which is off: leave out prefix_cache",
                              "prefix_cache")
        keys = engine.keys_of(EngineRequest("", tuple(loaded.tokens), cache_salt=salt))
        if not cache.tree.at(keys) and (owner := copy_in(cache, loaded, keys)):
            owner.likely_resume.add(loaded.done)
            cache.commit_checkpoints(owner, owner.logits)
            cache.release(owner)
    if not cache.tree.at(keys):
        pages = -(-loaded.done // PAGE)
        raise StateError(f"the cache has no room for {pages:,} pages and a state: raise `memory`, or try again when "
                         "fewer requests run")
    return [future for tier in cache.tiers for future in tier.writes]
