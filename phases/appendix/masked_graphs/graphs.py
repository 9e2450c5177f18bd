"""Masked decode steps as graphs: one before the masks are known, and two behind.

Such a step cannot be one graph: the host makes its masks while the device computes the first half. What does
not need them is done before: a `LogitsGraph` belongs to the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from common.sampling.sampler import Allowed, Needs, Plan, Sampled
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.buckets import decode_sizes
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import CAPTURED, DecodeGraph, captured, logits_dtype, narrow_logits
from cuda_graphs.plans import DecodePlan
from cuda_graphs.runner import GraphRunner
from cuda_graphs.step_kernels import scatter_tokens
from forward.model import Model
from triton_paged_attention.linear import FusedLinear


class MaskInputs:
    """Inputs of masked graphs of all sizes, of up to `most` places: masks, and what the first half left.

    words: `[most, ceil(V / 32)]` int32; places: `[most]` int64, -1: padding. See `Allowed`.
    logits: `[most, V]`, in the precision of `narrow_logits`.
    """

    def __init__(self, most: int, model: Model) -> None:
        vocab_size, device = model.config.vocab_size, model.device
        self.words = torch.zeros(most, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.places = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(most, vocab_size, dtype=logits_dtype(model), device=device)


class LogitsGraph:
    """From the hidden states of a decode graph that does not sample to logits, before their masks are known.

    Args:
        half: the graph that is replayed right before.
        masks: where its logits go, of `half.size` places or more.
    """

    def __init__(self, half: DecodeGraph, masks: MaskInputs, capturer: Capturer) -> None:
        self.half, self.masks = half, masks
        self.logits = masks.logits[: half.size]
        half.pad()
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """Run what is captured."""
        model, hidden = self.half.machine.model, self.half.hidden
        if isinstance(model.lm_head, FusedLinear) and model.config.final_soft_cap is None:
            model.lm_head.write(hidden, self.logits)
        else:
            self.logits.copy_(narrow_logits(model, hidden))


class MaskedGraph:
    """From logits and masks to tokens.

    Args:
        first: the graph that was replayed for this step.
        features: how it samples, one of `CAPTURED`.

    for_host: `[size]` int64, the tokens as in `Sampled`; good until the next replay.
    """

    for_host: Tensor

    def __init__(self, first: LogitsGraph, features: Needs, capturer: Capturer) -> None:
        self.first = first
        self.plan = Plan(features, (), None).for_any_rows()
        masks, size = first.masks, first.half.size
        self._allowed = Allowed(masks.words[:size], masks.places[:size])
        self.replay = capturer.capture(self.compute)

    @torch.inference_mode()
    def run(self, allowed: Allowed | None) -> None:
        """Copy a step's masks, which takes the device microseconds, and replay; None: no request has one."""
        words, places = self._allowed
        count = 0 if allowed is None else len(allowed.places)
        if allowed is not None:
            words[:count].copy_(allowed.words)
            places[:count].copy_(allowed.places)
        places[count:].fill_(-1)
        self.replay()

    def compute(self) -> None:
        """The half step; what is captured."""
        half, logits = self.first.half, self.first.logits
        on, (rows, at, steps) = half.machine, half.inputs
        sampled = on.sampler.sample(logits, rows, (), steps, self.plan, allowed=self._allowed)
        self.for_host = sampled.for_host
        scatter_tokens(rows, at, sampled.tokens, on.rows.tokens)


class MaskedPlan:
    """Decode steps whose samples are masked: phase 09's graph to the hidden states, then two more.

    graphs: by size and kind of sampling.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self.runner, self.decodes = runner, runner.plan(DecodePlan)
        self.graphs: dict[tuple[int, Needs], MaskedGraph] = {}
        self.count = len(self.decodes.sizes) * (1 + len(CAPTURED))

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """See `GraphPlan`."""
        masks = MaskInputs(self.decodes.sizes[-1], self.runner.model)
        for size in reversed(self.decodes.sizes):
            part(f"{size} requests, logits")
            first = LogitsGraph(self.decodes.graphs[size, None], masks, capturer)
            for kind in CAPTURED:
                part(f"{size} requests, masked")
                self.graphs[size, kind] = MaskedGraph(first, kind, capturer)

    def takes(self, works: Sequence[Work], masked: bool) -> tuple[int, bool] | None:
        """Take what phase 09's graphs take."""
        return self.decodes.takes(works, masked) if masked else None

    def run(self, works: Sequence[Work], ticket: tuple[int, bool]) -> Forwarded:
        """The first half of a step, whose second half is a graph where its kind of sampling has one."""
        step = self.decodes.run(works, ticket)
        plan = self.runner.sampler.plan(step.batch.host.sample_rows.tolist())
        graph = self.graphs.get((ticket[0], plan.features)) if captured(plan) else None
        if graph is not None:
            graph.first.replay()
            step.rest = partial(self._sample, works, graph)
        return step

    def _sample(self, works: Sequence[Work], graph: MaskedGraph, allowed: Allowed | None) -> Pending:
        """Run the second half of a step, under these masks."""
        graph.run(allowed)
        return Pending(works, Sampled(graph.for_host[: len(works)]), self.runner.extra)


PER_HALF = 1 << 20
"""Bytes of a graph of a few nodes."""


def masked_bytes(model: Model, rows: int) -> int:
    """Estimate from above what second halves of up to `rows` requests take, with their inputs."""
    vocab_size = model.config.vocab_size
    row = 4 * -(-vocab_size // 32) + vocab_size * logits_dtype(model).itemsize + 8
    return rows * row + len(decode_sizes(rows)) * (1 + len(CAPTURED)) * PER_HALF
