"""A prefix index as a radix tree: a sequence is a path from the root, and a node holds a run of its blocks.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (RadixAttention), arXiv
2312.07104.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from prefix_cache.index import Key, Match


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A node of a radix tree: a run of blocks that follow its parent's. Children differ in their first block.

    keys, blocks: for each of these blocks its tokens (as bytes), and its number; empty only in a root.
    children: by their first key. parent: None for a root. salt: that of the tree.
    pins: how many requests' cursors are at this node or below; with 0, its blocks can be evicted.
    used: when a cursor last left the node, in ticks of a counter of the index.
    """

    keys: list[Key]
    blocks: list[int]
    parent: Node | None
    salt: str
    children: dict[Key, Node] = field(default_factory=dict)
    pins: int = 0
    used: int = 0


AGE = attrgetter("used")
"""Sort key of leaves: when a cursor last left them. No two leaves have the same."""


class RadixIndex:
    """A prefix index as a radix tree for each salt; implements `PrefixIndex`.

    Only leaves without pins can be evicted. A pinned node pins all nodes above it, so every block without
    pins is on a leaf sooner or later: all of them are evictable.
    """

    def __init__(self) -> None:
        self.evictable = 0
        self._roots: dict[str, Node] = {}
        self._clock = count(1)
        self._leaves: list[Node] = []  # those without pins, the oldest first

    def match(self, keys: list[Key], salt: str) -> Match:
        """Return a `Match`: the blocks of the longest cached beginning of `keys` (the tokens of each block).

        salt: only sequences inserted under the same one match. Changes nothing.
        """
        blocks: list[int] = []
        unpinned = 0
        for node, length in self._walk(keys, salt):
            blocks += node.blocks[:length]
            unpinned += 0 if node.pins else length
        return Match(blocks, unpinned)

    def attach(self, keys: list[Key], salt: str) -> Node:
        """Pin the nodes of `keys`, all of which `match` has found, and return the last one as a cursor.

        A node that is matched in part is split, so that pins are exact.
        """
        node = self._roots.setdefault(salt, Node([], [], None, salt))
        for child, length in self._walk(keys, salt):
            node = child if length == len(child.keys) else self._split(child, length)
        self._pin(node)
        return node

    def extend(
        self, cursor: object, keys: list[Key], blocks: list[int]
    ) -> tuple[Node, list[int], list[int]]:
        """Follow the known keys after the cursor, then append the other blocks to a leaf, or to a new one.

        keys, blocks: one of each for every block after the cursor.

        Returns:
            The new cursor, the block in the index for each key, and those of `blocks` that were inserted.
        """
        assert isinstance(cursor, Node)
        node = cursor
        at = 0
        held = list[int]()
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            length = _common(child.keys, keys, at)
            if length < len(child.keys):
                child = self._split(child, length)
            held += child.blocks
            at += length
            node = child
            self._pin_one(node)
        new = blocks[at:]
        if new:
            if node.parent is not None and node.pins == 1 and not node.children:
                node.keys += keys[at:]  # no other node or request stands here
                node.blocks += new
            else:
                leaf = Node(keys[at:], new, node, node.salt, pins=1)
                node.children[keys[at]] = leaf
                node = leaf
        return node, held + new, new

    def fork(self, cursor: object) -> Node:
        """Return a second cursor: the same node, which is pinned once more with all above it."""
        assert isinstance(cursor, Node)
        self._pin(cursor)
        return cursor

    def detach(self, cursor: object) -> None:
        """Remove one pin of a cursor's node and of all above it; those without pins can be evicted now."""
        now = next(self._clock)
        node: Node | None = cursor if isinstance(cursor, Node) else None
        while node is not None:
            node.pins -= 1
            node.used = now
            if node.pins == 0:
                self.evictable += len(node.blocks)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> list[int]:
        """Remove at most `count` blocks from the ends of the least recently used leaves, and return them."""
        freed: list[int] = []
        while len(freed) < count and self._leaves:
            leaf = self._leaves[0]
            while leaf.blocks and len(freed) < count:
                freed.append(leaf.blocks.pop())
                first = leaf.keys.pop()
            if not leaf.blocks:
                del self._leaves[0]
                self._remove(leaf, first)
        self.evictable -= len(freed)
        return freed

    def blocks(self) -> list[int]:
        """Return a list of the numbers of all blocks in the trees of all salts."""
        found: list[int] = []
        todo = self.roots
        while todo:
            node = todo.pop()
            found += node.blocks
            todo += node.children.values()
        return found

    @property
    def roots(self) -> list[Node]:
        """Return a list of the root nodes, one for each salt's tree, for drawings and tests."""
        return list(self._roots.values())

    def _walk(self, keys: list[Key], salt: str) -> list[tuple[Node, int]]:
        """Return the nodes on the path of `keys`, below the root, each with its number of matching blocks.

        Only the last node may match in part. salt: whose tree is searched. Changes nothing.
        """
        path: list[tuple[Node, int]] = []
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(keys):
            node = node.children.get(keys[at])
            if node is None:
                break
            length = _common(node.keys, keys, at)
            path.append((node, length))
            at += length
            if length < len(node.keys):
                break
        return path

    def _split(self, node: Node, length: int) -> Node:
        """Split `node` after `length` blocks; return the new upper node. Cursors stay at the lower one."""
        assert node.parent is not None
        upper = Node(node.keys[:length], node.blocks[:length], node.parent, node.salt)
        upper.pins, upper.used = node.pins, node.used
        node.parent.children[upper.keys[0]] = upper
        del node.keys[:length], node.blocks[:length]
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def _pin(self, node: Node | None) -> None:
        while node is not None:
            self._pin_one(node)
            node = node.parent

    def _pin_one(self, node: Node) -> None:
        if node.pins == 0:
            self.evictable -= len(node.blocks)
            if node.blocks and not node.children:
                del self._leaves[bisect_left(self._leaves, node.used, key=AGE)]
        node.pins += 1

    def _offer(self, node: Node) -> None:
        """Add `node` to the evictable leaves if it is one without pins; remove its tree if it is empty."""
        if node.pins == 0 and not node.children:
            if node.parent is None:
                self._roots.pop(node.salt, None)  # an empty tree
            else:
                insort(self._leaves, node, key=AGE)

    def _remove(self, leaf: Node, first: Key) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[first]
        self._offer(leaf.parent)


def _common(held: list[Key], keys: list[Key], at: int) -> int:
    """Return how many leading keys two lists share: `held`, and `keys` from index `at` on."""
    length = min(len(held), len(keys) - at)
    if held[:length] == keys[at : at + length]:
        return length
    return next(i for i in range(length) if held[i] != keys[at + i])
