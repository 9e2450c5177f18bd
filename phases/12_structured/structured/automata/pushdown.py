"""Automata that call each other, for text that nests: a stack holds the state in which each caller goes on.

A rule is a deterministic automaton whose edges read a byte or call a rule. A regular expression is one rule
without calls: its stack holds one state, and to read a byte is to look into a table.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np

from common.errors import UserError
from structured.automata.deadline import check
from structured.automata.dfa import DEAD, Dfa, compile
from structured.automata.nfa import CALLS, utf8
from structured.automata.nodes import Alt, Cat, Chars, Members, Node, Repeat
from structured.automata.trie import Bools, Trie
from structured.matcher import Words

MOST_STATES = 20_000
MOST_MASK_BYTES = 64 << 20
"""Most memory for the masks of one grammar; when it is full, all of them are dropped."""

BOTTOM = -1
"""Stands below the lowest state of a stack, in the key of a mask that depends on the whole stack."""
MOST_WAYS = 3000
"""Most stacks that one stack may become before the next byte is read."""

Stack = tuple[int, ...]
"""The current state of the innermost rule comes last; before it, the states in which its callers go on."""

Place = frozenset[Stack]
"""All stacks that are possible after a text: several, where alternatives begin with the same text."""


def rules_that_end(rules: Mapping[str, Node]) -> dict[str, Node]:
    """Return the rules, by name, that match some text of finite length; `a = "x" a` matches none.

    rules: the syntax tree of each rule, by its name.
    """
    found: dict[str, Node] = {}
    while more := {
        name: node
        for name, node in rules.items()
        if name not in found and has_text(node, found)
    }:
        check()
        found |= more
    return found


def has_text(node: Node, rules: Container[str]) -> bool:
    """Return True if some text matches the syntax tree `node`.

    rules: names of the rules that it may call; a call of any other rule matches no text.
    """
    match node:
        case Chars(ranges):
            return next(utf8(ranges), None) is not None
        case Cat(parts):
            return all(has_text(part, rules) for part in parts)
        case Alt(parts):
            return any(has_text(part, rules) for part in parts)
        case Repeat(part, low):
            return low == 0 or has_text(part, rules)
        case Members(members):
            return all(has_text(member, rules) for member, required in members if required)
    return node.rule in rules


class Machine:
    """A pushdown automaton: the rules of a grammar, compiled to one table of states.

    A stack ends with the current state of the innermost rule; before it are the states in which its callers
    go on.

    Args:
        rules: the syntax tree of each rule, by its name.
        start: the name of the rule that an output must match.

    Raises:
        UserError: no output ever ends, or the rules take too many states.

    table: `[states + 1, 256]` int32, the state that follows each state and byte; -1: none. The last row is
        that of state -1.
    calls: of each state, the rules that it may call: (first state of the rule, next state of the caller).
    accepting: of each state, whether its rule may end there.
    reads: of each state, whether it has an edge that reads a byte.
    ends: of each state, whether its rule must end there: it accepts, and can neither read nor call.
    start: the set of possible stacks (a `Place`) before the first byte.
    """

    def __init__(self, rules: Mapping[str, Node], start: str) -> None:
        rules = rules_that_end(rules)
        if start not in rules:
            raise UserError("a grammar has no output that ever ends")
        numbers = {name: number for number, name in enumerate(rules)}
        made = list[Dfa]()
        firsts = [0]
        for node in rules.values():
            made.append(compile(node, numbers))
            firsts.append(firsts[-1] + len(made[-1].table))
            if firsts[-1] > MOST_STATES:
                raise UserError(f"a grammar takes more than {MOST_STATES} states: simplify it")
        table = np.vstack(
            [
                np.where(dfa.table < 0, DEAD, dfa.table + first)
                for first, dfa in zip(firsts[:-1], made, strict=True)
            ]
        )
        self.calls = [
            [(firsts[rule], after) for rule, after in enumerate(row) if after >= 0]
            for row in table[:, CALLS:].tolist()
        ]
        self.table = np.vstack([table[:, :CALLS], np.full((1, CALLS), DEAD)]).astype(np.int32)
        self.accepting = [bool(accepts) for dfa in made for accepts in dfa.accepting]
        self.reads: list[bool] = np.any(self.table >= 0, axis=1).tolist()
        self.ends = [
            accepting and not reads and not calls
            for accepting, reads, calls in zip(
                self.accepting, self.reads[:-1], self.calls, strict=True
            )
        ]
        self.calling = np.array([*map(bool, self.calls), False])
        self.ending = np.array([*self.accepting, False])
        self.start: Place = frozenset(self.expand_calls((firsts[numbers[start]],)))

    def expand_calls(self, stack: Stack) -> set[Stack]:
        """Return all stacks that `stack` may become by calls and returns before the next byte.

        `stack` itself is one of them: it need not call. Of these stacks, only those are returned whose top
        state can read a byte (`reads`), and the stack of a single state that accepts, where the output may
        end. A call replaces the top state by two states: the caller's next state, and above it
        the first state of the called rule. The caller's next state is left out if its rule must end there
        (`ends`), so a chain of last calls needs a short stack. A return removes the top state if it accepts
        and another state is below it.

        Raises:
            UserError: there are more than `MOST_WAYS` on the way, since a rule calls itself before it reads
                a byte.
        """
        found = set[Stack]()
        todo = [stack]
        seen = {stack}
        while todo:
            stack = todo.pop()
            top, below = stack[-1], stack[:-1]
            if self.reads[top] or (self.accepting[top] and not below):
                found.add(stack)
            # A caller that has nothing left to do gets no entry, so a chain of last calls stays short.
            more = [
                (*below, rule) if self.ends[after] else (*below, after, rule)
                for rule, after in self.calls[top]
            ]
            if self.accepting[top] and below:
                more.append(below)
            todo += [new for new in more if new not in seen]
            seen.update(more)
            if len(seen) > MOST_WAYS:  # it would push for ever
                raise UserError("a rule of the grammar calls itself before it reads anything")
        return found

    def step(self, place: Place, byte: int) -> Place:
        """Return the set of possible stacks after one more byte; empty if the byte cannot come next.

        place: the set of stacks before. byte: 0 to 255.
        """
        found = set[Stack]()
        for stack in place:
            state = int(self.table[stack[-1], byte])
            if state >= 0:
                found |= self.expand_calls((*stack[:-1], state))
        return frozenset(found)

    def may_end(self, place: Place) -> bool:
        """Return True if the output may end in `place`, the set of possible stacks after a text."""
        return any(len(stack) == 1 and self.accepting[stack[0]] for stack in place)


class MaskMaker:
    """Computes and caches the bit masks of the tokens that a pushdown automaton allows next.

    A mask depends on the states that one token can remove from the stack and the one below them, mostly on
    the top state alone. These states are the key of a cached mask; every stack that ends with them shares
    it.

    machine: the automaton. trie: all prefixes of the tokens. made: number of masks that were computed so
        far.
    """

    def __init__(self, machine: Machine, trie: Trie) -> None:
        self.machine, self.trie = machine, trie
        self.made = 0
        self._masks: dict[Stack, Words] = {}

    def mask(self, place: Place) -> Words:
        """Return the bit mask, int32 `[ceil(V / 32)]`, of the tokens that can come next, without end tokens.

        place: the set of possible stacks after the text so far. The caller must not change the mask, which
            is cached.
        """
        words = [self._of_stack(stack) for stack in place]
        return words[0] if len(words) == 1 else np.bitwise_or.reduce(words)

    def _of_stack(self, stack: Stack) -> Words:
        whole = (BOTTOM, *stack)
        for depth in range(1, len(whole) + 1):
            if (found := self._masks.get(whole[-depth:])) is not None:
                return found
        words, lowest = self._make(stack)
        if len(self._masks) * words.nbytes >= MOST_MASK_BYTES:
            self._masks.clear()
        depth = len(stack) - lowest + (2 if lowest == 1 else 1)
        self._masks[whole[-depth:]] = words
        return words

    def _make(self, stack: Stack) -> tuple[Words, int]:
        """Return the bit mask of the tokens that a stack allows, and the least height of the stack meanwhile.

        The height is the number of states that remain on the stack while a token is read, the least over
        all tokens.
        """
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
        """Mark as True in `reached` the trie's nodes below `node` that the automaton can read.

        node: a node of the trie, which is a prefix of tokens. stacks: the automaton's possible stacks at
            `node`. reached: bool `[N]`, for each node of the trie. lowest: the least height of a stack, in
            states, until now.

        Returns:
            The least of `lowest` and of the heights of the stacks on the way.
        """
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
