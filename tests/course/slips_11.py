"""Mistakes in the exercises of phase 11."""

from tests.course.slips import Slip

SLIPS = {
    "11.1": (
        "finds-itself",
        "takes-everything-in-again",
        Slip(
            "the-first-time",
            "self._ends[tuple(self.tokens[place - order :])] = place",
            "self._ends.setdefault(tuple(self.tokens[place - order :]), place)",
            "Keeps where an n-gram stood first.",
        ),
        Slip(
            "one-too-early",
            "follow(self.tokens, at, most)",
            "follow(self.tokens, at - 1, most)",
            "Begins with the n-gram's own last token.",
        ),
        Slip(
            "ends-with-the-text",
            "    while len(drafts) < most:\n        drafts.append(drafts[len(drafts) - period])\n",
            "",
            "Guesses no further than the text goes.",
        ),
    ),
    "11.2": (
        "compares-with-the-next-place",
        Slip(
            "one-too-many",
            "yield sampled[: right + 1]",
            "yield sampled[: right + 2]",
            "Takes a token behind the first wrong draft.",
        ),
        Slip(
            "drafts-only",
            "yield sampled[: right + 1]",
            "yield sampled[:right]",
            "Drops the token that was sampled in the wrong draft's place.",
        ),
        Slip(
            "all-that-agree",
            "    while right < len(drafts) and sampled[right] == drafts[right]:\n        right += 1\n",
            "    right = sum(a == b for a, b in zip(sampled, drafts, strict=False))\n",
            "Counts drafts that are right behind a wrong one.",
        ),
        Slip(
            "as-many-as-drafts",
            "islice(tokens, len(work.drafts) + 1)",
            "islice(tokens, max(1, len(work.drafts)))",
            "Leaves a token for the next request.",
        ),
    ),
    "11.3": (
        "replaced-by-p",
        "accepts-the-likely",
        Slip("upside-down", "* q[token] >= p[token]", "* p[token] >= q[token]", "Turns the ratio over."),
        Slip("mass-that-p-lacks", "(p - q).clamp(min=0)", "(p - q).abs()", "Also draws what q has more of."),
        Slip(
            "keeps-the-rejected",
            "[*drafts[:place], draw(",
            "[*drafts[: place + 1], draw(",
            "Keeps the draft that was rejected.",
        ),
        Slip(
            "none-behind-the-last",
            "[*drafts, draw(target[len(drafts)], generator)]",
            "[*drafts]",
            "Leaves out the token behind the last draft.",
        ),
        Slip("does-not-add-up", "rest / rest.sum()", "rest", "Leaves a residual that does not add up to 1."),
    ),
    "11.4": (
        "untried-drafts-count",
        "losses-are-free",
        "gains-without-end",
        Slip(
            "always-the-most",
            "found.append(count if pays else 0)",
            "found.append(self.most)",
            "Guesses as far as it may.",
        ),
        "having-any-is-free",
        Slip(
            "a-step-for-a-token",
            "worth = cost.plain / rows or 1.0",
            "worth = cost.plain or 1.0",
            "Takes a step's time for a token's.",
        ),
        Slip(
            "nothing-grows-old",
            "self.right = LONGER * self.right + accepted",
            "self.right = accepted",
            "Remembers the last step only.",
        ),
    ),
    "11.5": (
        "copies-share-children",
        "links-not-moved",
        Slip(
            "starts-over",
            "            while state and token not in self.next[state]:\n                state = self.link[state]\n                length = self.length[state]\n",
            "            if token not in self.next[state]:\n                state = length = 0\n",
            "Forgets everything where a match cannot be longer.",
        ),
        Slip(
            "links-to-nothing",
            "self.link[new] = 0 if state < 0 else self._split(state, token, self.next[state][token])",
            "self.link[new] = 0",
            "Links every state to the empty text.",
        ),
        Slip(
            "never-split",
            "if self.length[target] == self.length[state] + 1:",
            "if True:",
            "Lets a state stand for substrings that end elsewhere too.",
        ),
        Slip(
            "length-is-kept",
            "                state = self.link[state]\n                length = self.length[state]\n",
            "                state = self.link[state]\n",
            "Goes along a link and keeps the longer length.",
        ),
    ),
}
