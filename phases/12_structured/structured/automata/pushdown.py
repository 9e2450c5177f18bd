"""Automata that call each other: what nests needs a stack, and the stack holds where to go on afterwards.

A rule is a deterministic automaton whose edges are bytes and calls of rules. A regular expression is one rule
without calls: its stack is one state high, and everything here is a look into a table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from common.errors import UserError
from structured.automata.dfa import DEAD, Dfa, compile
from structured.automata.nfa import CALLS
from structured.automata.nodes import Node
from structured.automata.trie import Bools, Ints, Trie
from structured.matcher import Words

MOST_STATES = 20_000
MOST_MASK_BYTES = 64 << 20
"""Masks that one grammar keeps; then it begins anew."""

BOTTOM = -1
"""Below the lowest state of a stack, for masks that depend on there being nothing else."""
MOST_WAYS = 3000
"""Stacks that one stack may become before the next byte is read."""

Stack = tuple[int, ...]
"""States: the rule that is being read last, below it where each caller goes on."""

Place = frozenset[Stack]
"""All stacks that are possible after the same text; several where alternatives begin alike."""


class Machine:
    """The rules of a grammar in one table.

    table: `[states + 1, 256]`, the last row for state -1.
    calls: of each state, the rules that may begin there: their first state, and where to go on afterwards.
    accepting: of each state, whether its rule may end there.
    start: the place before the first byte.
    """

    def __init__(self, rules: Mapping[str, Node], start: str) -> None:
        numbers = {name: number for number, name in enumerate(rules)}
        tables = list[Ints]()
        firsts = list[int]()
        made = list[Dfa]()
        accepting: list[bool] = []
        count = 0
        for node in rules.values():
            made.append(compile(node, numbers))
            firsts.append(count)
            count += len(made[-1].table)
            if count > MOST_STATES:
                raise UserError(f"a grammar takes more than {MOST_STATES} states: simplify it")
        self.calls: list[list[tuple[int, int]]] = []
        for first, dfa in zip(firsts, made, strict=True):
            table = np.where(dfa.table < 0, DEAD, dfa.table + first).astype(np.int32)
            tables.append(table[:, :CALLS])
            accepting += dfa.accepting.tolist()
            for row in table[:, CALLS:].tolist():
                self.calls.append(
                    [(firsts[rule], after) for rule, after in enumerate(row) if after >= 0]
                )
        self.table = np.vstack([*tables, np.full((1, 256), DEAD, np.int32)])
        self.accepting = accepting
        begin = firsts[numbers[start]]
        self._prune(begin)
        reads = (self.table[:-1] >= 0).any(1)
        self.reads: list[bool] = np.asarray(reads).tolist()
        self.ends = [
            a and not r and not c
            for a, r, c in zip(accepting, self.reads, self.calls, strict=True)
        ]
        self.calling = np.array([*map(bool, self.calls), False])
        self.ending = np.array([*accepting, False])
        self.start: Place = frozenset(self.expand_calls((begin,)))

    def _prune(self, begin: int) -> None:
        """Remove what can never end: a state must lead to the end of its rule, by rules that can end."""
        leads: list[list[tuple[int, int]]] = [
            [] for _ in self.table
        ]  # from where, if another is alive too
        sources, symbols = (self.table >= 0).nonzero()
        for source, target in {
            *zip(sources.tolist(), self.table[sources, symbols].tolist(), strict=True)
        }:
            leads[target].append((source, target))
        for state, calls in enumerate(self.calls):
            for rule, after in calls:
                leads[rule].append((state, after))
                leads[after].append((state, rule))
        alive = np.append(np.array(self.accepting), False)
        queue = alive.nonzero()[0].tolist()
        while queue:
            for state, other in leads[queue.pop()]:
                if alive[other] and not alive[state]:
                    alive[state] = True
                    queue.append(state)
        if not alive[begin]:
            raise UserError("a grammar has no output that ever ends")
        self.table = np.where(alive[self.table], self.table, DEAD).astype(np.int32)
        self.calls = [
            [(r, a) for r, a in calls if alive[r] and alive[a]] for calls in self.calls
        ]

    # Reading.

    def expand_calls(self, stack: Stack) -> set[Stack]:
        """Return a stack, and those that it becomes by calls and returns: the ones from which a byte can be
        read, and the one that stands at the end of everything."""
        found = set[Stack]()
        todo = [stack]
        seen = {stack}
        while todo:
            stack = todo.pop()
            top, below = stack[-1], stack[:-1]
            if self.reads[top] or (self.accepting[top] and not below):
                found.add(stack)
            # A caller that has nothing left to do is not kept: so a chain of calls stays short.
            more = [
                (*below, *(() if self.ends[then] else (then,)), rule)
                for rule, then in self.calls[top]
            ]
            if self.accepting[top] and below:
                more.append(below)
            for new in more:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            if len(seen) > MOST_WAYS:  # it would push for ever
                raise UserError("a rule of the grammar calls itself before it reads anything")
        return found

    def step(self, place: Place, byte: int) -> Place:
        """Return the place after one more byte; empty if it cannot come next."""
        found = set[Stack]()
        for stack in place:
            state = int(self.table[stack[-1], byte])
            if state >= 0:
                found |= self.expand_calls((*stack[:-1], state))
        return frozenset(found)

    def may_end(self, place: Place) -> bool:
        """Tell whether the text up to here is a whole output."""
        return any(len(stack) == 1 and self.accepting[stack[0]] for stack in place)


class MaskMaker:
    """The masks of a machine over a trie, each made when it is first needed.

    A mask depends on as much of the stack as one token can unwind, which is seldom more than the top. So a
    mask is kept under that part, and every deeper stack that ends with it has it too.

    made: how many masks were made.
    """

    def __init__(self, machine: Machine, trie: Trie) -> None:
        self.machine, self.trie = machine, trie
        self.made = 0
        self._masks: dict[Stack, Words] = {}
        self._depths: dict[int, set[int]] = {}  # top of a stack -> how deep known masks look

    def mask(self, place: Place) -> Words:
        """Return every token that can come next, the end aside. The caller must not change it."""
        words = [self._of_stack(stack) for stack in place]
        return words[0] if len(words) == 1 else np.bitwise_or.reduce(words)

    def _of_stack(self, stack: Stack) -> Words:
        whole = (BOTTOM, *stack)
        for depth in self._depths.get(stack[-1], ()):
            if (found := self._masks.get(whole[-depth:])) is not None:
                return found
        words, lowest = self._make(stack)
        if len(self._masks) * words.nbytes >= MOST_MASK_BYTES:
            self._masks.clear()
            self._depths.clear()
        depth = len(stack) - lowest + (2 if lowest == 1 else 1)
        self._masks[whole[-depth:]] = words
        self._depths.setdefault(stack[-1], set()).add(depth)
        return words

    def _make(self, stack: Stack) -> tuple[Words, int]:
        """Make a stack's mask; returns also the lowest height that a token can unwind it to."""
        self.made += 1
        machine, below = self.machine, stack[:-1]
        states = self.trie.walk(machine.table, stack[-1])
        reached = states >= 0
        reached[0] = False
        lowest = len(stack)
        # Where a rule is called or ends inside a token, the rest of the token is read by the stacks there.
        branches = machine.calling | machine.ending if below else machine.calling
        for node in (reached & branches[states]).nonzero()[0].tolist():
            here = (*below, int(states[node]))
            others = machine.expand_calls(here) - {here}
            if machine.accepting[here[-1]] and below:
                lowest = min(lowest, len(below))
            lowest = self._explore(node, others, reached, lowest)
        return self.trie.mask(reached), lowest

    def _explore(self, node: int, stacks: set[Stack], reached: Bools, lowest: int) -> int:
        """Mark the nodes below `node` that some of the stacks there can read; returns the lowest height."""
        children, letters = self.trie.children, self.trie.letters
        todo = [(node, frozenset(stacks))]
        while todo:
            node, place = todo.pop()
            if not place:
                continue
            lowest = min(lowest, *(len(stack) for stack in place))
            for child in range(children[node], children[node + 1]):
                after = self.machine.step(place, letters[child])
                if after:
                    reached[child] = True
                    todo.append((child, after))
        return lowest
