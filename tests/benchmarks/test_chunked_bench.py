"""Phase 07's benchmark: long prompts come while others decode, not before."""

from __future__ import annotations

from typing import Any

import torch

import chunked_prefill
from benchmarks.evidence import BenchOptions
from common.request import Request
from forward import load_model
from phases.commands.benches import _module as bench_of


def test_a_prompt_comes_when_the_decodes_have_got_some_more_tokens() -> None:
    module: Any = bench_of("07_chunked_prefill")
    bench = object.__new__(module.Bench)  # without its ceilings, which take a while to measure
    bench.options, bench.size = BenchOptions(torch.device("cpu"), torch.float32), module.QUICK
    model = load_model("random:tiny", device="cpu", dtype="float32")
    decodes: list[Request] = []
    had: list[int] = []

    def make() -> Any:
        engine = chunked_prefill.load(model, max_rows=8, max_len=256, step_tokens=64, cache_bytes=1 << 22)
        add = engine.add

        def adds(prompt: list[int], *rest: Any, **more: Any) -> list[Request]:
            if len(prompt) == 96:
                had.append(min(len(request.output_ids) for request in decodes))
            made: list[Request] = add(prompt, *rest, **more)
            decodes.extend(made if len(prompt) == 32 else ())
            return made

        engine.add = adds  # type: ignore[method-assign]
        return engine

    work = module.decodes_and_prompts(module.QUICK, module.QUICK.prompts, "some", vocab=250)
    sample = bench.under_load(make, work)(0)
    assert had == [4, 8], "tokens that every decode had when the first and the second prompt came"
    assert sample["ttft_ms_p50"] > 0
