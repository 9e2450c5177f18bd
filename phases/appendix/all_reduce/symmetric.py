"""Symmetric memory (buffers of which all ranks know the addresses), and sums in it.

PyTorch's symmetric memory maps each rank's buffer into the other ranks' address spaces, so a kernel reads and
writes it over NVLink as if it were its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import triton
from torch import Tensor

from common.errors import UserError
from parallel.ranks import Ranks, Reducer
from phases.appendix.all_reduce.kernel import ALIGN, PROGRAMS, all_reduce_kernel
from triton_paged_attention.hardware import dependent_launch

DEPENDENT_ROWS = 8
"""Rows up to which the kernels around start before the last one ends (programmatic dependent launch)."""


_buffers_made = 0
"""Number of times that this process has made a `SymmetricBuffer`."""


class OtherRanks(UserError):
    """Raised if the ranks' processes have shared memory different numbers of times before.

    PyTorch numbers the times that a process shares memory (rendezvous), and ranks whose numbers differ would
    wait forever.
    """


class SymmetricBuffer:
    """A buffer of `size` bytes on every rank, mapped into the address spaces of all ranks.

    table: `[ranks]` int64 on the device, the address at which each rank's buffer begins.
    stop: int32 `[1]` in pinned memory; the host sets it to 1 to end the waits of kernels when a rank is lost.

    Raises:
        OtherRanks: some rank's process has made another number of buffers before.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        global _buffers_made
        counts = ranks.gather(torch.tensor([_buffers_made], device=ranks.device))
        if bool((counts != counts[0]).any()):
            raise OtherRanks("symmetric memory is for the first ranks of a process")
        _buffers_made += 1
        self._own: Any = symmetric.empty(size, dtype=torch.uint8, device=ranks.device)
        self._own.zero_()
        torch.cuda.synchronize(ranks.device)
        assert dist.group.WORLD is not None
        self._handle = symmetric.rendezvous(self._own, dist.group.WORLD.group_name)
        begins = [int(address) for address in self._handle.buffer_ptrs]
        offset = self._own.data_ptr() - begins[ranks.rank]  # the same on every rank
        addresses = [begin + offset for begin in begins]
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.table = torch.tensor(addresses, dtype=torch.int64, device=ranks.device)
        ranks.smallest(0)  # until all are there


MOST = 512 << 10
"""Bytes of the largest sum over shared memory; above, NCCL takes less."""


class SymmetricMemoryReducer(Reducer):
    """An all-reduce (sum over ranks) by one kernel, for `[..., hidden]` of at most `most` bytes.

    NCCL sums larger tensors (by default over 512 KiB), and tensors of another last dimension or dtype.
    """

    def __init__(
        self, ranks: Ranks, hidden: int, dtype: torch.dtype, most: int = MOST
    ) -> None:
        self.hidden, self.dtype = hidden, dtype
        row = hidden * dtype.itemsize
        self.most_rows = most // row
        each = -(-self.most_rows // PROGRAMS)
        self.place = -(-each * row // ALIGN.value) * ALIGN.value
        self.half = self.place * PROGRAMS
        self.shared = SymmetricBuffer(ranks, 2 * self.half + PROGRAMS * ALIGN.value)
        self.barriers_passed = torch.zeros(PROGRAMS, dtype=torch.int64, device=ranks.device)

    def sum(self, ranks: Ranks, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all ranks' `part`, plus `residual` if given, in `part`'s shape and dtype."""
        rows, size = part.numel() // self.hidden, self.hidden
        same = part.shape[-1] == size and part.dtype == self.dtype
        if not same or not 0 < rows <= self.most_rows:
            return super().sum(ranks, part, residual)
        out = torch.empty_like(part)
        padded = triton.next_power_of_2(size)
        all_reduce_kernel[(min(rows, PROGRAMS),)](
            out, part, None if residual is None else residual.contiguous(),
            self.shared.table, self.barriers_passed, self.shared.stop, rows,
            RANK=ranks.rank, RANKS=ranks.size,
            SIZE=size, SIZE_PAD=padded, SLOT=self.place, HALF=self.half,
            COUNTERS=2 * self.half,

            num_warps=min(16, max(1, padded // 256)),
            **dependent_launch(part.device, rows <= DEPENDENT_ROWS),
        )  # fmt: skip
        return out

    def stop(self) -> None:
        """End the waits of this rank's kernels, since another rank has died.

        What the waiting kernels then write is no valid sum.
        """
        self.shared.stop.fill_(1)
