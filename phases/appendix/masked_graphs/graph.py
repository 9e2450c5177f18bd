"""The second half of a decode step as a graph of its own, for steps whose samples are masked.

Such a step cannot be one graph: the host makes its masks while the device computes the first half. What does
not need them is done before: a `LogitsGraph` belongs to the first half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.sampler import Allowed, Needs, Plan
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import DecodeGraph, logits_dtype, narrow_logits
from cuda_graphs.step_kernels import scatter_tokens
from forward.model import Model
from triton_paged_attention.linear import FusedLinear


class MaskInputs:
    """Inputs of masked graphs of all sizes, of up to `most` places: masks, and what the first half left.

    words: `[most, ceil(V / 32)]` int32; places: `[most]` int64, -1: padding. See `Allowed`.
    logits: `[most, V]`, in the precision of `narrow_logits`.
    requests: `[3 * most]` int64, the `inputs` of decode graphs, one behind the other.
    """

    def __init__(self, most: int, model: Model) -> None:
        vocab_size, device = model.config.vocab_size, model.device
        self.words = torch.zeros(most, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.places = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.logits = torch.zeros(most, vocab_size, dtype=logits_dtype(model), device=device)
        self.requests = torch.zeros(3 * most, dtype=torch.int64, device=device)

    def put(self, allowed: Allowed | None, size: int) -> None:
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

    def __init__(self, first: LogitsGraph, features: Needs, capturer: Capturer) -> None:
        self.first = first
        self.plan = Plan(features, (), None).for_any_rows()
        masks, size = first.masks, first.half.size
        self._allowed = Allowed(masks.words[:size], masks.places[:size])
        self.replay = capturer.capture(self.compute)

    @torch.inference_mode()
    def run(self, allowed: Allowed | None) -> None:
        """The half step, under these masks; None: nobody has one."""
        self.first.masks.put(allowed, self.first.half.size)
        self.replay()

    def compute(self) -> None:
        """The half step; what is captured."""
        on, (rows, at, steps) = self.first.half.machine, self.first.inputs
        logits = self.first.logits
        sampled = on.sampler.sample(logits, rows, (), steps, self.plan, allowed=self._allowed)
        self.for_host = sampled.for_host
        scatter_tokens(rows, at, sampled.tokens, on.rows.tokens)
