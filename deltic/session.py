"""`Session`: manual control of one sequence, with the same cache, batches and ops as the engine."""

from __future__ import annotations

import os
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import wraps
from hashlib import blake2b
from operator import index
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload
from weakref import finalize

import torch
from torch import Tensor

from deltic.cache.handles import CacheSnapshot, SequenceCache
from deltic.cache.item_copies import read_state
from deltic.cache.manager import HybridCache
from deltic.cache.offload.state_manifest import SavedState
from deltic.config import ModelConfig
from deltic.engine.arguments import engine_config
from deltic.engine.loading import ModelOverrides, RandomModel, load_any
from deltic.engine.states import StateFiles
from deltic.engine.step_plan import PlannedRow, StepPlan, base_after, image_spans, next_row
from deltic.errors import ConfigError, DegenerateError, RequestError, UnavailableError, forked_from, show
from deltic.export.program import kind_of
from deltic.ops.types import Batch
from deltic.params import MAX_DRAFTS, Draft, Picture, Positions, Prompt, content_keys
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner, batch_logits
from deltic.runner.operator_profile import Profile, profiling

_FLAT = 1e-6
_DENSE = torch.strided
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_LAST = (1 << 30) - 1
"""Maximum rotary position of an input. Positions of later tokens must still fit 32 bits."""

LayerHook = Callable[[int, Tensor], Tensor | None]
Args = ParamSpec("Args")
Result = TypeVar("Result")


def _alone(method: Callable[Concatenate[Session, Args], Result]) -> Callable[Concatenate[Session, Args], Result]:
    """Restricts a method to one thread at a time, in the process that loaded the model."""
    @wraps(method)
    def locked(self: Session, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        if os.getpid() != self._process:
            raise forked_from(self._process)
        with self._lock:
            if not self.runtime.cache.accounts.owns(self._cache):
                raise UnavailableError("this session has been closed: fork another one before its `with` block ends")
            return method(self, *args, **kwargs)
    return locked


class Session:
    """Takes tokens and returns logits. Needs no tokenizer.

        session = Session("org/name")
        logits = session.prefill([1, 2, 3])      # float32 [vocabulary], of the last token
        logits = session.step(int(logits.argmax()))
        snapshot = session.snapshot()
        session.commit([5, 6]); session.restore(snapshot)

    Branches of a conversation share their common K/V:

        first, second = session.fork(2)          # each has its own state

    Every token enters the state exactly once. An error leaves the session unchanged. `verify` computes several tokens,
    and `accept` keeps only the first few:

        drafts = session.draft(7, 2)            # the draft head proposes two tokens after 7
        logits = session.verify([7, *drafts])   # float32 [3, vocabulary]; the state does not change
        session.accept(2)                        # adds 7 and the first draft to the state

    A session has its own model, cache and state. Any thread may call it; calls run one after another. Calls in a forked
    process raise UnavailableError. dtype: default float32, or a compiled model's dtype. config, weights: as in `LLM`.
    """

    def __init__(self, model: str | Path | RandomModel | None = None, dtype: str | None = None, *,
                 revision: str | None = None, config: Any = None, weights: Mapping[str, Tensor] | None = None,
                 **options: Any) -> None:
        compiled = isinstance(model, str | Path) and kind_of(model)
        chosen = engine_config({"dtype": dtype or ("auto" if compiled else "float32"), **options},
                               ["revision", "config", "weights"])
        if isinstance(chosen.speculation, Draft):
            raise ConfigError("speculate=draft is of no use here: give what another Session drafts to verify",
                              "speculate")
        if chosen.batch_invariant:
            raise ConfigError("batch_invariant is of no use here: a session computes what it is given at once, or "
                              "token by token if you step", "batch_invariant")
        self.runtime = load_any(model, chosen, revision, None, True, ModelOverrides(config, weights))
        # each step writes the state to the scratch slot, so that a failed one leaves no trace (L3)
        cache, scratch = self.runtime.cache.admit(), self.runtime.cache.admit()
        assert cache is not None and scratch is not None
        cache.keys = array("q")  # fast to copy
        self._cache: SequenceCache = cache
        self._shares_keys = False  # with the session that it was forked from: copied on write
        # the following fields are shared by all forks
        self._scratch: SequenceCache = scratch
        self._shifts = dict[int, int]()  # the `_shift` of each snapshot, by slot
        self._left = deque[SequenceCache]()  # caches of forks that were garbage-collected
        self._lock, self._process = threading.RLock(), os.getpid()
        self._files = StateFiles(self.runtime)
        self._verified: PlannedRow | None = None
        self._shift = 0  # the offset of the next rotary position from the cursor
        self.config: ModelConfig = self.runtime.config
        """The model's architecture, as in its files."""
        self.vocab_size = self.config.vocab_size
        """Number of token ids, which is the width of logits."""
        self.max_context = self.runtime.memory.max_context
        """Maximum number of tokens in the state."""
        self.device: torch.device = self.runtime.device
        """The device of the model and of the logits."""
        self.has_vision = self.runtime.encode is not None
        """True if `prefill` takes prompts with images."""
        self.has_draft_head = self.runtime.mtp_runner is not None
        """True if the model has a draft head, for `draft`."""

    @property
    def position(self) -> int:
        """Number of tokens in the state."""
        return self._cache.done

    @_alone
    def prefill(self, tokens: Sequence[int] | Prompt, all_logits: bool = False) -> Tensor:
        """Appends tokens. Returns the float32 logits of the last token [V], or of all tokens [n, V].

        A Prompt may have images, for example one that `ChatProcessor.chat` makes from messages; they are encoded
        first. Its rotary positions continue from the session's position.
        """
        logits = self._feed(tokens, all_logits)
        return logits if all_logits else logits[-1]

    @_alone
    def prefill_assembled(self, embeddings: Tensor, positions: Tensor | None = None,
                          all_logits: bool = False) -> Tensor:
        """Appends embeddings [n, hidden_size] in place of tokens. Returns logits as `prefill` does.

        positions [3, n] integers: rotary positions (time, height, width), relative to the session's position; later
        tokens follow the largest. None: consecutive. Raises RequestError for other input, and if numbers are not
        finite.
        """
        rows = self._checked_rows(embeddings)
        count = len(rows)
        axes = None if positions is None else _axes(positions, count)
        digest = blake2b(rows.numpy().tobytes() + repr(axes).encode(), digest_size=16).hexdigest()
        offset = 0 if axes is None else max(map(max, axes)) + 1 - count
        prompt = Prompt((0,) * count, content_keys(digest.encode(), count), axes, offset,
                        (Picture(0, count, digest, None),))
        logits = self._feed(prompt, all_logits, {digest: rows.to(self.runtime.device)})
        return logits if all_logits else logits[-1]

    @_alone
    def step(self, token: int) -> Tensor:
        """Appends one token. Returns its float32 logits [V]."""
        return self._feed([token], False)[-1]

    @_alone
    def commit(self, tokens: Sequence[int]) -> None:
        """Appends tokens without returning logits."""
        self._feed(tokens, False)

    @overload
    def draft(self, /, token: int, count: int, logits: Literal[False] = False) -> list[int]: ...

    @overload
    def draft(self, /, token: int, count: int, logits: Literal[True]) -> tuple[list[int], Tensor]: ...

    @_alone
    @torch.inference_mode()
    def draft(self, token: int, count: int, logits: bool = False) -> list[int] | tuple[list[int], Tensor]:
        """Returns `count` (1 to 12) tokens that the draft head proposes after `token`. The session does not change.

        logits: also return the head's logits, float32 [count, V], one row per draft. They are -inf for tokens that a
        shortened head (`draft_vocab`) cannot draft. Raises RequestError if the model has no draft head.
        """
        token, = self._checked([token])
        head, cache, sequence_cache = self.runtime.mtp_runner, self.runtime.cache, self._cache
        if head is None:
            raise RequestError("this model has no draft head, or was loaded with speculate='off'", "speculate")
        count = _checked_count(count, 1, MAX_DRAFTS)
        if cache.reserve(sequence_cache, count) < count:
            raise RequestError("no pages are left: drop snapshots, or raise memory")
        head.see([token])
        drafts, rows, hidden = [token], list[Tensor](), None
        for depth in range(count):
            last = PlannedRow((drafts[-1],), self.position + depth, sequence_cache.pages, sequence_cache.slot, 1,
                              rotary=self._shift)
            hidden, found = head.draft(self._batch(last), hidden)
            rows.append(found)
            drafts.append(int(found.argmax()))
        return (drafts[1:], torch.cat(rows)) if logits else drafts[1:]

    @_alone
    def verify(self, tokens: Sequence[int]) -> Tensor:
        """Returns the logits [n, V] after each of up to 13 tokens without appending them; `accept` appends them."""
        tokens, self._verified = self._checked(tokens), None
        cache, sequence_cache = self.runtime.cache, self._cache
        if len(tokens) > MAX_DRAFTS + 1:
            raise RequestError(f"{len(tokens)} tokens are too many to verify at once: at most {MAX_DRAFTS + 1}",
                               "tokens")
        if not cache.states.attach_delta_log(sequence_cache):
            raise RequestError("there is no room for a state delta log: raise memory", "memory")
        if cache.reserve(sequence_cache, len(tokens)) < len(tokens):
            raise RequestError("no pages are left: drop snapshots, or raise memory")
        row = PlannedRow(
            tuple(tokens),
            sequence_cache.done,
            sequence_cache.pages,
            sequence_cache.slot,
            len(tokens),
            base=sequence_cache.base,
            delta_log=sequence_cache.delta_log or 0,
            append=cache.states.may_defer(sequence_cache),
            drafts=len(tokens) - 1,
            rotary=self._shift,
        )
        if not row.append:
            row = replace(row, target=self._scratch.slot)
        logits = self.runtime.run(self._batch(row)).clone()
        cache.commit(sequence_cache, 0, base_after(row))  # the step may have advanced the state in the slot
        _check_health(logits)
        self._verified = row
        return logits

    @_alone
    def accept(self, count: int) -> None:
        """Appends the first `count` tokens of the `verify` call directly before; 0 appends none."""
        row, self._verified = self._verified, None
        if row is None:
            raise RequestError("there is nothing to accept: call verify right before", "count")
        count = _checked_count(count, 0, len(row.tokens))
        cache, sequence_cache = self.runtime.cache, self._cache
        self._append_keys(row.tokens[:count])
        cache.commit(sequence_cache, count, base_after(row))
        if self.runtime.mtp_runner and count:
            self.runtime.mtp_runner.settle(sequence_cache.slot, count - 1)
            self.runtime.mtp_runner.see(row.tokens[:count])

    @_alone
    def snapshot(self) -> CacheSnapshot:
        """Saves the current position in the cache. Raises RequestError if memory is short."""
        kept = self.runtime.cache.snapshot(self._cache)
        if kept is None:
            raise RequestError("no room for another snapshot: drop one, or raise max_batch or memory")
        self._shifts[kept.slot] = self._shift
        return kept

    @_alone
    def restore(self, snapshot: CacheSnapshot | None) -> None:
        """Goes back to a snapshot, or to the start for None. A snapshot can be restored any number of times."""
        if snapshot is not None:
            self._check_snapshot(snapshot)
        self._verified = None
        if not self.runtime.cache.restore(self._cache, snapshot):
            raise RequestError("no page is free to return to the snapshot: drop one, or raise memory")
        self._shift = self._shifts[snapshot.slot] if snapshot else 0

    @_alone
    def drop(self, snapshot: CacheSnapshot) -> None:
        """Releases a snapshot's memory."""
        self._check_snapshot(snapshot)
        del self._shifts[snapshot.slot]
        self.runtime.cache.release(snapshot)

    @_alone
    def save(self, directory: str | Path, name: str = "") -> SavedState:
        """Saves the tokens so far, K/V and state as files in a directory. `load` continues from it in any process with
        this model. Returns the saved state with its id. Raises RequestError without tokens or with images."""
        if not self._cache.done:
            raise RequestError("there are no tokens to save: call prefill before")
        if any(token < 0 for token in self._cache.tokens) or self._shift:
            raise RequestError("a session with images cannot be saved: save it before they are read")
        self._verified = None if self._cache.unflushed else self._verified
        return self._files.save_sequence(self._cache, directory, name)

    @_alone
    def load(self, directory: str | Path, state: str | None = None) -> SavedState:
        """Replaces the session's tokens and state by a saved state. Snapshots stay valid. state: its id or a prefix of
        it; None: the only state in the directory. Raises RequestError and changes nothing if it is unusable."""
        owner, saved = self._files.load_sequence(directory, state)
        _give_back(self.runtime.cache, self._cache)
        self._cache, self._verified, self._shift, self._shares_keys = owner, None, 0, False
        finalize(self, self._left.append, owner).atexit = False
        return saved

    @overload
    def fork(self, /) -> Session: ...

    @overload
    def fork(self, /, count: int) -> list[Session]: ...

    @_alone
    def fork(self, count: int | None = None) -> Session | list[Session]:
        """Returns a session at the current position, or a list of `count` sessions, which is faster than single calls.
        Each has its own state and shares the K/V so far. All share this session's model, memory, snapshots and lock. A
        fork releases its memory at the end of its `with` block or when garbage-collected. Raises RequestError if memory
        is short."""
        cache = self.runtime.cache
        wanted = 1 if count is None else _checked_count(count, 1, cache.slots.size)
        while self._left:
            _give_back(cache, self._left.popleft())
        found = list[Session]()
        for own in cache.accounts.forks(self._cache, wanted, self._cache.keys):
            session = copy(self)
            session._cache, session._verified, session._shares_keys = own, None, True
            finalize(session, self._left.append, own).atexit = False
            found.append(session)
        if not found:
            which = "another fork" if count is None else f"{count} more forks"
            raise RequestError(f"no room for {which}: drop some, or raise max_batch or memory", "count")
        return found[0] if count is None else found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Releases the state and K/V of this session or fork, which cannot be used afterwards. Others stay valid."""
        with self._lock:
            _give_back(self.runtime.cache, self._cache)

    def reset(self) -> None:
        """Goes back to the empty sequence. Snapshots stay valid."""
        self.restore(None)

    @contextmanager
    def hook(self, function: LayerHook) -> Iterator[None]:
        """Calls `function`, within a `with` block, with the index of each layer and its output [n, hidden_size] for
        the processed tokens; index -1 is the embeddings. If it returns a tensor, that tensor replaces the output.

        Layers then run one by one, which is slower. Prompts longer than `token_budget` are processed in parts. If the
        function raises an exception, the call ends and the session stays unchanged."""
        if not callable(function):
            raise RequestError(f"hook takes a function of (layer, output), not {show(function)}", "function")
        runtime = self._layered()
        if runtime.options.shards > 1 and runtime.options.on_gpu:
            raise RequestError(f"layers of tp={runtime.options.tp} GPUs cannot be looked at: use tp=1", "tp")
        checked = _checked_hook(function)
        with self._lock:
            runtime.hooks.append(checked)
            try:
                yield
            finally:
                runtime.hooks.remove(checked)

    @contextmanager
    def profile(self) -> Iterator[Profile]:
        """Measures all calls within a `with` block, by phase and operator."""
        with self._lock, profiling(self.runtime) as found:
            yield found

    @_alone
    def hidden_states(self, tokens: Sequence[int] | Prompt) -> Tensor:
        """Appends tokens. Returns the output of each layer, float32 [layers + 1, n, hidden_size], like transformers'
        `output_hidden_states`: entry 0 is the embeddings, and the last entry is after the final norm."""
        runtime, found = self._layered(), dict[int, list[Tensor]]()
        with self.hook(lambda layer, output: found.setdefault(layer, []).append(output.clone())):
            self._feed(tokens, False)
        layers = [torch.cat(parts) for _, parts in sorted(found.items())]
        with torch.inference_mode():
            layers[-1] = runtime.decoder.final_norm(layers[-1])
        return torch.stack([layer.float() for layer in layers])

    @_alone
    def recurrent_states(self) -> dict[int, Tensor]:
        """Returns copies of the recurrent layers' states at the current position, by layer index. Each is float32
        [value heads, key dim, value dim], and zero at the start."""
        runtime, sequence_cache = self._layered(), self._cache
        if sequence_cache.unflushed:
            self._verified = None
            runtime.cache.states.flush(sequence_cache)
        runtime.cache.operations.flush()
        runtime.pools.wait()
        states = read_state(runtime.pools.shards, sequence_cache.slot)["recurrent"].float()
        if not sequence_cache.done:
            states = torch.zeros_like(states)
        linear = self.config.linear
        if runtime.pools.shards[0].tiled and linear is not None:  # GGUF files have another order of heads
            states = states.unflatten(1, (-1, linear.num_key_heads)).transpose(1, 2).flatten(1, 2)
        return dict(zip(self.config.linear_layers, states.clone(), strict=True))

    @_alone
    def batch_logits(self, rows: Sequence[Sequence[int]], all_logits: bool = False) -> list[Tensor]:
        """Returns the logits of each of several independent prompts: of its last token [V], or of all tokens [n, V].
        Batches as many prompts as fit into memory. The session does not change."""
        if isinstance(rows, str) or not isinstance(rows, Sequence | Tensor):
            raise RequestError(f"rows must be a list of lists of token ids, not {show(rows)}", "rows")
        return batch_logits(self.runtime, [self._checked(row, 0) for row in rows], all_logits, _check_health)

    def _layered(self) -> ModelRunner:
        """Returns the model. Raises RequestError if its layers cannot run one by one."""
        runtime = self.runtime
        if not isinstance(runtime, ModelRunner):
            raise RequestError("a compiled model has no layers to look at: load the model itself", "model")
        if runtime.experts is not None and runtime.capabilities.overlaps:
            raise RequestError("layers cannot be looked at while experts lie beside a GPU: leave out `expert_memory`",
                               "expert_memory")
        if runtime.layers is not None:
            raise RequestError("layers cannot be looked at while some lie in host memory: give the GPU more "
                               "(`gpu_memory`)", "gpu_memory")
        return runtime

    def _feed(self, given: Sequence[int] | Prompt, all_logits: bool, rows: dict[str, Tensor] | None = None) -> Tensor:
        """Computes tokens in chunks. Writes states to the scratch slot; slots and cursor change only at the end (L3).
        rows: image embeddings by digest; None: computes them."""
        prompt = given if isinstance(given, Prompt) else None
        tokens, self._verified = self._checked(given.ids if isinstance(given, Prompt) else given), None
        if prompt and prompt.pictures and rows is None:
            rows = {picture.digest: self._encoded(picture) for picture in prompt.pictures}
        cache, sequence_cache, scratch, start = self.runtime.cache, self._cache, self._scratch, self.position
        if cache.reserve(sequence_cache, len(tokens)) < len(tokens):
            raise RequestError("no pages are left: drop snapshots, or raise memory")
        if (len(tokens) > 1 or self.runtime.hooks) and sequence_cache.unflushed and self.runtime.capabilities.verifies:
            cache.states.flush(sequence_cache)  # kernels for prompts require an empty log
        parts, size = [], self.runtime.options.token_budget
        row = next_row(sequence_cache, (), 1, target=scratch.slot)
        for offset in range(0, len(tokens), size):
            end = min(offset + size, len(tokens))
            row = replace(
                row,
                tokens=tuple(tokens[offset:end]),
                done=start + offset,
                rotary=self._rotary(prompt, offset, end),
                images=image_spans(prompt.pictures if prompt else (), offset, end),
            )
            parts.append(self.runtime.run(self._batch(row, all_logits, rows)).clone())
            _check_health(parts[-1])
            row = replace(row, slot=scratch.slot, base=None)
        cache.states.swap(sequence_cache, scratch)
        self._append_keys((prompt and prompt.keys) or tokens)
        if self.runtime.mtp_runner:
            self.runtime.mtp_runner.see(tokens)
        cache.commit(sequence_cache, len(tokens))
        self._shift += prompt.offset if prompt else 0
        return torch.cat(parts) if all_logits else parts[-1]

    def _append_keys(self, keys: Iterable[int]) -> None:
        if self._shares_keys:
            self._cache.keys, self._shares_keys = self._cache.tokens, False
        self._cache.keys.extend(keys)

    def _batch(self, row: PlannedRow, all_logits: bool = False, rows: dict[str, Tensor] | None = None) -> Batch:
        self.runtime.cache.operations.flush()
        return build(StepPlan((row,)), self.runtime.device, all_logits, self.runtime.mtp_runner is not None,
                     image_rows=rows.__getitem__ if rows else None, verified=self.runtime.capabilities.verifies)

    def _rotary(self, prompt: Prompt | None, start: int, end: int) -> Positions | int:
        """Returns the rotary positions of appended tokens, or their offset from the cache indices."""
        if prompt is None or prompt.positions is None:
            return self._shift
        first = self.position + self._shift
        one, two, three = (tuple(place + first for place in axis[start:end]) for axis in prompt.positions)
        return one, two, three

    def _encoded(self, picture: Picture) -> Tensor:
        if self.runtime.encode is None:
            raise RequestError("this model reads text only", "tokens")
        work = self.runtime.encode(picture.content)
        while True:
            try:
                next(work)
            except StopIteration as done:
                found: Tensor = done.value
                return found

    def _checked_rows(self, embeddings: Tensor) -> Tensor:
        """Checks embeddings. Returns them as float32 on the host."""
        width = self.runtime.config.hidden_size
        if not isinstance(embeddings, Tensor) or not embeddings.dtype.is_floating_point or embeddings.layout != _DENSE:
            raise RequestError(f"embeddings must be a dense tensor of floating-point numbers [n, {width}], not "
                               f"{_kind(embeddings)}", "embeddings")
        if embeddings.dim() != 2 or not len(embeddings) or embeddings.shape[1] != width:
            raise RequestError(f"embeddings must be [n, {width}], not {[*embeddings.shape]}", "embeddings")
        rows = embeddings.detach().float().cpu().contiguous()
        if not rows.isfinite().all():
            raise RequestError("embeddings must be finite: some are NaN or infinite", "embeddings")
        return rows

    def _check_snapshot(self, snapshot: CacheSnapshot) -> None:
        if not isinstance(snapshot, CacheSnapshot):
            raise RequestError(f"{show(snapshot)} is no snapshot: give what snapshot() returned", "snapshot")
        if not self.runtime.cache.accounts.owns(snapshot):
            raise RequestError("this snapshot was dropped, or belongs to another session", "snapshot")

    def _checked(self, tokens: Sequence[int], position: int | None = None) -> list[int]:
        """Checks tokens that follow `position` earlier tokens. Returns them as integers."""
        position = self.position if position is None else position
        try:
            tokens = [index(token) for token in tokens]
        except TypeError as error:
            raise RequestError(f"tokens must be integers, not {show(tokens)}", "tokens") from error
        if not tokens:
            raise RequestError("no tokens: give at least one", "tokens")
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise RequestError(f"token id {token} is outside of the vocabulary (0 .. {self.vocab_size - 1})",
                                   "tokens")
        if position + len(tokens) > self.max_context:
            raise RequestError(f"{position} + {len(tokens)} tokens exceed the context of {self.max_context}: "
                               "reset, or raise max_context", "tokens")
        return tokens


def _give_back(cache: HybridCache, own: SequenceCache) -> None:
    if cache.accounts.owns(own):
        cache.release(own)


def _checked_hook(function: LayerHook) -> LayerHook:
    """Returns a hook that also checks the result of `function`."""
    def called(layer: int, output: Tensor) -> Tensor | None:
        changed = function(layer, output)
        if changed is None:
            return None
        if not isinstance(changed, Tensor) or changed.shape != output.shape:
            raise RequestError(f"the hook must return None or a tensor {[*output.shape]} at layer {layer}, not "
                               f"{_kind(changed)}", "function")
        return changed.to(output)
    return called


def _axes(positions: Tensor, count: int) -> Positions:
    """Checks the rotary positions of `count` tokens. Returns them as tuples."""
    if not isinstance(positions, Tensor) or positions.dtype not in _INTEGERS or positions.layout != _DENSE:
        raise RequestError(f"positions must be a tensor of integers [3, {count}], not {_kind(positions)}", "positions")
    if positions.shape != (3, count) or not 0 <= int(positions.min()) <= int(positions.max()) <= _LAST:
        raise RequestError(f"positions must be [3, {count}], each from 0 to {_LAST:,}", "positions")
    one, two, three = map(tuple, positions.tolist())
    return one, two, three


def _kind(value: object) -> str:
    """Describes an invalid value for an error message."""
    return f"a tensor of {value.dtype}, {value.layout}" if isinstance(value, Tensor) else show(value)


def _checked_count(count: int, low: int, high: int) -> int:
    try:
        found = index(count)
    except TypeError as error:
        raise RequestError(f"count must be an integer, not {show(count)}", "count") from error
    if not low <= found <= high:
        raise RequestError(f"count must be from {low} to {high}, not {found}", "count")
    return found


def _check_health(logits: Tensor) -> None:
    low, high = float(logits.min()), float(logits.max())
    if not low - high <= -_FLAT or low == -torch.inf or high == torch.inf:
        raise DegenerateError(f"the logits range from {low} to {high}: weights, dtype or a kernel are broken; set "
                              "debug_layers=True to find the first bad layer, or ops=('reference',)")
