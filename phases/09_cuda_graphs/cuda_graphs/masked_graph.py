"""The second half of a decode step as a graph of its own, for steps whose samples are masked (phase 12).

Such a step cannot be one graph: the host makes its masks while the device computes the first half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.sampling.sampler import Allowed, Feature, Plan
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import DecodeGraph, narrow_logits
from cuda_graphs.step_kernels import scatter_tokens


class MaskInputs:
    """Where masked graphs find the masks of up to `most` places of a step, and what the first half was given.

    words: `[most, ceil(V / 32)]` int32; places: `[most]` int64, -1: padding. See `Allowed`.
    requests: `[3 * most]` int64, the `inputs` of decode graphs, one behind the other.
    """

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        self.words = torch.zeros(most, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.places = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.requests = torch.zeros(3 * most, dtype=torch.int64, device=device)

    def put(self, allowed: Allowed | None, size: int) -> None:
        """Copy a step's masks, for a graph of `size` requests: a few microseconds of the device."""
        count = 0 if allowed is None else len(allowed.places)
        if allowed is not None:
            self.words[:count].copy_(allowed.words)
            self.places[:count].copy_(allowed.places)
        self.places[count:size].fill_(-1)


class MaskedGraph:
    """From the hidden states of a decode graph that does not sample, and from masks, to tokens.

    Args:
        half: the graph that is replayed right before.
        masks: of `half.size` places or more.
        features: how it samples, one of `CAPTURED`.

    inputs: `[3, size]` int64, a copy of the half's: in those the next step's may be while masks are made.
    tokens: `[size]` int64, good until the next replay.
    """

    tokens: Tensor

    def __init__(self, half: DecodeGraph, masks: MaskInputs, features: Feature, capturer: Capturer) -> None:
        self.half, self.masks = half, masks
        self.plan = Plan(features, (), None).for_any_rows()
        self._allowed = Allowed(masks.words[: half.size], masks.places[: half.size])
        self.inputs = masks.requests[: 3 * half.size].view(3, half.size)
        half.pad()
        self.keep()
        self.replay = capturer.capture(self.compute)

    def keep(self) -> None:
        """Remember whose samples these are, right behind the first half."""
        self.inputs.copy_(self.half.inputs)

    @torch.inference_mode()
    def run(self, allowed: Allowed | None) -> None:
        """The half step, under these masks; None: nobody has one."""
        self.masks.put(allowed, self.half.size)
        self.replay()

    def compute(self) -> None:
        """The half step; what is captured."""
        on, (rows, at, steps) = self.half.machine, self.inputs
        logits = narrow_logits(on.model, self.half.hidden)
        self.tokens = on.sampler.sample(logits, rows, (), steps, self.plan, allowed=self._allowed).tokens
        scatter_tokens(rows, at, self.tokens, on.rows.tokens)
