"""The forward pass of a step with prompt tokens in it as a graph: any ragged batch that fits.

A chunk of 256 tokens keeps a large GPU busy for a millisecond or two; launching its kernels one by one takes
the host several. What differs between two such steps is data here: how many requests there are, how many
tokens each has, which of them are decodes. Padding fills the rest: tokens that are stored nowhere, requests
without tokens, tiles without rows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from continuous.batch import HostBatch, Ints
from cuda_graphs.batch import SAMPLED, fixed_batch
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import GraphContext
from cuda_graphs.step_kernels import gather_inputs
from paged_cache.attention import PagedBatch
from triton_paged_attention.attention import TritonPagedAttention

NARROW = ("query_starts", "context_lens", "members", "tiles")
"""Inputs that kernels read as int32; they come last."""
NOTHING: Ints = np.zeros(0, np.int64)


def most_tiles(attention: TritonPagedAttention, tokens: int, requests: int) -> int:
    """Return the most query tiles of a step (the prefill kernel's blocks of one prompt's queries).

    These are the full tiles, and for each prompt one that is not full.

    attention: says how many tokens a tile has. tokens, requests: most tokens and requests of the step.
    """
    return tokens // attention.tile_tokens(tokens) + min(
        requests, tokens // (attention.most_queries + 1)
    )


class Layout:
    """Offsets of the inputs of a `ChunkGraph` in one flat int64 array, so that one copy sends them all.

    Inputs have the names of the fields of `HostBatch` (a step's batch on the host), such as `positions`.

    tokens, requests: most tokens and requests of a step. Lists of requests have an entry more, for a
        request without tokens, which pads them.
    tiles: most query tiles (blocks of one prompt's queries in the prefill kernel).
    samples: most sampled tokens; None: one per request, and no input `drafts` (the device has the ids of
        draft tokens already).
    size: length of the array.
    """

    def __init__(
        self, tokens: int, requests: int, tiles: int, samples: int | None = None
    ) -> None:
        listed, drafts = requests + 1, {} if samples is None else {"drafts": tokens}
        samples = requests if samples is None else samples
        self.sizes = {
            **drafts,
            "token_rows": tokens,
            "positions": tokens,
            "rows": listed,
            **dict.fromkeys(SAMPLED, samples),
            "query_starts": listed + 1,
            "context_lens": listed,
            "members": listed,
            "tiles": 4 * tiles,
        }
        self.starts = dict(
            zip(self.sizes, accumulate(self.sizes.values(), initial=0), strict=False)
        )
        self.size = sum(self.sizes.values())
        self.empty = {"positions": -1, "members": requests, "drafts": -1}
        self.tile = np.array([requests, 0, 0, 0])

    def fill(
        self,
        flat: Ints,
        host: HostBatch,
        members: Ints,
        tiles: NDArray[np.integer[Any]],
        drafts: Ints | None = None,
    ) -> None:
        """Write the inputs of a step, padding included, into the array `flat [size]`.

        host: the step's batch. members: indices in the batch of the requests for the decode kernel.
        tiles: `[n, 4]`, query tiles of the other requests: request, row of the first query, queries, first
            position.
        drafts: `[T]`, for each token of the step its id if it is a draft that the device has not stored yet,
            else -1; None: no drafts.
        """
        others = {
            "members": members,
            "tiles": tiles.ravel(),
            "drafts": NOTHING if drafts is None else drafts,
        }
        given = vars(host) | others
        for name in self.sizes:
            part, values = self.part(flat, name), given[name]
            part[: len(values)] = values
            part[len(values) :] = self.empty.get(name, 0)
        self.part(flat, "query_starts")[len(host.query_starts) :] = host.query_starts[-1]
        self.part(flat, "tiles").reshape(-1, 4)[len(tiles) :] = self.tile

    def part(self, flat: Ints, name: str) -> Ints:
        """Return the input called `name`, such as "positions", as a view of the array `flat [size]`."""
        return flat[self.starts[name] : self.starts[name] + self.sizes[name]]

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        """Return all inputs by name, as views of the tensor `flat [size]`."""
        return dict(zip(self.sizes, torch.split(flat, list(self.sizes.values())), strict=True))


class ChunkGraph:
    """A CUDA graph of the forward pass of a step with several tokens per request, up to its hidden states.

    Sampling is left out: the number of sampled rows changes every time, and its launches are a small part
    of such a step.

    Args:
        machine: the model, attention and tables that all graphs of the engine share.
        layout: offsets of the inputs, for the most tokens and requests that fit; fewer are padded.
        inputs: `[layout.size]` int64 on the device, read at each replay.

    hidden: `[tokens, hidden]`, the hidden states; valid until the next replay.
    """

    hidden: Tensor

    def __init__(
        self, machine: GraphContext, layout: Layout, inputs: Tensor, capturer: Capturer
    ) -> None:
        self.machine, self.layout = machine, layout
        self.batch = fixed_batch(layout.sizes["positions"], 1, inputs.device)
        self.inputs = layout.tensors(inputs)
        self._narrow = inputs[layout.starts[NARROW[0]] :]
        padding = np.zeros(layout.size, np.int64)
        empty = dict.fromkeys(vars(self.batch.host), NOTHING) | {
            "query_starts": np.zeros(1, np.int64)
        }
        no_requests = HostBatch(**empty)
        layout.fill(padding, no_requests, NOTHING, NOTHING.reshape(0, 4))
        inputs.copy_(torch.from_numpy(padding))
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """Run the forward pass from the fixed inputs, and store `hidden`; `Capturer` captures this method."""
        on = self.machine
        batch = self.batch
        given = self.inputs
        gather_inputs(
            given["token_rows"], given["positions"], on.rows.tokens, on.tables.data, on.block_size, batch,
            drafts=given.get("drafts"),
        )  # fmt: skip
        sizes = [self.layout.sizes[name] for name in NARROW]
        query_starts, context_lens, members, tiles = torch.split(self._narrow.int(), sizes)
        block_tables = on.tables.data[given["rows"]]  # [requests + 1, max_blocks]
        batch = replace(
            batch,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=block_tables,
        )
        on.attention.begin_sorted(batch, members, tiles.view(-1, 4))
        self.hidden = on.model(batch.input_ids, batch.positions, on.attention)

    def sampled(self, host: HostBatch) -> PagedBatch:
        """Return the replayed step's batch on the device, for the caller to sample from `hidden`.

        host: the layout of the same batch on the host.
        """
        count = len(host.sample_at)
        return replace(
            self.batch, host=host, **{name: self.inputs[name][:count] for name in SAMPLED}
        )
