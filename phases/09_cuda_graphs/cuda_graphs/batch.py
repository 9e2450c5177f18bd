"""A batch whose tensors stay where they are, and are filled on the device before every step."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import torch

from continuous.batch import HostBatch
from paged_cache import PagedBatch


def fixed_batch(size: int, max_blocks: int, device: torch.device) -> PagedBatch:
    """A batch of `size` requests with one token each, everything zero; block tables `[size, max_blocks]`."""
    ones = np.ones(size, np.int64)  # context lengths may not be read: they differ from replay to replay
    others = {"query_lens": ones, "context_lens": ones, "query_starts": np.arange(size + 1)}
    names = [field.name for field in fields(HostBatch)]
    host = HostBatch(**dict.fromkeys(names, np.arange(size)) | others)
    zeros = partial(torch.zeros, dtype=torch.int64, device=device)
    sampled = ("sample_at", "sample_rows", "sample_positions", "sample_steps")
    return PagedBatch(
        host=host,
        input_ids=zeros(size),
        positions=zeros(size),
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        block_tables=zeros(size, max_blocks, dtype=torch.int32),
        slots=zeros(size),
        **dict.fromkeys(("token_rows", "rows", *sampled), zeros(0)),
    )
