"""Messages from rank 0 to the other ranks, their replies, and the channel that they come by, pickled."""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from continuous.work import Work


class RowOnly(NamedTuple):
    """Stands for a request in a broadcast step: runners read its row and nothing else."""

    row: int


def with_rows(work: Work) -> Work:
    """Return a work (one request's tokens in a step) with rows in place of requests, so that it is
    small when pickled.
    """
    stand_in: Any = RowOnly
    sampled = tuple(stand_in(request.row) for request in work.sampled_requests)
    return work._replace(request=stand_in(work.row), sampled_requests=sampled)


class CacheChanges(NamedTuple):
    """Changes of the cache that all ranks apply before a step.

    rows, columns, blocks: `[n]` each: entries of the block tables, and what they are now.
    moves, fresh, copies: what `PagedCache.take_moves`, `take_fresh` and `take_copies` returned.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int32]
    moves: Any
    fresh: list[int]
    copies: list[tuple[int, int]]


class ForwardMessage(NamedTuple):
    """Rank 0's message: run the forward pass of a step.

    works: the step's requests and tokens, with rows in place of requests.
    masked: its samples may be masked.
    requests: those that got a row since the last step.
    stained: some block may hold NaN; see `BlockPool`.
    """

    works: list[Work]
    masked: bool
    requests: list[Request]
    changes: CacheChanges
    stained: bool


class SampleMessage(NamedTuple):
    """Rank 0's message: sample the step whose forward pass has run. masked: rank 0 has masks for it."""

    masked: bool


class Join(NamedTuple):
    """Rank 0's message: join a process group of `size` ranks.

    device: rank 0's; this rank has the one that many behind it. path: of the store. threads: of PyTorch.
    """

    size: int
    device: str
    path: str
    threads: int


class Joining(NamedTuple):
    """A worker's reply: this rank has begun to join the process group."""


class Build(NamedTuple):
    """Rank 0's message: build an engine by this recipe, and run the steps that follow."""

    recipe: Any


class RunFunction(NamedTuple):
    """Rank 0's message: run a function and reply what it returns.

    It is in one module, or in `source` where that is not empty.
    """

    module: str
    name: str
    source: str
    given: tuple[Any, ...]


class Closed(NamedTuple):
    """Rank 0's message: the engine and the process group are not needed any more."""


class BroadcastChannel:
    """A worker's connection to rank 0."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def receive(self) -> Any:
        """Return the next message. Ends this process if rank 0 has ended."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)

    def send(self, message: Any) -> None:
        """Send a message to rank 0."""
        self.connection.send_bytes(pickle.dumps(message))
