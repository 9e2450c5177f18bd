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
    """Stands for a request in a `Work`: runners read its row and nothing else."""

    row: int


def with_rows(work: Work) -> Work:
    """Return a work that names its requests by their rows alone, so that it is small when pickled."""
    stand_in: Any = RowOnly
    sampled = tuple(stand_in(request.row) for request in work.sampled_requests)
    return work._replace(request=stand_in(work.row), sampled_requests=sampled)


class CacheChanges(NamedTuple):
    """Changes of the cache before a step.

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
    """The first half of a step.

    works: see `with_rows`.
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
    """The second half of the step. masked: rank 0 has masks for it."""

    masked: bool


class Join(NamedTuple):
    """Join a process group of `size` ranks.

    device: rank 0's; this rank has the one that many behind it. path: of the store. threads: of PyTorch.
    """

    size: int
    device: str
    path: str
    threads: int


class Joining(NamedTuple):
    """This rank has begun to join."""


class Build(NamedTuple):
    """Make an engine by this recipe, and run the steps that follow."""

    recipe: Any


class RunFunction(NamedTuple):
    """Run a function of one module, or of `source` where that is not empty, and reply what it returns."""

    module: str
    name: str
    source: str
    given: tuple[Any, ...]


class Closed(NamedTuple):
    """The engine and the process group are not needed any more."""


class BroadcastChannel:
    """The connection of another rank to rank 0."""

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
