"""Static batching: requests are grouped, padded to one length, and leave together.

Each step reads the weights once for the whole batch, which is what batching is for. The batch lasts as
long as its longest request, which is what is wrong with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batching.attention import PaddedAttention
from common.errors import integer
from common.events import FinishReason, TokenEvent
from common.rules import finish_reason, output_limit
from common.sampling.params import SamplingParams
from common.sampling.sampler import Sampled
from common.text.text_stream import TextStream
from common.text.tokenizer import Tokenizer
from forward.generator import Generator, refuse_nan
from forward.model import Model
from kv_cache.cache import KVCache


@dataclass
class Waste:
    """Counts of the token positions that a static batch computes without use.

    ``computed`` counts every position that went through the model; ``padding`` those that were padding;
    ``finished`` those of requests that had already ended; ``fraction`` is the share of padding and finished
    positions.
    """

    computed: int = 0
    padding: int = 0
    finished: int = 0

    @property
    def fraction(self) -> float:
        """Return the share of computed positions that served no request, 0 to 1."""
        return (self.padding + self.finished) / self.computed if self.computed else 0.0


@dataclass
class Row:
    """One request of the batch.

    index, sample: number of the prompt, and of the completion among the prompt's n.
    prompt: token ids. params: its settings. limit: most tokens it may generate.
    text: decodes the output, if stop strings are looked for; else None.
    output: token ids generated so far. reason: why the request ended; None before.
    """

    index: int
    sample: int
    prompt: list[int]
    params: SamplingParams
    limit: int
    text: TextStream | None
    output: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class BatchGenerator(Generator):
    """Serves requests in batches of ``batch_size``; a batch runs to its end before the next begins.

    Args:
        model: computes the hidden states.
        tokenizer: needed for stop strings only.
        batch_size: rows in a batch; memory grows with it.
        compact: drop finished rows from the batch as they finish, for the price of copying the others' cache.
            Waiting requests still wait for the whole batch.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int = 16,
        compact: bool = False,
    ) -> None:
        batch_size = integer("batch_size", batch_size, low=1)
        super().__init__(model, tokenizer, rows=batch_size)
        self.batch_size, self.compact = batch_size, compact
        self.waste = Waste()

    def _stream(
        self, prompts: list[list[int]], each: list[SamplingParams]
    ) -> Iterator[TokenEvent]:
        rows = []
        for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            limit = output_limit(len(prompt), params, self.model.max_len)
            for sample in range(params.n):
                if limit == 0:
                    yield TokenEvent(index, None, "length", time.perf_counter(), sample=sample)
                    continue
                text = (
                    TextStream(self.tokenizer, params, prompt)
                    if self.tokenizer and params.stop
                    else None
                )
                rows.append(Row(index, sample, prompt, params, limit, text))
        for first in range(0, len(rows), self.batch_size):
            yield from self._batch(rows[first : first + self.batch_size])

    def _batch(self, rows: list[Row]) -> Iterator[TokenEvent]:
        """Prefill a batch in one forward pass, then decode until its last row ends; yield the events."""
        longest = max(len(row.prompt) for row in rows)
        padding = [longest - len(row.prompt) for row in rows]
        cache = KVCache(
            self.model.config,
            batch=len(rows),
            # Padding takes memory like anything else; a row's last token is never computed and takes none.
            max_len=longest + max(row.limit for row in rows) - 1,
            device=self.model.device,
            dtype=self.model.dtype,
        )
        attention = PaddedAttention(cache, torch.tensor(padding, device=self.model.device))
        for place, row in enumerate(rows):
            eos = self.model.config.eos_token_ids
            self.sampler.set_row(place, row.params, row.prompt, eos_ids=eos, sample=row.sample)
        # On the left, so that every row's newest token is in the last column.
        ids = torch.tensor(
            [[0] * pad + row.prompt for pad, row in zip(padding, rows, strict=True)],
            device=self.model.device,
        )  # [B, S]
        self.waste.padding += sum(padding)
        active = rows
        indices = list(range(len(rows)))  # the sampler's row of each row of the batch
        step = 0
        while True:
            self.waste.computed += ids.numel()
            sampled = self._step(ids, attention, indices, step)
            # the only wait
            tokens = sampled.for_host.tolist()
            now = time.perf_counter()
            step += 1
            for place, (row, token) in enumerate(zip(active, tokens, strict=True)):
                if row.reason is None:
                    refuse_nan(token, row.index)
                    piece = self._append(row, token)
                    logprob = sampled.logprob(place)
                    yield TokenEvent(
                        row.index, token, row.reason, now, logprob, row.sample, piece
                    )
            ids = sampled.tokens.unsqueeze(1)  # [B, 1], never leaves the device
            live = [place for place, row in enumerate(active) if row.reason is None]
            if not live:
                return
            if self.compact and len(live) < len(active):
                kept = torch.tensor(live, device=self.model.device)
                attention.keep(kept)
                active, indices = [active[i] for i in live], [indices[i] for i in live]
                ids = ids[kept]
            self.waste.finished += len(active) - len(live)

    def _append(self, row: Row, token: int) -> str | None:
        """Append a token to `row`, and set the row's `reason` if it is the last one.

        Returns:
            The text that the token adds; None without stop strings.
        """
        row.output.append(token)
        row.reason = finish_reason(
            token, len(row.output), row.params, self.model.config.eos_token_ids, row.limit
        )
        if row.text is None:
            return None
        row.reason, piece = row.text.advance(token, row.reason)
        return piece

    @torch.inference_mode()  # not around the loop: a generator would leave it switched on for its consumer
    def _step(
        self, ids: Tensor, attention: PaddedAttention, indices: list[int], step: int
    ) -> Sampled:
        """Run ``ids [B, S]`` as the next S columns; return every row's next token, from the last column.

        indices: the sampler's row of each request. step: number of these tokens in the outputs, from 0.
        """
        count = ids.shape[1]
        attention.begin(count)
        # A row's position is its column less its padding. Padding has none, and a finished row may be
        # dragged beyond the context by a longer neighbour: both take any legal one.
        positions = (attention.columns - attention.padding.unsqueeze(-1)).clamp(
            0, self.model.max_len - 1
        )
        hidden: Tensor = self.model(ids, positions, attention)  # [B, S, hidden]
        attention.cache.advance(count)
        at = torch.tensor(indices, device=ids.device)
        steps = torch.full_like(at, step)
        plan = self.sampler.plan(indices)
        return self.sampler.sample(self.model.logits(hidden[:, -1]), at, steps, plan)
