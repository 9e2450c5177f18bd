"""Warm-up: serve made-up requests of every kind, so that no real request waits for a compiler.

Triton compiles a kernel when it is first launched, and once more for every set of constants and every class
of integer arguments (1, divisible by 16, others). Graphs compile what they capture. Kernels that only eager
steps use would be compiled when the first long prompt comes, or the first request with penalties.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from common.errors import UserError
from common.progress import bar
from common.sampling.params import SamplingParams
from continuous.stats import Stats
from paged_cache import EngineBuilder, Feature, PagedEngine
from triton_paged_attention import Kernels
from triton_paged_attention.tables import LONG

GREEDY = SamplingParams()


@dataclass(frozen=True)
class WarmupBatch:
    """Made-up requests that are added to a new engine together, so that it compiles its kernels.

    title: shown while the batch runs.
    lengths: of the requests' prompts, in tokens.
    tokens: tokens that each request generates.
    params: the requests' sampling settings.
    running: number of further requests that decode already when these are added.
    """

    title: str
    lengths: tuple[int, ...]
    tokens: int = 3
    params: SamplingParams = GREEDY
    running: int = 0


def warmup_batches(engine: PagedEngine) -> list[WarmupBatch]:
    """Return the batches of made-up requests with which an engine compiles every kernel.

    Their steps have all sizes, with numbers of tokens that are multiples of 16 and that are not.
    """
    rows, most = engine.scheduler.rows.count, engine.scheduler.step_tokens
    sampled = SamplingParams(temperature=0.8, seed=1)
    picky = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, logprobs=2
    )
    penalized = SamplingParams(
        temperature=0.8, repetition_penalty=1.1, logit_bias={0: 1.0}, seed=1
    )
    full = min(rows, 64) * (32,)
    # A decode's context is split over programs, fewer the more requests decode, and each number of splits (a
    # power of two) is a kernel of its own. Half more at a time misses none.
    beside = sorted({count for power in range(40) if (count := round(1.5**power)) < rows})
    return [
        WarmupBatch("one short prompt", (33,), 4),
        WarmupBatch("one prompt of whole tiles", (64,), 4, sampled),
        WarmupBatch("short prompts", (1, 2, 5, 17, 48), 4, sampled),
        WarmupBatch("long prompts", (700, 900, 1100, 37), 3, sampled),
        WarmupBatch("a full step", (most // 2, most // 2), 2),
        WarmupBatch(
            "a full step and a bit", (most // 3 + 1, most // 3 + 2, most // 2 + 3), 2, sampled
        ),
        WarmupBatch("a long context", (LONG + 100,), 2),
        *(
            WarmupBatch(f"a long prompt beside {n} decodes", (most // 2 + 2,), 2, running=n)
            for n in beside
        ),
        *(
            WarmupBatch(f"and one of few tokens beside {n}", (most // 2, 3), 2, running=n)
            for n in beside
        ),
        WarmupBatch("many requests", full, 3),
        WarmupBatch("many sampled requests", (*full, 31), 3, sampled),
        WarmupBatch("top-k, top-p and log-probabilities", (16, 40), 3, picky),
        WarmupBatch("penalties", (16, 40, 33), 3, penalized),
    ]


def rehearse(engine: PagedEngine) -> None:
    """Run every warm-up batch on a new engine; then reset its statistics and empty its prefix cache."""
    played = warmup_batches(engine)
    with bar("compiling kernels", len(played)) as part:
        for batch in played:
            part(batch.title)
            run_batch(engine, batch)
    vars(engine.stats).update(vars(Stats()))  # from zero
    engine.cache.forget()
    if engine.runner.model.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.model.device)


def run_batch(engine: PagedEngine, batch: WarmupBatch) -> None:
    """Run all requests of a warm-up batch to their end.

    Requests that do not fit into the engine's cache are left out.

    Raises:
        RuntimeError: a step failed.
    """
    for number in range(batch.running):
        _add(engine, batch, number, 16, 6)
    for _ in range(2 if batch.running else 0):
        _step(engine, batch)
    for number, length in enumerate(batch.lengths):
        _add(engine, batch, batch.running + number, length, batch.tokens)
    while not engine.idle:
        _step(engine, batch)


def _add(
    engine: PagedEngine, batch: WarmupBatch, number: int, length: int, tokens: int
) -> None:
    """Add a request of a warm-up batch to the engine, unless its cache is too small for it.

    number: of the request, which varies its prompt. length: of the prompt, in tokens, or as many as the
        engine serves. tokens: to generate.
    The batch's salt keeps the prefix cache from finding another batch's blocks: a long prompt would become a
    short one.
    """
    vocab = min(1000, engine.config.vocab_size)
    prompt = [
        (7 * number + token) % vocab
        for token in range(max(1, min(length, engine.max_len - tokens - 1)))
    ]
    given = SamplingParams(**{**vars(batch.params), "max_tokens": tokens, "ignore_eos": True})
    with suppress(UserError):  # its cache is smaller than that
        engine.add(prompt, given, salt=f"rehearsal: {batch.title}")


def _step(engine: PagedEngine, batch: WarmupBatch) -> None:
    for output in engine.step():
        if output.finish_reason == "error":
            raise RuntimeError(f"a rehearsal failed: {batch.title}") from output.request.error


@dataclass(frozen=True)
class Rehearsal(Feature):
    """Compile every kernel when the engine is made, not when it is first needed."""

    name = "rehearsal"
    phase = 6
    for_draft_models = True
    needs = on_with = (Kernels,)
    on_device = "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Let the complete engine serve made-up requests first, so that no request waits for a compiler.

        Does nothing without a GPU.
        """
        if builder.model.device.type == "cuda":
            builder.warmups.append(rehearse)
