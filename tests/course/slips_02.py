"""Mistakes in the exercises of phase 02."""

from tests.course.slips import Slip

SLIPS = {
    "02.1": (
        "ring-in-order",
        "reads-the-unwritten",
        "reads-a-copy",
        Slip(
            "newest-is-not-there-yet",
            "(end - 1 - slots)",
            "(end - slots)",
            "Takes the column that comes next for one that is there.",
        ),
        Slip(
            "columns-that-are-not",
            "torch.arange(min(end, self.capacity),",
            "torch.arange(self.capacity,",
            "Names columns for slots that nobody has written.",
        ),
    ),
    "02.2": (
        "chunk-written-uncut",
        "first-columns-stay",
        "start-of-the-cut-chunk",
        "values-in-keys-place",
        "grows-by-copying",
    ),
    "02.3": (
        "bytes-beyond-the-context",
        "bytes-of-query-heads",
        "bytes-of-keys-only",
        "keeps-old-values",
        "keeps-the-first-rows",
        "full-one-too-early",
    ),
    "02.4": (
        "masks-every-layer",
        "one-mask-for-all-windows",
        "square-mask",
        "chunk-without-window",
        "write-before-read",
        "layer-advances",
    ),
    "02.5": (
        "a-column-for-the-last-token",
        "cache-as-long-as-the-context",
        "always-float32",
        "first-token-decides",
        "computes-the-prompt-again",
        "position-zero",
    ),
}
