"""The prefix tree: which token prefixes have K/V pages here, and at which positions a state is kept.

A node is one full page of tokens below its parent; the path from the root spells a prefix. A mark is a kept position:
the state after a node's prefix and the mark's tail, the 0 to PAGE - 1 tokens after the last full page, whose K/V is in
a page of the mark's own. Only marks can be resumed; a node without a mark in its subtree is of no use, and the tree
has none (L2).

    root ── page 0 ── page 1 ── page 2
                        │          └ mark, tail of 5 tokens
                        └ page 2'  └ mark, no tail

Pure accounting: the tree owns units of the ledgers and touches no tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltic.cache.ledger import Ledger
from deltic.types import PAGE

_BYTES = 8 * PAGE


@dataclass(slots=True, eq=False)
class Node:
    """One full page of tokens, whose 64-bit keys are `key`. depth: pages from the root, this one included."""

    parent: Node | None
    key: bytes
    page: int
    depth: int
    children: dict[bytes, Node] = field(default_factory=dict)
    marks: dict[bytes, Mark] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Mark:
    """A kept position of `done` tokens: a state slot and, with a tail, the partial page.

    logits: those of the last token, if a prompt ended here. saved: tokens that it spares over the next mark above.
    worth: when it goes (the least first). locks: how many are just starting here.
    """

    node: Node
    tail: bytes
    slot: int
    page: int | None
    done: int
    saved: int
    logits: Any = None
    worth: float = 0.0
    locks: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a prompt: the deepest mark to resume at, and how many tokens of full pages it shares
    with some earlier prompt, which may be more."""

    mark: Mark | None
    shared: int


class PrefixTree:
    """Prefixes by their tokens. Worth is greedy-dual: the age of the last use plus tokens saved per token held."""

    def __init__(self, pages: Ledger, slots: Ledger, slot_tokens: float) -> None:
        """slot_tokens: what a slot costs, in tokens of K/V."""
        self._pages, self._slots, self._slot_tokens = pages, slots, slot_tokens
        self._root = Node(None, b"", -1, 0)
        self._marks: dict[Mark, None] = {}
        self._age = 0.0
        self.evictions = 0

    def __len__(self) -> int:
        """Marks that are kept."""
        return len(self._marks)

    def match(self, tokens: Sequence[int]) -> Match:
        """The deepest mark that `tokens` begin with; at their very end only one that knows its logits."""
        keys, node, best = _keys(tokens), self._root, None
        while True:
            best = self._deepest(node, keys, len(tokens)) or best
            start = node.depth * _BYTES
            child = node.children.get(keys[start:start + _BYTES])
            if child is None:
                return Match(best, node.depth * PAGE)
            node = child

    def use(self, mark: Mark) -> None:
        """Note that a mark has served: among equals it goes last."""
        self._marks.pop(mark, None)
        self._marks[mark] = None
        mark.worth = self._age + mark.saved / (self._slot_tokens + mark.saved)

    def path(self, mark: Mark) -> list[int]:
        """The pages that hold the mark's tokens, the partial one last."""
        pages = [] if mark.page is None else [mark.page]
        node = mark.node
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def tokens(self, mark: Mark) -> list[int]:
        """The token keys that the mark stands for."""
        keys, node = [mark.tail], mark.node
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return array("q", b"".join(reversed(keys))).tolist()

    def insert(self, tokens: Sequence[int], pages: Sequence[int], slot: int, page: int | None,
               logits: Any = None) -> None:
        """Keep the state after `tokens`. Takes over `slot` and the partial page; shares the full `pages`."""
        keys, node, above = _keys(tokens), self._root, 0
        for index in range(len(tokens) // PAGE):
            above = max(above, _above(node, keys, len(tokens)))
            node = self._child(node, keys[index * _BYTES:(index + 1) * _BYTES], pages[index])
        above = max(above, _above(node, keys, len(tokens)))
        tail = keys[node.depth * _BYTES:]
        known = node.marks.get(tail)
        if known is None:
            known = node.marks[tail] = Mark(node, tail, slot, page, len(tokens), len(tokens) - above)
        else:
            self._slots.release([slot])
            self._pages.release([] if page is None else [page])
        known.logits = logits if known.logits is None else known.logits
        self.use(known)

    def evict(self) -> bool:
        """Give up the mark that is worth least, and the pages that only it needed; False if all are locked."""
        victim = min((mark for mark in self._marks if not mark.locks), key=lambda mark: mark.worth, default=None)
        if victim is None:
            return False
        self._age = max(self._age, victim.worth)
        self.evictions += 1
        self._remove(victim)
        return True

    def owned_pages(self) -> Iterator[int]:
        """Every page, once per owner in the tree."""
        yield from (mark.page for mark in self._marks if mark.page is not None)
        yield from (node.page for node in self._nodes())

    def owned_slots(self) -> Iterator[int]:
        yield from (mark.slot for mark in self._marks)

    def check(self) -> None:
        """Assert that every mark hangs where its tokens say, and that every leaf has one."""
        for mark in self._marks:
            assert mark.node.marks.get(mark.tail) is mark, "a mark hangs at the wrong node"
            assert mark.done == mark.node.depth * PAGE + len(mark.tail) // 8, "a mark's position is wrong"
            assert (mark.page is None) == (not mark.tail), "a mark has a tail without page, or a page without tail"
        for node in self._nodes():
            assert node.children or node.marks, "a page is kept that no mark needs"
            assert node.parent and node.parent.children.get(node.key) is node, "a node hangs at the wrong parent"

    def _deepest(self, node: Node, keys: bytes, length: int) -> Mark | None:
        start = node.depth * _BYTES
        fits = [mark for mark in node.marks.values() if keys.startswith(mark.tail, start)
                and (mark.done < length or mark.logits is not None)]
        return max(fits, key=lambda mark: mark.done, default=None)

    def _child(self, node: Node, key: bytes, page: int) -> Node:
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, page, node.depth + 1)
            self._pages.share([page])
        return child

    def _remove(self, mark: Mark) -> None:
        del self._marks[mark]
        del mark.node.marks[mark.tail]
        self._slots.release([mark.slot])
        self._pages.release([] if mark.page is None else [mark.page])
        node = mark.node
        while node.parent is not None and not node.children and not node.marks:
            del node.parent.children[node.key]
            self._pages.release([node.page])
            node = node.parent

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _above(node: Node, keys: bytes, length: int) -> int:
    """The deepest mark of a node that `keys` pass before their end."""
    start = node.depth * _BYTES
    return max((mark.done for mark in node.marks.values() if mark.done < length and keys.startswith(mark.tail, start)),
               default=0)


def _keys(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
