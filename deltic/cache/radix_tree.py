"""The prefix tree: a radix tree of token prefixes with K/V pages, and of positions with a kept state. No torch.

A node is a run of full pages of tokens below its parent; the path from the root spells a prefix. A checkpoint is a kept
position: the state after a node's prefix and a tail, the 0 to PAGE - 1 tokens after the last full page. The checkpoint
owns the page with the tail's K/V. Only checkpoints can be resumed. Every node has a checkpoint in its subtree (L2), or
a sequence that resumed there: such a sequence does not own the pages up to its checkpoint's node, but keeps the node.

    root ── pages 0, 1 ── pages 2, 3, 4
                 │             └ checkpoint, tail of 5 tokens
                 └─────── page 2'
                               └ checkpoint, no tail

A node ends only where it has checkpoints or users, or where prefixes part. So there are fewer than two nodes for each
checkpoint or user, however long the prefixes are, which keeps pauses of the garbage collector short. Tokens are given
as keys (`params.Prompt`).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from deltic.cache.frames import PagePool, SlotPool
from deltic.cache.lineage import Line
from deltic.params import PAGE, common_length

log = logging.getLogger("deltic")

_BYTES = 8 * PAGE


@dataclass(slots=True, eq=False)
class Node:
    """A run of full pages of tokens. Its end never changes; its beginning moves when nodes are split or joined.

    keys: the 64-bit keys of its tokens, as bytes.
    depth: number of pages from the root to its end.
    children: the child nodes, keyed by the keys of their first page.
    users: number of running sequences that resumed at its end or in the page after it.
    kept: True while the node is in the tree.
    """

    parent: Node | None
    keys: bytes
    pages: array[int]
    depth: int
    children: dict[bytes, Node] = field(default_factory=dict)
    checkpoints: dict[bytes, Checkpoint] = field(default_factory=dict)
    users: int = 0
    kept: bool = True

    @property
    def key(self) -> bytes:
        """The keys of the first page."""
        return self.keys[:_BYTES]

    def keys_after(self, depth: int, most: int | None = None) -> bytes:
        """Returns the node's keys behind the first `depth` pages from the root, at most `most` bytes."""
        start = len(self.keys) - (self.depth - depth) * _BYTES
        return self.keys[start:None if most is None else start + most]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A kept position of `done` tokens: a state slot and, with a tail, the partial page.

    parent: the next checkpoint towards the root.
    logits: the logits after the last token, if a prompt ended here.
    likely_resume: True if a later prompt is likely to resume here.
    pinned: True if all other checkpoints are evicted first.
    guards: number of running or preempted sequences that would return here.
    preempted: number of preempted sequences that will resume here.
    line: the conversation that goes on here, if known.
    uses: number of sequences that resumed here.
    locks: number of `locking` blocks that currently protect it from eviction.
    superseded: later checkpoints of the same conversation, which a prompt that resumes here abandons.
    age: the tree's age (`PrefixTree`) at the last use.
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
    preempted: int = 0
    line: Line | None = None
    uses: int = 0
    locks: int = 0
    superseded: tuple[Checkpoint, ...] = ()
    age: float = 0.0

    @property
    def saved(self) -> int:
        """Number of tokens that resuming here saves over resuming at the parent."""
        return self.done - (self.parent.done if self.parent else 0)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The deepest checkpoint of a prompt, and the number of its tokens whose full pages are in the tree."""

    checkpoint: Checkpoint | None
    shared: int


class PrefixTree:
    """A radix tree of token prefixes that owns their pages and slots and evicts them by value.

    Eviction order: checkpoints that are unlikely to be resumed, likely ones, guarded ones, ends of lines with running
    sequences (a branch's before its main line's; of one line the shorter first), ends of preempted sequences, pinned
    checkpoints. Among equals, the one with the lowest worth (greedy-dual) is evicted first: the tree's age at its last
    use plus tokens saved per token of memory.

    changes: grows whenever a checkpoint is added or removed, or its logits change."""

    def __init__(self, pages: PagePool, slots: SlotPool, slot_tokens: float) -> None:
        """slot_tokens: the memory of a slot, in tokens of K/V."""
        self._pages, self._slots, self._slot_tokens = pages, slots, slot_tokens
        self._root = Node(None, b"", array("q"), 0)
        self._checkpoints: dict[Checkpoint, None] = {}
        self._ends: dict[Checkpoint, None] = {}
        self._age = 0.0
        self._matched: tuple[array[int], bool, int, PrefixMatch] | None = None
        self._path: tuple[Checkpoint, list[int]] | None = None
        self.evictions = self.changes = 0

    def __len__(self) -> int:
        """Returns the number of checkpoints."""
        return len(self._checkpoints)

    def match(self, tokens: Sequence[int], end: bool = True) -> PrefixMatch:
        """Returns the deepest checkpoint that is a prefix of `tokens`. One at the very end of `tokens` counts only if
        `end` is set and its logits are known. If `tokens` is an array, which must not change, the result is remembered
        until the tree changes."""
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
        """Pins the checkpoint at the end of `tokens`, so that it is evicted last; returns False if there is none."""
        checkpoint = self.at(tokens)
        if checkpoint is None:
            return False
        checkpoint.pinned = True
        return True

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """Returns the full pages in the tree that hold the beginning of `tokens`."""
        return _joined(node.pages[:len(node.pages) + depth - node.depth] for node, depth, _ in self._walk(tokens))

    def diverged(self, tokens: Sequence[int]) -> int:
        """Returns how many leading tokens `tokens` share with a prefix in the tree, also within a page."""
        *_, (node, depth, rest) = self._walk(tokens)
        others = (*node.children, *node.checkpoints) if depth == node.depth else (node.keys_after(depth),)
        return depth * PAGE + max((common_length(rest, other) // 8 for other in others), default=0)

    def at(self, tokens: Sequence[int]) -> Checkpoint | None:
        """Returns the checkpoint at the very end of `tokens`, if there is one."""
        *_, (node, depth, rest) = self._walk(tokens)
        return node.checkpoints.get(rest) if depth == node.depth else None

    @contextmanager
    def locking(self, checkpoints: Collection[Checkpoint]) -> Iterator[None]:
        """Protects these checkpoints from eviction for a `with` block."""
        for one in checkpoints:
            one.locks += 1
        try:
            yield
        finally:
            for one in checkpoints:
                one.locks -= 1

    def locked(self) -> list[Checkpoint]:
        return [one for one in self._checkpoints if one.locks]

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Returns True if a checkpoint has not been evicted. Thread-safe."""
        return checkpoint in self._checkpoints

    def use(self, checkpoint: Checkpoint) -> None:
        """Records that a sequence resumed at a checkpoint."""
        self._checkpoints.pop(checkpoint, None)
        self._checkpoints[checkpoint] = None
        if self._ends.pop(checkpoint, self) is None:
            self._ends[checkpoint] = None
        checkpoint.uses += 1
        checkpoint.age = self._age
        for later in checkpoint.superseded:
            later.likely_resume = later.uses > 0
        checkpoint.superseded = ()

    def supersede(self, tokens: Sequence[int], expected: Collection[int], near: Node | None = None,
                  line: Line | None = None) -> list[Checkpoint]:
        """Records that a conversation has reached the end of `tokens`. A checkpoint on the path stays likely to be
        resumed only if it is at an expected position, is an end of another line, or several prompts resumed at it.
        Returns the checkpoints at the expected positions, ascending. near: as in `insert`."""
        found, start = [], self._nearest(near, len(tokens))
        for node, depth, rest in chain(_upward(start), self._walk(tokens, start)):
            if not node.checkpoints or depth < node.depth:
                continue
            passed = [checkpoint for checkpoint in node.checkpoints.values() if rest.startswith(checkpoint.tail)]
            found += [checkpoint for checkpoint in passed if checkpoint.done in expected]
            for checkpoint in passed:
                checkpoint.likely_resume = checkpoint.likely_resume and (
                    checkpoint.done in expected or checkpoint.uses > 1 or checkpoint.line not in (None, line)
                )
        return sorted(found, key=lambda checkpoint: checkpoint.done)

    def path(self, checkpoint: Checkpoint) -> Sequence[int]:
        """Returns the pages that hold the checkpoint's tokens, the partial one last. Remembers the last result."""
        if self._path is None or self._path[0] is not checkpoint:
            runs, node = [checkpoint.node.pages], checkpoint.node.parent
            while node is not None:
                runs.append(node.pages)
                node = node.parent
            self._path = checkpoint, _joined(reversed(runs)) + ([] if checkpoint.page is None else [checkpoint.page])
        return self._path[1]

    def leave(self, node: Node) -> None:
        """Removes a user from a node: a sequence that needs the node's pages no longer."""
        node.users -= 1
        self._prune(node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], slot: int, page: int | None,
               logits: Any = None, near: Node | None = None) -> Checkpoint:
        """Adds a checkpoint after `tokens` and returns it. Takes over `slot` and the partial page; shares the full
        `pages`. near: a node on the path of the tokens, from which the walk starts."""
        start = self._nearest(near, len(tokens))
        parent = None
        for node, depth, rest in self._walk(tokens, start):
            if node.checkpoints and depth == node.depth:
                parent = _passed(node, rest, len(tokens)) or parent
        if parent is None:
            passed = (_passed(node, rest, len(tokens)) for node, _, rest in _upward(start) if node.checkpoints)
            parent = next(filter(None, passed), None)
        full = len(tokens) // PAGE
        keys, last = _keys(tokens[depth * PAGE:]), (full - depth) * _BYTES
        node = self._extend(self._split(node, depth), keys[:last], pages[depth:full])
        tail = keys[last:]
        checkpoint = node.checkpoints.get(tail)
        if checkpoint is None:
            checkpoint = node.checkpoints[tail] = Checkpoint(node, tail, slot, page, len(tokens), parent)
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
        """Drops the logits of all checkpoints except the `most` most recently used ones that have logits."""
        while len(self._ends) > max(most, 0):
            checkpoint = next(iter(self._ends))
            del self._ends[checkpoint]
            checkpoint.logits = None
            self.changes += 1

    def evict(self, keeping: bool = False) -> bool:
        """Removes the least valuable checkpoint and the pages that only it needed; returns False if all are locked.
        keeping: the memory is for another checkpoint, not for a sequence to run: then also returns False if only pinned
        checkpoints, ends of preempted sequences and ends of lines with running sequences are left."""
        victim = min((one for one in self._checkpoints if not one.locks), key=self._order, default=None)
        if victim is None or (keeping and any(self._order(victim)[:3])):
            return False
        if victim.pinned:
            log.warning("the pinned prompt of %d tokens is evicted for a running request: raise `memory`", victim.done)
        self._age = max(self._age, self._worth(victim))
        self.evictions += 1
        self._remove(victim)
        return True

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Replaces the numbers of moved pages. moved: new numbers by old ones."""
        self._path = None
        for node in self._nodes():
            if not moved.keys().isdisjoint(node.pages):
                node.pages = array("q", [moved.get(page, page) for page in node.pages])
        for checkpoint in self._checkpoints:
            if checkpoint.page is not None:
                checkpoint.page = moved.get(checkpoint.page, checkpoint.page)

    def owned_pages(self) -> Iterator[int]:
        """Yields the pages that nodes and checkpoints own, each once per owner."""
        yield from (checkpoint.page for checkpoint in self._checkpoints if checkpoint.page is not None)
        yield from chain.from_iterable(node.pages for node in self._nodes())

    def owned_slots(self) -> Iterator[int]:
        yield from (checkpoint.slot for checkpoint in self._checkpoints)

    def check(self) -> None:
        """Asserts that every checkpoint hangs at the node of its tokens, and that every node is needed."""
        for checkpoint in self._checkpoints:
            node, tail = checkpoint.node, checkpoint.tail
            assert node.checkpoints.get(tail) is checkpoint, "a checkpoint hangs at the wrong node"
            assert checkpoint.done == node.depth * PAGE + len(tail) // 8, "a checkpoint's position is wrong"
            assert (checkpoint.page is None) == (not tail), "a checkpoint has a tail and no page, or a page and no tail"
            assert (checkpoint.logits is None) == (checkpoint not in self._ends), "a checkpoint's logits are miscounted"
            assert checkpoint.line is None or checkpoint in checkpoint.line.ends, "a checkpoint is no end of its line"
        for node in self._nodes():
            assert node.children or node.checkpoints or node.users, "pages are kept that nothing needs"
            assert node.checkpoints or node.users or len(node.children) > 1, "a node should be joined with its child"
            assert node.parent and node.parent.children.get(node.key) is node, "a node hangs at the wrong parent"
            assert len(node.keys) == len(node.pages) * _BYTES, "a node has not as many keys as pages"
            assert node.depth == node.parent.depth + len(node.pages) > node.parent.depth, "a node's depth is wrong"
            assert node.kept, "a node in the tree is marked as removed"

    def _order(self, checkpoint: Checkpoint) -> tuple[bool, bool, int, int, bool, bool, float]:
        likely, line = checkpoint.likely_resume, checkpoint.line
        rank = line.rank if line and likely else 0
        return (checkpoint.pinned, checkpoint.preempted > 0, rank, checkpoint.done if rank else 0,
                checkpoint.guards > 0, likely, self._worth(checkpoint))

    def _worth(self, checkpoint: Checkpoint) -> float:
        saved = checkpoint.saved
        return checkpoint.age + saved / (self._slot_tokens + saved)

    def _nearest(self, node: Node | None, length: int) -> Node:
        """Returns the node itself, or its nearest ancestor, that is in the tree and at most `length` tokens deep."""
        node = node or self._root
        while node.parent is not None and (not node.kept or node.depth * PAGE > length):
            node = node.parent
        return node

    def _walk(self, tokens: Sequence[int], first: Node | None = None) -> Iterator[tuple[Node, int, bytes]]:
        """Yields the nodes on the path of `tokens`, starting at `first` or the root, each with its depth and the keys
        of the tokens' next page, or of the rest. The last node may lie only partly on the path: then the depth is that
        of its matching pages. Keys are computed in blocks, because the path of an unknown prompt is short."""
        first = first or self._root
        node: Node | None = first
        depth, block = first.depth, 4
        keys, place = b"", 0
        while node is not None:
            rest = keys[place:place + _BYTES]
            if len(rest) < _BYTES:
                block *= 2
                keys, place = _keys(tokens[depth * PAGE:(depth + block) * PAGE]), 0
                rest = keys[:_BYTES]
            if depth == node.depth:
                yield node, depth, rest
                node = node.children.get(rest)
                passed = len(node.pages) if node and (keys.startswith(node.keys, place)
                                                      or _begins(node, tokens, depth)) else 1
            elif rest != node.keys_after(depth, _BYTES):
                yield node, depth, rest
                return
            else:
                run = node.keys_after(depth, len(keys) - place)
                passed = _pages_in_common(run, keys[place:place + len(run)])
            place, depth = place + passed * _BYTES, depth + passed

    def _deepest(self, node: Node, rest: bytes, length: int, end: bool) -> Checkpoint | None:
        """Returns the node's deepest checkpoint where a prompt of `length` tokens can resume. rest: its next keys."""
        fits = [one for one in node.checkpoints.values() if rest.startswith(one.tail)
                and (one.done < length or (end and one.logits is not None))]
        return max(fits, key=lambda one: one.done, default=None)

    def _extend(self, node: Node, keys: bytes, pages: Sequence[int]) -> Node:
        """Adds a child with these pages and returns it; returns the node itself if `pages` is empty."""
        assert len(keys) == len(pages) * _BYTES, "a prefix has not as many pages as it fills"
        if not pages:
            return node
        child = node.children[keys[:_BYTES]] = Node(node, keys, array("q", pages), node.depth + len(pages))
        self._pages.share(pages)
        return child

    def _split(self, node: Node, depth: int) -> Node:
        """Returns the node that ends at `depth`, splitting `node` if the depth is within it."""
        if depth == node.depth:
            return node
        parent, first = node.parent, len(node.pages) + depth - node.depth
        assert parent is not None
        upper = parent.children[node.key] = Node(parent, node.keys[:first * _BYTES], node.pages[:first], depth)
        node.parent = upper
        node.keys, node.pages = node.keys[first * _BYTES:], node.pages[first:]
        upper.children[node.key] = node
        return upper

    def _join(self, node: Node) -> None:
        """Prepends a node to its only child, which takes its place."""
        (child,), parent = node.children.values(), node.parent
        assert parent is not None
        child.parent = parent
        child.keys, child.pages = node.keys + child.keys, node.pages + child.pages
        parent.children[child.key] = child
        node.kept = False

    def _remove(self, checkpoint: Checkpoint) -> None:
        del self._checkpoints[checkpoint]
        del checkpoint.node.checkpoints[checkpoint.tail]
        self._ends.pop(checkpoint, None)
        checkpoint.logits, checkpoint.superseded, self._path = None, (), None
        if checkpoint.line:
            checkpoint.line.drop(checkpoint)
        self.changes += 1
        for other in self._checkpoints:
            if other.parent is checkpoint:
                other.parent = checkpoint.parent
        self._slots.release([checkpoint.slot])
        self._pages.release([] if checkpoint.page is None else [checkpoint.page])
        self._prune(checkpoint.node)

    def _prune(self, node: Node) -> None:
        """Removes a node, or joins it with its only child, if nothing needs its end any more."""
        if node.parent is not None and not (node.children or node.checkpoints or node.users):
            del node.parent.children[node.key]
            node.kept = False
            self._pages.release(node.pages)
            node = node.parent
        if node.parent is not None and len(node.children) == 1 and not (node.checkpoints or node.users):
            self._join(node)

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            yield node


def _upward(node: Node) -> Iterator[tuple[Node, int, bytes]]:
    """Yields the ancestors of a node, nearest first, in the form of `_walk`."""
    while node.parent is not None:
        yield node.parent, node.parent.depth, node.keys
        node = node.parent


def _passed(node: Node, rest: bytes, length: int) -> Checkpoint | None:
    """Returns the node's deepest checkpoint before the end of a prefix of `length` tokens. rest: the keys after it."""
    passed = (one for one in node.checkpoints.values() if one.done < length and rest.startswith(one.tail))
    return max(passed, key=lambda one: one.done, default=None)


def _begins(node: Node, tokens: Sequence[int], depth: int) -> bool:
    """Returns True if the node's whole run equals the tokens after `depth` pages. Only for arrays, which are compared
    without a copy; False for other sequences."""
    end = (depth + len(node.pages)) * PAGE
    return (isinstance(tokens, array) and len(tokens) >= end
            and node.keys.startswith(memoryview(tokens)[depth * PAGE:end]))


def _pages_in_common(left: bytes, right: bytes) -> int:
    """Returns the number of leading full pages that two runs of keys have in common."""
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
    return array("q", b"".join(runs)).tolist()


def _keys(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
