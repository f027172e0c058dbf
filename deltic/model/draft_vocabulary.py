"""Selects the tokens of a shortened draft head: a fixed base, and adaptive rows for tokens that occur.

A draft reads the matrix of logits once, which is the largest matrix of a small model. Rows for an eighth of a
vocabulary of 250,000 cost little; the choice of their tokens decides how much of a text can be drafted
(docs/speculation.md has the shares by language).
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, Final

import torch
from torch import Tensor

from deltic.ops.capabilities import on_device
from deltic.ops.quantized import PANEL, QTensor
from deltic.ops.types import Block, Weight

_ADAPTIVE: Final = 9
"""One row in `_ADAPTIVE` is adaptive: 4,000 for a base of 32,000. A conversation uses a few hundred tokens outside the
base, so that a dozen conversations fit."""
_FIRST: Final = 0.7
"""The share of the base for the lowest ids, which are English and programs in the vocabularies of the family. With
less, English and programs would lose more than two of a hundred tokens; with more, Korean and Arabic would lose ten."""
_PIECE: Final = 4096
"""Number of rows that are copied at a time when a model is loaded."""
_LEAD: Final = re.compile("[\xc2-\xf4]")
"""The first byte of a non-ASCII character, as byte-level tokenizers spell it. About fifty such bytes are in use, each
for one script or a part of it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The parts of a tokenizer.json that drafts need. ids: token ids by spelling. added: ids of the added tokens, which
    are special tokens and others, such as the markers of tool calls."""

    ids: Mapping[str, int] = field(default_factory=dict)
    added: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str) -> Tokens:
        """Parses the file's text. Returns `NOTHING` if it has another form."""
        try:
            ids = _member(text, "vocab")
            if not isinstance(ids, dict):
                ids = {token: id for id, (token, _) in enumerate(ids)}
            return cls(ids, tuple([int(token["id"]) for token in _member(text, "added_tokens")]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return NOTHING


NOTHING: Final = Tokens()


def _member(text: str, name: str) -> Any:
    """Returns a member of a JSON text by name. Does not parse the merges, which would take longest."""
    found = re.search(rf'"{name}"\s*:\s*', text)
    return json.JSONDecoder().raw_decode(text, found.end())[0] if found else ()


def draftable(base: int, size: int, tokens: Tokens = NOTHING, ends: Iterable[int] = ()) -> list[int] | None:
    """Returns the tokens of a head's rows: a fixed base of `base` tokens, then initial adaptive ones; None: all `size`.

    The base always has `ends` and the added tokens. The lowest ids are 0.7 of the base: byte-pair tokenizers number
    their tokens by frequency (FastMTP, arXiv 2509.18362), but extended vocabularies start anew for each script that was
    added. The rest of the base is therefore the first tokens of each script, with the same share of every script.
    """
    rows = -(-(base + -(-base // (_ADAPTIVE - 1))) // PANEL) * PANEL
    if not base or rows >= size:
        return None
    first = int(base * _FIRST) if tokens.ids else base
    own = dict.fromkeys(chain(ends, tokens.added, range(first), _by_script(tokens.ids, first)))
    own = dict.fromkeys(islice((id for id in own if 0 <= id < size), base))
    return [*islice(dict.fromkeys(chain(own, range(size))), rows)]


def _by_script(ids: Mapping[str, int], first: int) -> list[int]:
    """Returns tokens with non-ASCII letters, from the id `first` on, sorted by relative place within their script."""
    scripts = defaultdict[str, list[int]](list)
    for spelling, id in ids.items():
        lead = _LEAD.search(spelling) if id >= first else None
        if lead:
            scripts[lead[0]].append(id)
    places = [(place / len(script), id) for script in scripts.values() for place, id in enumerate(sorted(script), 1)]
    return [id for _, id in sorted(places)]


class DraftVocabulary:
    """The rows of a shortened head and the token of each row.

    head [N, H]: the rows, in the format of the whole matrix. ids [N] int64, on the same device: their tokens. The
    drafting thread overwrites both in place, between two drafts. A device does this in the order of its stream, so that
    recorded graphs stay valid, and no draft mixes rows of one step with tokens of another. copies: (head, ids) by
    device. size: number of tokens of the whole vocabulary. copied: number of rows that were overwritten until now.
    """

    def __init__(self, whole: Weight, tokens: List[int], devices: Iterable[torch.device] = (),
                 pack: Callable[[Tensor, bool], Block] | None = None) -> None:
        """whole [V, H]: the matrix of all logits, which is kept; or its parts in order, which may be on several
        devices. tokens: as `draftable` returns them. devices: the devices that draft. pack: as in `Ops`, for a plain
        matrix."""
        parts = whole if isinstance(whole, tuple) else (whole,)
        self.size, self.copied = sum(map(len, parts)), 0
        self.ids = torch.tensor(tokens, device=parts[0].data.device)
        # single rows cannot be read from oneDNN's layout, so the rows of such a matrix never change
        self._parts = () if isinstance(parts[0], Tensor) and parts[0].is_mkldnn else parts
        self.head = gather_rows(parts, self.ids)
        if pack is not None and isinstance(self.head, Tensor):
            self.head = pack(self.head, True)
        self.copies = {device: (to_device(self.head, device), self.ids.to(device)) for device in devices}
        base = len(tokens) - len(tokens) // _ADAPTIVE
        self._base = frozenset(tokens[:base])
        self._recent = OrderedDict((tokens[row], row) for row in reversed(range(base, len(tokens))))
        """The adaptive tokens and their rows: tokens that were never seen, then the least recently seen, and so on."""

    def __contains__(self, token: object) -> bool:
        """True if the token has a row."""
        return token in self._base or token in self._recent

    @torch.inference_mode()
    def see(self, tokens: Iterable[int]) -> None:
        """Gives these tokens rows, in place of the least recently seen tokens. Takes some operations for each token,
        and a copy of a row for each new one."""
        if not self._parts:
            return
        changed = dict[int, int]()
        for token in tokens:
            if token in self._base:
                continue
            if token in self._recent:
                self._recent.move_to_end(token)
            else:
                row = self._recent.popitem(last=False)[1]
                self._recent[token], changed[row] = row, token
        if changed:
            self._overwrite(changed)

    def spread(self, logits: Tensor) -> Tensor:
        """Returns logits [T, N] of the rows as logits [T, V] of all tokens, -inf for a token without a row."""
        return logits.new_full((len(logits), self.size), -torch.inf).index_copy_(1, self.ids, logits)

    def _overwrite(self, tokens: Mapping[int, int]) -> None:
        """Overwrites rows. tokens: the new token of each row."""
        host = torch.tensor([*tokens, *tokens.values()])
        rows, ids = on_device(host, self.ids.device).chunk(2)
        if len(self._parts) == 1:
            _put(self.head, rows, self._parts[0], ids)
        else:
            _put_parts(self.head, self._parts, *host.chunk(2))
        self.ids.index_copy_(0, rows, ids)
        for head, own in self.copies.values():
            if own is self.ids:
                continue
            places, new = on_device(host, own.device).chunk(2)
            _put(head, places, self.head, rows)
            own.index_copy_(0, places, new)
        self.copied += len(tokens)


def to_device(weight: Weight, device: torch.device) -> Any:
    """Returns a weight on a device; the weight itself if it is already there."""
    if isinstance(weight, tuple):
        return tuple(to_device(block, device) for block in weight)
    if weight.data.device == device:
        return weight
    return weight.to(device) if isinstance(weight, Tensor) else replace(weight, data=weight.data.to(device))


def gather_rows(parts: List[Block], ids: Tensor | None = None) -> Block:
    """Returns a copy of rows of a matrix, on the device of its first part. ids: the rows; None: all. Waits for the
    devices."""
    if ids is None:
        ids = torch.arange(sum(map(len, parts)), device=parts[0].data.device)
    if len(parts) == 1:
        return _picked(parts[0], ids)
    first = parts[0]
    head = first.new_empty(len(ids), first.shape[1]) if isinstance(first, Tensor) else first.room_for(len(ids))
    for start in range(0, len(ids), _PIECE):
        part = ids[start:start + _PIECE].cpu()
        _put_parts(head, parts, torch.arange(start, start + len(part)), part)
    return head


def _put_parts(head: Block, parts: List[Block], rows: Tensor, ids: Tensor) -> None:
    """Works like `_put`, for a matrix in parts. rows, ids: on the host."""
    begin = 0
    for part in parts:
        own = (ids >= begin) & (ids < begin + len(part))
        if bool(own.any()):
            _put(head, on_device(rows[own], head.data.device), part, on_device(ids[own] - begin, part.data.device))
        begin += len(part)


def _picked(whole: Block, ids: Tensor) -> Block:
    """Returns a copy of the rows `ids` of a matrix."""
    if isinstance(whole, Tensor):
        return (whole.to_dense() if whole.is_mkldnn else whole).index_select(0, ids)
    head = whole.room_for(len(ids))
    for first in range(0, len(ids), _PIECE):
        part = ids[first:first + _PIECE]
        head.put(torch.arange(first, first + len(part), device=ids.device), whole, part)
    return head


def _put(head: Block, rows: Tensor, whole: Block, ids: Tensor) -> None:
    """Overwrites rows of `head` with the rows `ids` of `whole`. rows, ids: on the device of their matrix."""
    device = head.data.device
    if whole.data.device != device:
        whole, ids = to_device(_picked(whole, ids), device), torch.arange(len(ids), device=device)
    if isinstance(head, QTensor):
        assert isinstance(whole, QTensor)
        head.put(rows, whole, ids)
    else:
        assert isinstance(whole, Tensor)
        head.index_copy_(0, rows, whole.index_select(0, ids))
