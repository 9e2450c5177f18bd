"""Deterministic automata: the subset construction, the smallest one, and two at a time.

A deterministic automaton is in one state at a time, so following a text is one look into a table a byte.
Rabin and Scott, "Finite Automata and Their Decision Problems" (1959); Hopcroft, "An n log n algorithm for
minimizing states in a finite automaton" (1971).
"""

from __future__ import annotations

from collections.abc import Callable
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
    """State 0 begins.

    table: `[states, symbols]` int32, where each symbol leads from each state; `DEAD`: nowhere. From every
        state some text is accepted, unless the language is empty.
    accepting: `[states]` bool.
    """

    table: NDArray[np.int32]
    accepting: NDArray[np.bool_]


def compile(node: Node, rules: dict[str, int] | None = None) -> Dfa:
    """The smallest automaton of an expression. Raises `UserError` if it takes too much."""
    return minimize(determinize(Nfa(node, rules)))


def determinize(nfa: Nfa) -> Dfa:
    """Each state is a set of states of `nfa`: all in which it may be after the same text."""
    classes, symbols = symbol_classes(nfa)
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """What can be reached without reading anything; only states with edges, or the end, matter."""
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
    numbers, queue, rows = {start: 0}, [start], list[list[int]]()
    for states in queue:  # which grows
        check()
        moves: list[set[int]] = [set() for _ in range(len(symbols))]
        for state in states:
            for low, high, target in nfa.edges[state]:
                reached = closure(target)
                first, last = classes[low], classes[high]
                for kind in range(first, last + 1):
                    moves[kind] |= reached
        row = []
        for move in moves:
            if not move:
                row.append(DEAD)
                continue
            found = frozenset(move)
            if found not in numbers:
                numbers[found] = len(queue)
                queue.append(found)
                if len(queue) > MOST_STATES:
                    raise UserError(f"a grammar takes more than {MOST_STATES} states: simplify it")
            row.append(numbers[found])
        rows.append(row)
    by_class = np.array(rows, np.int32).reshape(len(rows), len(symbols))
    kinds = np.array(classes)
    table = (
        np.where(kinds < 0, DEAD, by_class[:, np.maximum(kinds, 0)])
        if len(symbols)
        else np.full((len(rows), len(classes)), DEAD)
    )
    accepting = np.array([1 in states for states in queue])
    return Dfa(table.astype(np.int32), accepting)


def symbol_classes(nfa: Nfa) -> tuple[list[int], list[int]]:
    """Symbols between which no edge makes a difference are one class: its number for each symbol, in order.

    Returns:
        `[symbols]` classes, -1 where no edge leads anywhere, and the first symbol of each class.
    """
    size = 256 + len(nfa.rules)
    bounds, used = {0}, np.zeros(size + 1, np.int64)
    for edges in nfa.edges:
        for low, high, _ in edges:
            bounds |= {low, high + 1}
            used[low] += 1
            used[high + 1] -= 1
    covered = used.cumsum()
    classes, firsts = [], list[int]()
    for symbol in range(size):
        if symbol in bounds and covered[symbol]:
            firsts.append(symbol)
        classes.append(len(firsts) - 1 if covered[symbol] else -1)
    return classes, firsts


def minimize(dfa: Dfa) -> Dfa:
    """The same language in as few states as can be.

    Begin with two groups, those that accept and the others, and split a group as long as some symbol leads
    from its states into different groups. Of the parts of a group only the smaller has to be looked at again.
    """
    count, width = dfa.table.shape
    whole = np.vstack([np.where(dfa.table < 0, count, dfa.table), np.full((1, width), count)])  # a trap
    columns = np.unique(whole, axis=1)
    sources: list[list[list[int]]] = []  # for each symbol and state, the states that lead there
    for column in columns.T.tolist():
        into: list[list[int]] = [[] for _ in range(count + 1)]
        for source, target in enumerate(column):
            into[target].append(source)
        sources.append(into)
    accepting = set(dfa.accepting.nonzero()[0].tolist())
    groups = [group for group in (accepting, set(range(count + 1)) - accepting) if group]
    group_of = [0] * (count + 1)
    for number, group in enumerate(groups):
        for state in group:
            group_of[state] = number
    waiting = {min(range(len(groups)), key=lambda number: len(groups[number]))}
    while waiting:
        check()
        splitter = list(groups[waiting.pop()])
        for into in sources:
            touched: dict[int, set[int]] = {}
            for target in splitter:
                for source in into[target]:
                    touched.setdefault(group_of[source], set()).add(source)
            for number, part in touched.items():
                if len(part) == len(groups[number]):
                    continue
                groups[number] -= part
                groups.append(part)
                new = len(groups) - 1
                for state in part:
                    group_of[state] = new
                smaller = new if len(part) <= len(groups[number]) else number
                waiting.add(new if number in waiting else smaller)
    return _renumber(dfa, groups, group_of)


def _renumber(dfa: Dfa, groups: list[set[int]], group_of: list[int]) -> Dfa:
    """One state for each group but the trap, the first one first, in the order in which they are reached."""
    count = len(dfa.table)
    trap = group_of[count]
    table = np.where(dfa.table < 0, count, dfa.table)
    order = {group_of[0]: 0}
    queue, rows = [group_of[0]], list[list[int]]()
    to_group = np.array(group_of)
    for group in queue:  # which grows
        row = to_group[table[next(state for state in groups[group] if state < count)]].tolist()
        for target in row:
            if target != trap and target not in order:
                order[target] = len(queue)
                queue.append(target)
        rows.append([order.get(target, DEAD) if target != trap else DEAD for target in row])
        if group == trap:  # the language is empty
            return Dfa(np.full((1, dfa.table.shape[1]), DEAD, np.int32), np.zeros(1, np.bool_))
    accepting = np.array([any(dfa.accepting[state] for state in groups[g] if state < count) for g in queue])
    return Dfa(np.array(rows, np.int32), accepting)


def product(left: Dfa, right: Dfa, keep: Callable[[bool, bool], bool]) -> Dfa:
    """Both at a time: a text is accepted if `keep` says so of what the two say.

    With `and` that is what they have in common, with `left and not right` the difference.
    """
    size = left.table.shape[1]
    start = (0, 0)
    numbers, queue, rows = {start: 0}, [start], list[list[int]]()
    tables = [dfa.table.tolist() for dfa in (left, right)]
    for one, other in queue:  # which grows
        check()
        row = []
        for symbol in range(size):
            pair = (
                tables[0][one][symbol] if one >= 0 else DEAD,
                tables[1][other][symbol] if other >= 0 else DEAD,
            )
            if pair == (DEAD, DEAD):
                row.append(DEAD)
                continue
            if pair not in numbers:
                numbers[pair] = len(queue)
                queue.append(pair)
                if len(queue) > MOST_STATES:
                    raise UserError(f"a grammar takes more than {MOST_STATES} states: simplify it")
            row.append(numbers[pair])
        rows.append(row)
    accepting = np.array(
        [
            keep(one >= 0 and bool(left.accepting[one]), other >= 0 and bool(right.accepting[other]))
            for one, other in queue
        ]
    )
    return minimize(Dfa(np.array(rows, np.int32), accepting))
