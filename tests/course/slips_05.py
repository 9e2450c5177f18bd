"""Mistakes in the exercises of phase 05."""

from tests.course.slips import Slip

SLIPS = {
    "05.1": (
        "free-too-soon",
        Slip(
            "takes-the-bottom",
            "self._free[-count:]\n        del self._free[-count:]",
            "self._free[:count]\n        del self._free[-count:]",
            "Hands out other blocks than it takes off the stack.",
        ),
        Slip(
            "none-is-all",
            "        if count == 0:\n            return []\n",
            "",
            "Takes a slice of -0, which is everything.",
        ),
        Slip(
            "no-user-yet",
            "            self.refs[block] = 1",
            "            self.refs[block] = 0",
            "Hands blocks out without a user.",
        ),
        Slip(
            "retains-the-free",
            "if self.refs[block] < 1:",
            "if self.refs[block] < 0:",
            "Lets somebody retain a free block.",
        ),
        Slip(
            "twice-is-fine",
            "elif refs < 0:",
            "elif refs < -1:",
            "Does not see a block that is given back twice.",
        ),
    ),
    "05.2": (
        "slots-in-32-bits",
        "slot-of-the-token",
        "narrow-tables",
        Slip(
            "block-of-the-slot",
            "host.positions // size]",
            "host.positions % size]",
            "Takes the place in the block for the block.",
        ),
        Slip(
            "tables-of-all",
            "self.cache.tables[host.rows, :width]",
            "self.cache.tables[: len(host.rows), :width]",
            "Takes the first rows for the batch's.",
        ),
    ),
    "05.3": (
        "one-block-too-many",
        "one-block-too-few",
        "watermark-for-nobody",
        "no-watermark",
        "fits-by-prompt",
        "holds-one-less",
    ),
    "05.4": (
        "last-user-copies",
        "two-users-are-one",
        "copy-without-room",
        "source-is-kept",
        "copy-backwards",
        Slip(
            "may-write-what-was-asked",
            "self._writable[row] = self._owned[row] * self.block_size",
            "self._writable[row] = upto + self.block_size",
            "May write behind its last block.",
        ),
    ),
    "05.5": (
        "parent-writes-on",
        "child-writes-on",
        "copied-again",
        "copies-for-who-has-left",
        "row-stays-writable",
        "fork-takes-all",
        "fork-without-users",
    ),
    "05.6": (
        "next-in-turn-is-preempted",
        "one-victim-at-most",
        "victim-still-served",
        "07:end-of-the-queue-preempted",
        "07:needy-never-preempted",
        "07:served-are-preempted",
    ),
}
