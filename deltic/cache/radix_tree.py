"""The prefix tree: which token prefixes have K/V pages here, and at which positions a state is kept.

A node is a run of full pages of tokens below its parent; the path from the root spells a prefix. A checkpoint is a
kept position: the state after a node's prefix and the tail, the 0 to PAGE - 1 tokens after the last full page, whose
K/V is in a page of the checkpoint's own. Only checkpoints can be resumed; a node without one in its subtree is of no
use, and the tree has none (L2).

    root ── pages 0, 1 ── pages 2, 3, 4
                 │             └ checkpoint, tail of 5 tokens
                 └─────── page 2'
                               └ checkpoint, no tail

A node ends only where it must: where it has checkpoints, or where prefixes part. So there are fewer than two for each
checkpoint, however long the prefixes are: the garbage collector looks at each of them while all requests wait.

Tokens are known by their keys (`types.Prompt`): whoever asks for tokens here gives those.

Pure accounting: the tree owns units of the ledgers and touches no tensors.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from deltic.cache.block_pool import BlockPool
from deltic.params import PAGE, common_length

log = logging.getLogger("deltic")

_BYTES = 8 * PAGE


@dataclass(slots=True, eq=False)
class Node:
    """A run of full pages of tokens: the prefix that it ends never changes, but where the run begins does.

    keys: the 64-bit keys of its tokens.
    depth: pages from the root, these included.
    children: by the keys of their first page.
    kept: it is still in the tree.
    """

    parent: Node | None
    keys: bytes
    pages: array[int]
    depth: int
    children: dict[bytes, Node] = field(default_factory=dict)
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)
    kept: bool = True

    @property
    def key(self) -> bytes:
        """The keys of the first page."""
        return self.keys[:_BYTES]

    def keys_after(self, depth: int, most: int | None = None) -> bytes:
        """Those after so many pages from the root, a place within the node; at most so many bytes."""
        start = len(self.keys) - (self.depth - depth) * _BYTES
        return self.keys[start:None if most is None else start + most]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A kept position of `done` tokens: a state slot and, with a tail, the partial page.

    logits: those of the last token, if a prompt ended here.
    parent: the next kept position on the way to the root.
    likely_resume: a following prompt is likely to resume here.
    guards: how many running sequences would return here.
    pinned: to be kept for as long as anything can be.
    uses: how many resumed here.
    locks: how many are just doing so.
    superseded: those of the same conversation that nobody will need who resumes here.
    age: of the tree at the last use.
    """

    node: Node
    tail: bytes
    slot: int
    page: int | None
    done: int
    parent: Checkpoint | None
    logits: Any = None
    likely_resume: bool = False
    pinned: bool = False
    guards: int = 0
    uses: int = 0
    locks: int = 0
    superseded: tuple[Checkpoint, ...] = ()
    age: float = 0.0

    @property
    def saved(self) -> int:
        """Tokens that it spares over the next checkpoint above."""
        return self.done - (self.parent.done if self.parent else 0)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the tree knows of a prompt: the deepest checkpoint to resume at, and how many tokens of full pages it shares
    with some earlier prompt, which may be more."""

    checkpoint: Checkpoint | None
    shared: int


class PrefixTree:
    """Prefixes by their tokens.

    What goes first is neither pinned, nor what a running sequence would return to, nor where a following prompt is
    expected; among equals, worth decides. It is greedy-dual: the age of the last use plus tokens saved per token held.
    changes: grows with every checkpoint that comes or goes, and with its logits.
    """

    def __init__(self, pages: BlockPool, slots: BlockPool, slot_tokens: float) -> None:
        """slot_tokens: what a slot costs, in tokens of K/V."""
        self._pages, self._slots, self._slot_tokens = pages, slots, slot_tokens
        self._root = Node(None, b"", array("q"), 0)
        self._checkpoints: dict[Checkpoint, None] = {}
        self._ends: dict[Checkpoint, None] = {}
        self._age = 0.0
        self._matched: tuple[array[int], bool, int, PrefixMatch] | None = None
        self.evictions = self.changes = 0

    def __len__(self) -> int:
        """Checkpoints that are kept."""
        return len(self._checkpoints)

    def match(self, tokens: Sequence[int], end: bool = True) -> PrefixMatch:
        """The deepest checkpoint that `tokens` begin with; at their very end only one that knows its logits, and none
        without `end`. The same array, which must not have changed, is looked up once as long as the tree stays as it
        is."""
        if self._matched and self._matched[0] is tokens and self._matched[1:3] == (end, self.changes):
            return self._matched[3]
        best = None
        for node, depth, rest in self._walk(tokens):
            if node.checkpoints and depth == node.depth:
                best = self._deepest(node, rest, len(tokens), end) or best
        found = PrefixMatch(best, depth * PAGE)
        self._matched = (tokens, end, self.changes, found) if isinstance(tokens, array) else None
        return found

    def cached_length(self, tokens: Sequence[int], end: bool = True) -> int:
        """Returns the position of the checkpoint that `match` finds."""
        checkpoint = self.match(tokens, end).checkpoint
        return checkpoint.done if checkpoint else 0

    def pin(self, tokens: Sequence[int]) -> bool:
        """Keeps the checkpoint at the end of `tokens` for as long as anything can be kept; False if there is none."""
        checkpoint = self.at(tokens)
        if checkpoint is None:
            return False
        checkpoint.pinned = True
        return True

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """The full pages here that hold the beginning of `tokens`."""
        return _joined(node.pages[:len(node.pages) + depth - node.depth] for node, depth, _ in self._walk(tokens))

    def diverged(self, tokens: Sequence[int]) -> int:
        """How many of the tokens some kept prefix begins with, to the token."""
        *_, (node, depth, rest) = self._walk(tokens)
        others = (*node.children, *node.checkpoints) if depth == node.depth else (node.keys_after(depth),)
        return depth * PAGE + max((common_length(rest, other) // 8 for other in others), default=0)

    def at(self, tokens: Sequence[int]) -> Checkpoint | None:
        """The checkpoint at the very end of `tokens`."""
        *_, (node, depth, rest) = self._walk(tokens)
        return node.checkpoints.get(rest) if depth == node.depth else None

    def use(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint has served: among equals it goes last."""
        self._checkpoints.pop(checkpoint, None)
        self._checkpoints[checkpoint] = None
        if self._ends.pop(checkpoint, self) is None:
            self._ends[checkpoint] = None
        checkpoint.uses += 1
        checkpoint.age = self._age
        for later in checkpoint.superseded:
            later.likely_resume = later.uses > 0
        checkpoint.superseded = ()

    def supersede(self, tokens: Sequence[int], expected: Collection[int], near: Node | None = None
                  ) -> list[Checkpoint]:
        """A conversation has come to the end of `tokens`: on the way there, following prompts are expected at these
        positions only, and where several had resumed. Returns the checkpoints at these positions. near: as in
        `insert`."""
        found, start = [], self._nearest(near, len(tokens))
        for node, depth, rest in chain(_upward(start), self._walk(tokens, start)):
            if not node.checkpoints or depth < node.depth:
                continue
            on_the_way = [checkpoint for checkpoint in node.checkpoints.values() if rest.startswith(checkpoint.tail)]
            found += [checkpoint for checkpoint in on_the_way if checkpoint.done in expected]
            for checkpoint in on_the_way:
                checkpoint.likely_resume = checkpoint.likely_resume and (
                    checkpoint.done in expected or checkpoint.uses > 1
                )
        return sorted(found, key=lambda checkpoint: checkpoint.done)

    def path(self, checkpoint: Checkpoint) -> list[int]:
        """The pages that hold the checkpoint's tokens, the partial one last."""
        runs, node = [checkpoint.node.pages], checkpoint.node.parent
        while node is not None:
            runs.append(node.pages)
            node = node.parent
        return _joined(reversed(runs)) + ([] if checkpoint.page is None else [checkpoint.page])

    def insert(self, tokens: Sequence[int], pages: Sequence[int], slot: int, page: int | None,
               logits: Any = None, near: Node | None = None) -> Checkpoint:
        """Keep the state after `tokens`. Takes over `slot` and the partial page; shares the full `pages`. near: a node
        that was on their way; what is left of it, nobody goes again."""
        start, full, above = self._nearest(near, len(tokens)), len(tokens) // PAGE, None
        for node, depth, rest in self._walk(tokens, start):
            if node.checkpoints and depth == node.depth:
                above = _above(node, rest, len(tokens)) or above
        if above is None:
            passed = (_above(node, rest, len(tokens)) for node, _, rest in _upward(start) if node.checkpoints)
            above = next(filter(None, passed), None)
        keys, last = _keys(tokens[depth * PAGE:]), (full - depth) * _BYTES
        node, tail = self._extend(self._split(node, depth), keys[:last], pages[depth:full]), keys[last:]
        checkpoint = node.checkpoints.get(tail)
        if checkpoint is None:
            checkpoint = node.checkpoints[tail] = Checkpoint(node, tail, slot, page, len(tokens), above)
            checkpoint.age = self._age
            self._checkpoints[checkpoint] = None
            self.changes += 1
        else:
            self._slots.release([slot])
            self._pages.release([] if page is None else [page])
            self._checkpoints[checkpoint] = self._checkpoints.pop(checkpoint)
            checkpoint.age = self._age
        if logits is not None:
            self._ends.pop(checkpoint, None)
            self._ends[checkpoint] = None
        if checkpoint.logits is None and logits is not None:
            checkpoint.logits = logits
            self.changes += 1
        return checkpoint

    def keep_logits(self, most: int) -> None:
        """Let all checkpoints forget their logits but the `most` that were used last."""
        while len(self._ends) > max(most, 0):
            checkpoint = next(iter(self._ends))
            del self._ends[checkpoint]
            checkpoint.logits = None
            self.changes += 1

    def evict(self) -> bool:
        """Give up the checkpoint that is worth least, and the pages that only it needed; False if all are locked."""
        victim = min((one for one in self._checkpoints if not one.locks), key=self._order, default=None)
        if victim is None:
            return False
        if victim.pinned:
            log.warning("the pinned prompt of %d tokens gives way to a running request: raise `memory`", victim.done)
        self._age = max(self._age, self._worth(victim))
        self.evictions += 1
        self._remove(victim)
        return True

    def owned_pages(self) -> Iterator[int]:
        """Every page, once per owner in the tree."""
        yield from (checkpoint.page for checkpoint in self._checkpoints if checkpoint.page is not None)
        yield from chain.from_iterable(node.pages for node in self._nodes())

    def owned_slots(self) -> Iterator[int]:
        yield from (checkpoint.slot for checkpoint in self._checkpoints)

    def check(self) -> None:
        """Assert that every checkpoint hangs where its tokens say, and that no node ends in vain."""
        for checkpoint in self._checkpoints:
            node, tail = checkpoint.node, checkpoint.tail
            assert node.checkpoints.get(tail) is checkpoint, "a checkpoint hangs at the wrong node"
            assert checkpoint.done == node.depth * PAGE + len(tail) // 8, "a checkpoint's position is wrong"
            assert (checkpoint.page is None) == (not tail), "a checkpoint has a tail and no page, or a page and no tail"
            assert (checkpoint.logits is None) == (checkpoint not in self._ends), "a checkpoint's logits are miscounted"
        for node in self._nodes():
            assert node.children or node.checkpoints, "pages are kept that no checkpoint needs"
            assert node.checkpoints or len(node.children) > 1, "a node ends where nothing does"
            assert node.parent and node.parent.children.get(node.key) is node, "a node hangs at the wrong parent"
            assert len(node.keys) == len(node.pages) * _BYTES, "a node has not as many keys as pages"
            assert node.depth == node.parent.depth + len(node.pages) > node.parent.depth, "a node's depth is wrong"
            assert node.kept, "a node in the tree says that it is not"

    def _order(self, checkpoint: Checkpoint) -> tuple[bool, bool, bool, float]:
        return checkpoint.pinned, checkpoint.guards > 0, checkpoint.likely_resume, self._worth(checkpoint)

    def _worth(self, checkpoint: Checkpoint) -> float:
        saved = checkpoint.saved
        return checkpoint.age + saved / (self._slot_tokens + saved)

    def _nearest(self, node: Node | None, length: int) -> Node:
        """The deepest node that is in the tree and not past the end of so many tokens, of one on their way and those
        that were above it."""
        node = node or self._root
        while node.parent is not None and (not node.kept or node.depth * PAGE > length):
            node = node.parent
        return node

    def _walk(self, tokens: Sequence[int], first: Node | None = None) -> Iterator[tuple[Node, int, bytes]]:
        """The nodes on the way of `tokens` as far as there are some, from the first one or the root on. Each comes with
        the pages up to its end and the keys of the page that comes next, or of what is left; the last one, if only the
        first of its pages are on the way, with the pages up to those. Keys are made as the way goes on: a stranger's
        way is short."""
        first = first or self._root
        node: Node | None = first
        depth, keys, place, block = first.depth, b"", 0, 4
        while node is not None:
            rest = keys[place:place + _BYTES]
            if len(rest) < _BYTES:
                block *= 2
                keys, place = _keys(tokens[depth * PAGE:(depth + block) * PAGE]), 0
                rest = keys[:_BYTES]
            if depth == node.depth:
                yield node, depth, rest
                node = node.children.get(rest)
                passed = len(node.pages) if node and keys.startswith(node.keys, place) else 1
            elif rest != node.keys_after(depth, _BYTES):
                yield node, depth, rest
                return
            else:
                run = node.keys_after(depth, len(keys) - place)
                passed = _pages_in_common(run, keys[place:place + len(run)])
            place, depth = place + passed * _BYTES, depth + passed

    def _deepest(self, node: Node, rest: bytes, length: int, end: bool) -> Checkpoint | None:
        """The deepest checkpoint of a node where a prompt of so many tokens, `rest` the next of them, can resume."""
        fits = [one for one in node.checkpoints.values() if rest.startswith(one.tail)
                and (one.done < length or (end and one.logits is not None))]
        return max(fits, key=lambda one: one.done, default=None)

    def _extend(self, node: Node, keys: bytes, pages: Sequence[int]) -> Node:
        """Add a node below one for these pages and their keys and return it; the one itself, if there are none."""
        assert len(keys) == len(pages) * _BYTES, "a prefix has not as many pages as it fills"
        if not pages:
            return node
        child = node.children[keys[:_BYTES]] = Node(node, keys, array("q", pages), node.depth + len(pages))
        self._pages.share(pages)
        return child

    def _split(self, node: Node, depth: int) -> Node:
        """The node that ends after so many pages, within a node or at its end."""
        if depth == node.depth:
            return node
        parent, first = node.parent, len(node.pages) + depth - node.depth
        assert parent is not None
        upper = parent.children[node.key] = Node(parent, node.keys[:first * _BYTES], node.pages[:first], depth)
        node.parent, node.keys, node.pages = upper, node.keys[first * _BYTES:], node.pages[first:]
        upper.children[node.key] = node
        return upper

    def _join(self, node: Node) -> None:
        """Have a node's only child begin where the node does, in its place."""
        (child,), parent = node.children.values(), node.parent
        assert parent is not None
        child.parent, child.keys, child.pages = parent, node.keys + child.keys, node.pages + child.pages
        parent.children[child.key] = child
        node.kept = False

    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint]
        del checkpoint.node.checkpoints[checkpoint.tail]
        self._ends.pop(checkpoint, None)
        checkpoint.logits, checkpoint.superseded = None, ()
        self.changes += 1
        for other in self._checkpoints:
            if other.parent is checkpoint:
                other.parent = checkpoint.parent
        self._slots.release([checkpoint.slot])
        self._pages.release([] if checkpoint.page is None else [checkpoint.page])
        node = checkpoint.node
        if node.parent is not None and not node.children and not node.checkpoints:
            del node.parent.children[node.key]
            node.kept = False
            self._pages.release(node.pages)
            node = node.parent
        if node.parent is not None and len(node.children) == 1 and not node.checkpoints:
            self._join(node)

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _upward(node: Node) -> Iterator[tuple[Node, int, bytes]]:
    """The nodes above one, the nearest first, each with the pages up to its end and the keys of those that come next on
    the way to the one."""
    while node.parent is not None:
        yield node.parent, node.parent.depth, node.keys
        node = node.parent


def _above(node: Node, rest: bytes, length: int) -> Checkpoint | None:
    """The deepest checkpoint of a node that tokens, of which `rest` comes next, pass before their end."""
    passed = (one for one in node.checkpoints.values() if one.done < length and rest.startswith(one.tail))
    return max(passed, key=lambda one: one.done, default=None)


def _pages_in_common(left: bytes, right: bytes) -> int:
    """How many full pages keys begin with in common."""
    low, high = 0, min(len(left), len(right)) // _BYTES
    middle = high
    while low < high:
        if left[low * _BYTES:middle * _BYTES] == right[low * _BYTES:middle * _BYTES]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


def _joined(runs: Iterable[array[int]]) -> list[int]:
    """The pages of runs, one run after the other."""
    return array("q", b"".join(runs)).tolist()


def _keys(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
