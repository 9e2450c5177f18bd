"""The sampler's memory: the sampling settings and the past of every running request, on host and device."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import UserError
from common.sampling import ops
from common.sampling.params import SamplingParams

MAX_VOCAB: Final = 1 << 21  # so that the integer weights of a row add up to less than 2**62

# The columns of the two tables of settings, `floats` and `ints`.
TEMPERATURE, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(5)
KEY, TOP_K, TOP_P = range(3)

_FOREVER: Final = (1 << 63) - 1


class Feature(enum.IntFlag):
    """What a row needs beyond the argmax."""

    RANDOM = enum.auto()  # a temperature above 0
    EDITS = enum.auto()  # logit_bias or min_tokens
    PENALTIES = enum.auto()
    MIN_P = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()


TRUNCATION: Final = Feature.TOP_K | Feature.TOP_P


class Draw(NamedTuple):
    """Some rows for which tokens are drawn together.

    places: where they stand in the batch; int64 on the device unless they are neighbours.
    features: the union over these rows. Rows with top-k or top-p, which are much more work, are drawn apart
        from those without.
    """

    places: slice | Tensor
    features: Feature


@dataclass(frozen=True)
class Plan:
    """What one batch needs, decided on the host from the host's copies; sampling branches on nothing else.

    features: the union over the rows of the batch.
    draws: the random part of the batch; empty when all rows are greedy.
    wanted: for each place in the batch how many top log-probabilities were asked for, -1 where no
        log-probabilities were; None when no row asked for any.
    """

    features: Feature
    draws: tuple[Draw, ...]
    wanted: tuple[int, ...] | None

    def for_any_rows(self) -> Plan:
        """Return a plan with the same features that draws for the whole batch at once, whoever is in it.

        It may be captured in a CUDA graph and serves every batch whose plan has no other features.
        """
        draws = (Draw(slice(None), self.features),) if Feature.RANDOM in self.features else ()
        return Plan(self.features, draws, self.wanted)


class SamplerRows:
    """Settings and token counts of `rows` requests: arrays [rows, ...] on the device, host's copies beside.

    `set_row` and `clear_row` touch the host's copies only; `plan` sends what has changed, in a few copies
    however many rows that is. The arrays on the device are updated in place, so a CUDA graph may read them.
    Those for edits and penalties are made when a request first needs them, and those for edits grow: a
    captured graph must not use these features, or must be captured again once `plan` has made or grown them.
    """

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device | str, *, seed: int | None = None
    ) -> None:
        """Make rows 0 to rows - 1, all of them greedy.

        seed: of the generator that draws seeds for requests without one; None: different in every process.
        """
        if vocab_size > MAX_VOCAB:
            raise UserError(f"vocab_size is {vocab_size}, but must be at most {MAX_VOCAB} to be sampled from")
        self.rows, self.vocab_size, self.device = rows, vocab_size, torch.device(device)
        self._seeds = random.Random(seed)
        # Rows to draw for at once. The temporary tensors are several times as large as the logits: two rows
        # of 49,152 fit a CPU's cache, where 16 rows took three to five times as long a row, and on a GPU
        # this saves memory.
        elements = 1 << (17 if self.device.type == "cpu" else 25)
        self._at_once = max(1, elements // max(vocab_size, 1 << ops.DIGIT_BITS))
        self._features = np.zeros(rows, dtype=np.int64)
        self._wanted = np.full(rows, -1, dtype=np.int64)
        self._floats = np.zeros((rows, 5), dtype=np.float32)
        self._floats[:, REPETITION] = 1.0
        self._ints = np.zeros((rows, 3), dtype=np.int64)
        self.floats = torch.from_numpy(self._floats).to(self.device, copy=True)  # [rows, 5]
        self.ints = torch.from_numpy(self._ints).to(self.device, copy=True)  # [rows, 3]
        # Edits are sparse additions to the logits, (token id, value, first step without it): E for each row,
        # where a row has fewer the others add 0 to token 0.
        self._edits: dict[int, list[tuple[int, float, int]]] = {}
        self.edit_ids = torch.zeros(rows, 0, dtype=torch.int64, device=self.device)  # [rows, E]
        self.edit_values = torch.zeros(rows, 0, dtype=torch.float32, device=self.device)
        self.edit_until = torch.zeros(rows, 0, dtype=torch.int64, device=self.device)
        # For the penalties: which tokens stand in the prompt, and how often each one stands in the output.
        self._history: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self.in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=self.device)  # later [rows, V]
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=self.device)  # later [rows, V]
        self._changed: set[int] = set()

    def new_seed(self) -> int:
        """Draw a seed of 64 bits."""
        return self._seeds.getrandbits(64)

    def penalty_bytes(self) -> int:
        """Return how many bytes the penalties' arrays take on the device once a request uses a penalty."""
        return self.rows * self.vocab_size * (self.in_prompt.element_size() + self.counts.element_size())

    def set_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        output_ids: Sequence[int] = (),
        *,
        seed: int | None = None,
        sample: int = 0,
        eos_ids: Collection[int] = (),
    ) -> int:
        """Give `row` to a request, or back to it after a preemption, and return the seed it draws with.

        prompt_ids, output_ids: its tokens so far, for the penalties; ids must have passed `check_prompt`.
        seed: overrides that of `params`. A preempted request that comes back with the seed returned here
            draws what it would have drawn.
        sample: which of its prompt's n completions; shifts the seed of `params`.
        eos_ids: the model's end-of-sequence tokens, which min_tokens holds back.
        """
        if seed is None:
            seed = params.seed_of(sample)
        if seed is None:
            seed = self.new_seed()
        edits = self._edits_of(params, eos_ids)
        features = self._features_of(params, edits=bool(edits))
        one, top_k = 1 << ops.FRACTION_BITS, params.top_k if Feature.TOP_K in features else self.vocab_size
        self._features[row] = features
        self._wanted[row] = -1 if params.logprobs is None else params.logprobs
        self._floats[row, TEMPERATURE] = params.temperature if Feature.RANDOM in features else 0.0
        self._floats[row, MIN_P] = params.min_p
        self._floats[row, REPETITION] = params.repetition_penalty
        self._floats[row, PRESENCE] = params.presence_penalty
        self._floats[row, FREQUENCY] = params.frequency_penalty
        self._ints[row] = ops.stream_key(seed), top_k, max(1, round(params.top_p * one))
        if edits or row in self._edits:
            self._edits[row] = edits
        self._history.pop(row, None)
        if params.penalized:
            self._history[row] = np.array(prompt_ids, dtype=np.int64), np.array(output_ids, dtype=np.int64)
        self._changed.add(row)
        return seed

    def clear_row(self, row: int) -> None:
        """Make a row that no request has greedy again, so that it may pad a batch at no cost."""
        self.set_row(row, SamplingParams(), seed=0)

    def plan(self, rows_host: Sequence[int]) -> Plan:
        """Send changed settings to the device and return what a batch of these rows needs. Never waits."""
        if self._changed:
            self._send()
        rows = np.asarray(rows_host, dtype=np.int64)
        features = self._features[rows]
        union = Feature(int(np.bitwise_or.reduce(features, initial=0)))
        wanted = self._wanted[rows]
        draws = tuple(self._draws(features)) if Feature.RANDOM in union else ()
        return Plan(union, draws, tuple(wanted.tolist()) if (wanted >= 0).any() else None)

    def _draws(self, features: NDArray[np.int64]) -> Iterator[Draw]:
        random, truncated = features & int(Feature.RANDOM) != 0, features & int(TRUNCATION) != 0
        for chosen in (random & ~truncated, truncated):
            places = np.flatnonzero(chosen)
            for first in range(0, len(places), self._at_once):
                part = places[first : first + self._at_once]
                begin, end = int(part[0]), int(part[-1]) + 1
                neighbours = end - begin == len(part)
                where = slice(begin, end) if neighbours else self._upload(part)
                yield Draw(where, Feature(int(np.bitwise_or.reduce(features[part]))))

    def _features_of(self, params: SamplingParams, *, edits: bool) -> Feature:
        features = Feature(0)
        # With top_k = 1 the argmax is what is left, and says so exactly where a tie would keep two tokens.
        if not params.greedy and params.top_k != 1:
            features |= Feature.RANDOM
            if params.min_p > 0:
                features |= Feature.MIN_P
            if 0 < params.top_k < self.vocab_size:
                features |= Feature.TOP_K
            if params.top_p < 1:
                features |= Feature.TOP_P
        if params.penalized:
            features |= Feature.PENALTIES
        return features | Feature.EDITS if edits else features

    def _edits_of(self, params: SamplingParams, eos_ids: Collection[int]) -> list[tuple[int, float, int]]:
        edits = [(token, bias, _FOREVER) for token, bias in params.logit_bias.items()]
        if params.min_tokens > 0:
            held_back = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
            # An id that the vocabulary does not have cannot be chosen anyway.
            known = sorted(token for token in held_back if token < self.vocab_size)
            edits += [(token, float("-inf"), params.min_tokens) for token in known]
        return edits

    @torch.inference_mode()
    def _send(self) -> None:
        rows = np.array(sorted(self._changed), dtype=np.int64)
        self._changed.clear()
        at = self._upload(rows)
        self.floats[at] = self._upload(self._floats[rows])
        self.ints[at] = self._upload(self._ints[rows])
        if self._edits:
            self._send_edits(rows)
        if self._history:
            self._send_history()

    def _send_edits(self, rows: NDArray[np.int64]) -> None:
        width = max(len(edits) for edits in self._edits.values())
        if width > self.edit_ids.shape[1]:
            width = 1 << (width - 1).bit_length()  # doubling: seldom made anew
            rows = np.arange(self.rows)
            self.edit_ids = torch.zeros(self.rows, width, dtype=torch.int64, device=self.device)
            self.edit_values = torch.zeros(self.rows, width, dtype=torch.float32, device=self.device)
            self.edit_until = torch.zeros(self.rows, width, dtype=torch.int64, device=self.device)
        shape = (len(rows), self.edit_ids.shape[1])
        ids, until = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        values = np.zeros(shape, dtype=np.float32)
        for line, row in enumerate(rows.tolist()):
            for column, edit in enumerate(self._edits.get(row, ())):
                ids[line, column], values[line, column], until[line, column] = edit
        at = self._upload(rows)
        self.edit_ids[at] = self._upload(ids)
        self.edit_values[at] = self._upload(values)
        self.edit_until[at] = self._upload(until)

    def _send_history(self) -> None:
        if len(self.counts) == 0:
            self.in_prompt = torch.zeros(self.rows, self.vocab_size, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(self.rows, self.vocab_size, dtype=torch.int32, device=self.device)
        rows = self._upload(np.array(list(self._history), dtype=np.int64))
        self.in_prompt[rows] = False
        self.counts[rows] = 0
        starts = [row * self.vocab_size for row in self._history]  # of each row in the arrays laid flat
        pairs = list(zip(starts, self._history.values(), strict=True))
        prompt = self._upload(np.concatenate([start + prompt for start, (prompt, _) in pairs]))
        output = self._upload(np.concatenate([start + output for start, (_, output) in pairs]))
        self._history.clear()
        self.in_prompt.view(-1)[prompt] = True
        self.counts.view(-1).scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _upload(self, array: NDArray[Any]) -> Tensor:
        """Copy to the device without waiting for its queued work; on CUDA that takes pinned memory."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device, copy=True)
