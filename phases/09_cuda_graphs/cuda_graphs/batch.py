"""A batch whose tensors stay where they are, and are filled on the device before every step."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import torch

from continuous.batch import HostBatch
from paged_cache import PagedBatch


def fixed_batch(size: int, max_blocks: int, device: torch.device, each: int = 1) -> PagedBatch:
    """Return a batch of `size` requests with `each` tokens on the device, all zeros, for a CUDA graph to
    read.

    max_blocks: columns of its block tables, `[size, max_blocks]`.
    """
    lens = np.full(
        size, each
    )  # context lengths may not be read: they differ from replay to replay
    others = {
        "query_lens": lens,
        "context_lens": lens,
        "query_starts": np.arange(size + 1) * each,
    }
    names = [field.name for field in fields(HostBatch)]
    host = HostBatch(
        **dict.fromkeys(names, np.arange(size * each)) | others | {"rows": np.arange(size)}
    )
    zeros = partial(torch.zeros, dtype=torch.int64, device=device)
    sampled = ("sample_at", "sample_rows", "sample_positions", "sample_steps")
    return PagedBatch(
        host=host,
        input_ids=zeros(size * each),
        positions=zeros(size * each),
        query_starts=torch.arange(0, size * each + 1, each, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        block_tables=zeros(size, max_blocks, dtype=torch.int32),
        slots=zeros(size * each),
        **dict.fromkeys(("token_rows", "rows", *sampled), zeros(0)),
    )
