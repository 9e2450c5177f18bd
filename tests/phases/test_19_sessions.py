"""Phase 19's scheduling by the clock of a simulated GPU: steps on one stream, copies on two others.

What a step or a copy takes comes from rates that an H200 had with an 8B (docs/log/19.md). Everything is a
`SCALE`-th as long as there, and costs what it costs there, so that a CPU gets through it in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import pytest
import torch

from benchmarks.workloads import Workload, agent
from chunked_prefill import Chunked
from continuous.runner import Forwarded, Pending
from continuous.work import Work
from cuda_graphs import Overlap
from forward.loading import random_model
from forward.shapes import SHAPES
from moving_blocks import MovingBlocks, admission
from moving_blocks.connector import ConnectorWorker, Transfer
from moving_blocks.rule import GENTLE, LoadRule, PrefillCost
from moving_blocks.tiers import TieredConnector
from paged_cache import BlockPool, PagedEngine, PagedSizes, Recipe, build
from prefix_cache import Prefix
from tests.phases.test_19_moving_blocks import tiny

SCALE = 8
BLOCK = 64
COST = PrefillCost.of(SHAPES["qwen3-8b"])
FLOPS, BUS = 6e14, 48e9
"""Operations and bytes a second."""
STEP = 6.5e-3
"""Seconds of a step of decodes."""
LAUNCHES = 15e-3
"""Seconds that the host needs to launch a step with a prompt, kernel by kernel."""
BLOCK_BYTES = 147_456 * BLOCK
SESSIONS, TURNS = 8, 10
SYSTEM, NEW = 2048, 1500


@dataclass
class Gpu:
    """The time of the host, and when each stream has done what was launched on it, in seconds."""

    now: float = 0.0
    compute: float = 0.0
    load: float = 0.0
    save: float = 0.0
    tokens: int = 0
    ends: dict[int, float] = field(default_factory=dict)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Copy(Transfer):
    gpu: Gpu
    end: float

    def done(self) -> bool:
        self.gpu.now += 5e-6
        return self.gpu.now >= self.end


@dataclass
class Bus(ConnectorWorker):
    """Copies at once, and says by the clock when the GPU would have done so."""

    gpu: Gpu
    inner: ConnectorWorker

    def start_copy(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_host: bool,
        after: Sequence[Transfer] = (),
        gently: bool = False,
    ) -> Transfer:
        self.inner.start_copy(blocks, slots, to_host=to_host)
        gpu = self.gpu
        gpu.now += 3e-4
        seconds = len(blocks) * BLOCK_BYTES / (BUS * (GENTLE if gently else 1.0))
        waits = [gpu.now, gpu.compute, *(copy.end for copy in after if isinstance(copy, Copy))]
        if to_host:
            gpu.save = max(gpu.save, *waits) + seconds
            return Copy(gpu, gpu.save)
        gpu.load = max(gpu.load, *waits) + seconds
        return Copy(gpu, gpu.load)

    def wait_for(self, transfer: Transfer) -> None:
        assert isinstance(transfer, Copy)
        self.gpu.compute = max(self.gpu.compute, transfer.end)


class Rule(LoadRule):
    """The rule for prompts of `SCALE` times as many tokens."""

    def compute_seconds(self, start: int, end: int) -> float:
        return super().compute_seconds(start * SCALE, end * SCALE)


def simulated(
    work: Workload, share: float, patch: pytest.MonkeyPatch
) -> tuple[PagedEngine, Gpu]:
    """An engine with room for a share of what a workload's prompts have in all."""
    config = replace(tiny().config, vocab_size=1000, max_position_embeddings=8192)
    model = random_model(config, device="cpu", dtype=torch.float32)
    size = BLOCK // SCALE
    each = BlockPool.bytes_per_block(config, size, model.dtype)
    blocks = (SYSTEM + SESSIONS * TURNS * NEW) // BLOCK
    sizes = PagedSizes(
        max_len=max(work.prompt_lens) + 4 * size,
        max_rows=SESSIONS,
        block_size=size,
        step_tokens=8192 // SCALE,
        cache_bytes=int(share * blocks) * each,
    )
    moving = MovingBlocks(
        host_bytes=int(1.25 * blocks) * each,
        offload="computed",
        prefill_rate=1.0,
        load_rate=1.0,
    )
    engine = build(Recipe(model, sizes, (Chunked(), Prefix(), Overlap(), moving)))
    connector, gpu = engine.cache.connector, Gpu()  # type: ignore[attr-defined]
    assert isinstance(connector, TieredConnector)
    connector.worker = Bus(gpu, connector.worker)
    connector.clock = lambda: gpu.now
    connector.rule = Rule(COST, BLOCK_BYTES, FLOPS, BUS, step_seconds=STEP)
    patch.setattr(admission, "time", gpu)
    forward, sample = engine.runner.forward, engine.runner.sample
    wait = engine.wait

    def launch(works: list[Work], **options: Any) -> Forwarded:
        prompts = [work for work in works if work.count > 1]
        spans = [(w.start * SCALE, (w.start + w.count) * SCALE) for w in prompts]
        gpu.now += LAUNCHES if prompts else 1e-3
        gpu.tokens += sum(work.count for work in prompts)
        seconds = max(STEP, sum(COST.between(*span) for span in spans) / FLOPS)
        gpu.compute = max(gpu.compute, gpu.now) + seconds
        return forward(works, **options)

    def sampled(step: Forwarded, *more: Any) -> Pending:
        pending = sample(step, *more)
        gpu.ends[id(pending)] = gpu.compute
        return pending

    def waited(pending: Pending) -> Any:
        gpu.now = max(gpu.now, gpu.ends.pop(id(pending)))
        return wait(pending)

    patch.setattr(engine.runner, "forward", launch)
    patch.setattr(engine.runner, "sample", sampled)
    patch.setattr(engine, "wait", waited)
    return engine, gpu


@pytest.mark.slow
@pytest.mark.parametrize("share, gain", [(0.25, 3.0), (1.25, 4.0)])
def test_sessions_of_agents_compute_only_what_is_new(
    share: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for a quarter of the sessions, loads go on beside steps, and none is given up."""
    sizes = {"system": SYSTEM // SCALE, "step": NEW // SCALE, "output": 4}
    work = agent("agent-session", 999, sessions=SESSIONS, turns=TURNS, **sizes)
    engine, gpu = simulated(work, share, monkeypatch)
    alone = sum(COST.between(0, SCALE * length) for length in work.prompt_lens) / FLOPS
    asked = sorted(zip(work.prompts, work.params, strict=True), key=lambda item: len(item[0]))
    for _, turn in groupby(asked, key=lambda item: len(item[0])):
        requests = [engine.add(prompt, params)[0] for prompt, params in turn]
        while not engine.idle:
            engine.step()
            gpu.now += 3e-4
        assert {request.finish_reason for request in requests} == {"length"}
    new = len(work.prompts[0]) + sizes["step"] * (len(work.prompts) - 1)
    # Of each prompt the last two blocks at most once more; the first turn's prompts come at once.
    more = SESSIONS * sizes["system"] + len(work.prompts) * 2 * BLOCK // SCALE
    assert new <= gpu.tokens <= new + more, (
        f"{gpu.tokens} tokens were computed, but only {new} are new: loads were given up"
    )
    assert gpu.now < alone / gain, (
        f"{gpu.now:.1f} s, {alone / gpu.now:.1f} times as fast as computing all: copies wait for steps"
    )
