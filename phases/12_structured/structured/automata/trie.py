"""The token trie: all tokens as one tree of bytes, so that a common beginning is read once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from structured.matcher import Words

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class Trie:
    """Nodes in the order of their depth; node 0 is the empty text, and the children of a node are neighbours.

    parents, bytes: `[N]`, the node before each and the byte between them.
    levels: where each depth begins and ends.
    children: `[N + 1]`; those of node `n` are `children[n] .. children[n + 1] - 1`.
    token_nodes: `[V]`, where each token ends; node `N`, which is never reached, for tokens without bytes.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.vocab_size = len(tokens)
        token_nodes = np.full(len(tokens), -1, np.int64)
        parents, letters, levels = [0], [0], [(0, 1)]
        first_child: list[int] = []
        # All tokens that begin alike stand together when they are sorted; each level splits them by a byte.
        order = sorted((token, number) for number, token in enumerate(tokens) if token)
        spans = [(0, len(order))]  # of each node of the level before, its tokens in `order`
        depth = 0
        while spans:
            begin, below = len(parents), list[tuple[int, int]]()
            for node, (at, end) in enumerate(spans, start=levels[-1][0]):
                first_child.append(len(parents))
                while at < end and len(order[at][0]) == depth:
                    token_nodes[order[at][1]] = node
                    at += 1
                while at < end:
                    letter, first = order[at][0][depth], at
                    while at < end and order[at][0][depth] == letter:
                        at += 1
                    parents.append(node)
                    letters.append(letter)
                    below.append((first, at))
            spans, depth = below, depth + 1
            levels.append((begin, len(parents)))
        first_child.append(len(parents))
        self.size = len(parents)
        self.parents, self.bytes = np.array(parents, np.int32), np.array(letters, np.int32)
        self.levels = levels[1:-1]
        self.children = first_child
        self.letters = letters
        self.token_nodes = np.where(token_nodes < 0, self.size, token_nodes)

    def walk(self, table: Ints, state: int) -> Ints:
        """Follow all tokens at once, a byte of each at a time: the state in which every node ends, `[N]`.

        table: `[states + 1, 256]`; the last row is that of state -1, from which nothing leads anywhere.
        """
        states = np.full(self.size, -1, np.int32)
        states[0] = state
        for begin, end in self.levels:
            states[begin:end] = table[states[self.parents[begin:end]], self.bytes[begin:end]]
        return states

    def mask(self, reached: Bools) -> Words:
        """Return the tokens whose nodes are `reached [N]`, as the words of a mask."""
        allowed = np.append(reached, False)[self.token_nodes]
        words = np.zeros(-(-self.vocab_size // 32), np.int32)
        packed = np.packbits(allowed, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return words
