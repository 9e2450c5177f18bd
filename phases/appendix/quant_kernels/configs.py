"""Block sizes of the matrix-vector kernels for quantized weights: rows of a tile, programs to launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from triton_paged_attention.hardware import multiprocessors

BLOCK_K = (128, 4096)
"""Fewest and most inputs that a tile holds of a row: a span of four-bit words, and what registers hold."""
NUMBERS = 16_384
"""Weights that a program multiplies while as many more are on their way."""
ROWS = 16
EACH = {(8, 1): 4, (8, 2): 12, (4, 1): 4, (4, 2): 3}
"""Programs of a multiprocessor, by (bits, matrices); measured with the kernels before and behind. About as
many as run at once, less the room for the next kernel's, which load their weights there.
"""


@dataclass(frozen=True)
class LoopConfig:
    """Block sizes of a matrix-vector kernel for weights of 4 or 8 bits, whose programs loop over tiles.

    rows: outputs of a tile.
    block_k: inputs of a tile.
    each: most programs per multiprocessor.
    num_warps: warps of a program.
    """

    rows: int
    block_k: int
    each: int
    num_warps: int = 4

    def programs(self, rows: int, device: torch.device) -> int:
        """Return how many programs to launch for `rows` outputs.

        That is one for each tile, but at most `each` per multiprocessor.
        """
        return min(triton.cdiv(rows, self.rows), self.each * multiprocessors(device))


@cache
def loop_config(
    outputs: int, size: int, matrices: int, bits: int, device: torch.device
) -> LoopConfig:
    """Return block sizes of a matrix-vector kernel whose weights have 4 or 8 `bits`.

    outputs, size: outputs and inputs of a matrix. matrices: 1, or 2 with a gate.

    A four-bit weight takes half the registers, but the other work of a program stays the same. Rows that are
    longer than a tile use the registers of twice as many threads.
    """
    block_k = min(BLOCK_K[1], max(BLOCK_K[0], triton.next_power_of_2(size)))
    parts = triton.cdiv(size, block_k)
    if parts > 1:
        return LoopConfig(2, block_k, each=2, num_warps=8)
    wanted = NUMBERS // (block_k if bits == 4 else block_k * matrices)
    # A program for every multiprocessor.
    wanted = min(wanted, outputs // multiprocessors(device), ROWS)
    rows = max(2, triton.next_power_of_2(wanted + 1) // 2)
    return LoopConfig(rows, block_k, EACH[bits, matrices])
