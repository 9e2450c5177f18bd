"""Mistakes in the exercises of phase 09."""

from tests.course.slips import Slip

SLIPS = {
    "09.1": (
        "bucket-one-too-large",
        "no-graph-for-the-most",
        Slip(
            "the-most-twice",
            "range(16, most, 16)",
            "range(16, most + 1, 16)",
            "Captures the largest size twice.",
        ),
        Slip(
            "small-ones-twice", "if size < most]", "if size <= most]", "Captures a small largest size twice."
        ),
        Slip("steps-of-32", "range(16, most, 16)", "range(16, most, 32)", "Leaves gaps of 32 rows."),
    ),
    "09.2": (
        "padding-is-stored",
        "padding-has-a-key",
        "last-block-not-copied",
        "token-of-the-row-before",
        "sampled-in-its-own-place",
        "padding-writes-its-token",
    ),
    "09.3": (
        "all-tables-sent",
        "only-new-blocks-sent",
        "table-of-the-place",
        Slip(
            "never-remembers",
            "        self._sent[rows[line], column] = values\n",
            "",
            "Sends again what it has sent.",
        ),
        Slip(
            "width-of-the-step",
            "rows[line] * self.data.shape[1] + column",
            "rows[line] * blocks + column",
            "Takes this step's width for the table's.",
        ),
    ),
    "09.4": (
        "buffer-written-too-early",
        "event-before-the-copy",
        "one-buffer",
        Slip(
            "sent-before-it-is-filled",
            "        yield self._views[turn][:size]\n        self.device[:size].copy_(self._host[turn][:size], non_blocking=True)\n",
            "        self.device[:size].copy_(self._host[turn][:size], non_blocking=True)\n        yield self._views[turn][:size]\n",
            "Sends the numbers before they are there.",
        ),
        Slip(
            "sends-the-next-buffer",
            "copy_(self._host[turn][:size]",
            "copy_(self._host[self._turn][:size]",
            "Sends the buffer whose turn comes next.",
        ),
    ),
    "09.5": (
        "launched-after-it-is-read",
        "idle-while-a-step-flies",
        Slip(
            "read-twice",
            "        landing, self.flying = self.flying, None\n",
            "        landing = self.flying\n",
            "Collects what is on its way, and once more with the next step.",
        ),
        Slip(
            "reads-what-it-launches",
            "landing, self.flying = self.flying, engine.launch",
            "landing = self.flying = engine.launch",
            "Waits for the step that it has just launched.",
        ),
        Slip(
            "last-step-unread",
            "engine.launch(engine.schedule())\n        if landing is not None:",
            "engine.launch(engine.schedule())\n        if landing is not None and self.flying is not None:",
            "Reads no step behind which none is launched.",
        ),
    ),
}
