"""Attention of a ragged batch: its interface, and the simplest one, for a KV cache of one row a request."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from continuous.batch import Batch
from continuous.cache import RowStore
from continuous.groups import (
    PADDING_PER_CALL,
    Group,
    attend_masked,
    group,
    prompt_groups,
)
from forward.attention import LayerSpec, causal_mask


class BatchAttention(Protocol):
    """Interface of the attention that a model calls once in every layer, for all requests of a step."""

    def begin(self, batch: Batch) -> None:
        """Prepare masks and indices for a step; the calls of all its layers then use `batch`."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k` and `v [T, KH, D]` in the cache, and return the attention of `q [T, H, D]`: `[T, H, D]`.

        `T`: tokens of the batch. `H`, `KH`: heads of queries, and of keys and values. `D`: size of a head.
        layer: the number, heads, score scale and window of the layer that calls.
        """

    def wipe(self, row: int) -> None:
        """Overwrite the cached keys and values of a request's row, so that no later request reads NaN."""


def avoid_plans_per_shape() -> None:
    """Keep PyTorch from choosing cuDNN's attention on CUDA, for the whole process.

    cuDNN compiles a plan for every new shape, which takes tens of milliseconds, and with continuous
    batching almost every step has a context length that no step had before. (Measured on an H200: 40 ms a
    step instead of 14.)
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def prompt_attention(
    plan: Group, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> None:
    """Write the attention of one group of prompts to their tokens of `out [T, H, D]`.

    The prompts have no cached tokens: each attends to its own keys and values of this step.
    plan: the group, made by `prompt_groups`. layer: its score scale and window are used.
    q: `[T, H, D]`; k and v: `[T, KH, D]`, of the whole batch.
    """
    q = plan.take(q)
    k = plan.take(k)
    v = plan.take(v)
    window = layer.sliding_window
    if layer.sinks is None and (window is None or window >= plan.queries):
        result = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scale, enable_gqa=True
        )
    else:
        if window not in plan.masks:
            columns = torch.arange(plan.queries, device=q.device)
            plan.masks[window] = causal_mask(columns, columns, window)[None, None]
        result = attend_masked(layer, q, k, v, plan.masks[window])
    plan.put(out, result)


class RowAttention:
    """Attention for a KV cache in which each request has a row (`RowStore`).

    A prompt attends to its own keys and values of this step, a decode to those in its row. A prompt is
    always computed whole: each request of a batch has either no cached tokens or just one new token.
    """

    def __init__(self, store: RowStore) -> None:
        avoid_plans_per_shape()
        self.store = store
        self.batch: Batch
        self._prompts: list[Group] = []
        self._decodes: list[tuple[Group, slice]] = []

    def begin(self, batch: Batch) -> None:
        """Start a step: group its prompts, and its decodes, by length; attention is called once a group."""
        self.batch = batch
        host, device = batch.host, batch.positions.device
        self._prompts, decoding = prompt_groups(host, device)
        order = decoding[np.argsort(host.rows[decoding])].tolist()
        runs = group(
            order, host.query_lens, host.context_lens, PADDING_PER_CALL[device.type], host.rows
        )
        self._decodes = []
        for members in runs:
            rows = host.rows[members]
            first, end = int(rows[0]), int(rows[-1]) + 1
            # A row between that is not the group's repeats the member before it, so that the view has no gap.
            every = np.arange(first, end)
            place = np.searchsorted(rows, every, side="right") - 1
            plan = Group.of(members[place], host, device, np.isin(every, rows))
            self._decodes.append((plan, slice(first, end)))

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store `k`, `v [T, KH, D]` in the requests' rows of `layer`; return attention `[T, H, D]` of `q`."""
        keys, values = self.store.layers[layer.index]  # [R, KH, max_len, D]
        keys[self.batch.token_rows, :, self.batch.positions] = k
        values[self.batch.token_rows, :, self.batch.positions] = v
        out = torch.empty_like(q)
        for plan in self._prompts:
            prompt_attention(plan, layer, q, k, v, out)
        for plan, rows in self._decodes:
            past = rows, slice(None), slice(plan.context)  # of which views are made
            mask = plan.mask(layer.sliding_window, plan.context, q.device)
            plan.put(out, attend_masked(layer, plan.take(q), keys[past], values[past], mask))
        return out

    def wipe(self, row: int) -> None:
        """Fill a cache row with zeros, as at the start: NaN in it would reach the row's next request."""
        self.store.data[:, :, row] = 0
