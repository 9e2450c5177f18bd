"""A batch whose tensors stay where they are, and are filled on the device before every step."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import torch

from continuous.batch import HostBatch
from paged_cache import PagedBatch

SAMPLED = ("sample_at", "sample_rows", "sample_positions", "sample_steps")
"""Fields of a batch that have a number for each sampled token."""


def fixed_batch(size: int, max_blocks: int, device: torch.device) -> PagedBatch:
    """Return a `PagedBatch` of `size` one-token requests on the device, for a CUDA graph to read.

    Its tensors are zeros (`query_starts` counts up); before each replay they are filled in place.

    max_blocks: columns of its block tables, `[size, max_blocks]`.
    """
    # Context lengths may not be read: they differ from replay to replay.
    lens = np.ones(size, int)
    lengths = {"query_lens": lens, "context_lens": lens, "query_starts": np.arange(size + 1)}
    names = [field.name for field in fields(HostBatch)]
    host = HostBatch(**dict.fromkeys(names, np.arange(size)) | lengths)
    zeros = partial(torch.zeros, dtype=torch.int64, device=device)

    return PagedBatch(
        host=host,
        input_ids=zeros(size),
        positions=zeros(size),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        block_tables=zeros(size, max_blocks, dtype=torch.int32),
        slots=zeros(size),
        **dict.fromkeys(("token_rows", "rows", *SAMPLED), zeros(0)),
    )
