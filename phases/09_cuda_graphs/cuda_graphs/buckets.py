"""Sizes for which graphs are captured. A batch runs in the smallest graph that holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def decode_sizes(most: int) -> list[int]:
    """Batch sizes up to `most`: powers of two up to 16, then steps of 16, so at most 15 rows are padding.

    A padding row costs next to nothing in attention (no keys) and little in matrix products, whose tiles have
    16 rows or more anyway.
    """
    small = [size for size in (1, 2, 4, 8) if size < most]
    return [*small, *range(16, most, 16), most]


def chunk_sizes(most: int) -> list[int]:
    """Token counts up to `most` for steps with prompt tokens in them: powers of two from 32, and in between.

    Beyond a few thousand tokens the device takes longer than the launches of an eager step do.
    """
    sizes, size = [], 32
    while size < most:
        sizes.append(size)
        if size >= 128 and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


def verify_sizes(most_rows: int, most_drafts: int) -> dict[int, list[int]]:
    """For each number of requests the token counts of steps that verify drafts: 2, 4, 8, ... a request.

    Beyond `MOST_VERIFIED` tokens in all a step is so long that sampling outside of its graph is no matter.
    """
    lengths = [length for length in (2, 4, 8, 16) if length < most_drafts + 1] + [most_drafts + 1]
    rows = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size <= most_rows]
    found = {size: [size * length for length in lengths if size * length <= MOST_VERIFIED] for size in rows}
    return {size: tokens for size, tokens in found.items() if tokens}


MOST_VERIFIED = 512


def smallest(sizes: Sequence[int], wanted: int) -> int | None:
    """The smallest of the sorted sizes that holds `wanted`, or None."""
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None
