"""Memory that sampling takes: permanent bytes, temporary bytes, and how many rows are processed at once."""

from __future__ import annotations

import torch

from common.sampling import ops
from common.sampling.list_fields import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return how many rows of logits (of `vocab_size`) an operation may process at once.

    The limit is for operations whose temporary tensors are several times the logits. Two rows of 49,152 fit a
    CPU's cache; with 16 rows at once, a row took three to five times as long. On a GPU the limit saves
    memory: 8 million logits keep it busy, and take 0.4 GB, beside which the histograms of selection by radix
    (0.26 MB a row) are small.
    """
    elements = 1 << (17 if device.type == "cpu" else 23)
    return max(1, elements // vocab_size)


def persistent_bytes(rows: int, vocab_size: int) -> int:
    """Return the most bytes that a sampler's permanent arrays for `rows` requests can take on the device.

    These are settings, token ids, the penalties' arrays, and the edits (added to logits) of a batch.
    """
    edits = (8 + 4 + 8 + 8) * (MAX_BIASED_TOKENS + MAX_STOP_TOKEN_IDS)
    return rows * (5 * 4 + 3 * 8 + edits + vocab_size * (1 + 4)) + 4 * vocab_size


def scratch_bytes(batch: int, vocab_size: int, device: torch.device) -> int:
    """Return the most bytes of temporary tensors that choosing `batch` tokens takes at a time.

    That is a copy of the logits to edit, and, for as many rows as are processed at once, what selection by
    radix takes: 48 bytes a logit and a histogram. The logits themselves are not counted, and neither is a
    prompt that comes with penalties (12 bytes a token, one prompt at a time).
    """
    part = min(batch, rows_at_once(vocab_size, device))
    return batch * (4 * vocab_size + 512) + part * (48 * vocab_size + (8 << ops.DIGIT_BITS))
