"""The boundaries of a request: the prefixes of its body at which another request may part from it, as hashes. No torch.

    body      tools, system | message | message, a long one .......... | message
    keys                    1         2        3 (2,048 characters)    4         5

A key is a hash of all that the model reads before the boundary, chained like the keys of the cache's tiers. The body is
hashed instead of token ids: a prompt has the exact tokens of earlier answers, thinking included, which only the replica
that gave them knows. So the front needs no tokenizer, no template and no history, and a replica connects the keys with
its own token positions (`reachable.py`).
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
"""Boundaries that are kept of a request with more: those of a shared beginning, and those of the last turns."""
_HEAD: Final = ("model", "tools", "system", "instructions", "chat_template_kwargs", "history", "functions")
"""Fields that templates render before the messages."""
_SYSTEM: Final = ("tools", "system", "instructions")
_BODIES: Final = ("messages", "input", "prompt")
_SECRETS: Final = ("authorization", "x-api-key")


@dataclass(frozen=True, slots=True)
class Boundaries:
    """keys: of the boundaries of a request, the first one first. sizes: characters up to each. system: characters of
    the system prompt and the tools."""

    keys: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    system: int = 0

    @property
    def size(self) -> int:
        """Characters of the whole request."""
        return self.sizes[-1] if self.sizes else 0


def boundaries_of(body: Any, headers: Mapping[str, str] = {}) -> Boundaries:
    """Returns the boundaries of a request of any API. headers: with lower-case names; requests with different API keys
    or salts share nothing. A body that is not understood has none: its request goes where there is least to do."""
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
    """Yields messages or input items; a prompt of token ids in runs, so that a run of them is one part."""
    if not isinstance(content, list):
        yield content
    elif content and all(isinstance(token, int) for token in islice(content, 4)):
        yield from (content[start:start + _TOKENS] for start in range(0, len(content), _TOKENS))
    else:
        yield from content


class _Chain:
    """Hashes parts one after another, and notes the boundaries between them."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=KEY_BYTES)
        self.size = 0
        self.keys: list[int] = []
        self._sizes: list[int] = []

    def add(self, *texts: str) -> None:
        for text in texts:
            self._hash.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def restart(self, key: int) -> None:
        """Begins where a stored response ends. Its id is known to one client only, whichever key that sends."""
        self._hash = blake2b(key.to_bytes(KEY_BYTES), digest_size=KEY_BYTES)
        self.keys, self._sizes = [key], [0]

    def text(self, text: str) -> None:
        """Adds a text, with boundaries within a long one."""
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
