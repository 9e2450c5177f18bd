"""Deterministic automata: the subset construction, and the smallest equivalent automaton.

A deterministic automaton is in one state at a time, so following a text is one look into a table a byte.
Rabin and Scott, "Finite Automata and Their Decision Problems" (1959); Moore, "Gedanken-experiments on
Sequential Machines" (1956).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from common.errors import UserError
from structured.automata.deadline import check
from structured.automata.nfa import Nfa
from structured.automata.nodes import Node

MOST_STATES = 4_000

DEAD = -1


@dataclass(frozen=True, eq=False)
class Dfa:
    """A deterministic automaton over bytes and calls of rules, its symbols; state 0 is the start.

    table: `[states, symbols]` int32, the state that follows each state and symbol; `DEAD`: none does. From
        every state some text leads to an accepting state, unless the automaton accepts no text at all.
    accepting: `[states]` bool, whether the automaton accepts a text that leads to the state.
    """

    table: NDArray[np.int32]
    accepting: NDArray[np.bool_]


def compile(node: Node, rules: dict[str, int] | None = None) -> Dfa:
    """Return the smallest deterministic automaton that accepts what a syntax tree matches.

    node: the syntax tree. rules: the number of each rule that it may call, by the rule's name; None: it
        calls none.

    Raises:
        UserError: the automaton has too many states, or takes too long to make.
    """
    return minimize(determinize(Nfa(node, rules)))


def determinize(nfa: Nfa) -> Dfa:
    """Return a deterministic automaton that accepts the same texts as `nfa`.

    Each of its states is a set: the states in which `nfa` may be after the same text. Left out of a set are
    states without an edge that reads a symbol, except state 1, the end of `nfa`. A set accepts if state 1
    is in it. Sets are numbered as they are found; from each set, the lowest symbol is followed first.

    Raises:
        UserError: there are more than `MOST_STATES` sets, or it takes too long (`check`, called for each).
    """
    classes, count = symbol_classes(nfa)
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """Return the states that `state` reaches without reading: those with edges, and the end."""
        if state not in closures:
            seen, stack = {state}, [state]
            while stack:
                for target in nfa.free[stack.pop()]:
                    if target not in seen:
                        seen.add(target)
                        stack.append(target)
            closures[state] = frozenset(s for s in seen if nfa.edges[s] or s == 1)
        return closures[state]

    start = closure(0)
    numbers = {start: 0}
    queue = [start]
    rows = list[list[int]]()
    for states in queue:  # which grows
        check()
        moves: list[set[int]] = [set() for _ in range(count)]
        for state in states:
            for low, high, target in nfa.edges[state]:
                reached = closure(target)
                for kind in range(classes[low], classes[high] + 1):
                    moves[kind] |= reached
        row = []
        for move in moves:
            found = frozenset(move)
            if found and found not in numbers:
                numbers[found] = len(queue)
                queue.append(found)
                if len(queue) > MOST_STATES:
                    raise UserError(
                        f"a grammar takes more than {MOST_STATES} states: simplify it"
                    )
            row.append(numbers[found] if found else DEAD)
        rows.append(row)
    return Dfa(
        np.array(rows, np.int32)[:, classes], np.array([1 in states for states in queue])
    )


def symbol_classes(nfa: Nfa) -> tuple[list[int], int]:
    """Group the symbols that no edge of `nfa` distinguishes into classes.

    Returns:
        The number of the class of each symbol, by symbol, and how many classes there are.
    """
    size = 256 + len(nfa.rules)
    bounds = sorted(
        {0}.union(*({low, high + 1} for edges in nfa.edges for low, high, _ in edges)) - {size}
    )
    return (np.searchsorted(bounds, np.arange(size), "right") - 1).tolist(), len(bounds)


def minimize(dfa: Dfa) -> Dfa:
    """Return the automaton that accepts the same texts as `dfa` and has the fewest states.

    It begins with two groups of states, the accepting ones and the others. It splits groups by the groups
    to which their symbols lead, until no symbol tells two states of a group apart. `check` is called before
    each round.

    Returns:
        One state for each group, numbered in the order of the groups' first states in `dfa`. States from
        which no text leads to an accepting state are left out, and edges to them are `DEAD`. If no other
        states remain, state 0 alone is kept, with `DEAD` edges.
    """
    count, width = dfa.table.shape
    table = np.vstack(
        [np.where(dfa.table < 0, count, dfa.table), np.full((1, width), count)]
    )  # a trap
    columns = np.unique(table, axis=1)
    groups, many = np.append(dfa.accepting, False).astype(np.int64), 0
    while groups.max() >= many:
        check()
        many = groups.max() + 1
        signs = np.column_stack([groups, groups[columns]])
        groups = np.unique(signs, axis=0, return_inverse=True)[1].reshape(-1)
    # One state a group, in the order of their first states; states as good as the trap are left out.
    firsts = sorted(np.unique(groups, return_index=True)[1].tolist())
    firsts = [first for first in firsts if groups[first] != groups[count]] or [0]
    numbers = np.full(many, DEAD, np.int32)
    numbers[groups[firsts]] = np.arange(len(firsts))
    numbers[groups[count]] = DEAD
    return Dfa(numbers[groups[table[firsts]]], dfa.accepting[firsts])
