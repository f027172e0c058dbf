"""The prefix tree: which token prefixes have K/V pages here, and at which positions a state is kept.

A node is one full page of tokens below its parent; the path from the root spells a prefix. A mark is a kept
position: the state after a node's prefix and the tail, the 0 to PAGE - 1 tokens after the last full page, whose K/V is
in a page of the mark's own. Only marks can be resumed; a node without one in its subtree is of no use, and
the tree has none (L2).

    root ── page 0 ── page 1 ── page 2
                        │          └ mark, tail of 5 tokens
                        └ page 2'  └ mark, no tail

Pure accounting: the tree owns units of the ledgers and touches no tensors.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltic.cache.ledger import Ledger
from deltic.types import PAGE, common_length

log = logging.getLogger("deltic")

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

    logits: those of the last token, if a prompt ended here.
    above: the next kept position on the way to the root.
    expected: a following prompt is likely to resume here.
    guards: how many running sequences would return here.
    pinned: to be kept for as long as anything can be.
    uses: how many resumed here.
    locks: how many are just doing so.
    later: those of the same conversation that nobody will need who resumes here.
    age: of the tree at the last use.
    """

    node: Node
    tail: bytes
    slot: int
    page: int | None
    done: int
    above: Mark | None
    logits: Any = None
    expected: bool = False
    pinned: bool = False
    guards: int = 0
    uses: int = 0
    locks: int = 0
    later: list[Mark] = field(default_factory=list)
    age: float = 0.0

    @property
    def saved(self) -> int:
        """Tokens that it spares over the next mark above."""
        return self.done - (self.above.done if self.above else 0)


@dataclass(frozen=True, slots=True)
class Match:
    """What the tree knows of a prompt: the deepest mark to resume at, and how many tokens of full pages it shares
    with some earlier prompt, which may be more."""

    mark: Mark | None
    shared: int


class PrefixTree:
    """Prefixes by their tokens.

    What goes first is neither pinned, nor what a running sequence would return to, nor where a following prompt is
    expected; among equals, worth decides. It is greedy-dual: the age of the last use plus tokens saved per token held.
    changes: grows with every mark that comes or goes, and with its logits.
    """

    def __init__(self, pages: Ledger, slots: Ledger, slot_tokens: float) -> None:
        """slot_tokens: what a slot costs, in tokens of K/V."""
        self._pages, self._slots, self._slot_tokens = pages, slots, slot_tokens
        self._root = Node(None, b"", -1, 0)
        self._marks: dict[Mark, None] = {}
        self._ends: dict[Mark, None] = {}
        self._age = 0.0
        self.evictions = self.changes = 0

    def __len__(self) -> int:
        """Marks that are kept."""
        return len(self._marks)

    def match(self, tokens: Sequence[int]) -> Match:
        """The deepest mark that `tokens` begin with; at their very end only one that knows its logits."""
        best = None
        for node, rest in self._walk(tokens):
            if node.marks:
                best = self._deepest(node, rest, len(tokens)) or best
        return Match(best, node.depth * PAGE)

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """The full pages here that hold the beginning of `tokens`."""
        return [node.page for node, _ in self._walk(tokens)][1:]

    def diverged(self, tokens: Sequence[int]) -> int:
        """How many of the tokens some kept prefix begins with, to the token."""
        *_, (node, rest) = self._walk(tokens)
        others = (*node.children, *node.marks)
        return node.depth * PAGE + max((common_length(rest, other) // 8 for other in others), default=0)

    def at(self, tokens: Sequence[int]) -> Mark | None:
        """The mark at the very end of `tokens`."""
        *_, (node, rest) = self._walk(tokens)
        return node.marks.get(rest)

    def use(self, mark: Mark) -> None:
        """Note that a mark has served: among equals it goes last."""
        self._marks.pop(mark, None)
        self._marks[mark] = None
        if self._ends.pop(mark, self) is None:
            self._ends[mark] = None
        mark.uses += 1
        mark.age = self._age
        for later in mark.later:
            later.expected = later.uses > 0
        mark.later = []

    def supersede(self, tokens: Sequence[int], expected: Collection[int]) -> list[Mark]:
        """A conversation has come to the end of `tokens`: on the way there, following prompts are expected at these
        positions only, and where several had resumed. Returns the marks at these positions."""
        found = []
        for node, rest in self._walk(tokens):
            if not node.marks:
                continue
            on_the_way = [mark for mark in node.marks.values() if rest.startswith(mark.tail)]
            found += [mark for mark in on_the_way if mark.done in expected]
            for mark in on_the_way:
                mark.expected = mark.expected and (mark.done in expected or mark.uses > 1)
        return sorted(found, key=lambda mark: mark.done)

    def path(self, mark: Mark) -> list[int]:
        """The pages that hold the mark's tokens, the partial one last."""
        pages = [] if mark.page is None else [mark.page]
        node = mark.node
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def insert(self, tokens: Sequence[int], pages: Sequence[int], slot: int, page: int | None,
               logits: Any = None) -> Mark:
        """Keep the state after `tokens`. Takes over `slot` and the partial page; shares the full `pages`."""
        keys, node, above = _keys(tokens), self._root, None
        for index, full in enumerate(pages[:len(tokens) // PAGE]):
            key = keys[index * _BYTES:(index + 1) * _BYTES]
            if node.marks:
                above = _above(node, key, len(tokens)) or above
            node = node.children.get(key) or self._child(node, key, full)
        tail = keys[node.depth * _BYTES:]
        above = _above(node, tail, len(tokens)) or above
        mark = node.marks.get(tail)
        if mark is None:
            mark = node.marks[tail] = Mark(node, tail, slot, page, len(tokens), above)
            mark.age = self._age
            self._marks[mark] = None
            self.changes += 1
        else:
            self._slots.release([slot])
            self._pages.release([] if page is None else [page])
            self._marks[mark] = self._marks.pop(mark)
            mark.age = self._age
        if logits is not None:
            self._ends.pop(mark, None)
            self._ends[mark] = None
        if mark.logits is None and logits is not None:
            mark.logits = logits
            self.changes += 1
        return mark

    def keep_logits(self, most: int) -> None:
        """Let all marks forget their logits but the `most` that were used last."""
        while len(self._ends) > max(most, 0):
            mark = next(iter(self._ends))
            del self._ends[mark]
            mark.logits = None
            self.changes += 1

    def evict(self) -> bool:
        """Give up the mark that is worth least, and the pages that only it needed; False if all are locked."""
        victim = min((one for one in self._marks if not one.locks), key=self._order, default=None)
        if victim is None:
            return False
        if victim.pinned:
            log.warning("the pinned prompt of %d tokens gives way to a running request: raise --memory", victim.done)
        self._age = max(self._age, self._worth(victim))
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
            node, tail = mark.node, mark.tail
            assert node.marks.get(tail) is mark, "a mark hangs at the wrong node"
            assert mark.done == node.depth * PAGE + len(tail) // 8, "a mark's position is wrong"
            assert (mark.page is None) == (not tail), "a mark has a tail and no page, or a page and no tail"
            assert (mark.logits is None) == (mark not in self._ends), "a mark's logits are miscounted"
        for node in self._nodes():
            assert node.children or node.marks, "a page is kept that no mark needs"
            assert node.parent and node.parent.children.get(node.key) is node, "a node hangs at the wrong parent"

    def _order(self, mark: Mark) -> tuple[bool, bool, bool, float]:
        return mark.pinned, mark.guards > 0, mark.expected, self._worth(mark)

    def _worth(self, mark: Mark) -> float:
        saved = mark.saved
        return mark.age + saved / (self._slot_tokens + saved)

    def _walk(self, tokens: Sequence[int]) -> Iterator[tuple[Node, bytes]]:
        """The nodes on the way of `tokens` as far as there are some, the root first, each with the keys of the page
        that comes next, or of what is left. Keys are made as the way goes on: a stranger's way is short."""
        node: Node | None = self._root
        keys, start, block = b"", 0, 4
        while node is not None:
            rest = keys[start:start + _BYTES]
            if len(rest) < _BYTES:
                block *= 2
                keys, start = _keys(tokens[node.depth * PAGE:(node.depth + block) * PAGE]), 0
                rest = keys[:_BYTES]
            yield node, rest
            node, start = node.children.get(rest), start + _BYTES

    def _deepest(self, node: Node, rest: bytes, length: int) -> Mark | None:
        """The deepest mark of a node where a prompt of so many tokens, `rest` the next of them, can resume."""
        fits = [one for one in node.marks.values() if rest.startswith(one.tail)
                and (one.done < length or one.logits is not None)]
        return max(fits, key=lambda one: one.done, default=None)

    def _child(self, node: Node, key: bytes, page: int) -> Node:
        child = node.children[key] = Node(node, key, page, node.depth + 1)
        self._pages.share([page])
        return child

    def _remove(self, mark: Mark) -> None:
        del self._marks[mark]
        del mark.node.marks[mark.tail]
        self._ends.pop(mark, None)
        mark.logits, mark.later = None, []
        self.changes += 1
        for other in self._marks:
            if other.above is mark:
                other.above = mark.above
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


def _above(node: Node, rest: bytes, length: int) -> Mark | None:
    """The deepest mark of a node that tokens, of which `rest` comes next, pass before their end."""
    passed = (one for one in node.marks.values() if one.done < length and rest.startswith(one.tail))
    return max(passed, key=lambda one: one.done, default=None)


def _keys(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
