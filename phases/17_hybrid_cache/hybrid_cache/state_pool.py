"""The tensors that states lie in, and the mixer over them in plain torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.models.config import DeltaConfig
from continuous.batch import upload
from hybrid_cache.delta_rule import causal_conv, recurrence, scan
from hybrid_cache.mixer import DeltaInputs
from hybrid_cache.state import StateMoves
from paged_cache.attention import PagedBatch


class StatePool:
    """All layers' states, in slots.

    Args:
        config: of the layers.
        slots: slots; one more, the last, is always zeros: the state before a text.
        pages: numbers of pages.
        block_size: tokens in a page.
        dtype: of the model; states are float32 whatever it is.

    recurrent: `[layers, slots + 1, H, Dk, Dv]` float32, in the order of the layers that have states.
    conv: `[layers, slots + 1, W - 1, C]`.
    places: `[pages]` int32, each page's slot.
    step: `[4, B]` int32, of this step's requests: the slots where the state before it is, where that at the
        last page boundary within the step goes (-1: nowhere), and where the last one goes (-1: padding); and
        the tokens before that boundary, or 0.
    """

    step: Tensor

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
        self.index = {layer: i for i, layer in enumerate(np.flatnonzero(config.layers).tolist())}
        count, self.null, self.block_size = len(self.index), slots, block_size
        self.recurrent = torch.zeros(count, slots + 1, *config.state_shape, device=device)
        self.conv = torch.zeros(count, slots + 1, *config.conv_shape, device=device, dtype=dtype)
        self.places = torch.full((pages,), slots, dtype=torch.int32, device=device)

    @staticmethod
    def bytes_per_slot(config: DeltaConfig, dtype: torch.dtype) -> int:
        """Bytes of one state, over all layers."""
        each = 4 * np.prod(config.state_shape) + dtype.itemsize * np.prod(config.conv_shape)
        return int(sum(config.layers) * each)

    def regroup(self, moves: StateMoves | None) -> None:
        """Do what changes before a step."""
        if moves is None:
            return
        wide = {"pages": moves.pages, "copies": moves.copies}
        moved = upload(self.places.device, wide, {"slots": moves.slots})
        self.places[moved["pages"]] = moved["slots"]
        if len(moves.copies):
            sources, targets = moved["copies"].unbind(1)
            self.recurrent[:, targets] = self.recurrent[:, sources]
            self.conv[:, targets] = self.conv[:, sources]

    def begin(self, batch: PagedBatch) -> None:
        """Start a step: find the slots of its requests. All of it is on the device, for graphs."""
        size, ends = self.block_size, batch.context_lens.long()
        counts = batch.query_starts.diff()
        starts, last = ends - counts, (ends - 1).div(size, rounding_mode="floor")
        source = self._slots(batch, starts.sub(1).div(size, rounding_mode="floor"))
        source = torch.where(starts > 0, source, self.null)
        boundary = self._slots(batch, last - 1)
        saved = (last * size > starts) & (boundary != self.null)
        live = (counts > 0) & (ends > 0)
        boundary = torch.where(live & saved, boundary, -1)
        into = torch.where(live, self._slots(batch, last), -1)
        cut = torch.where(boundary >= 0, last * size - starts, 0)
        self.step = torch.stack((source, boundary, into, cut)).int()
        self.batch = batch

    def _slots(self, batch: PagedBatch, places: Tensor) -> Tensor:
        """The slots of a place in each request's table, `[B]`."""
        pages = batch.block_tables.gather(1, places.clamp(min=0).unsqueeze(1)).squeeze(1)
        return self.places[pages.long()]

    def mix(self, inputs: DeltaInputs) -> Tensor:
        """Mix a ragged batch: its decodes at once, and each longer work by itself."""
        host, slots, x, config = self.batch.host, self.step.tolist(), inputs.mixed, inputs.config
        out = torch.empty(len(x), config.value_heads, config.value_dim, device=x.device)
        ones = np.flatnonzero(host.query_lens == 1)
        if len(ones):
            at = torch.from_numpy(host.query_starts[ones]).to(x.device).unsqueeze(1)  # [decodes, 1]
            source, into = ([slots[part][i] for i in ones] for part in (0, 2))
            out[at] = self._advance(inputs.take(at), source, into)
        for i in np.flatnonzero(host.query_lens > 1).tolist():
            first, last = (int(host.query_starts[j]) for j in (i, i + 1))
            source, boundary, into, count = (part[i] for part in slots)
            if boundary >= 0:
                part = slice(first, first + count)
                out[part] = self._advance(inputs.take(part), source, boundary)
                first, source = part.stop, boundary
            out[first:last] = self._advance(inputs.take(slice(first, last)), source, into)
        return out.to(x.dtype)

    def _advance(self, inputs: DeltaInputs, source: int | list[int], into: int | list[int]) -> Tensor:
        """Go on from the states in `source`, and leave those behind the last tokens in `into`."""
        recurrent, conv = (part[self.index[inputs.layer]] for part in (self.recurrent, self.conv))
        mixed, conv[into] = causal_conv(inputs.mixed, inputs.conv, conv[source])
        rule = recurrence if inputs.mixed.shape[-2] == 1 else scan
        out, recurrent[into] = rule(recurrent[source], inputs.tokens(mixed))
        return out
