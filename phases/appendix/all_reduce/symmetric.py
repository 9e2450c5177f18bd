"""Memory that every rank has, at an address that all ranks know, and sums over it.

On GPUs it is PyTorch's symmetric memory: each rank's part is mapped into the others' address spaces, so a
kernel reads and writes it over NVLink as if it were its own. On a CPU it is a shared file, for the same
kernels in Triton's interpreter.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from common.errors import UserError
from forward.model import Model
from parallel.reduce import Reducer
from phases.appendix.all_reduce.kernel import ALIGN, PROGRAMS, all_reduce_kernel
from triton_paged_attention.hardware import dependent_launch

if TYPE_CHECKING:
    from parallel.ranks import Ranks

DEPENDENT_ROWS = 8
"""Up to so many rows the kernels around are those of phase 09, which begin before the last one ends."""


_met = 0
"""How often this process has met others over symmetric memory."""


class OtherRanks(UserError):
    """This process has met other ranks before. PyTorch numbers the meetings of a process over symmetric
    memory, and ranks whose numbers differ would wait for each other."""


class Shared:
    """A stretch of memory of every rank.

    table: `[ranks]` int64 on the device, where each rank's begins.
    stop: one int32 that the host can set while a kernel waits: a rank is gone.
    """

    def __init__(self, ranks: Ranks, size: int, name: str) -> None:
        self.size = size
        if ranks.device.type == "cuda":
            import torch.distributed._symmetric_memory as symmetric

            global _met
            counts = ranks.gather(torch.tensor([_met], device=ranks.device))
            if bool((counts != counts[0]).any()):
                raise OtherRanks("symmetric memory is for the first ranks of a process")
            _met += 1
            self._own: Any = symmetric.empty(size, dtype=torch.uint8, device=ranks.device)
            self._own.zero_()
            torch.cuda.synchronize(ranks.device)
            assert dist.group.WORLD is not None
            self._handle = symmetric.rendezvous(self._own, dist.group.WORLD.group_name)
            begins = [int(address) for address in self._handle.buffer_ptrs]
            offset = self._own.data_ptr() - begins[ranks.rank]  # the same on every rank
            addresses = [begin + offset for begin in begins]
            self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        else:
            paths = [Path("/dev/shm") / f"ladder-{name}-{rank}" for rank in range(ranks.size)]
            with paths[ranks.rank].open("wb") as file:
                file.truncate(size)
            ranks.smallest(0)  # until everybody's is there
            self._own = [
                torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths
            ]
            ranks.smallest(0)  # until everybody has all
            os.unlink(paths[ranks.rank])
            addresses = [part.data_ptr() for part in self._own]
            self.stop = torch.zeros(1, dtype=torch.int32)
        self.table = torch.tensor(addresses, dtype=torch.int64, device=ranks.device)
        ranks.smallest(0)


@dataclass(frozen=True)
class SizeLimits:
    """Up to how many bytes each way is taken; above both it is torch.distributed's."""

    one: int
    two: int


MOST = 8 << 20
"""Bytes of the largest sum over shared memory."""
USUAL = {2: SizeLimits(256 << 10, MOST), 4: SizeLimits(128 << 10, MOST)}
"""By the number of ranks: where PyTorch's own kernels of the two kinds cross on H200s."""


class Symmetric(Reducer):
    """Adds up over shared memory, by one shot or two."""

    def __init__(self, ranks: Ranks, hidden: int, dtype: torch.dtype, limits: SizeLimits, name: str) -> None:
        self.limits, self.hidden, self.dtype = limits, hidden, dtype
        row = hidden * dtype.itemsize
        self.most_rows = max(limits.one, limits.two) // row
        each = -(-self.most_rows // PROGRAMS)
        self.place = -(-each * row // ALIGN.value) * ALIGN.value
        self.half = self.place * PROGRAMS
        self.counters = 3 * self.half  # two halves for parts, and the sums
        self.shared = Shared(ranks, self.counters + PROGRAMS * ALIGN.value, name)
        self.meetings = torch.zeros(PROGRAMS, dtype=torch.int64, device=ranks.device)

    def sum(self, ranks: Ranks, part: Tensor) -> Tensor:
        """See `Reducer.sum`."""
        if not self._fits(part):
            return super().sum(ranks, part)
        return self._launch(ranks, part, None, None)[1]

    def add(self, ranks: Ranks, part: Tensor, residual: Tensor) -> Tensor:
        """See `Reducer.add`."""
        if not self._fits(part):
            return super().add(ranks, part, residual)
        return self._launch(ranks, part, residual.contiguous(), None)[1]

    def add_norm(self, ranks: Ranks, part: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """See `Reducer.add_norm`."""
        if not self._fits(part):
            return super().add_norm(ranks, part, residual, norm)
        return self._launch(ranks, part, residual.contiguous(), norm)

    def _fits(self, part: Tensor) -> bool:
        rows = part.numel() // self.hidden
        return part.shape[-1] == self.hidden and part.dtype == self.dtype and 0 < rows <= self.most_rows

    def _launch(
        self, ranks: Ranks, part: Tensor, residual: Tensor | None, norm: Any
    ) -> tuple[Tensor, Tensor]:
        """The sum with the residual, and what comes behind that."""
        rows, size = part.numel() // self.hidden, self.hidden
        out = torch.empty_like(part)
        total = out if norm is None else torch.empty_like(part)
        weight, eps, one_plus = (part, 0.0, False) if norm is None else norm
        padded = triton.next_power_of_2(size)
        early = rows <= DEPENDENT_ROWS and dependent_launch(part.device)
        all_reduce_kernel[(min(rows, PROGRAMS),)](
            out, total, part, part if residual is None else residual, weight, eps,
            self.shared.table, self.meetings, self.shared.stop, rows,
            RANK=ranks.rank, RANKS=ranks.size, RANKS_PAD=triton.next_power_of_2(ranks.size),
            SIZE=size, SIZE_PAD=padded, PLACE=self.place, HALF=self.half, COUNTERS=self.counters,
            TWO=part.nbytes > self.limits.one, ADD=residual is not None, NORM=norm is not None,
            ONE_PLUS=one_plus, PDL=early,
            num_warps=min(16, max(1, padded // 256)), **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
        return total, out

    def stop(self) -> None:
        """Let no kernel wait any more."""
        self.shared.stop.fill_(1)


def symmetric(ranks: Ranks, model: Model, way: str) -> Symmetric:
    """Sums of a model's hidden states over shared memory: by one way, or by `auto` as their size has it."""
    most = MOST if ranks.device.type == "cuda" else 1 << 16  # the interpreter needs long for more
    chosen = {"one-shot": SizeLimits(most, 0), "two-shot": SizeLimits(0, most)}
    limits = chosen.get(way) or USUAL.get(ranks.size, USUAL[4])
    limits = SizeLimits(min(limits.one, most), min(limits.two, most))
    name = uuid.uuid4().hex if ranks.rank == 0 else ""
    name = ranks.text(name)
    return Symmetric(ranks, model.config.hidden_size, model.dtype, limits, name)
