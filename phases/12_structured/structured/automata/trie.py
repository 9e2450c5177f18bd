"""The token trie: all tokens as one tree of bytes, so that a common prefix is read once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from structured.matcher import Words

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]


class Trie:
    """A tree of all prefixes of tokens: a node for each. Nodes are sorted by length, then by text.

    Node 0 is the empty text.

    tokens: the bytes of each token, by its id; a token without bytes stands for no text.
    size: number of nodes, `N`.
    parents, bytes: `[N]`, the parent of each node, and the byte that leads from the parent to it.
    levels: for each length from 1 on, its first node and one past its last.
    children: `[N + 1]`; the children of node `n` are `children[n] .. children[n + 1] - 1`.
    token_nodes: `[V]`, the node where each token ends; `N`, which is no node, for tokens without bytes.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        prefixes = {token[:end] for token in tokens for end in range(len(token) + 1)}
        texts = sorted(prefixes, key=lambda text: (len(text), text))
        nodes = {text: node for node, text in enumerate(texts)}
        depths = [len(text) for text in texts]
        begins = np.searchsorted(depths, np.arange(1, depths[-1] + 2)).tolist()
        self.levels: list[tuple[int, int]] = list(pairwise(begins))
        self.size = len(nodes)
        self.parents = np.array([nodes[text[:-1]] for text in nodes], np.int32)
        self.letters = [text[-1] if text else 0 for text in nodes]
        self.bytes = np.array(self.letters, np.int32)
        first_child = 1 + np.searchsorted(self.parents[1:], np.arange(self.size + 1))
        self.children: list[int] = first_child.tolist()
        self.token_nodes = np.array([nodes[token] if token else self.size for token in tokens])

    def walk(self, table: Ints, state: int) -> Ints:
        """Return the automaton's state after each node's text, `[N]` int32; -1: it cannot read the text.

        table: `[states + 1, 256]` int32, the state that follows each state and byte. Its last row, which is
            that of state -1, holds -1 only. state: the automaton's state before the text.
        """
        states = np.full(self.size, -1, np.int32)
        states[0] = state
        for begin, end in self.levels:
            states[begin:end] = table[states[self.parents[begin:end]], self.bytes[begin:end]]
        return states

    def mask(self, reached: Bools) -> Words:
        """Return the bit mask, int32 `[ceil(V / 32)]`, of the tokens that end at nodes marked in `reached`.

        reached: bool `[N]`. Bit `t % 32` (0 is the lowest) of number `t // 32` is that of token `t`; 0 for
            tokens without bytes.
        """
        allowed = np.append(reached, False)[self.token_nodes]
        words = np.zeros(-(-len(allowed) // 32), np.int32)
        packed = np.packbits(allowed, bitorder="little")
        words.view(np.uint8)[: len(packed)] = packed
        return words
