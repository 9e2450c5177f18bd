"""A batch whose tensors stay where they are, and are filled on the device before every step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from continuous.batch import HostBatch
from paged_cache import PagedBatch


def fixed_batch(size: int, max_blocks: int, device: torch.device) -> PagedBatch:
    """A batch of `size` requests with one token each, everything zero; block tables `[size, max_blocks]`."""
    count = np.arange(size)
    ones = np.ones(size, np.int64)
    host = HostBatch(
        rows=count,
        query_lens=ones,
        query_starts=np.arange(size + 1),
        context_lens=ones,  # the real ones may not be read: they differ from replay to replay
        token_rows=count,
        positions=count,
        sample_at=count,
        sample_rows=count,
        sample_positions=count,
        sample_steps=count,
    )

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    nothing = zeros(0)
    return PagedBatch(
        host=host,
        input_ids=zeros(size),
        positions=zeros(size),
        token_rows=nothing,
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
        context_lens=zeros(size, dtype=torch.int32),
        rows=nothing,
        sample_at=nothing,
        sample_rows=nothing,
        sample_positions=nothing,
        sample_steps=nothing,
        block_tables=zeros(size, max_blocks, dtype=torch.int32),
        slots=zeros(size),
    )
