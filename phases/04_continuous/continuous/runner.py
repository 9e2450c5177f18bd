"""The runner: turns the works of one step into tensors, runs the model, and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common.events import Logprob
from common.request import Request
from common.sampling.sampler import Allowed, Sampled, Sampler
from continuous.batch import Batch, HostBatch, upload
from continuous.rows import Rows
from continuous.work import Work
from forward.attention import LayerSpec
from forward.model import Model

_by_row = attrgetter("row")

Token = tuple[int, Logprob | None]
"""A sampled token, and its log-probabilities if they were asked for."""


class BatchAttention(Protocol):
    """The seam's object, told once a step what the batch is."""

    def begin(self, batch: Batch) -> None:
        """Plan the step."""
        ...

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [T, H, D]`, `k` and `v [T, KH, D]` -> `[T, H, D]`."""
        ...


class RequestError(Exception):
    """One request's settings cannot be used; its cause says why. Nothing is wrong with the others."""

    def __init__(self, request: Request) -> None:
        super().__init__(f"request {request.id} cannot be prepared")
        self.request = request


class Pending:
    """A step that the device may still be working on. `get` is the only place where the host waits for it.

    works: those of the step that the results belong to, in order.
    started: `time.perf_counter()` when the engine began the step.
    """

    def __init__(self, works: Sequence[Work], sampled: Sampled | None) -> None:
        self.works, self.started = works, 0.0
        self._arriving = None if sampled is None else sampled.to_host()  # starts the copy, does not wait

    def get(self) -> list[list[Token]]:
        """Wait for the step; for each taker of each work, in order, the tokens that it gets.

        That is one, but for a work with drafts: every draft that is what was sampled in its place, and the
        token sampled after the last of these.
        """
        if self._arriving is None:
            return []
        tokens = self._arriving.get()
        if not any(work.drafts for work in self.works):
            return [[token] for token in tokens]
        return list(_accepted(self.works, iter(tokens)))


def _accepted(works: Sequence[Work], tokens: Iterator[Token]) -> Iterator[list[Token]]:
    """Verify drafts: what was sampled at a position is the truth, whatever was guessed there."""
    for work in works:
        for _ in work.takers:
            sampled = list(islice(tokens, len(work.drafts) + 1))
            right = 0
            while right < len(work.drafts) and sampled[right][0] == work.drafts[right]:
                right += 1
            yield sampled[: right + 1]


@dataclass
class Forwarded:
    """The first half of a step: the model has run, or will have, and nothing is sampled yet.

    works: in the order of the batch.
    hidden: `[T, hidden]`.
    started: `time.perf_counter()` when the engine began the step.
    """

    works: Sequence[Work]
    batch: Batch
    hidden: Tensor
    started: float = 0.0


class Runner:
    """Runs steps, each in two halves: `forward`, then `sample`.

    Args:
        model: computes hidden states and logits.
        attention: over this engine's cache.
        rows: where the tokens are.
        sampler: what chooses the tokens; a later phase brings kernels.
    """

    def __init__(
        self, model: Model, attention: BatchAttention, rows: Rows, *, sampler: type[Sampler] = Sampler
    ) -> None:
        self.model, self.attention, self.rows = model, attention, rows
        self.sampler = sampler(rows.count, model.config.vocab_size, model.device)

    def run(self, works: Sequence[Work]) -> Pending:
        """Start one step. It returns when everything is handed to the device, not when it is done."""
        return self.sample(self.forward(works))

    @torch.inference_mode()
    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Forwarded:
        """The first half: from tokens to hidden states.

        masked: the second half will be given masks. (A graph that does both halves at once must know.)
        """
        # In the order of their rows, so that neighbours in the cache are neighbours in the batch.
        works = sorted(works, key=_by_row)
        self.refresh(works)
        batch = self.prepare(works)
        self.attention.begin(batch)
        hidden = self.model(batch.input_ids, batch.positions, self.attention)  # [T, hidden]
        return Forwarded(works, batch, hidden)

    @torch.inference_mode()
    def sample(self, step: Forwarded, allowed: Tensor | Allowed | None = None) -> Pending:
        """The second half: from the last hidden states of every work to its takers' next tokens.

        allowed: see `Sampler.sample`; None: every token may be chosen.
        """
        batch = step.batch
        rows_host = batch.host.sample_rows.tolist()
        if not rows_host:
            return Pending(step.works, None)
        logits = self.model.logits(step.hidden[batch.sample_at])  # [S, V], not [T, V]
        sampled = self.sampler.sample(
            logits, batch.sample_rows, rows_host, batch.sample_steps, allowed=allowed
        )
        self.rows.tokens[batch.sample_rows, batch.sample_positions] = sampled.tokens
        return Pending(step.works, sampled)

    def refresh(self, works: Sequence[Work]) -> None:
        """Before a step: hand over what the device does not know of its requests yet.

        That is the tokens and settings of those that got a row since the last step, and drafts.
        """
        for request in self.rows.upload():
            try:
                self.set_row(request)
            except Exception as error:
                raise RequestError(request) from error
        drafted = [work for work in works if work.drafts]
        if drafted:
            lens = [len(work.drafts) for work in drafted]
            ends = np.cumsum(lens)
            first = np.repeat([work.start + work.count for work in drafted] - ends, lens)
            columns = {
                "rows": np.repeat([work.row for work in drafted], lens),
                "positions": first + np.arange(ends[-1]),
                "tokens": np.concatenate([work.drafts for work in drafted]),
            }
            moved = upload(self.rows.tokens.device, columns)
            self.rows.tokens[moved["rows"], moved["positions"]] = moved["tokens"]

    def set_row(self, request: Request) -> None:
        """Tell the sampler how the request in a row wants its tokens chosen."""
        self.sampler.set_row(
            request.row,
            request.params,
            request.tokens[: request.prompt_len],
            output_ids=request.tokens[request.prompt_len :],
            eos_ids=self.model.config.eos_token_ids,
            seed=request.seed,
        )

    def prepare(self, works: Sequence[Work]) -> Batch:
        """The step's inputs."""
        return Batch.of(HostBatch.of(works, self.rows.prompt_lens), self.rows)
