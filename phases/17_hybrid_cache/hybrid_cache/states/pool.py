"""The device's tensors of Gated DeltaNet states, and a `Mixer` over them in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.models.config import DeltaConfig
from hybrid_cache.states.delta_rule import causal_conv, recurrence, scan
from hybrid_cache.states.mixer import DeltaInputs
from paged_cache.attention import PagedBatch


class StatePool:
    """The states of all Gated DeltaNet layers, in slots on the device, and the `Mixer` (what computes these
    layers) over them in plain torch.

    config: sizes of the layers' heads. dtype: of the convolution's inputs; states are float32.
    slots: number of slots. There are two more: `null` is always zeros, the state before a text; the
        last one takes states that no request reads, those after draft tokens.
    pages, block_size: number of pages (ranges of tokens that block tables name), and tokens of each.
    recurrent: `[layers, slots + 2, H, Dk, Dv]` float32, in the order of the layers that have states.
    conv: `[layers, slots + 2, W - 1, C]`, the last inputs of the convolution.
    page_slots, page_tokens_after: `[pages]` int32, of each page its slot, and how many tokens of a step
        that ends there come after its snapshot boundary, the position whose state is kept (negative: these
        tokens are drafts).
    step: `[4, B]` int32, for this step's requests: the slot that is read; the slot that the state at the
        snapshot boundary goes to (-1: none); the slot that the last state goes to (-1: padding); and the
        number of the step's tokens before the boundary.
    """

    step: Tensor
    _on_host: list[list[int]] | None

    def __init__(
        self,
        config: DeltaConfig,
        slots: int,
        pages: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.index = {
            layer: i for i, layer in enumerate(np.flatnonzero(config.layers).tolist())
        }
        count = len(self.index)
        self.null = slots
        self.block_size = block_size
        self.recurrent = torch.zeros(count, slots + 2, *config.state_shape, device=device)
        self.conv = torch.zeros(
            count, slots + 2, *config.conv_shape, device=device, dtype=dtype
        )
        self.page_slots = torch.full((pages,), slots, dtype=torch.int32, device=device)
        self.page_tokens_after = torch.zeros_like(self.page_slots)

    @staticmethod
    def bytes_per_slot(config: DeltaConfig, dtype: torch.dtype) -> int:
        """Return the bytes of one slot: each layer's state, and the inputs that its convolution keeps."""
        each = 4 * np.prod(config.state_shape) + dtype.itemsize * np.prod(config.conv_shape)
        return int(sum(config.layers) * each)

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the states in whole slots on the device, from slot numbers `sources [n]` to `targets [n]`."""
        self.recurrent[:, targets] = self.recurrent[:, sources]
        self.conv[:, targets] = self.conv[:, sources]

    def begin(self, batch: PagedBatch) -> None:
        """Start a step: compute `step`, the slots that its requests read and write, on the device.

        Nothing waits for the host, so a CUDA graph can capture this.
        """
        ends, counts = batch.context_lens.long(), batch.query_starts.diff()
        starts = ends - counts
        live = (counts > 0) & (ends > 0)
        several = counts > 1
        last = self._pages(batch, ends)
        tail = self.page_tokens_after[last]
        cut = counts - tail.abs()
        source, boundary = (
            self.page_slots[self._pages(batch, tokens)] for tokens in (starts, starts + cut)
        )
        source = torch.where(starts > 0, source, self.null)
        saves = live & several & (tail != 0) & (boundary != self.null)
        into = torch.where(several & (tail < 0), self.null + 1, self.page_slots[last])
        parts = (
            torch.where(saves, boundary, -1),
            torch.where(live, into, -1),
            torch.where(saves, cut, 0),
        )
        self.start(batch, torch.stack((source, *parts)).int())

    def start(self, batch: PagedBatch, step: Tensor) -> None:
        """Set the batch of a step and its slots (numbers of stored states), for the calls of `mix` that
        follow.

        step: `[4, B]` int32, for each request: the slot to read (`null` at a text's beginning), the slot that
            keeps the state at the snapshot boundary (-1: none), the slot of the state after the step (-1:
            padding), and how many of the step's tokens lie before that boundary.
        """
        self.step = step
        self.batch = batch
        self._on_host = None

    def _pages(self, batch: PagedBatch, tokens: Tensor) -> Tensor:
        """Return the page `[B]` that holds the last of the first `tokens [B]` tokens of each request of the
        batch.
        """
        indices = tokens.sub(1).clamp(min=0).div(self.block_size, rounding_mode="floor")
        return batch.block_tables.gather(1, indices.unsqueeze(1)).squeeze(1).long()

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """Return a layer's outputs `[T, H, Dv]` for the batch's `T` tokens; store the new states in slots.

        inputs: of the layer for these tokens: queries, keys and values, decays, and write strengths.
        All requests with one token are computed together, each longer request by itself.
        """
        if self._on_host is None:
            self._on_host = self.step.tolist()
        host = self.batch.host
        slots = self._on_host
        x = inputs.mixed
        config = inputs.config
        out = torch.empty(len(x), config.value_heads, config.value_dim, device=x.device)
        ones = np.flatnonzero(host.query_lens == 1)
        if len(ones):
            at = (
                torch.from_numpy(host.query_starts[ones]).to(x.device).unsqueeze(1)
            )  # [decodes, 1]
            sources, targets = ([slots[part][i] for i in ones] for part in (0, 2))
            out[at] = self._advance(inputs.take(at), sources, targets)
        for i in np.flatnonzero(host.query_lens > 1).tolist():
            first, last = (int(host.query_starts[j]) for j in (i, i + 1))
            source, boundary, into, count = (part[i] for part in slots)
            if boundary >= 0:
                part = slice(first, first + count)
                out[part] = self._advance(inputs.take(part), source, boundary)
                first, source = part.stop, boundary
            out[first:last] = self._advance(inputs.take(slice(first, last)), source, into)
        return out.to(x.dtype)

    def _advance(
        self, inputs: DeltaInputs, source: int | list[int], into: int | list[int]
    ) -> Tensor:
        """Compute tokens from the states in slots `source`, and store the states after them in slots `into`.

        inputs: of one request's tokens `[tokens, ...]` (with one slot number), or of several requests with
            one token each `[requests, 1, ...]` (with a list of slots).

        Returns:
            The outputs `[..., H, Dv]`.
        """
        recurrent, conv = (
            part[self.index[inputs.layer]] for part in (self.recurrent, self.conv)
        )
        mixed, conv[into] = causal_conv(inputs.mixed, inputs.conv, conv[source])
        rule = recurrence if inputs.mixed.shape[-2] == 1 else scan
        out, recurrent[into] = rule(recurrent[source], inputs.tokens(mixed))
        return out
