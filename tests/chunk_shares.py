"""The shares of chunks that a kernel's programs have, as the kernel works them out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from batch_invariance.kernels.attention import share_of_chunks


@triton.jit
def shares_kernel(out, begin, end, splits, CHUNK: tl.constexpr):
    """Write the share of each program, `[splits, 3]`."""
    split = tl.program_id(0)
    low, high, used = share_of_chunks(begin, end, split, splits, CHUNK)
    tl.store(out + 3 * split, low)
    tl.store(out + 3 * split + 1, high)
    tl.store(out + 3 * split + 2, used)


def shares(begin: int, end: int, splits: int, chunk: int) -> list[tuple[int, ...]]:
    """Return each program's first key, the end of its keys, and how many programs have any."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.zeros(splits, 3, dtype=torch.int32, device=device)
    shares_kernel[(splits,)](out, begin, end, splits, CHUNK=chunk)
    return [tuple(row) for row in out.tolist()]
