"""Saved prefixes: a manifest that names a model, tokens and items by their content. Needs no torch.

    STORE/
        SHA256.json           a manifest; the SHA-256 of its bytes is the id of the saved prefix
        SHA256.safetensors    an item in the disk tier's format, named by the SHA-256 of its bytes

Prefixes that begin with the same tokens share items. A changed file no longer has the hash in its name and is refused.
A hash does not show who made a file: load only from stores that you trust.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deltic.cache.offload.types import Kind, PrefixHash, StoredItem
from deltic.errors import RequestError, show

MANIFEST_SUFFIX: Final = ".json"
FORMAT: Final = "deltic-state"
VERSION: Final = 1
LARGEST_MANIFEST: Final = 16 << 20
LARGEST_ITEM: Final = 1 << 40
MOST_BOUNDARIES: Final = 64
_MOST_TOKENS: Final = 1 << 22
LARGEST_RECORD: Final = 3 << 20
"""Maximum bytes of the record of an answer."""
_ID = re.compile(r"[0-9a-f]{64}")

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ShortDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=500)]
Count = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]


class StateError(RequestError):
    """A saved prefix is missing, damaged, or belongs to another model."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "state")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StateModel(_Record):
    """The model that wrote a prefix. weights: digest of its weights, equal for all dtypes and devices. identity: digest
    under which the disk tier stores its items. about: how items are computed, for people."""

    name: Text
    weights: ShortDigest
    identity: ShortDigest
    about: Text


class ItemFile(_Record):
    """The file of an item. start, done, kind: as in `StoredItem`."""

    kind: Kind
    start: Count
    done: Count
    size: Annotated[int, Field(ge=8, le=LARGEST_ITEM)]
    sha256: Digest


class SavedAnswer(_Record):
    """The record of a conversation's last answer, which turns the template's prompt into the tokens that the model
    generated. key: key of the record. tokens: count up to its end. data: the record without tokens, in base64."""

    key: ShortDigest
    tokens: Count
    data: Annotated[str, Field(max_length=4 * LARGEST_RECORD // 3 + 4)]


class Manifest(_Record):
    """A saved prefix. boundaries: token counts with a recurrent state, ascending; the last one is the prefix's length.
    items: for each boundary the K/V since the previous boundary, then the state. dtypes: dtypes of the items' tensors,
    for people. answer: the record of the conversation's last answer, if there is one."""

    format: Literal["deltic-state"]
    version: Annotated[int, Field(ge=VERSION, le=VERSION)]
    name: Text
    created: Annotated[int, Field(ge=0, le=1 << 40)]
    model: StateModel
    dtypes: Annotated[dict[Text, Text], Field(max_length=16)]
    tokens: Annotated[list[TokenId], Field(min_length=1, max_length=_MOST_TOKENS)]
    boundaries: Annotated[list[Count], Field(min_length=1, max_length=MOST_BOUNDARIES)]
    items: Annotated[list[ItemFile], Field(min_length=2, max_length=2 * MOST_BOUNDARIES)]
    answer: SavedAnswer | None

    @property
    def size(self) -> int:
        """Bytes of all items."""
        return sum(item.size for item in self.items)

    def encoded(self) -> bytes:
        return json.dumps(self.model_dump(), ensure_ascii=False, separators=(",", ":")).encode()

    def stored_items(self) -> list[tuple[StoredItem, ItemFile]]:
        """Returns the items with their keys."""
        prefix, parent, found = PrefixHash(array("q", self.tokens)), "", list[tuple[StoredItem, ItemFile]]()
        for run, state in zip(self.items[::2], self.items[1::2], strict=True):
            key = prefix.key(run.done)
            found += [(StoredItem(file.kind, key, parent, file.start, file.done, file.size), file)
                      for file in (run, state)]
            parent = key
        return found

    def problem(self) -> str:
        """Returns the reason why tokens, boundaries and items do not fit together; empty if they do."""
        runs, states = self.items[::2], self.items[1::2]
        ends = [0, *self.boundaries]
        if any(start >= end for start, end in pairwise(ends)) or ends[-1] != len(self.tokens):
            return "its boundaries do not fit its tokens"
        spans = [*pairwise(ends)]
        if [(item.start, item.done) for item in runs] != spans or [(item.start, item.done) for item in states] != spans:
            return "its items do not fit its boundaries"
        if any(item.kind != "kv" for item in runs) or any(item.kind == "kv" for item in states):
            return "its items are not K/V and states in turn"
        if self.answer and self.answer.tokens > len(self.tokens):
            return "its answer does not fit its tokens"
        return ""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The description of a saved prefix. id: id of its manifest. tokens: its length. bytes: bytes of its items. exact:
    True if the next tokens have the same bits as without the file; False if another backend or dtype wrote it."""

    id: str
    name: str
    tokens: int
    boundaries: tuple[int, ...]
    bytes: int
    created: int
    model: str
    about: str
    exact: bool | None = None

    @classmethod
    def of(cls, id: str, manifest: Manifest, exact: bool | None = None) -> SavedState:
        return cls(id, manifest.name, len(manifest.tokens), tuple(manifest.boundaries), manifest.size,
                   manifest.created, manifest.model.name, manifest.model.about, exact)


def checked_id(id: object) -> str:
    """Returns `id`, which is then safe as part of a file name. Raises StateError if it is not a valid id."""
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise StateError(f"{show(id)} is no id of a saved state: it has 64 hexadecimal digits, as `deltic state ls` "
                         "shows them")
    return id


def parse_manifest(id: str, data: bytes) -> Manifest:
    """Returns the manifest in `data`. Raises StateError if its id differs from `id` or if it is inconsistent."""
    if sha256(data).hexdigest() != checked_id(id):
        raise StateError(f"the saved state {id} was changed: its manifest does not have the hash that it is named by")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise StateError(f"the saved state {id} is not one that this version of deltic reads ({place}: "
                         f"{first['msg']})") from None
    if problem := manifest.problem():
        raise StateError(f"the saved state {id} is damaged: {problem}")
    return manifest


def digest_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Returns the SHA-256 of the concatenated pieces."""
    found = sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()
