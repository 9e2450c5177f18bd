"""Mistakes in the exercises of phase 12."""

from tests.course.slips import Slip

SLIPS = {
    "12.1": (
        "loops-leak",
        Slip(
            "one-too-few",
            "for _ in range(node.low):",
            "for _ in range(node.low - 1):",
            "Asks for one copy less.",
        ),
        Slip(
            "one-more-at-least",
            "        self.free[begin].append(end)\n        for _ in range(node.high",
            "        for _ in range(node.high",
            "Cannot end after the copies that must be there.",
        ),
        Slip(
            "as-many-again",
            "range(node.high - node.low)",
            "range(node.high)",
            "Allows the highest number on top of the lowest.",
        ),
        Slip("no-way-out", "            self.free[loop].append(end)\n", "", "Loops for ever."),
    ),
    "12.2": (
        "accepting-by-all",
        "no-closure",
        Slip(
            "last-class-missing",
            "range(first, last + 1)",
            "range(first, last)",
            "Leaves out the last class of a range.",
        ),
        Slip(
            "last-edge-wins",
            "moves[kind] |= reached",
            "moves[kind] = set(reached)",
            "Keeps one edge's targets of several.",
        ),
        Slip(
            "start-alone",
            "start = closure(0)",
            "start = frozenset({0})",
            "Begins without what can be reached for nothing.",
        ),
    ),
    "12.3": (
        "not-the-smallest",
        Slip("never-split", "    while waiting:", "    while False:", "Leaves it at two groups."),
        Slip(
            "nobody-is-told",
            "                for state in part:\n                    group_of[state] = new\n",
            "",
            "Does not tell states of their new group.",
        ),
        Slip(
            "first-class-ignored",
            "for into in sources:",
            "for into in sources[1:]:",
            "Ignores a class of symbols.",
        ),
        Slip(
            "trap-leads-to-the-start",
            "np.full((1, width), count)",
            "np.full((1, width), 0)",
            "Lets the trap lead back to the beginning.",
        ),
        Slip(
            "whole-groups-split",
            "if len(part) == len(groups[number]):",
            "if len(part) != len(groups[number]):",
            "Splits groups that need not be split, and no others.",
        ),
    ),
    "12.4": (
        Slip("root-is-dead", "        states[0] = state\n", "", "Begins nowhere."),
        Slip("highest-bit-first", 'bitorder="little"', 'bitorder="big"', "Puts tokens into words backwards."),
        Slip(
            "nothing-is-something",
            "np.append(reached, False)",
            "np.append(reached, True)",
            "Allows tokens without bytes.",
        ),
        Slip(
            "one-byte-only",
            "for begin, end in self.levels:",
            "for begin, end in self.levels[:1]:",
            "Follows the first byte of each token.",
        ),
        Slip(
            "byte-of-the-parent",
            "self.bytes[begin:end]]",
            "self.bytes[self.parents[begin:end]]]",
            "Goes by the byte before.",
        ),
    ),
    "12.5": (
        "ends-everywhere",
        "never-returns",
        Slip(
            "callers-forgotten", "(*stack[:-1], state)", "(state,)", "Forgets the callers at the first byte."
        ),
        Slip(
            "one-stack-of-many",
            "found |= self.settle",
            "found = self.settle",
            "Keeps the last stack of several.",
        ),
        Slip(
            "nothing-to-go-on-with",
            "*(() if self.ends[after] else (after,))",
            "*(())",
            "Forgets where a caller goes on.",
        ),
        Slip(
            "returns-in-the-middle",
            "if self.accepting[top] and below:",
            "if below:",
            "Returns before a rule has ended.",
        ),
    ),
    "12.6": (
        "tokens-twice",
        "wrong-places",
        Slip(
            "prompt-is-fed",
            "request.tokens[request.prompt_len + self.taken :]",
            "request.tokens[self.taken :]",
            "Feeds the prompt to the matcher.",
        ),
        Slip(
            "one-place-each",
            "            if drafts:\n                self.places += range(place + 1, place + len(drafts) + 1)\n",
            "",
            "Gives a request one place, whatever its drafts.",
        ),
        Slip(
            "end-not-held-back",
            "longer.apply(words, self._ends_at)",
            "longer",
            "Lets a text end before min_tokens.",
        ),
    ),
}
