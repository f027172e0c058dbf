"""Checks requests and makes their sequences. A request is checked once, when it arrives; an error names the field."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable

import torch

from deltic.cache.memory_plan import distinct, kept_positions
from deltic.engine.sequence import Repeats, Sequence
from deltic.errors import LongPromptError, RequestError, context_bound, too_long
from deltic.params import Embed, EngineRequest, Prompt, SamplingParams, content_keys

_SALTED = 2  # number of keys that are hashed with the salt: 126 bits
_NO_TOKENS = SamplingParams(temperature=0.0, max_tokens=0, max_repeat=0)
"""The sampling parameters of a request for a vector."""


def keys_of(request: EngineRequest, vocabulary: int, max_context: int, pictures: bool) -> array[int]:
    """Returns the keys of a request's prompt, not yet salted. Raises RequestError if it cannot be served. vocabulary:
    its size. max_context: upper bound for prompt and answer. pictures: the model has a vision tower."""
    if not request.prompt:
        raise RequestError("the prompt is empty: give at least one token", "prompt")
    if len(request.prompt) >= max_context:
        raise LongPromptError(too_long(len(request.prompt), context_bound(max_context)), "prompt")
    ids = _array(request.ids)
    if ids is None or not all(0 <= int(bound) < vocabulary for bound in torch.frombuffer(ids, dtype=torch.int64
                                                                                      ).aminmax()):
        raise RequestError(f"the prompt has token ids outside of 0 .. {vocabulary - 1}", "prompt")
    keys = request.prompt.keys if isinstance(request.prompt, Prompt) else None
    if isinstance(request.prompt, Prompt) and request.prompt.pictures and not pictures:
        raise RequestError("this model reads text only: leave pictures out", "prompt")
    if keys and any(0 <= key != id for id, key in zip(request.ids, keys, strict=True)):
        raise RequestError("the prompt has keys that are neither its ids nor negative", "prompt")
    known = array("q", keys) if keys else ids
    if isinstance(request.output, Embed):
        return known
    bias, stops = request.output.logit_bias, request.output.stop_token_ids
    foreign = [token for token in (*bias, *stops) if token >= vocabulary]
    if foreign:
        raise RequestError(f"token id {foreign[0]} is outside of the vocabulary (0 .. {vocabulary - 1})",
                           "logit_bias" if foreign[0] in bias else "stop_token_ids")
    return known


def salted(keys: array[int], salt: str, public: Iterable[array[int]] = ()) -> array[int]:
    """Salts the keys of a prompt in place: a prompt with another salt does not match them.

    The prefix tree, the tiers, the draft models and the scheduler compare keys only, so this one change separates all
    of them. It hashes the first two keys with the salt. If the prompt starts with one of the `public` prompts, it
    hashes the two keys after the longest of these, so that all salts share the public part. An empty salt changes
    nothing.
    """
    start = max((len(prompt) for prompt in public if keys[:len(prompt)] == prompt), default=0)
    for place in range(start, min(start + _SALTED, len(keys)) if salt else start):
        keys[place], = content_keys(f"{salt}\0{keys[place]}".encode(), 1)
    return keys


def new_sequence(request: EngineRequest, choice: int, seed: int | None, keys: array[int], max_context: int,
                 eos: frozenset[int], spacing: int) -> Sequence:
    """Returns the sequence of one choice. seed: the seed of the other choices. keys: the keys of the prompt. eos: ids
    that end an answer of this model. spacing: tokens between checkpoints of a long prompt."""
    params, prompt = request.output if isinstance(request.output, SamplingParams) else _NO_TOKENS, request.ids
    if seed is None:
        seed = secrets.randbits(63) if params.seed is None else params.seed
    limit = max_context if params.max_tokens is None else min(max_context, len(prompt) + params.max_tokens)
    ignores_eos = params.ignore_eos and not request.constraint  # a constraint decides where an answer may end
    ends = frozenset(params.stop_token_ids) | (frozenset() if ignores_eos else eos)
    boundaries = distinct(request.stable_prefixes, len(prompt))
    wanted = () if choice else kept_positions(len(prompt), boundaries, spacing)
    if isinstance(request.output, Embed):
        wanted = wanted[:-1]  # no prompt continues after its end
    return Sequence(
        request,
        choice,
        params,
        seed,
        ends,
        limit,
        tuple(prompt),
        matcher=request.matcher() if request.matcher else None,
        guide=request.guide() if request.guide else None,
        constraint=request.constraint() if request.constraint else None,
        repeats=Repeats(params.max_repeat) if params.max_repeat else None,
        prompt_keys=keys,
        stable_prefixes=boundaries,
        wanted=wanted,
    )


def _array(ids: tuple[int, ...]) -> array[int] | None:
    """Returns the ids as an array; None if an id does not fit 64 bits."""
    try:
        return array("q", ids)
    except OverflowError:
        return None
