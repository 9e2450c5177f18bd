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
from common.sampling.metadata import (
    RADIX,
    Draw,
    Edits,
    Positions,
    SamplingFlags,
    SamplingMetadata,
)
from common.sampling.noise import stream_key
from common.sampling.params import MAX_BIASED_TOKENS, MAX_STOP_TOKEN_IDS, SamplingParams

MAX_VOCAB = 1 << 21  # so that the integer weights of a row add up to less than 2**62

# The columns of the two tables of settings, `floats` and `ints`.
TEMPERATURE, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(5)
KEY, TOP_K, TOP_P = range(3)

_FOREVER = (1 << 63) - 1


class SamplerRows:
    """Settings and token counts of `rows` requests: arrays [rows, ...] on the device, copied on the host.

    `set_row` changes the host's copies only; `plan` sends what has changed, in a fixed number of copies
    however many rows that is (and some more for each row with penalties). The arrays on the device are
    updated in place, so a CUDA graph may read them. Those for penalties are allocated when a request first
    needs them: a captured graph must not use them, or must be captured again. They cost time only in steps
    with such rows.
    """

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        seed: int | None = None,
    ) -> None:
        """Make rows 0 to rows - 1, all of them greedy.

        seed: of the generator that draws seeds for requests without one; None: different in every process.
        """
        if vocab_size > MAX_VOCAB:
            raise UserError(
                f"vocab_size is {vocab_size}, but must be at most {MAX_VOCAB} to be sampled from"
            )
        self.rows = rows
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._seeds = random.Random(seed)
        self.at_once = self.rows_at_once(vocab_size, self.device)
        self._features = np.zeros(rows, dtype=np.int64)
        self._wanted = np.full(rows, -1, dtype=np.int64)
        self._floats = np.zeros((rows, 5), dtype=np.float32)
        self._floats[:, REPETITION] = 1.0
        self._ints = np.zeros((rows, 3), dtype=np.int64)
        self.floats = torch.from_numpy(self._floats).to(self.device, copy=True)  # [rows, 5]
        self.ints = torch.from_numpy(self._ints).to(self.device, copy=True)  # [rows, 3]
        self._edits: dict[int, Edits] = {}
        # For the penalties: which tokens stand in the prompt, and how often each one stands in the output.
        self._history: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        # later [rows, V]
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=self.device)
        # later [rows, V]
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=self.device)
        self._changed: set[int] = set()
        self._planned: tuple[list[int], SamplingMetadata] | None = None  # the last: rows, plan
        self.ids = torch.arange(vocab_size, dtype=torch.int32, device=self.device)  # [V]

    @staticmethod
    def rows_at_once(vocab_size: int, device: torch.device) -> int:
        """Return how many rows are processed at once where temporary tensors are several times the logits.

        Two rows of 49,152 fit a CPU's cache, where 16 rows took three to five times as long a row. On a GPU
        this saves memory: 8 million logits fill it, and take 0.4 GB, and histograms of selection by radix
        (0.26 MB a row) little beside.
        """
        elements = 1 << (17 if device.type == "cpu" else 23)
        return max(1, elements // vocab_size)

    @staticmethod
    def persistent_bytes(rows: int, vocab_size: int) -> int:
        """Return the most bytes that the arrays of `rows` rows ever take on the device.

        These are settings, token ids, the penalties' arrays, and the edits of a batch.
        """
        edits = (8 + 4 + 8 + 8) * (MAX_BIASED_TOKENS + MAX_STOP_TOKEN_IDS)
        return rows * (5 * 4 + 3 * 8 + edits + vocab_size * (1 + 4)) + 4 * vocab_size

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
        seed: overrides that of `params`; None: does not. A preempted request that comes back with the seed
            returned here draws what it would have drawn.
        sample: number of the completion among its prompt's n; shifts the seed of `params`.
        eos_ids: the model's end-of-sequence tokens, which min_tokens holds back.
        """
        if seed is None:
            seed = params.seed_of(sample)
        if seed is None:
            seed = self._seeds.getrandbits(64)
        edits = self._edits_of(params, eos_ids)
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
        self._edits.pop(row, None)
        if edits is not None:
            self._edits[row] = edits
        self._history.pop(row, None)
        if params.penalized:
            self._history[row] = np.array(prompt_ids, np.int64), np.array(output_ids, np.int64)
        self._changed.add(row)
        return seed

    def plan(self, rows_host: Sequence[int]) -> SamplingMetadata:
        """Send changed settings to the device, and return the `SamplingMetadata` of a batch of these rows.

        Never waits for the device.

        rows_host: the row of the request at each position in the batch.
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
        plan = SamplingMetadata(
            union,
            tuple(self._draws(features)) if SamplingFlags.RANDOM in union else (),
            tuple(wanted.tolist()) if (wanted >= 0).any() else None,
            self._edited(wanted_rows) if SamplingFlags.EDITS in union else None,
            self._penalized(features) if SamplingFlags.PENALTIES in union else (),
        )
        self._planned = wanted_rows, plan
        return plan

    def _draws(self, features: NDArray[np.int64]) -> Iterator[Draw]:
        random, radix = features & int(SamplingFlags.RANDOM) != 0, features & int(RADIX) != 0
        for chosen in (~random, random & ~radix, radix):
            for part, positions in self._parts(chosen):
                yield Draw(positions, SamplingFlags(int(np.bitwise_or.reduce(features[part]))))

    def _penalized(self, features: NDArray[np.int64]) -> tuple[Positions, ...]:
        chosen = features & int(SamplingFlags.PENALTIES) != 0
        return tuple(positions for _, positions in self._parts(chosen))

    def _edited(self, rows: Sequence[int]) -> Edits:
        own = [
            (place, self._edits[row]) for place, row in enumerate(rows) if row in self._edits
        ]
        positions = np.concatenate([np.full(len(edits.tokens), place) for place, edits in own])
        columns = zip(*(edits[:3] for _, edits in own), strict=True)
        tokens, values, until = (self._upload(np.concatenate(column)) for column in columns)
        return Edits(tokens, values, until, self._upload(positions))

    def _parts(
        self, chosen: NDArray[np.bool_]
    ) -> Iterator[tuple[NDArray[np.int64], Positions]]:
        """Yield where `chosen [B]` is True, `at_once` positions at a time: (on the host, on the device)."""
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

    def _edits_of(self, params: SamplingParams, eos_ids: Collection[int]) -> Edits | None:
        """Return the additions to a request's logits by bias and `min_tokens`; None: there are none."""
        bias = params.logit_bias
        held_back = list[int]()
        if params.min_tokens > 0 and params.grammar is None:  # a grammar's mask sees to it
            ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
            # An id that the vocabulary does not have cannot be chosen anyway.
            held_back = sorted(token for token in ids if token < self.vocab_size)
        if not bias and not held_back:
            return None
        return Edits(
            np.array([*bias.keys(), *held_back], dtype=np.int64),
            np.array([*bias.values(), *[float("-inf")] * len(held_back)], dtype=np.float32),
            np.array(
                [_FOREVER] * len(bias) + [params.min_tokens] * len(held_back), dtype=np.int64
            ),
        )

    @torch.inference_mode()
    def _send(self) -> None:
        rows = np.array(sorted(self._changed), dtype=np.int64)
        self._changed.clear()
        at = self._upload(rows)
        self.floats[at] = self._upload(self._floats[rows])
        self.ints[at] = self._upload(self._ints[rows])
        if self._history:
            self._send_history()

    def _send_history(self) -> None:
        if len(self.counts) == 0:
            shape = self.rows, self.vocab_size
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        for row, (prompt, output) in self._history.items():
            self.in_prompt[row].zero_()[self._upload(prompt)] = True
            tokens = self._upload(output)
            one = torch.ones_like(tokens, dtype=torch.int32)
            self.counts[row].zero_().scatter_add_(0, tokens, one)
        self._history.clear()

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """Return a copy of an array on the device, without waiting for the device's queued work."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device, copy=True)
