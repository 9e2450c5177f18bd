"""Mistakes in the exercises of phase 06."""

from tests.course.slips import Slip

SLIPS = {
    "06.1": (
        "gemma-norm-from-zero",
        "eps-beside-the-root",
        "mean-of-the-padded-row",
        "sum-is-not-rounded",
        Slip("norm-without-weight", "/ SIZE + eps) * w", "/ SIZE + eps)", "Forgets the weight."),
        Slip(
            "sum-not-stored",
            "        tl.store(total + row + i, value, mask=mask)\n",
            "",
            "Keeps the sum to itself.",
        ),
    ),
    "06.2": (
        "v1-no-running-maximum",
        "v1-sum-does-not-shrink",
        "v1-window-by-blocks",
        "v1-block-of-a-power-of-two",
        "v1-cap-without-its-height",
    ),
    "06.3": (
        "total-does-not-shrink",
        "causal-mask-hides-itself",
        "window-one-too-long",
        Slip("acc-does-not-shrink", "acc * shrink[:, None]", "acc", "Adds values of different scales."),
        Slip(
            "maximum-of-unscaled-scores",
            "tl.max(s, axis=1) * factor",
            "tl.max(s, axis=1)",
            "Compares scaled with unscaled scores.",
        ),
        Slip(
            "everything-below-high-and-one",
            "(key < high)[None, :]",
            "(key <= high)[None, :]",
            "Shows the key behind the last one.",
        ),
    ),
    "06.4": (
        "v2-one-block-a-tile",
        Slip(
            "one-key-too-many",
            "visible = (key < context)",
            "visible = (key <= context)",
            "Reads the key behind the last one.",
        ),
        Slip(
            "window-too-short",
            "tl.maximum(context - WINDOW, 0)",
            "tl.maximum(context - WINDOW + 1, 0)",
            "Hides the window's first key.",
        ),
        Slip(
            "slot-of-the-tile",
            "(key % P) * slot_stride",
            "(n % P) * slot_stride * 2",
            "Takes the place in the tile for the place in the block.",
        ),
        Slip("not-normalized", "(acc / total[:, None])", "acc", "Does not divide by the sum."),
        Slip(
            "heads-of-the-first-group",
            "kv_head * GROUP + row)[:, None] * D",
            "row)[:, None] * D",
            "Lets every program serve the first heads.",
        ),
    ),
    "06.5": (
        "v3-first-split-does-all",
        "v3-splits-overlap",
        "v3-lse-without-the-maximum",
        Slip(
            "weights-do-not-sum-to-one",
            " / tl.sum(weight, axis=0)",
            "",
            "Does not divide by the sum of weights.",
        ),
        Slip(
            "natural-base",
            "weight = tl.exp2(logs",
            "weight = tl.exp(logs",
            "Takes logarithms of base 2 for natural ones.",
        ),
        Slip(
            "empty-splits-divide-by-zero",
            "tl.where(total > 0, total, 1.0)",
            "total",
            "Divides an empty split's nothing by its nothing.",
        ),
    ),
    "06.6": (
        "short-tiles-first",
        Slip(
            "position-of-the-chunk",
            "- lens[request] + first\n",
            "- lens[request]\n",
            "Gives all tiles of a chunk one position.",
        ),
        Slip(
            "last-tile-is-full",
            "count = np.minimum(lens[request] - first, tokens)",
            "count = np.full_like(first, tokens)",
            "Lets the last tile run into the next request.",
        ),
        Slip(
            "rows-without-the-others",
            "starts[request] + first",
            "first",
            "Counts rows from the request's first token.",
        ),
        Slip(
            "tiles-rounded-down",
            "per_request = -(-lens // tokens) if only",
            "per_request = lens // tokens if only",
            "Forgets the tokens of a last, partial tile.",
        ),
        Slip(
            "all-have-tiles",
            "np.where(only, -(-lens // tokens), 0)",
            "-(-lens // tokens)",
            "Makes tiles for requests that are left out.",
        ),
    ),
}
