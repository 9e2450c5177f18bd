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
        nodes = {b"": 0}
        rest = tokens
        depth = 0
        self.levels: list[tuple[int, int]] = []
        while rest := [token for token in rest if len(token) > depth]:
            begin, depth = len(nodes), depth + 1
            for text in sorted(
                {token[:depth] for token in rest}
            ):  # so those of one parent are neighbours
                nodes[text] = len(nodes)
            self.levels.append((begin, len(nodes)))
        self.size = len(nodes)
        self.parents = np.array([nodes[text[:-1]] for text in nodes], np.int32)
        self.letters = [text[-1] if text else 0 for text in nodes]
        self.bytes = np.array(self.letters, np.int32)
        first_child = 1 + np.searchsorted(self.parents[1:], np.arange(self.size + 1))
        self.children: list[int] = first_child.tolist()
        self.token_nodes = np.array([nodes[token] if token else self.size for token in tokens])

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
        words = np.zeros(-(-len(allowed) // 32), np.int32)
        packed = np.packbits(allowed, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return words
