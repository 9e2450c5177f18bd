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
            "range(classes[low], classes[high] + 1)",
            "range(classes[low], classes[high])",
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
        Slip(
            "never-split", "    while groups.max() >= many:", "    while False:", "Leaves it at two groups."
        ),
        Slip(
            "split-once",
            "    while groups.max() >= many:",
            "    if groups.max() >= many:",
            "Splits groups once and never looks again.",
        ),
        Slip(
            "groups-forget-themselves",
            "np.column_stack([groups, groups[columns]])",
            "groups[columns]",
            "Joins states of which one accepts, if they lead to the same.",
        ),
        Slip(
            "first-class-ignored",
            "np.column_stack([groups, groups[columns]])",
            "np.column_stack([groups, groups[columns[:, 1:]]])",
            "Ignores a class of symbols.",
        ),
        Slip(
            "trap-leads-to-the-start",
            "np.full((1, width), count)",
            "np.full((1, width), 0)",
            "Lets the trap lead back to the beginning.",
        ),
        Slip(
            "trap-is-a-state",
            "    numbers[groups[count]] = DEAD\n",
            "    numbers[groups[count]] = 0\n",
            "Takes the beginning for what is dead.",
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
            "*(() if self.ends[then] else (then,))",
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
        Slip(
            "wrong-places",
            "places += range(place, place + count)",
            "places += range(len(places), len(places) + count)",
            "Gives the masks to the first rows of the batch.",
        ),
        Slip(
            "prompt-is-fed",
            "request.tokens[request.prompt_len + self.taken :]",
            "request.tokens[self.taken :]",
            "Feeds the prompt to the matcher.",
        ),
        Slip(
            "one-place-each",
            "count = len(work.drafts) + 1",
            "count = 1",
            "Gives a request one place, whatever its drafts.",
        ),
        Slip(
            "drafts-are-kept",
            "        self.matcher.rollback(taken)\n",
            "",
            "Leaves the matcher behind drafts that are not verified yet.",
        ),
    ),
}
