"""A rehearsal leaves nothing behind but compiled kernels, and leaves none out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prefix_cache
from common.events import generate
from common.sampling.params import SamplingParams
from continuous.stats import Stats
from forward.model import Model
from phases import phase_named
from phases.appendix.rehearsal.rehearsal import play, rehearse, warmup_batches
from phases.registry import load_engine


@pytest.mark.parametrize(
    "options", [{}, {"step_tokens": 7}, {"max_rows": 1}, {"max_len": 8}], ids=str
)
@pytest.mark.slow
def test_an_engine_forgets_its_rehearsal(model: Model, options: dict[str, Any]) -> None:
    given = {
        "max_rows": 4,
        "max_len": 200,
        "step_tokens": 64,
        "cache_bytes": 1 << 20,
    } | options
    plain, rehearsed = (prefix_cache.load(model, **given) for _ in range(2))
    rehearse(rehearsed)
    assert rehearsed.stats == Stats() and rehearsed.idle
    assert rehearsed.cache.free == rehearsed.cache.allocator.count
    assert rehearsed.cache.allocator.free == rehearsed.cache.allocator.count, (
        "the index remembers blocks"
    )
    rehearsed.check_integrity()
    params = SamplingParams(max_tokens=5, temperature=0.9, seed=4, ignore_eos=True)
    prompts = [[1, 2, 3], [4]]
    found = [
        [c.token_ids for c in generate(engine, prompts, params)]
        for engine in (plain, rehearsed)
    ]
    assert found[0] == found[1]
    assert rehearsed.cache.stats.hit_tokens == 0, (
        "a rehearsed prompt is shared with a real one"
    )


def test_scenes_are_played_as_they_are_written(model: Model) -> None:
    """A prompt that another scene's blocks hold in part is a short one, and its step one of another kind."""
    engine = prefix_cache.load(
        model, max_rows=4, max_len=200, step_tokens=64, cache_bytes=1 << 20
    )
    for scene in warmup_batches(engine):
        engine.stats = Stats()
        play(engine, scene)
        assert engine.cache.stats.hit_tokens == 0, (
            f"{scene.title}: its prompts are known from another scene"
        )
        if scene.running:
            lengths = [min(length, 200 - scene.tokens - 1) for length in scene.lengths]
            expected = (
                scene.running * (16 + 5) + sum(lengths) + len(lengths) * (scene.tokens - 1)
            )
            assert engine.stats.computed_tokens == expected, scene.title


@pytest.mark.gpu
def test_nothing_is_compiled_after_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    sizes = {"max_len": 4096, "graph_rows": 16, "graph_tokens": 256, "cache_bytes": 8 << 30}
    engine = load_engine(phase_named("09"), "random:qwen3-0.6b", device="cuda", **sizes)
    compiled: list[str] = []

    def note(*given: Any, **facts: Any) -> None:
        compiled.append(str(facts.get("repr") or given))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    generator = torch.Generator().manual_seed(0)
    for count, most in ((1, 50), (3, 900), (40, 300), (64, 1500), (90, 128), (80, 1024)):
        lengths = torch.randint(1, most, (count,), generator=generator).tolist()
        prompts = [torch.randint(1, 5000, (n,), generator=generator).tolist() for n in lengths]
        params = SamplingParams(max_tokens=6, temperature=0.6, seed=1, ignore_eos=True)
        generate(engine, prompts, params)
        generate(engine, prompts[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert compiled == [], f"{len(compiled)} kernels were compiled while requests waited"
