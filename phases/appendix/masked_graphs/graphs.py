"""Masked decode steps as graphs: one before the masks are known, and two behind.

Such a step cannot be one graph: the host makes its masks while the device computes the first half. What does
not need them is done before: a `LogitsGraph` belongs to the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from common.sampling.sampler import Sampled, SamplingFlags, SamplingMetadata, TokenBitmask
from continuous.batch import Ints
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs.buckets import decode_sizes, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import (
    CAPTURED,
    DecodeGraph,
    captured,
    logits_dtype,
    narrow_logits,
)
from cuda_graphs.executors import DecodeGraphExecutor, decodes
from cuda_graphs.runner import GraphRunner
from cuda_graphs.step_kernels import scatter_tokens
from forward.model import Model
from triton_paged_attention.linear import FusedLinear


class MaskInputs:
    """Inputs of masked graphs of all sizes, of up to `most` places: masks, and what the first half left.

    words: `[most, ceil(V / 32)]` int32; places: `[most]` int64, -1: padding. See `TokenBitmask`.
    logits: `[most, V]`, in the precision of `narrow_logits`.
    requests: `[3 * most]` int64, the `inputs` of decode graphs, one behind the other.
    """

    def __init__(self, most: int, model: Model) -> None:
        vocab_size, device = model.config.vocab_size, model.device
        self.words = torch.zeros(most, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.places = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(most, vocab_size, dtype=logits_dtype(model), device=device)
        self.requests = torch.zeros(3 * most, dtype=torch.int64, device=device)

    def put(self, allowed: TokenBitmask | None, size: int) -> None:
        """Copy a step's masks, for a graph of `size` requests: a few microseconds of the device."""
        count = 0 if allowed is None else len(allowed.places)
        if allowed is not None:
            self.words[:count].copy_(allowed.words)
            self.places[:count].copy_(allowed.places)
        self.places[count:size].fill_(-1)


class LogitsGraph:
    """From the hidden states of a decode graph that does not sample to logits, before their masks are known.

    Args:
        half: the graph that is replayed right before.
        masks: where its logits go, of `half.size` places or more.

    inputs: `[3, size]` int64, a copy of the half's: in those the next step's may be while masks are made.
    """

    def __init__(self, half: DecodeGraph, masks: MaskInputs, capturer: Capturer) -> None:
        self.half, self.masks = half, masks
        self.logits = masks.logits[: half.size]
        self.inputs = masks.requests[: 3 * half.size].view(3, half.size)
        half.pad()
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """Run what is captured."""
        self.inputs.copy_(self.half.inputs)
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

    def __init__(
        self, first: LogitsGraph, features: SamplingFlags, capturer: Capturer
    ) -> None:
        self.first = first
        self.plan = SamplingMetadata(features, (), None).for_any_rows()
        masks, size = first.masks, first.half.size
        self._allowed = TokenBitmask(masks.words[:size], masks.places[:size])
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """The half step; what is captured."""
        on, (rows, at, steps) = self.first.half.machine, self.first.inputs
        logits = self.first.logits
        sampled = on.sampler.sample(logits, rows, (), steps, self.plan, allowed=self._allowed)
        self.for_host = sampled.for_host
        scatter_tokens(rows, at, sampled.tokens, on.rows.tokens)


class MaskedGraphExecutor:
    """Decode steps whose samples are masked: phase 09's graph to the hidden states, then two more.

    While the masks of a step are being made, the host has time: it then sends what the next step reads.

    graphs: by size and kind of sampling.
    """

    def __init__(self, runner: GraphRunner) -> None:
        self.runner, self.decodes = runner, runner.plan(DecodeGraphExecutor)
        self.graphs: dict[tuple[int, SamplingFlags], MaskedGraph] = {}
        self.count = len(self.decodes.sizes) * (1 + len(CAPTURED))
        self._staged: tuple[Sequence[Work], Ints] | None = None

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """See `GraphExecutor`."""
        masks = MaskInputs(self.decodes.sizes[-1], self.runner.model)
        for size in reversed(self.decodes.sizes):
            part(f"{size} requests, logits")
            first = LogitsGraph(self.decodes.graphs[size, None], masks, capturer)
            for kind in CAPTURED:
                part(f"{size} requests, masked")
                self.graphs[size, kind] = MaskedGraph(first, kind, capturer)

    @torch.inference_mode()
    def stage(self, works: Sequence[Work]) -> None:
        """Send what the next step reads, before the second half of this one.

        Not if a request is new: the row may have had an owner whose last token is yet to be written.
        """
        size, last = self.supports(works, masked=True), self.runner.last
        half_done = (
            last is not None and last.rest is not None
        )  # the second half is a graph, too
        if size is not None and half_done and not self.runner.rows.fresh:
            self._staged = works, self.decodes.stage(works, size)

    def supports(self, works: Sequence[Work], masked: bool) -> int | None:
        """The size of the graphs."""
        return smallest(self.decodes.sizes, len(works)) if masked and decodes(works) else None

    def run(self, works: Sequence[Work], ticket: int) -> Forwarded:
        """The first half of a step."""
        staged, self._staged = self._staged, None
        if staged is not None and staged[0] is works:
            rows = staged[1]
        else:
            self.runner.refresh(works)
            rows = self.decodes.stage(works, ticket)
        plan = self.runner.sampler.plan(rows.tolist())
        graph = self.decodes.graphs[ticket, None]
        self.runner.replays += 1
        graph.replay()
        rest = self.graphs.get((ticket, plan.features)) if captured(plan) else None
        if rest is None:
            return Forwarded(works, graph.sampled(rows), graph.hidden)
        rest.first.replay()
        return Forwarded(
            works, graph.batch, graph.hidden, rest=partial(self.finish, works, rest)
        )

    def finish(
        self, works: Sequence[Work], graph: MaskedGraph, allowed: TokenBitmask | None
    ) -> Pending:
        """The second half of a step, under these masks; None: no request has one."""
        graph.first.masks.put(allowed, graph.first.half.size)
        graph.replay()
        return Pending(works, Sampled(graph.for_host[: len(works)]), self.runner.verifier)


PER_HALF = 1 << 20
"""Bytes of a graph of a few nodes."""


def masked_bytes(model: Model, rows: int) -> int:
    """Estimate from above what second halves of up to `rows` requests take, with their inputs."""
    vocab_size = model.config.vocab_size
    row = 4 * -(-vocab_size // 32) + vocab_size * logits_dtype(model).itemsize + 8 + 3 * 8
    return rows * row + len(decode_sizes(rows)) * (1 + len(CAPTURED)) * PER_HALF
