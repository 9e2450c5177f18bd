"""One decode step as a graph: from rows and positions to sampled tokens, with nothing left to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.sampling.metadata import SamplingFlags, SamplingMetadata
from common.sampling.sampler import Sampler
from continuous.batch import Ints
from continuous.rows import RequestRows
from cuda_graphs.batch import fixed_batch
from cuda_graphs.capture import Capturer
from cuda_graphs.step_kernels import gather_inputs, scatter_tokens
from cuda_graphs.tables import DeviceTables
from forward.model import Model
from paged_cache.attention import PagedBatch
from triton_paged_attention.attention import TritonPagedAttention

CAPTURED = (SamplingFlags(0), SamplingFlags.RANDOM)
"""Kinds of sampling inside graphs: greedy, and by temperature."""
KINDS = (*CAPTURED, None)
"""`None`: none; the hidden states of a batch that needs anything else are sampled eagerly."""


def captured(plan: SamplingMetadata) -> bool:
    """Return True if a decode graph can sample by `plan`.

    That is greedily or with a temperature, and without log-probabilities.
    """
    return plan.features in CAPTURED and plan.wanted is None


@dataclass(frozen=True)
class GraphContext:
    """All that the CUDA graphs of an engine read and write, at addresses that never change.

    rows: the token ids of all running requests. tables: their block tables. block_size: tokens in a block.
    """

    model: Model
    attention: TritonPagedAttention
    sampler: Sampler
    rows: RequestRows
    tables: DeviceTables
    block_size: int


def narrow_logits(model: Model, hidden: Tensor) -> Tensor:
    """Return logits `[S, V]` of `hidden [S, hidden]` in the model's dtype; float32 if it soft-caps them.

    In half precision a float32 copy is larger than the logits themselves, and the sampling kernel converts
    each number as it reads it.
    """
    capped = model.config.final_soft_cap is not None
    logits: Tensor = model.logits(hidden) if capped else model.lm_head(hidden)
    return logits


def logits_dtype(model: Model) -> torch.dtype:
    """Return the dtype of a model's logits in graphs: the model's own, or float32 if it soft-caps them."""
    return model.dtype if model.config.final_soft_cap is None else torch.float32


class DecodeGraph:
    """A CUDA graph of a step of `size` requests that each compute one token, sampling included.

    Args:
        machine: the model, attention, sampler and tables that all graphs of the engine share.
        size: requests; fewer are padded.
        inputs: `[3, size]` int64 on the device: each request's row in the token table, the position of the
            token it computes (-1: padding), and how many tokens it has generated before.
        features: how it samples, greedily or with a temperature; None: it does not sample.

    tokens: `[size]` int64, the sampled tokens. for_host: the same, with `NAN_TOKEN` where logits were NaN.
    hidden: `[size, hidden]`, the hidden states. All three are valid until the next replay.
    """

    tokens: Tensor
    hidden: Tensor

    def __init__(
        self,
        machine: GraphContext,
        size: int,
        inputs: Tensor,
        features: SamplingFlags | None,
        capturer: Capturer,
    ) -> None:
        self.machine, self.size = machine, size
        self.inputs = inputs
        self.rows, self.at, self.steps = inputs
        self.plan = (
            None if features is None else SamplingMetadata(features, (), None).for_any_rows()
        )
        self.batch = fixed_batch(size, machine.tables.data.shape[1], inputs.device)
        self.pad()
        self.replay = capturer.capture(self.compute)

    def pad(self) -> None:
        """Set all inputs to padding, for which a replay stores no keys and no tokens.

        Graphs of other sizes share the inputs' memory, so it may hold anything before.
        """
        self.rows[:] = 0
        self.at[:] = -1
        self.steps[:] = 0

    def compute(self) -> None:
        """Run the step from the fixed inputs, and store its results; `Capturer` captures this method."""
        on, batch = self.machine, self.batch
        gather_inputs(
            self.rows,
            self.at,
            on.rows.tokens,
            on.tables.data,
            on.block_size,
            batch,
            decodes=True,
        )
        on.attention.begin(batch)
        self.hidden = on.model(
            batch.input_ids, batch.positions, on.attention
        )  # [size, hidden]
        if self.plan is None:
            return
        # They are not kept: a tensor that outlives the capture takes memory of its own, and logits of every
        # size would be more than a gigabyte.
        logits = narrow_logits(on.model, self.hidden)
        sampled = on.sampler.sample(logits, self.rows, self.steps, self.plan)
        self.tokens, self.for_host = sampled.tokens, sampled.for_host
        scatter_tokens(self.rows, self.at, self.tokens, on.rows.tokens)

    def sampled(self, rows: Ints) -> PagedBatch:
        """Return the replayed step's batch on the device, for the caller to sample from `hidden`.

        rows: `[B]` int64 on the host, the row of each request in the token table; `B` may be less than
            `size`.
        """
        own = slice(len(rows))
        device_rows, at, steps = self.inputs
        return replace(
            self.batch,
            host=replace(self.batch.host, sample_rows=rows),
            sample_at=self.batch.query_starts[:-1][own],
            sample_rows=device_rows[own],
            sample_positions=at[own] + 1,
            sample_steps=steps[own],
        )
