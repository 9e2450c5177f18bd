"""How the kernels for one token are cut: rows of a tile, tiles of a program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from triton_paged_attention.hardware import multiprocessors

BLOCK_K = (128, 4096)
"""Fewest and most inputs that a tile holds of a row: a span of four-bit words, and what registers hold."""
WARPS = 4
REGISTERS = 65_536
"""Of a multiprocessor."""
INPUT_BYTES = {8: 20_480, 4: 40_960}
"""What preparing the input costs a program, as bytes that it could have read instead, by bits; measured."""


@dataclass(frozen=True)
class StepsConfig:
    """How a matrix-vector kernel with few bits runs.

    rows: of a tile; steps: tiles of rows a program; ahead: tiles that are on their way while one is
    multiplied. block_k, num_warps, late: see `cuda_graphs.latency.tables.GemvConfig`.
    """

    rows: int
    steps: int
    block_k: int
    num_warps: int = WARPS
    ahead: int = 2
    late: bool = False


@cache
def steps_config(rows: int, size: int, matrices: int, bits: int, device: torch.device) -> StepsConfig:
    """For `rows` outputs of `size` inputs, and as many matrices as are multiplied at once.

    All programs prepare the same input, so there had better be few; but they run in waves, and a wave that is
    not full takes as long as a full one. So what counts is how many waves there are, times what a program
    takes. Longer rows than a tile leave no registers to choose from.
    """
    block_k = min(BLOCK_K[1], max(BLOCK_K[0], triton.next_power_of_2(size)))
    row = block_k * bits // 8
    parts = triton.cdiv(size, block_k)
    if parts > 1:
        return StepsConfig(2, 16 // bits, block_k, ahead=16 // bits)
    choices = [
        StepsConfig(tile // row, steps, block_k)
        for tile in (8_192, 16_384)
        for steps in (1, 2, 4)
        if tile >= row and (bits == 8 or tile == 8_192)
    ]

    def cost(config: StepsConfig) -> tuple[int, int]:
        tile = config.rows * row
        registers = 72 + (config.ahead + 1) * tile // (4 * 32 * WARPS)
        slots = multiprocessors(device) * (REGISTERS // (32 * WARPS * registers))
        programs = triton.cdiv(rows, config.rows * config.steps)
        return triton.cdiv(programs, slots) * (config.steps * tile * matrices + INPUT_BYTES[bits]), -tile

    return min(choices, key=cost)
