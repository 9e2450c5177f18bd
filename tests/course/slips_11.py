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
        Slip(
            "untried-drafts-count",
            "tried = min(drafts, accepted + 1)",
            "tried = drafts",
            "Counts drafts behind the first wrong one as wrong, though nobody knows.",
        ),
        Slip(
            "losses-are-free",
            "cost.lost > allowed:",
            "cost.lost > 9 * allowed:",
            "Lets guessing lose more than its budget.",
        ),
        Slip(
            "gains-without-end",
            "max(-CREDIT * self.plain, self.lost + seconds - self.plain * tokens / rows)",
            "self.lost + seconds - self.plain * tokens / rows",
            "Lets guessing lose for ever what it gained once.",
        ),
        Slip(
            "always-the-most",
            "found.append(count if gain > cost.having + cost.each * count else 0)",
            "found.append(self.most)",
            "Guesses as far as it may.",
        ),
        Slip(
            "having-any-is-free",
            "gain > cost.having + cost.each * count",
            "gain > cost.each * count",
            "Overlooks what it costs to have any drafts.",
        ),
        Slip(
            "a-step-for-a-token",
            "self.plain * tokens / rows)",
            "self.plain * tokens)",
            "Takes a step's time for a token's.",
        ),
        Slip(
            "nothing-grows-old",
            "keep, right = MEMORY**tried, accepted / tried",
            "keep, right = 0.0, accepted / tried",
            "Remembers the last step only.",
        ),
    ),
    "11.5": (
        Slip(
            "keeps-what-was-wrong",
            "            if own.tokens[known + right] != shadow.drafts[right]:\n                break\n",
            "",
            "Keeps what was computed behind a wrong draft.",
        ),
        Slip(
            "the-last-was-computed",
            "right < len(shadow.drafts) - 1:",
            "right < len(shadow.drafts):",
            "Counts the last draft as computed, which nobody went on from.",
        ),
        Slip(
            "all-that-is-new",
            "own.num_computed_tokens + right, len(own.tokens) - 1",
            "own.num_computed_tokens + right + 1, len(own.tokens) - 1",
            "Counts the token in the first wrong draft's place as computed.",
        ),
        Slip(
            "stays-without-room",
            "            self.leave(request)\n            return None\n        return shadow",
            "            return shadow\n        return shadow",
            "Drafts where there is no room.",
        ),
    ),
}
