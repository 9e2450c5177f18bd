"""Decode steps with grammar masks as three CUDA graphs: forward pass, logits, and masked sampling.

Such a step cannot be one graph, since the host makes its masks while the device computes. The logits need no
masks, so a `LogitsGraph` is replayed right after the forward pass, while the masks are being made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from common.sampling.metadata import SamplingFlags, SamplingMetadata
from common.sampling.sampler import HostSampled, Sampled, TokenBitmask
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


class MaskInputs:
    """The static input buffers of masked CUDA graphs, for up to `most` requests; all graphs share them.

    words: `[most, ceil(V / 32)]` int32, the bit masks; a bit is 1 if its token is allowed.
    positions: `[most]` int64, the row of the logits that each mask belongs to; -1 is padding.
    logits: `[most, V]`, in the model's dtype; float32 if the model soft-caps them.
    requests: `[3 * most]` int64, a flat copy of a decode graph's `inputs`: rows in the token table, then
        positions of tokens, then numbers of generated tokens.
    """

    def __init__(self, most: int, model: Model) -> None:
        vocab_size, device = model.config.vocab_size, model.device
        self.words = torch.zeros(most, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.positions = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(most, vocab_size, dtype=logits_dtype(model), device=device)
        self.requests = torch.zeros(3 * most, dtype=torch.int64, device=device)

    def put(self, allowed: TokenBitmask | None, size: int) -> None:
        """Copy the masks of a step into the buffers, padded to `size` requests.

        allowed: the masks; None: no request has one.
        """
        count = 0 if allowed is None else len(allowed.positions)
        if allowed is not None:
            self.words[:count].copy_(allowed.words)
            self.positions[:count].copy_(allowed.positions)
        self.positions[count:size].fill_(-1)


class LogitsGraph:
    """A CUDA graph that computes logits from a forward pass's hidden states while masks are being made.

    half: the graph of the forward pass, which does not sample; it is replayed right before. capturer:
        captures the graph.
    masks: the buffers that logits are written to, for `half.size` requests or more.
    inputs: `[3, size]` int64, a copy of `half.inputs` (rows in the token table, positions, generated
        tokens): the next step may overwrite `half.inputs` while masks are made.
    """

    def __init__(self, half: DecodeGraph, masks: MaskInputs, capturer: Capturer) -> None:
        self.half, self.masks = half, masks
        self.logits = masks.logits[: half.size]
        self.inputs = masks.requests[: 3 * half.size].view(3, half.size)
        half.pad()
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """Write the logits to the shared buffer, and copy the step's inputs; the graph captures this."""
        self.inputs.copy_(self.half.inputs)
        self.logits.copy_(narrow_logits(self.half.machine.model, self.half.hidden))


class MaskedGraph:
    """A CUDA graph that samples tokens from logits under grammar masks.

    Args:
        first: the graph that computes the logits, replayed before.
        features: the kind of sampling that it can do, one of `CAPTURED`: greedy, or by temperature.
        capturer: captures the graph.

    for_host: `[size]` int64 on the device, the tokens that are copied to the host; valid until the next
        replay.
    """

    for_host: Tensor

    def __init__(
        self, first: LogitsGraph, features: SamplingFlags, capturer: Capturer
    ) -> None:
        self.first = first
        self.plan = SamplingMetadata(features, (), None).for_any_rows()
        masks, size = first.masks, first.half.size
        self._allowed = TokenBitmask(masks.words[:size], masks.positions[:size])
        self.replay = capturer.capture(self.compute)

    def compute(self) -> None:
        """Sample the tokens, and store them where the next step reads them; the graph captures this."""
        on, (rows, at, steps) = self.first.half.machine, self.first.inputs
        logits = self.first.logits
        sampled = on.sampler.sample(logits, rows, steps, self.plan, allowed=self._allowed)
        self.for_host = sampled.for_host
        scatter_tokens(rows, at, sampled.tokens, on.rows.tokens)


class MaskedGraphExecutor:
    """Runs decode steps with grammar masks by three CUDA graphs: forward pass, logits, sampling.

    While the masks of a step are being made, the host copies the inputs of the next step to the device.

    graphs: the sampling graphs, by number of requests and kind of sampling.
    count: number of graphs to capture.
    """

    order: ClassVar[int] = 10

    def __init__(self, runner: GraphRunner) -> None:
        self.runner, self.decodes = runner, runner.executor(DecodeGraphExecutor)
        self.graphs: dict[tuple[int, SamplingFlags], MaskedGraph] = {}
        self.count = len(self.decodes.sizes) * (1 + len(CAPTURED))
        self._staged: tuple[Sequence[Work], Ints] | None = None

    def capture(self, capturer: Capturer, part: Callable[[str], object]) -> None:
        """Capture all graphs, those for the most requests first.

        capturer: captures a function as a graph. part: called with each graph's name before, to show
            progress.
        """
        masks = MaskInputs(self.decodes.sizes[-1], self.runner.model)
        for size in reversed(self.decodes.sizes):
            part(f"{size} requests, logits")
            first = LogitsGraph(self.decodes.graphs[size, None], masks, capturer)
            for kind in CAPTURED:
                part(f"{size} requests, masked")
                self.graphs[size, kind] = MaskedGraph(first, kind, capturer)

    @torch.inference_mode()
    def stage(self, works: Sequence[Work]) -> None:
        """Copy the next step's inputs to the device, before the current step's sampling is launched.

        works: the next step's requests, with the tokens that each computes.
        Nothing is copied if the next step is no decode step with masks of a grammar, the current one does
        not sample by a graph, or a request is new: its row may have had another request, whose last token is
        still to be written.
        """
        size, last = self.supports(works, masked=True), self.runner.last
        # The second half is a graph, too.
        half_done = last is not None and last.rest is not None
        if size is not None and half_done and not self.runner.rows.fresh:
            self._staged = works, self.decodes.stage(works, size)

    def supports(self, works: Sequence[Work], masked: bool) -> int | None:
        """Return the size (requests) of the smallest graphs that can run a step; None: no graphs can.

        Graphs run decode steps with grammar masks, up to their size.

        works: the step's requests, with the tokens that each computes. masked: whether a grammar masks
            logits.
        """
        return smallest(self.decodes.sizes, len(works)) if masked and decodes(works) else None

    def run(self, works: Sequence[Work], ticket: int) -> Forwarded:
        """Launch a step's forward pass and logits by graphs; return a `Forwarded`, whose `rest` is `finish`.

        If no graph can do the step's kind of sampling, only the forward pass is launched, and the runner
        samples.

        works: the step's requests, with the tokens that each computes. ticket: size of the graphs, from
            `supports`.
        """
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
        """Launch a step's sampling by a graph; return a `Pending`: tokens that the device still computes.

        works: the step's requests. graph: samples them. allowed: the masks; None: no request has one.
        """
        graph.first.masks.put(allowed, graph.first.half.size)
        graph.replay()
        tokens = graph.for_host[: len(works)]
        sampled = HostSampled(Sampled(tokens, tokens))
        return Pending(works, sampled, self.runner.verifier)


PER_HALF = 1 << 20
"""Estimated bytes of a small graph."""


def masked_bytes(model: Model, rows: int) -> int:
    """Return an upper estimate of the bytes that masked CUDA graphs take for up to `rows` requests."""
    vocab_size = model.config.vocab_size
    row = 4 * -(-vocab_size // 32) + vocab_size * logits_dtype(model).itemsize + 8 + 3 * 8
    return rows * row + len(decode_sizes(rows)) * (1 + len(CAPTURED)) * PER_HALF
