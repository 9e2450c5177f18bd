"""A step that verifies drafts as a graph, down to the tokens sampled at every position.

A few tokens of a few requests are a small mixed step. What differs from `ChunkGraph`: every position is
sampled, and inside the graph, since the host is waiting for the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from common.sampling.sampler import Feature, Plan
from continuous.batch import HostBatch, Ints
from continuous.work import Work
from cuda_graphs.capture import Capturer
from cuda_graphs.chunk_graph import ChunkGraph, Layout
from cuda_graphs.decode_graph import Machine, narrow_logits
from cuda_graphs.step_kernels import scatter_tokens


class VerifyGraph(ChunkGraph):
    """A step of up to `tokens` tokens of up to `requests` requests, all of which may be sampled.

    features: how it samples, one of `decode_graph.CAPTURED`.

    for_host: `[tokens]` int64, in the order of the samples, as in `Sampled`; good until the next replay.
    """

    for_host: Tensor

    def __init__(
        self,
        machine: Machine,
        tokens: int,
        requests: int,
        layout: Layout,
        inputs: Tensor,
        features: Feature,
        capturer: Capturer,
    ) -> None:
        self.plan = Plan(features, (), None).for_any_rows()
        super().__init__(machine, tokens, requests, layout, inputs, capturer)

    def compute(self) -> None:
        """The step; what is captured."""
        super().compute()
        on, given = self.machine, self.inputs
        hidden = self.hidden[given["sample_at"]]  # [tokens, hidden]
        logits = narrow_logits(on.model, hidden)
        rows, steps = given["sample_rows"], given["sample_steps"]
        sampled = on.sampler.sample(logits, rows, (), steps, self.plan)
        self.for_host = sampled.for_host
        # A padded sample's position is 0, so that it would be written behind position -1: nowhere.
        scatter_tokens(rows, given["sample_positions"] - 1, sampled.tokens, on.rows.tokens)


def drafts_of(works: Sequence[Work], host: HostBatch) -> Ints:
    """Each token's draft `[T]`, -1 where it is none: the last ones of a work."""
    drafts: Ints = np.full(len(host.positions), -1)
    for work, end in zip(works, host.query_starts[1:].tolist(), strict=True):
        if work.drafts:
            drafts[end - len(work.drafts) : end] = work.drafts
    return drafts
