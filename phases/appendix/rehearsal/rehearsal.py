"""A rehearsal: made-up requests of every kind, so that no real one waits for a compiler.

Triton compiles a kernel when it is first launched, and once more for every set of constants and every class
of integer arguments (1, divisible by 16, others). Graphs compile what they capture. What only eager steps use
is met when the first long prompt comes, or the first request with penalties.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.errors import UserError
from common.progress import bar
from common.sampling.params import SamplingParams
from continuous.stats import Stats
from paged_cache import EngineBuilder, Feature, PagedEngine
from triton_paged_attention.tables import LONG

GREEDY = SamplingParams()


@dataclass(frozen=True)
class WarmupBatch:
    """Requests that come at once.

    lengths: of their prompts; each then generates `tokens` tokens.
    running: so many requests decode already when they come.
    """

    title: str
    lengths: tuple[int, ...]
    tokens: int = 3
    params: SamplingParams = GREEDY
    running: int = 0


def warmup_batches(engine: PagedEngine) -> list[WarmupBatch]:
    """Return the scenes to play: steps of all sizes, whose numbers of tokens 16 divides or does not."""
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
    """Play every scene on an engine that has just been made; it forgets them."""
    played = warmup_batches(engine)
    with bar("compiling kernels", len(played)) as part:
        for scene in played:
            part(scene.title)
            play(engine, scene)
    engine.stats = Stats()
    engine.cache.forget()
    if engine.runner.model.device.type == "cuda":
        torch.cuda.synchronize(engine.runner.model.device)


def play(engine: PagedEngine, scene: WarmupBatch) -> None:
    """Serve a scene's requests, as far as the engine has room for them.

    Raises:
        RuntimeError: a step failed.
    """
    for number in range(scene.running):
        _add(engine, scene, number, 16, 6)
    for _ in range(2 if scene.running else 0):
        _step(engine, scene)
    for number, length in enumerate(scene.lengths):
        _add(engine, scene, scene.running + number, length, scene.tokens)
    while not engine.idle:
        _step(engine, scene)


def _add(
    engine: PagedEngine, scene: WarmupBatch, number: int, length: int, tokens: int
) -> None:
    """A request with a prompt of `length` tokens, or as many as this engine serves.

    A prefix cache finds nothing of another scene's in it: what is left of a long prompt would be a short one.
    """
    vocab = min(1000, engine.config.vocab_size)
    prompt = [
        (7 * number + token) % vocab
        for token in range(max(1, min(length, engine.max_len - tokens - 1)))
    ]
    given = SamplingParams(**{**vars(scene.params), "max_tokens": tokens, "ignore_eos": True})
    with suppress(UserError):  # its cache is smaller than that
        engine.add(prompt, given, salt=f"rehearsal: {scene.title}")


def _step(engine: PagedEngine, scene: WarmupBatch) -> None:
    for output in engine.step():
        if output.finish_reason == "error":
            raise RuntimeError(f"a rehearsal failed: {scene.title}") from output.request.error


@dataclass(frozen=True)
class Rehearsal(Feature):
    """On a GPU, every kernel is compiled at the start, not when it is first met."""

    name: ClassVar[str] = "rehearsal"
    phase: ClassVar[int] = 6

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """On with kernels on a GPU."""
        return device.type == "cuda" and others.get("kernels") is not None

    def install(self, builder: EngineBuilder) -> None:
        """Play made-up requests when the engine is complete."""
        if "kernels" not in builder.features:
            raise UserError(
                "rehearsal is for kernels, which are off: switch them on with kernels=True"
            )
        if builder.model.device.type == "cuda":
            builder.stages["rehearse"].append(lambda whole: rehearse(whole.engine))
