"""Sizes for which graphs are captured. A batch runs in the smallest graph that holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from continuous.work import Work
from forward.model import Model


def decode_sizes(most: int) -> list[int]:
    """Return the batch sizes of decode graphs: powers of two up to 16, then steps of 16, up to `most`.

    So at most 15 rows are padding. A padding row costs next to nothing in attention (no keys) and little
    in matrix products, whose tiles have 16 rows or more anyway.
    """
    small = [size for size in (1, 2, 4, 8) if size < most]
    return [*small, *range(16, most, 16), most]


def chunk_sizes(most: int) -> list[int]:
    """Return the token counts for which graphs of steps with prompt tokens are captured, ascending.

    They are powers of two from 32, from 128 on also the middle between two powers, and `most`, the largest
    count.
    """
    sizes, size = [], 32
    while size < most:
        sizes.append(size)
        if size >= 128 and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


def full_step(model: Model, step_tokens: int, most: int) -> int:
    """Return `step_tokens` if steps of `step_tokens` tokens should have a CUDA graph of their own, else 0.

    step_tokens: most tokens that the scheduler puts into a step. most: tokens of the largest other graph
        for steps with prompt tokens; 0: there are no such graphs, and 0 is returned.

    Above `most` tokens padding would cost much, and usually the device takes longer than the launches of an
    eager step (one without a graph). On a GPU it does not if a step of `step_tokens` tokens takes at most
    `LAUNCHED_FLOP` operations: there one more graph is faster. With a larger model it would only take memory.
    """
    config = model.config
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    flop = 2 * step_tokens * config.num_layers * layer
    on_gpu = model.device.type == "cuda"
    return step_tokens if on_gpu and step_tokens > most > 0 and flop <= LAUNCHED_FLOP else 0


LAUNCHED_FLOP = 20e12
"""What a large GPU computes while an eager step's launches take 25 ms, at 800 TFLOP/s."""
FULL = 0.9
"""How much of a full step's graph must be used, or padding would cost more than launches."""


def fills(full: int, works: Sequence[Work], longest: int) -> bool:
    """Return True if a step has 0.9 of the tokens of the graph for full steps, and no very long prompt.

    full: tokens of that graph, the most that the scheduler puts into a step. works: for each request of the
        step, the tokens to compute. longest: context length, in tokens, from which prompts are computed by
        another kernel, so that the graph is not used.
    """
    ends = [work.start + work.count for work in works if work.count > 1]
    return sum(work.count for work in works) >= FULL * full and max(ends, default=0) < longest


def smallest(sizes: Sequence[int], wanted: int) -> int | None:
    """Return the smallest of the ascending `sizes` that is at least `wanted`, or None if all are smaller."""
    at = bisect_left(sizes, wanted)
    return sizes[at] if at < len(sizes) else None
