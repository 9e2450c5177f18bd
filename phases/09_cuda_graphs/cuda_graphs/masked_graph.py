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
    """Where masked graphs find the masks of up to `most` places of a step.

    words: `[most, ceil(V / 32)]` int32; places: `[most]` int64, -1: padding. See `Allowed`.
    """

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        self.words = torch.zeros(most, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.places = torch.full((most,), -1, dtype=torch.int64, device=device)

    def put(self, allowed: Allowed, size: int) -> None:
        """Copy a step's masks, for a graph of `size` requests: a few microseconds of the device."""
        count = len(allowed.places)
        self.words[:count].copy_(allowed.words)
        self.places[:count].copy_(allowed.places)
        self.places[count:size].fill_(-1)


class MaskedGraph:
    """From the hidden states of a decode graph that does not sample, and from masks, to tokens.

    Args:
        half: the graph that is replayed right before.
        masks: of `half.size` places or more.
        features: how it samples, one of `CAPTURED`.

    tokens: `[size]` int64, good until the next replay.
    """

    tokens: Tensor

    def __init__(self, half: DecodeGraph, masks: MaskInputs, features: Feature, capturer: Capturer) -> None:
        self.half, self.masks = half, masks
        self.plan = Plan(features, (), None).for_any_rows()
        self._allowed = Allowed(masks.words[: half.size], masks.places[: half.size])
        half.pad()
        self.replay = capturer.capture(self.compute)

    @torch.inference_mode()
    def run(self, allowed: Allowed) -> None:
        """The half step, under these masks."""
        self.masks.put(allowed, self.half.size)
        self.replay()

    def compute(self) -> None:
        """The half step; what is captured."""
        half, on = self.half, self.half.machine
        logits = narrow_logits(on.model, half.hidden)
        sampled = on.sampler.sample(logits, half.rows, (), half.steps, self.plan, allowed=self._allowed)
        self.tokens = sampled.tokens
        scatter_tokens(half.rows, half.at, self.tokens, on.rows.tokens)
