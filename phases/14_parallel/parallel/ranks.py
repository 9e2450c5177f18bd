"""The ranks of one model as each of them sees the others: sums, and what else they exchange on the device."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError

HOST = "127.0.0.1"
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # NVLink's multicast is not used
    "NCCL_SOCKET_IFNAME": "=lo",  # all ranks are on this machine, so no other one may connect to them
    "NCCL_RAS_ENABLE": "0",  # a port for diagnoses
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # A pool would give memory again that other ranks, long gone, have met over, and take it for met.
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}
"""What has to be set in every rank's process before it meets the others."""
PARTING = 10.0
"""Seconds that leaving the others may take: NCCL waits for ever for a rank that does not."""
PATIENCE = timedelta(seconds=600)
"""How long a rank waits for the others at most. One that has ended is noticed at once, elsewhere; this is for
one that compiles or loads."""


def open_store(path: str, size: int) -> Any:
    """Open the store in which `size` ranks of this machine tell each other their addresses.

    It is a file: the port of a `TCPStore` would be open to every process that reaches the machine.

    path: in a folder that only this user may enter.
    """
    kinds: Any = dist
    store = kinds.FileStore(path, size)
    store.set_timeout(PATIENCE)
    return store


def device_of(first: str, rank: int) -> torch.device:
    """Rank `rank`'s device, given rank 0's: the GPUs behind it, in order."""
    device = torch.device(first)
    return (
        torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device
    )


def graphs_of(engine: Any) -> Callable[[], None]:
    """Return a function that destroys an engine's graphs, in which sums may be. It holds no engine."""
    return getattr(engine.runner, "release", lambda: None)


def parted() -> bool:
    """Return True if this process's group has ended, which is tried for some seconds."""
    end = threading.Thread(target=dist.destroy_process_group, name="parting", daemon=True)
    try:
        end.start()
    except RuntimeError:  # the interpreter ends, and the process with it
        return True
    end.join(PARTING)
    return not end.is_alive()


_ours: Any = None
"""The default group of this process, if it was made here."""
_joined: weakref.WeakSet[Ranks] = weakref.WeakSet()
"""Ranks that are in it, have not left the others, and have not lost one."""


def make_way() -> None:
    """End the group of an engine that has lost a rank, or could not be made.

    Raises:
        UserError: it is another engine's that still lives, or was not made here.
        RuntimeError: it does not end.
    """
    if not dist.is_initialized():
        return
    if dist.group.WORLD is not _ours or _joined:
        raise UserError(
            "on GPUs a process has one engine in ranks at a time, for torch.distributed has one default "
            "group: close() the other one first"
        )
    if not parted():
        raise RuntimeError(
            "ranks that were lost still hold the GPU: begin again in a new process"
        )


class Reducer:
    """A way to add up over ranks: by torch.distributed. A faster way for some sizes is a subclass."""

    def sum(self, ranks: Ranks, part: Tensor) -> Tensor:
        """See `Ranks.all_reduce`."""
        return ranks.plain_sum(part)

    def add(self, ranks: Ranks, part: Tensor, residual: Tensor) -> Tensor:
        """See `Ranks.reduce_add`."""
        return residual + self.sum(ranks, part)

    def stop(self) -> None:
        """Let no rank wait any more: one is gone."""


PLAIN = Reducer()


class Ranks:
    """A rank among `size`.

    reducer: how sums are made.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Any) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.reducer: Reducer = PLAIN
        self.store = store
        self._gloo: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            make_way()
            dist.init_process_group(
                "nccl",
                store=store,
                rank=rank,
                world_size=size,
                timeout=PATIENCE,
                device_id=device,
            )
            global _ours
            _ours = dist.group.WORLD
            _joined.add(self)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=HOST)]
            options._timeout = PATIENCE
            self._gloo = gloo(store, rank, size, options)

    def __deepcopy__(self, memo: object) -> Ranks:
        """Copies of layers add up over the same ranks."""
        return self

    # Sums.

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, the same bits on every rank; `part` itself may be overwritten."""
        return self.reducer.sum(self, part.contiguous())

    def reduce_add(self, part: Tensor, residual: Tensor) -> Tensor:
        """`residual` plus the sum of all ranks' `part`; all ranks have the same `residual`."""
        return self.reducer.add(self, part.contiguous(), residual)

    # Plain operations of the library.

    def plain_sum(self, part: Tensor) -> Tensor:
        """`all_reduce` in place, by torch.distributed."""
        if self._gloo is None:
            dist.all_reduce(part)  # on the stream of the caller, so a graph can capture it
        else:
            self._gloo.allreduce([part]).wait()
        return part

    def gather(self, part: Tensor) -> Tensor:
        """`[...]` of every rank -> `[size, ...]`."""
        part = part.contiguous()
        found = part.new_empty(self.size, *part.shape)
        if self._gloo is None:
            dist.all_gather_into_tensor(found, part)
        else:
            self._gloo.allgather([list(found)], [part]).wait()
        return found

    def first(self, tensor: Tensor) -> Tensor:
        """Replace the tensor by rank 0's."""
        if self._gloo is None:
            dist.broadcast(tensor, 0)
        else:
            self._gloo.broadcast(tensor, 0).wait()
        return tensor

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return int(self.gather(torch.tensor([number], device=self.device)).min())

    def leave(self) -> None:
        """It is over: the next engine of this process may end what is left of the group."""
        _joined.discard(self)

    def abort(self) -> None:
        """Wait for no rank any more: one is gone. Any thread may call this."""
        self.leave()
        self.reducer.stop()
        if self._gloo is None and dist.is_initialized():
            with suppress(Exception):  # whatever it says, this process is about to be told why
                dist.group.WORLD.abort()  # type: ignore[union-attr]

    def close(self) -> None:
        """Leave the others, after the last step."""
        self.leave()
        self.reducer = PLAIN
        if self._gloo is None and dist.is_initialized():
            torch.cuda.synchronize(self.device)
            if not parted():
                print(
                    "warning: the ranks did not part from each other",
                    file=sys.stderr,
                    flush=True,
                )
        self._gloo = None
