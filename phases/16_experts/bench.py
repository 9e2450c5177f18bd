"""Phase 16: bytes that a token costs, and the speed of a mixture beside the dense models it is compared with.

A mixture has two of these: the dense model of all its weights, which it replaces, and the dense model of
equal activity, which multiplies a token with as many weights. On a CPU all three are small, on a GPU they are
of Qwen3-30B-A3B's shape.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import experts
import serving
from benchmarks.bench import Bench, evidence_of
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import Samples
from benchmarks.model_work import decode_work, layer_parameters
from benchmarks.plotting import Panel, figure
from benchmarks.published import PUBLISHED, SIZES
from benchmarks.workloads import uniform
from common.models.config import ExpertConfig, ModelConfig
from experts.routing import route
from forward.loading import random_model
from forward.shapes import SHAPES
from paged_cache import PagedEngine

PHASE = "16_experts"
REPLACED = "dense of all weights"
DENSE = "dense of equal activity"
SHAPE = "random:qwen3-30b-a3b"
SMALL = replace(
    SHAPES["tiny-moe"],
    hidden_size=512,
    num_layers=12,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    sliding_windows=(),
    vocab_size=4096,
    max_position_embeddings=1024,
    experts=ExpertConfig(count=16, top_k=2, intermediate_size=512),
)
"""A shape for a CPU: 16 experts of 0.8 million weights in each layer, of which a token goes through 2."""
SMALL_NAME = "random:moe-16x512"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def run(options: BenchOptions) -> Evidence:
    """Speed first, then what is counted."""
    runs = on_gpu(options) if options.device.type == "cuda" else on_cpu(options)
    return evidence_of(PHASE, runs + counted(), options)


def shapes(config: ModelConfig) -> dict[str, ModelConfig]:
    """Return a mixture's shape and those of the two dense models it is compared with, by variant."""
    facts = config.experts
    assert facts is not None
    dense = replace(config, family="qwen3", experts=None)
    return {
        REPLACED: replace(dense, intermediate_size=facts.count * facts.intermediate_size),
        DENSE: replace(dense, intermediate_size=facts.top_k * facts.intermediate_size),
        PHASE: config,
    }


def on_cpu(options: BenchOptions) -> list[Run]:
    """Decodes of one request and of 16, all three models in alternating order."""
    bench = Bench(replace(options, model=SMALL_NAME))
    sizes: dict[str, Any] = {"max_rows": 16, "max_len": 512, "drafter": "none"}
    engines = {
        variant: (experts if variant == PHASE else serving).load(
            random_model(config, device=options.device, dtype=options.dtype), **sizes
        )
        for variant, config in shapes(SMALL).items()
    }
    works = (
        uniform("decode-1x32+32", 1, 32, 32, vocab=SMALL.vocab_size),
        uniform("decode-16x32+8", 16, 32, 8, vocab=SMALL.vocab_size),
    )
    return [run for w in works for run in bench.race(engines, w, batch=len(w.items))]


def different(chosen: Tensor) -> int:
    """Return how many different experts there are in `chosen`."""
    return int((torch.bincount(chosen.flatten()) > 0).sum())


# Bytes, counted for a shape.


def counted() -> list[Run]:
    """Bytes of weights that a decode step reads for each of its tokens, in bfloat16, at even routing."""
    bench = Bench(BenchOptions(torch.device("cpu"), torch.bfloat16, SHAPE))
    models = shapes(SHAPES[SHAPE.removeprefix("random:")])
    config = models[PHASE]
    facts = config.experts
    assert facts is not None
    generator = torch.Generator().manual_seed(0)
    head = config.vocab_size * config.hidden_size
    runs = []
    for batch in BATCHES:
        work = uniform(f"step-of-{batch}", batch, 1, 1)
        logits = (
            torch.randn(batch, facts.count, generator=generator)
            for _ in range(config.num_layers)
        )
        chosen = [route(each, facts.top_k, True)[1] for each in logits]
        read = sum(map(different, chosen)) / config.num_layers
        weights = {
            variant: decode_work(models[variant], torch.bfloat16, batch, 0).weight_bytes
            for variant in (REPLACED, DENSE)
        } | {PHASE: 2 * (layer_parameters(config, read) + head)}
        for variant, size in weights.items():
            sample = {"step_gigabytes": size / 1e9, "token_gigabytes": size / batch / 1e9}
            if variant == PHASE:
                sample["experts_read"] = read
            found = bench.run_of(variant, work, Samples([sample]), batch=batch)
            runs.append(replace(found, noise=None))
    return runs


# A large model, on a GPU.


def on_gpu(options: BenchOptions) -> list[Run]:
    """The published workloads, one model after the other: each fills a good part of the memory.

    The dense model of all weights gets only the workload of one request. Only the mixture with the features
    of the appendix drafts tokens (speculative decoding).
    """
    bench = Bench(replace(options, model=options.model or SHAPE))
    models = shapes(SHAPES[bench.name.removeprefix("random:")])

    def dense(variant: str) -> PagedEngine:
        model = random_model(models[variant], device=options.device, dtype=options.dtype)
        return engine_of("13", model, **SIZES, drafter="none")

    def mixture(variant: str, **more: Any) -> PagedEngine:
        # By its name, so that no layer's experts are there twice.
        sizes = {**SIZES, "device": "cuda", "dtype": bench.dtype_name}
        return engine_of(variant, bench.name, **sizes, **more)

    made = {
        DENSE: partial(dense, DENSE),
        PHASE: partial(mixture, PHASE, drafter="none"),
        PHASE + APPENDIX: partial(mixture, PHASE + APPENDIX),
    }
    alone = {REPLACED: partial(dense, REPLACED)}
    return bench.one_by_one(made) + bench.one_by_one(alone, PUBLISHED[:1])


draw = figure(
    Panel(
        "Gigabytes of weights that each token reads", "token_gigabytes", x="batch", log="xy"
    ),
    Panel(
        "One request, {model}",
        where={"variant": (REPLACED, DENSE, PHASE), "workload": ("decode-1x*", "single-*")},
    ),
)
