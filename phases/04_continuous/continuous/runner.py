"""The runner: turns the works of one step into tensors, runs the model, and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from common.events import Logprob
from common.request import Request
from common.sampling.sampler import (
    TORCH,
    Sampled,
    Sampler,
    SamplerBackend,
    SamplingMetadata,
    TokenBitmask,
)
from continuous.batch import Batch, HostBatch
from continuous.rows import RequestRows
from continuous.work import Work
from forward.attention import LayerSpec
from forward.model import Model

_by_row = attrgetter("row")

Token = tuple[int, Logprob | None]
"""A sampled token, and its log-probabilities if they were asked for."""
Results = Sequence[Sequence[Token]]
"""The tokens of a step: for each taker of each work, in order, those that it gets."""


class BatchAttention(Protocol):
    """The seam's object, which is given the batch once a step."""

    def begin(self, batch: Batch) -> None:
        """Plan the step."""

    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q [T, H, D]`, `k` and `v [T, KH, D]` -> `[T, H, D]`."""

    def wipe(self, row: int) -> None:
        """The request in this row ends, and the cache may hold NaN of it, which no later owner may read."""


class OutputVerifier:
    """The tokens of a step: one for each request that takes one. A later phase verifies several."""

    def write(self, works: Sequence[Work]) -> None:
        """Write the drafts of a step into the rows, before it runs."""

    def accepted(self, works: Sequence[Work], tokens: Sequence[Token]) -> Results:
        """Deal out what was sampled, in order."""
        return [[token] for token in tokens]


ONE_TOKEN_EACH = OutputVerifier()


class Pending:
    """A step that the device may still be working on. `get` is the only place where the host waits for it.

    works: those of the step that the results belong to, in order.
    """

    def __init__(
        self,
        works: Sequence[Work],
        sampled: Sampled | None,
        verifier: OutputVerifier = ONE_TOKEN_EACH,
    ) -> None:
        self.works, self.verifier = works, verifier
        self._arriving = (
            None if sampled is None else sampled.to_host()
        )  # starts the copy, does not wait

    def get(self) -> Results:
        """Wait for the step, and return its tokens."""
        return (
            ()
            if self._arriving is None
            else self.verifier.accepted(self.works, self._arriving.get())
        )


@dataclass
class Forwarded:
    """The first half of a step: the model has run, or will have, and nothing is sampled yet.

    works: in the order of the batch.
    hidden: `[T, hidden]`.
    rest: the second half, where a plan has its own; it takes what `Runner.sample` is given.
    logits: `[S, V]` float32 of the samples, where a plan has computed them.
    """

    works: Sequence[Work]
    batch: Batch
    hidden: Tensor
    rest: Callable[[TokenBitmask | None], Pending] | None = None
    logits: Tensor | None = None


class StepExecutor(Protocol):
    """Runs certain steps in a faster way; a later phase brings plans."""

    def supports(self, works: Sequence[Work], masked: bool) -> Any | None:
        """Return a ticket for `run`, or None to leave the step to the next plan."""

    def run(self, works: Sequence[Work], ticket: Any) -> Forwarded:
        """Refresh, and run the first half of a step that the plan takes."""


class Runner:
    """Runs steps, each in two halves: `forward`, then `sample`.

    Args:
        model: computes hidden states and logits.
        attention: over this engine's cache.
        rows: where the tokens are.
        chooser: of the sampler's tokens; a later phase brings kernels.

    plans: asked for each step in this order; the eager way comes last.
    extra: says what each taker gets of a step; replacing it may change the text.
    last: the first half of the newest step, whose hidden states are good until the next one.
    """

    plans: Sequence[StepExecutor] = ()
    last: Forwarded | None = None

    def __init__(
        self,
        model: Model,
        attention: BatchAttention,
        rows: RequestRows,
        *,
        sampler_backend: SamplerBackend = TORCH,
    ) -> None:
        self.model = model
        self.attention = attention
        self.rows = rows
        self.sampler = Sampler(rows.count, model.config.vocab_size, model.device)
        self.sampler.sampler_backend = sampler_backend
        self.verifier = ONE_TOKEN_EACH

    def run(self, works: Sequence[Work]) -> Pending:
        """Start one step. It returns when everything is handed to the device, not when it is done."""
        return self.sample(self.forward(works))

    @torch.inference_mode()
    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Forwarded:
        """The first half: from tokens to hidden states.

        masked: the second half will be given masks. (A graph that does both halves at once must know.)
        """
        for plan in self.plans:
            if (ticket := plan.supports(works, masked)) is not None:
                self.last = plan.run(works, ticket)
                break
        else:
            self.last = self.eager(works)
        return self.last

    def eager(self, works: Sequence[Work]) -> Forwarded:
        """Run the first half of any step, one operation after the other."""
        # In the order of their rows, so that neighbours in the cache are neighbours in the batch.
        works = sorted(works, key=_by_row)
        self.refresh(works)
        batch = self.prepare(works)
        self.attention.begin(batch)
        hidden = self.model(batch.input_ids, batch.positions, self.attention)  # [T, hidden]
        return Forwarded(works, batch, hidden)

    @torch.inference_mode()
    def sample(self, step: Forwarded, allowed: TokenBitmask | None = None) -> Pending:
        """The second half: from the last hidden states of every work to its takers' next tokens.

        allowed: see `Sampler.sample`; None: every token may be chosen.
        """
        if step.rest is not None:
            return step.rest(allowed)
        batch = step.batch
        rows_host = batch.host.sample_rows.tolist()
        if not rows_host:
            return Pending(step.works, None)
        plan = self.sampler.plan(rows_host)
        # A plan may have computed the logits already; else of the sampled rows only: [S, V], not [T, V].
        logits = (
            self.logits(step.hidden[batch.sample_at], plan)
            if step.logits is None
            else step.logits
        )
        sampled = self.sampler.sample(
            logits, batch.sample_rows, rows_host, batch.sample_steps, plan, allowed=allowed
        )
        self.rows.tokens[batch.sample_rows, batch.sample_positions] = sampled.tokens
        return Pending(step.works, sampled, self.verifier)

    def logits(self, hidden: Tensor, plan: SamplingMetadata) -> Tensor:
        """Logits of the hidden states `[S, hidden]` that are sampled: `[S, V]` float32."""
        return self.model.logits(hidden)

    def refresh(self, works: Sequence[Work]) -> None:
        """Before a step: hand over what the device does not know of its requests yet.

        That is the tokens and settings of those that got a row since the last step.
        """
        for request in self.rows.upload():
            self.set_row(request)
        self.verifier.write(works)

    def set_row(self, request: Request) -> None:
        """Tell the sampler how the request in a row wants its tokens chosen."""
        self.sampler.set_row(
            request.row,
            request.params,
            request.ids(0, request.prompt_len),
            output_ids=request.ids(request.prompt_len, len(request.tokens)),
            eos_ids=self.model.config.eos_token_ids,
            seed=request.seed,
        )

    def prepare(self, works: Sequence[Work]) -> Batch:
        """The step's inputs."""
        return Batch.of(HostBatch.of(works, self.rows.prompt_lens), self.rows)
