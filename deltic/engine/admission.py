"""What a request asks for is looked at once, when it comes: what cannot be served is refused with the field's name."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch

from deltic.errors import LongPromptError, RequestError, context_bound, too_long
from deltic.params import Embed, EngineRequest, Prompt, content_keys

_SALTED = 2  # keys: 126 bits of hashes


def keys_of(request: EngineRequest, vocabulary: int, max_context: int, pictures: bool) -> array[int]:
    """The keys of its prompt, not yet salted; RequestError if it cannot be served as asked. vocabulary: tokens of the
    model. max_context: those that a prompt and its answer may have together. pictures: the model sees them."""
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


def _array(ids: tuple[int, ...]) -> array[int] | None:
    """None where some are larger than any token."""
    try:
        return array("q", ids)
    except OverflowError:
        return None
