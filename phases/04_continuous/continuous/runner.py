"""The runner: turns the works of one step into tensors, runs the model, and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from common.events import Logprob
from common.sampling.sampler import Sampled, Sampler
from continuous.batch import Batch, HostBatch
from continuous.rows import Rows
from continuous.scheduler import Work
from forward.attention import LayerSpec
from forward.model import Model

_by_row = attrgetter("row")


class BatchAttention(Protocol):
    """The seam's object, told once a step what the batch is."""

    def begin(self, batch: Batch) -> None:
        """Plan the step."""
        ...

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [T, H, D]`, `k` and `v [T, KH, D]` -> `[T, H, D]`."""
        ...


class Pending:
    """A step that the device may still be working on. `get` is the only place where the host waits for it.

    started: `time.perf_counter()` when the engine began the step.
    """

    def __init__(self, works: Sequence[Work], sampled: Sampled | None) -> None:
        self.works, self.started = works, 0.0
        self._arriving = None if sampled is None else sampled.to_host()  # starts the copy, does not wait

    def get(self) -> list[tuple[int, Logprob | None]]:
        """Wait for the step; the sampled tokens, one for each taker of each work, in order."""
        return [] if self._arriving is None else self._arriving.get()


class Runner:
    """Runs steps.

    Args:
        model: computes hidden states and logits.
        attention: over this engine's cache.
        rows: where the tokens are.
        make_sampler: what chooses the tokens; later phases bring kernels.
    """

    def __init__(
        self,
        model: Model,
        attention: BatchAttention,
        rows: Rows,
        *,
        make_sampler: Callable[[int, int, torch.device], Sampler] = Sampler,
    ) -> None:
        self.model, self.attention, self.rows = model, attention, rows
        self.sampler = make_sampler(rows.count, model.config.vocab_size, model.device)

    @torch.inference_mode()
    def run(self, works: Sequence[Work]) -> Pending:
        """Start one step. It returns when everything is handed to the device, not when it is done."""
        # In the order of their rows, so that neighbours in the cache are neighbours in the batch.
        works = sorted(works, key=_by_row)
        self.refresh()
        batch = self.prepare(works)
        self.attention.begin(batch)
        hidden = self.model(batch.input_ids, batch.positions, self.attention)  # [T, hidden]
        return Pending(works, self._sample(batch, hidden))

    def refresh(self) -> None:
        """Before a step: hand over tokens and settings of the requests that got a row since the last one."""
        for request in self.rows.upload():
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

    def _sample(self, batch: Batch, hidden: Tensor) -> Sampled | None:
        """Sample from the last hidden state of every work that ends at its request's newest token."""
        rows_host = batch.host.sample_rows.tolist()
        if not rows_host:
            return None
        logits = self.model.logits(hidden[batch.sample_at])  # [S, V], not [T, V]
        sampled = self.sampler.sample(logits, batch.sample_rows, rows_host, batch.sample_steps)
        self.rows.tokens[batch.sample_rows, batch.sample_positions] = sampled.tokens
        return sampled
