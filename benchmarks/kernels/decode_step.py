"""A whole decode step of few requests, replayed from a CUDA graph.

Workload `decode-step`: from tokens and their positions to the next greedy tokens, each request with so many
keys. `seconds` is one replay of many in a row, so gaps between kernels count and the host does not. The
roofline reads every weight that the step needs and all keys and values once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run, collect
from benchmarks.kernels.harness import graph_seconds, read_once
from benchmarks.model_work import Ceilings
from benchmarks.plotting import MARKERS, colours, log_axis, panels, reference_line, save, tick
from benchmarks.roofline import ceilings
from common.errors import UserError
from cuda_graphs.batch import fixed_batch
from cuda_graphs.sampling import argmax_rows
from forward.loading import load_model
from forward.model import Model
from forward.surgery import clone
from paged_cache import BlockPool, PagedBatch
from paged_cache.memory import weight_bytes
from phases.appendix.latency.layers import install
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.layers import optimize

NAME, STEP = "decode_step", "06_triton_paged_attention"
LATENCY = STEP + APPENDIX
"""With the appendix's kernels for one token."""
MODELS = ("qwen3-0.6b", "qwen3-8b")
CONTEXTS = (100, 356, 612, 4096, 16384)
MIDDLE = 356
"""Keys in the middle of `single-512`: a prompt of 100 tokens and half of 512."""
FEW_COUNTS = (2, 4, 8)
BLOCK = 64


def run(options: BenchOptions) -> Evidence:
    """Both models."""
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but kernels are timed on 'cuda' only"
        )
    top = ceilings(options.device, options.dtype)
    runs: list[Run] = []
    for name in MODELS[:1] if options.quick else MODELS:
        runs += steps(name, options, top)
    return collect(NAME, runs, options.device, top.to_json())


def steps(name: str, options: BenchOptions, top: Ceilings) -> Iterator[Run]:
    """One request at each context and a few at one of them, with all kernels; fewer kernels at that one."""
    base = load_model(
        f"random:{name}", device=str(options.device), dtype=str(options.dtype).split(".")[-1]
    )
    models = {
        LATENCY: install(optimize(clone(base))),
        STEP: optimize(clone(base)),
        "attention only": clone(base),
    }
    config = base.config
    blocks = -(-max(CONTEXTS) // BLOCK)
    pool = BlockPool(config, blocks, BLOCK, device=options.device, dtype=options.dtype)
    pool.data.normal_()
    attention = TritonPagedAttention(pool, config.num_heads)

    def step(model: Model, batch: PagedBatch) -> Tensor:
        attention.begin(batch)
        return argmax_rows(model.lm_head(model(batch.input_ids, batch.positions, attention)))

    for variant, model in models.items():
        for count, context in cases(variant, options.quick):
            batch = fixed_batch(count, blocks // count, options.device)
            batch.input_ids.fill_(1234)
            batch.block_tables.copy_(
                torch.randperm(blocks)[: batch.block_tables.numel()].view(count, -1)
            )
            batch.context_lens.fill_(context)
            batch.positions.fill_(context - 1)
            last = batch.block_tables[:, (context - 1) // BLOCK].long()
            batch.slots.copy_(last * BLOCK + (context - 1) % BLOCK)
            with torch.inference_mode():
                samples = graph_seconds([partial(step, model, batch)], target=0.05, repeats=9)
            work = weight_bytes(base) + count * context * config.kv_bytes_per_token(
                options.dtype
            )
            if not config.tie_word_embeddings:
                work -= config.vocab_size * config.hidden_size * options.dtype.itemsize
            print(
                f"{name} {variant} {count} x {context}: {sorted(samples)[4] * 1e6:.1f} us",
                flush=True,
            )
            chosen = {"batch": count, "context": context}
            yield read_once(
                variant,
                "decode-step",
                samples,
                work,
                model=name,
                dtype=options.dtype,
                top=top,
                options=chosen,
            )


def cases(variant: str, quick: bool) -> list[tuple[int, int]]:
    """Requests and keys of each."""
    some = [(count, MIDDLE) for count in FEW_COUNTS]
    if variant != LATENCY or quick:
        return [(1, MIDDLE)]
    return [(1, context) for context in CONTEXTS] + some


def draw(evidence: Evidence, out: Path) -> None:
    """Steps of one request over the context."""
    figure, (left,) = panels()
    step = LATENCY if evidence.appendix else STEP  # names hid it before 2026-11-29
    models = list(dict.fromkeys(run.model for run in evidence.find(step, batch=1)))
    shown = colours(models, STEP)
    reached = {}
    for model, marker in zip(models, MARKERS, strict=False):
        runs = sorted(
            evidence.find(step, model=model, batch=1), key=lambda run: run.options["context"]
        )
        fractions = [run.roofline.fraction for run in runs if run.roofline]
        reached[model] = max(fractions)
        contexts = [run.options["context"] for run in runs]
        left.plot(contexts, fractions, marker=marker, color=shown[model], label=model)
    left.set_title(
        "One token reaches " + ", ".join(f"{s:.0%} ({model})" for model, s in reached.items())
    )
    log_axis(left, vertical=False)
    left.set_xticks(contexts, [tick(context) for context in contexts])
    left.set_xlabel("context")
    left.set_ylim(0, 1.12)
    left.set_ylabel("share of the roofline")
    reference_line(left, 1.0, "reading weights and cache, and nothing else")
    left.legend(loc="lower right")
    save(figure, out, evidence)
