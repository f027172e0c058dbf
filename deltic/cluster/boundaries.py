"""The boundaries of a request: hashes of the prefixes of its body at which another request may diverge. No torch.

    body      tools, system | message | message, a long one .......... | message
    keys                    1         2        3 (2,048 characters)    4         5

A key is a hash of all model input before the boundary, chained like the keys of the cache's tiers. The hash is over the
body, not over token ids: a prompt has the exact tokens of earlier answers, including thinking, and only the replica
that gave these answers knows them. The front therefore needs no tokenizer, no template and no history. A replica maps
the keys to its own token positions (`reachable.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Final

KEY_BYTES: Final = 8
_SPACING: Final = 2048
"""Characters between two boundaries within a text."""
_TOKENS: Final = _SPACING // 8
"""Token ids between two boundaries of a prompt of ids."""
_FIRST, _LAST = 64, 192
"""Numbers of boundaries that a long request keeps: from its beginning, which may be shared, and from its last turns."""
_HEAD: Final = ("model", "tools", "system", "instructions", "chat_template_kwargs", "history", "functions")
"""Fields that templates render before the messages."""
_SYSTEM: Final = ("tools", "system", "instructions")
_BODIES: Final = ("messages", "input", "prompt")
_SECRETS: Final = ("authorization", "x-api-key")


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries of a request, in order. keys: their hashes. sizes: characters up to each boundary. system:
    characters of the system prompt and the tools."""

    keys: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    system: int = 0

    @property
    def size(self) -> int:
        """Characters of the whole request."""
        return self.sizes[-1] if self.sizes else 0


def boundaries_of(body: Any, headers: Mapping[str, str] = {}) -> Boundaries:
    """Returns the boundaries of a request of any API. headers: with lower-case names; requests with different API keys
    or salts share nothing. An unknown form of body has no boundaries: its request goes to the least busy replica."""
    if not isinstance(body, Mapping):
        return Boundaries()
    chain = _Chain()
    chain.add(*(headers.get(name, "") for name in _SECRETS), str(body.get("cache_salt", "")))
    fork = body.get("fork_from")
    previous = body.get("previous_response_id") or (fork.get("id") if isinstance(fork, Mapping) else fork)
    if isinstance(previous, str):
        chain.restart(response_key(previous))
    head = [body[name] for name in _HEAD if name in body and not (previous and name == "instructions")]
    if head:
        chain.text(_canonical(head))
        chain.bound()
    content = next((body[name] for name in _BODIES if name in body), None)
    system = chain.size if any(body.get(name) for name in _SYSTEM) else 0
    for part in _parts(content):
        chain.part(part)
        chain.bound()
        if isinstance(part, Mapping) and part.get("role") in ("system", "developer") and len(chain.keys) < _FIRST:
            system = chain.size
    return chain.boundaries(system)


def response_key(id: str) -> int:
    """Returns the key of a stored response, at which `previous_response_id` and `fork_from` continue."""
    return int.from_bytes(blake2b(b"response " + id.encode("utf-8", "replace"), digest_size=KEY_BYTES).digest())


def _parts(content: Any) -> Iterator[Any]:
    """Yields messages or input items. A prompt of token ids is split into runs, and each run is one part."""
    if not isinstance(content, list):
        yield content
    elif content and all(isinstance(token, int) for token in islice(content, 4)):
        yield from (content[start:start + _TOKENS] for start in range(0, len(content), _TOKENS))
    else:
        yield from content


class _Chain:
    """Hashes parts one after another, and records the boundaries between them."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=KEY_BYTES)
        self.size = 0
        self.keys: list[int] = []
        self._sizes: list[int] = []

    def add(self, *texts: str) -> None:
        for text in texts:
            self._hash.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def restart(self, key: int) -> None:
        """Starts again from the end of a stored response. Only one client knows its id, whatever API key it sends."""
        self._hash = blake2b(key.to_bytes(KEY_BYTES), digest_size=KEY_BYTES)
        self.keys, self._sizes = [key], [0]

    def text(self, text: str) -> None:
        """Adds a text, with boundaries inside a long text."""
        for start in range(0, len(text), _SPACING):
            if start:
                self.bound()
            piece = text[start:start + _SPACING]
            self.add(piece)
            self.size += len(piece)

    def part(self, part: Any) -> None:
        content = part.get("content") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            self.text(part)
        elif isinstance(part, Mapping) and isinstance(content, str):
            self.add(_canonical({name: value for name, value in part.items() if name != "content"}))
            self.text(content)
        else:
            self.text(_canonical(part))

    def bound(self) -> None:
        self.keys.append(int.from_bytes(self._hash.digest()))
        self._sizes.append(self.size)

    def boundaries(self, system: int) -> Boundaries:
        keys, sizes = self.keys, self._sizes
        if len(keys) > _FIRST + _LAST:
            keys, sizes = [*keys[:_FIRST], *keys[-_LAST:]], [*sizes[:_FIRST], *sizes[-_LAST:]]
        return Boundaries(tuple(keys), tuple(sizes), system)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
