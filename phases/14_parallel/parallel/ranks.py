"""The process group of one model: sums over ranks, and what else ranks exchange on their devices."""

from __future__ import annotations

import sys
import threading
import weakref
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
    # A pool would reuse memory of an earlier group's rendezvous without a new one.
    "TORCH_SYMMMEM_IMPLICIT_POOL": "0",
}
"""Environment variables of every rank's process, set before it enters the group."""
DESTROY_SECONDS = 10.0
"""Most seconds to destroy a group: NCCL waits forever for a rank that does not do so."""
TIMEOUT = timedelta(seconds=600)
"""Longest wait for a rank that compiles or loads. One that has ended is noticed at once, by its process."""


def open_store(path: str, size: int) -> Any:
    """Open and return the `FileStore` by which `size` ranks of this machine exchange their addresses.

    path: of its file, in a folder that only this user may enter. It is a file because the port of a
        `TCPStore` would be open to every process that reaches the machine.
    """
    kinds: Any = dist
    store = kinds.FileStore(path, size)
    store.set_timeout(TIMEOUT)
    return store


def device_of(first: str, rank: int) -> torch.device:
    """Return the device of a rank, given `first`, that of rank 0: the CPU, or the `rank`-th GPU after it."""
    device = torch.device(first)
    return (
        torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" else device
    )


def destroy_group() -> bool:
    """Destroy this process's default process group.

    Returns True when it is destroyed, False if that takes more than `DESTROY_SECONDS`.
    """
    end = threading.Thread(target=dist.destroy_process_group, name="destroy", daemon=True)
    try:
        end.start()
    except RuntimeError:  # the interpreter ends, and the process with it
        return True
    end.join(DESTROY_SECONDS)
    return not end.is_alive()


_ours: Any = None
"""The default group of this process, if it was made here."""
_joined: weakref.WeakSet[Ranks] = weakref.WeakSet()
"""Ranks that use it: they have not left it, and none of it is lost."""


def destroy_unused_group() -> None:
    """Destroy the default process group that an engine has left behind, if there is one.

    An engine leaves it behind that has lost a rank or could not be made.

    Raises:
        UserError: an engine uses the group, or another program made it.
        RuntimeError: it cannot be destroyed.
    """
    if not dist.is_initialized():
        return
    if dist.group.WORLD is not _ours or _joined:
        raise UserError(
            "on GPUs a process has one engine in ranks at a time, for torch.distributed has one default "
            "group: close() the other one first"
        )
    if not destroy_group():
        raise RuntimeError(
            "ranks that were lost still hold the GPU: begin again in a new process"
        )


class Reducer:
    """Sums tensors over ranks by torch.distributed. A subclass may be faster for some sizes."""

    def sum(self, ranks: Ranks, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all ranks' `part`, equal in every bit on all ranks; may overwrite `part`.

        residual: a tensor of the same shape, equal on all ranks, that is added once. None: nothing is added.
        """
        total = ranks.plain_sum(part)
        return total if residual is None else residual + total

    def stop(self) -> None:
        """End all waits of this process for other ranks, because a rank is lost."""


PLAIN = Reducer()


class Ranks:
    """One rank of a process group, with the sums and other exchanges between the ranks.

    rank: 0 .. size - 1. size: number of ranks. device: of this rank.
    store: made by `open_store`, over which the ranks find each other.
    reducer: computes the sums; replaceable by one that is faster.
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
            destroy_unused_group()
            dist.init_process_group(
                "nccl",
                store=store,
                rank=rank,
                world_size=size,
                timeout=TIMEOUT,
                device_id=device,
            )
            global _ours
            _ours = dist.group.WORLD
            _joined.add(self)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=HOST)]
            options._timeout = TIMEOUT
            self._gloo = gloo(store, rank, size, options)

    def __deepcopy__(self, memo: object) -> Ranks:
        """Return this object itself, so that copied layers sum over the same ranks. `memo` is not used."""
        return self

    # Sums.

    def all_reduce(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of all ranks' `part`, equal in every bit on all ranks; may overwrite `part`.

        residual: a tensor of the same shape, equal on all ranks, that is added once. None: nothing is added.
        """
        return self.reducer.sum(self, part.contiguous(), residual)

    # Plain operations of the library.

    def plain_sum(self, part: Tensor) -> Tensor:
        """Add up all ranks' `part` in place, by torch.distributed, and return `part`."""
        if self._gloo is None:
            dist.all_reduce(part)  # on the stream of the caller, so a graph can capture it
        else:
            self._gloo.allreduce([part]).wait()
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' `part [...]` as `[size, ...]`, in the order of ranks."""
        part = part.contiguous()
        found = part.new_empty(self.size, *part.shape)
        if self._gloo is None:
            dist.all_gather_into_tensor(found, part)
        else:
            self._gloo.allgather([list(found)], [part]).wait()
        return found

    def first(self, tensor: Tensor) -> Tensor:
        """Overwrite `tensor` with rank 0's (a broadcast), in place, and return it."""
        if self._gloo is None:
            dist.broadcast(tensor, 0)
        else:
            self._gloo.broadcast(tensor, 0).wait()
        return tensor

    def smallest(self, number: int) -> int:
        """Return the smallest of the `number`s that the ranks have passed; every rank must call this."""
        return int(self.gather(torch.tensor([number], device=self.device)).min())

    def leave(self) -> None:
        """Stop using the process group; the next engine of this process may then destroy it."""
        _joined.discard(self)

    def abort(self) -> None:
        """End all waits of this process for other ranks, since a rank is lost. Any thread may call this."""
        self.leave()
        self.reducer.stop()
        if self._gloo is None and dist.is_initialized():
            with suppress(Exception):  # the loss is reported elsewhere
                dist.group.WORLD.abort()  # type: ignore[union-attr]

    def close(self) -> None:
        """Leave the process group and destroy it, after the last step."""
        self.leave()
        self.reducer = PLAIN
        if self._gloo is None and dist.is_initialized():
            torch.cuda.synchronize(self.device)
            if not destroy_group():
                print(
                    "warning: the process group of the ranks could not be destroyed",
                    file=sys.stderr,
                    flush=True,
                )
        self._gloo = None
