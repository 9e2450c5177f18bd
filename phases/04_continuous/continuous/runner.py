"""The runner: turns a step's works (each: one request's tokens) into tensors, runs the model, samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from common.events import Logprob
from common.sampling.metadata import SamplingMetadata
from common.sampling.sampler import (
    TORCH,
    HostSampled,
    Sampler,
    SamplerBackend,
    TokenBitmask,
)
from continuous.attention import BatchAttention
from continuous.batch import Batch, HostBatch
from continuous.rows import RequestRows
from continuous.work import Work
from forward.model import Model

_by_row = attrgetter("row")

Token = tuple[int, Logprob | None]
"""A sampled token, and its log-probabilities if they were asked for."""
Results = Sequence[Sequence[Token]]
"""The tokens of a step: for each sampled request of each work, in order, a list of tokens."""


class OutputVerifier:
    """Decides which sampled tokens each request gets: here one each. Phase 11's verifies draft tokens."""

    def write(self, works: Sequence[Work]) -> None:
        """Write the drafts of a step's works into their requests' rows, before it runs; here are none."""

    def accepted(self, works: Sequence[Work], tokens: Sequence[Token]) -> Results:
        """Return, for each sampled request of the works, those of the step's tokens that it keeps."""
        return list(zip(tokens))  # tuples of one token


ONE_TOKEN_EACH = OutputVerifier()


@dataclass
class Pending:
    """The results of a step that the device may still be computing. Only `get` waits for it.

    works: what the step computed for each request, in the order of the results.
    arriving: its tokens, whose copy to the host is under way; None: nothing was sampled.
    """

    works: Sequence[Work]
    arriving: HostSampled | None
    verifier: OutputVerifier = ONE_TOKEN_EACH

    def get(self) -> Results:
        """Wait for the step, and return for each sampled request the list of its tokens."""
        if self.arriving is None:
            return ()
        return self.verifier.accepted(self.works, self.arriving.get())


@dataclass
class Forwarded:
    """The first half of a step: the forward pass is launched, and nothing is sampled yet.

    works: what the step computes for each request, in the order of the batch. batch: its inputs.
    hidden: `[T, hidden]`.
    rest: computes the second half by a CUDA graph, given the bit masks; None: `Runner` computes it.
    logits: `[S, V]` float32 of the samples, if they are computed already; else None.
    """

    works: Sequence[Work]
    batch: Batch
    hidden: Tensor
    rest: Callable[[TokenBitmask | None], Pending] | None = None
    logits: Tensor | None = None


class Runner:
    """Runs steps, each in two halves: `forward`, then `sample`.

    Args:
        model: computes hidden states and logits.
        attention: stores keys and values in the engine's cache, and attends to them.
        rows: the running requests' token ids on the device.
        sampler_backend: chooses a token from each row of logits, by torch or by kernels.
        verifier: decides which sampled tokens each request keeps.
    """

    def __init__(
        self,
        model: Model,
        attention: BatchAttention,
        rows: RequestRows,
        *,
        sampler_backend: SamplerBackend = TORCH,
        verifier: OutputVerifier = ONE_TOKEN_EACH,
    ) -> None:
        self.model = model
        self.attention = attention
        self.rows = rows
        self.sampler = Sampler(rows.count, model.config.vocab_size, model.device)
        self.sampler.sampler_backend = sampler_backend
        self.verifier = verifier

    @torch.inference_mode()
    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Forwarded:
        """Run the first half of a step of these works, from tokens to hidden states, and return these.

        masked: True if the second half will be given bit masks.
        """
        # In the order of their rows, so that neighbours in the cache are neighbours in the batch.
        works = sorted(works, key=_by_row)
        self.refresh(works)
        batch = self.prepare(works)
        self.attention.begin(batch)
        hidden = self.model(batch.input_ids, batch.positions, self.attention)  # [T, hidden]
        return Forwarded(works, batch, hidden)

    @torch.inference_mode()
    def sample(self, step: Forwarded, allowed: TokenBitmask | None = None) -> Pending:
        """Sample the next tokens from the last hidden states of every request; return the pending results.

        step: what `forward` returned. allowed: bit masks of tokens that may be sampled; None: every token.
        """
        if step.rest is not None:
            return step.rest(allowed)
        batch = step.batch
        rows_host = batch.host.sample_rows.tolist()
        if not rows_host:
            return Pending(step.works, None)
        plan = self.sampler.plan(rows_host)
        logits = step.logits  # an executor may have computed them already
        if logits is None:  # of the sampled rows only: [S, V], not [T, V]
            logits = self.logits(step.hidden[batch.sample_at], plan)
        sampled = self.sampler.sample(
            logits, batch.sample_rows, batch.sample_steps, plan, allowed
        )
        self.rows.tokens[batch.sample_rows, batch.sample_positions] = sampled.tokens
        return Pending(step.works, HostSampled(sampled), self.verifier)

    def logits(self, hidden: Tensor, plan: SamplingMetadata) -> Tensor:
        """Return the logits of hidden states `[S, hidden]` to be sampled by `plan`: `[S, V]` float32."""
        return self.model.logits(hidden)

    def refresh(self, works: Sequence[Work]) -> None:
        """Upload the tokens and settings of requests with new rows, and the drafts of this step's works."""
        for request in self.rows.upload():
            self.sampler.set_row(
                request.row,
                request.params,
                request.ids(0, request.prompt_len),
                output_ids=request.ids(request.prompt_len, len(request.tokens)),
                eos_ids=self.model.config.eos_token_ids,
                seed=request.seed,
            )
        self.verifier.write(works)

    def prepare(self, works: Sequence[Work]) -> Batch:
        """Return a step's inputs on the device. works: each the tokens of one request, in batch order."""
        return Batch.of(HostBatch.of(works, self.rows.prompt_lens), self.rows)
