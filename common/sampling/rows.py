"""The sampler's memory: settings and past tokens of every running request, on host and device."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import UserError
from common.sampling import ops
from common.sampling.edits import edits_of, edits_of_batch
from common.sampling.memory import rows_at_once
from common.sampling.metadata import (
    RADIX,
    Draw,
    Edits,
    Positions,
    SamplingFlags,
    SamplingMetadata,
)
from common.sampling.noise import stream_key
from common.sampling.params import SamplingParams
from common.sampling.penalties import TokenHistory

MAX_VOCAB = 1 << 21  # so that the integer weights of a row add up to less than 2**62

# The columns of the two tables of settings, `floats` and `ints`.
TEMPERATURE, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(5)
KEY, TOP_K, TOP_P = range(3)


class SamplerRows:
    """Settings and token counts of `rows` requests: arrays [rows, ...] on the device, and copies on the host.

    `set_row` changes the host's copies only; `plan` sends all changed rows in a fixed number of copies (and
    some more for each row with penalties). The arrays on the device are updated in place, so a CUDA graph may
    read them.

    history: tokens of the rows with penalties.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        """Make rows 0 to rows - 1, all of them greedy."""
        if vocab_size > MAX_VOCAB:
            raise UserError(
                f"vocab_size is {vocab_size}, but must be at most {MAX_VOCAB} to be sampled from"
            )
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.at_once = rows_at_once(vocab_size, self.device)
        self._features = np.zeros(rows, dtype=np.int64)
        self._wanted = np.full(rows, -1, dtype=np.int64)
        self._floats = np.zeros((rows, 5), dtype=np.float32)
        self._floats[:, REPETITION] = 1.0
        self._ints = np.zeros((rows, 3), dtype=np.int64)
        self.floats = torch.from_numpy(self._floats).to(self.device, copy=True)  # [rows, 5]
        self.ints = torch.from_numpy(self._ints).to(self.device, copy=True)  # [rows, 3]
        self._edits: dict[int, Edits | None] = {}
        self.history = TokenHistory(rows, vocab_size, self.device)
        self._changed: set[int] = set()
        self._planned: tuple[list[int], SamplingMetadata] | None = None  # the last: rows, plan
        self.ids = torch.arange(vocab_size, dtype=torch.int32, device=self.device)  # [V]

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int] | NDArray[np.int64] = (),
        output_ids: Sequence[int] | NDArray[np.int64] = (),
        *,
        seed: int | None = None,
        sample: int = 0,
        eos_ids: Collection[int] = (),
    ) -> int:
        """Write a request's settings to `row`, also after a preemption; return its seed of random numbers.

        prompt_ids, output_ids: its tokens so far, for the penalties; ids must have passed `check_prompt`.
        seed: overrides the seed in `params`; None: does not. A preempted request that comes back with the
            seed returned here draws what it would have drawn.
        sample: number of the completion among its prompt's n; shifts the seed of `params`.
        eos_ids: the model's end-of-sequence tokens, which min_tokens holds back.
        """
        if seed is None:
            seed = params.seed_of(sample)
        if seed is None:
            seed = random.getrandbits(64)
        edits = None
        if params.logit_bias or params.min_tokens:
            edits = edits_of(params, eos_ids, self.vocab_size)
        features = self._features_of(params, edits=edits is not None)
        top_k = params.top_k if SamplingFlags.TOP_K in features else self.vocab_size
        self._features[row] = features
        self._wanted[row] = -1 if params.logprobs is None else params.logprobs
        floats, ints = self._floats[row], self._ints[row]
        floats[TEMPERATURE] = params.temperature if SamplingFlags.RANDOM in features else 0.0
        floats[MIN_P] = params.min_p
        floats[REPETITION] = params.repetition_penalty
        floats[PRESENCE] = params.presence_penalty
        floats[FREQUENCY] = params.frequency_penalty
        ints[KEY], ints[TOP_K] = stream_key(seed), top_k
        ints[TOP_P] = max(1, round(params.top_p * (1 << ops.FRACTION_BITS)))
        self._edits[row] = edits
        if params.penalized:
            known = np.array(prompt_ids, np.int64), np.array(output_ids, np.int64)
            self.history.changed[row] = known
        self._changed.add(row)
        return seed

    def plan(self, rows_host: Sequence[int]) -> SamplingMetadata:
        """Send changed settings to the device, and return the `SamplingMetadata` of a batch of these rows.

        Never waits for the device. rows_host: the row of the request at each position in the batch.
        """
        wanted_rows = list(rows_host)
        if self._changed:
            self._send()
        elif self._planned is not None and self._planned[0] == wanted_rows:
            # A decode like the last one.
            return self._planned[1]
        rows = np.array(wanted_rows, np.int64)
        features = self._features[rows]
        union = SamplingFlags(int(np.bitwise_or.reduce(features, initial=0)))
        wanted = self._wanted[rows]
        edits = None
        penalties: tuple[Positions, ...] = ()
        if SamplingFlags.EDITS in union:
            edits = edits_of_batch(self._edits, wanted_rows, self._upload)
        if SamplingFlags.PENALTIES in union:
            penalized = features & int(SamplingFlags.PENALTIES) != 0
            penalties = tuple(positions for _, positions in self._parts(penalized))
        plan = SamplingMetadata(
            union,
            tuple(self._draws(features)) if SamplingFlags.RANDOM in union else (),
            tuple(wanted.tolist()) if (wanted >= 0).any() else None,
            edits,
            penalties,
        )
        self._planned = wanted_rows, plan
        return plan

    def _draws(self, features: NDArray[np.int64]) -> Iterator[Draw]:
        random, radix = features & int(SamplingFlags.RANDOM) != 0, features & int(RADIX) != 0
        for chosen in (~random, random & ~radix, radix):
            for part, positions in self._parts(chosen):
                yield Draw(positions, SamplingFlags(int(np.bitwise_or.reduce(features[part]))))

    def _parts(
        self, chosen: NDArray[np.bool_]
    ) -> Iterator[tuple[NDArray[np.int64], Positions]]:
        """Yield the positions where `chosen [B]` is True, in parts: as (host array, device indices)."""
        positions = np.flatnonzero(chosen)
        for first in range(0, len(positions), self.at_once):
            part = positions[first : first + self.at_once]
            begin, end = int(part[0]), int(part[-1]) + 1
            neighbours = end - begin == len(part)
            yield part, slice(begin, end) if neighbours else self._upload(part)

    def _features_of(self, params: SamplingParams, *, edits: bool) -> SamplingFlags:
        features = SamplingFlags(0)
        if not params.greedy:
            features |= SamplingFlags.RANDOM
            if params.min_p > 0:
                features |= SamplingFlags.MIN_P
            if 0 < params.top_k < self.vocab_size:
                features |= SamplingFlags.TOP_K
            if params.top_p < 1:
                features |= SamplingFlags.TOP_P
        if params.penalized:
            features |= SamplingFlags.PENALTIES
        return features | SamplingFlags.EDITS if edits else features

    @torch.inference_mode()
    def _send(self) -> None:
        rows = np.array(sorted(self._changed), dtype=np.int64)
        self._changed.clear()
        at = self._upload(rows)
        self.floats[at] = self._upload(self._floats[rows])
        self.ints[at] = self._upload(self._ints[rows])
        if self.history.changed:
            self.history.send(self._upload)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """Return a copy of an array on the device, without waiting for the device's queued work."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device, copy=True)
