"""Messages from rank 0 to the other ranks, and their replies; each is sent pickled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.request import Request
from continuous.work import Work


class RowOnly(NamedTuple):
    """Stands for a request in a broadcast step: runners read only the request's row of the block tables."""

    row: int


def with_rows(work: Work) -> Work:
    """Return a copy of a work (one request's tokens in a step) that is small when pickled.

    Each `Request` in the work is replaced by a `RowOnly`: the request's row of the block tables.
    """
    stand_in: Any = RowOnly
    sampled = tuple(stand_in(request.row) for request in work.sampled_requests)
    return work._replace(request=stand_in(work.row), sampled_requests=sampled)


class CacheChanges(NamedTuple):
    """Changes of the cache that all ranks apply before a step.

    rows, columns, blocks: `[n]` each: positions in the block tables, and the block numbers there now.
    moves: changes of a hybrid cache's page tables (phase 17), or None.
    fresh: numbers of blocks that have got a new owner. copies: (source, target) blocks to copy.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int32]
    moves: Any
    fresh: list[int]
    copies: list[tuple[int, int]]


class ForwardMessage(NamedTuple):
    """Rank 0's message: run the forward pass of a step.

    works: the step's requests and tokens, with rows of the block tables in place of requests.
    masked: whether grammars may mask the step's samples.
    requests: those that got a row of the block tables since the last step.
    changes: of the cache. stained: whether some block of the KV cache may hold NaN.
    """

    works: list[Work]
    masked: bool
    requests: list[Request]
    changes: CacheChanges
    stained: bool


class SampleMessage(NamedTuple):
    """Rank 0's message: sample the step whose forward pass has run.

    masked: rank 0 has grammar masks for the step.
    """

    masked: bool


class Join(NamedTuple):
    """Rank 0's message: join a process group of `size` ranks.

    device: rank 0's; rank `r` takes the `r`-th GPU after it. path: file by which the ranks find each other.
    threads: number of threads that PyTorch may use.
    """

    size: int
    device: str
    path: str
    threads: int


class Build(NamedTuple):
    """Rank 0's message: build an engine by this recipe (model and options), and run the steps that follow."""

    recipe: Any


class RunFunction(NamedTuple):
    """Rank 0's message: run the function `name` with the arguments `given` and reply what it returns.

    The function is in the module `module`, or in `source` where that is not empty.
    """

    module: str
    name: str
    source: str
    given: tuple[Any, ...]


class Closed(NamedTuple):
    """Rank 0's message: the engine and the process group are not needed any more."""
