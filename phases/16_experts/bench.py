"""Phase 16: bytes that a token costs, dense and in experts; the load of experts; quality and speed.

On a CPU SmolLM2 is cut into experts, and compared with itself. On a GPU Qwen3-30B-A3B is compared with the
dense model that has as many weights as it has active ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import Tensor

import experts
import serving
from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.fidelity import compare
from benchmarks.measure import Sample, Samples, alternate_engines, summarize
from benchmarks.plotting import colours, lines, number, panels, save, times
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target
from benchmarks.workloads import Item, Workload, uniform, workload
from common.models.config import ModelConfig
from common.models.hub import model_folder
from common.roofline import decode_work, layer_parameters
from common.text.tokenizer import Tokenizer
from experts.layer import Experts
from experts.routing import route
from forward.attention import Attention, RecomputeAttention
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import PagedEngine
from quant.calibrate import TEXT

PHASE = "16_experts"
BEFORE = "13_serving"
DENSE = "dense of equal activity"
SHAPE = "random:qwen3-30b-a3b"
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACTIVE = (4, 5, 6, 7, 8)
READ, WINDOW = 2048, 512
"""Tokens of the text that quality is measured on, and how many are read from nothing."""


def run(options: BenchOptions) -> Evidence:
    """Speed first, then what is counted."""
    if options.device.type == "cuda":
        runs = on_gpu(replace(options, model=options.model or SHAPE))
    else:
        runs = on_cpu(replace(options, model=options.model or "smollm2"))
    return collect(
        PHASE,
        runs + counted(),
        options.device,
        ceilings(options.device, options.dtype).to_json(),
    )


# A real model, cut.


def on_cpu(options: BenchOptions) -> list[Run]:
    """Speed, quality and load of a dense model and its experts."""
    model = load_target(options)
    tokenizer = Tokenizer(model_folder(options.model or ""))
    sizes: dict[str, Any] = {
        "max_rows": 16,
        "max_len": 512,
        "drafter": "none",
        "tokenizer": tokenizer,
    }

    def cut(active: int) -> PagedEngine:
        return experts.load(model, active_experts=active, **sizes)

    engines: dict[tuple[str, int | None], PagedEngine] = {
        (BEFORE, None): serving.load(model, **sizes)
    }
    engines |= {(PHASE, active): cut(active) for active in (4, 8)}
    runs = []
    for batch, output in ((1, 32), (16, 8)):
        work = uniform(
            f"decode-{batch}x32+{output}", batch, 32, 4 if options.quick else output
        )
        runs += timed(engines, work, options, {"batch": batch})
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8"))[
        : WINDOW if options.quick else READ
    ]
    work = Workload(f"news-from-nowhere-{len(text)}", (Item(tuple(text), 1),))
    ways = ACTIVE[:1] if options.quick else ACTIVE
    made: Iterator[tuple[str, Model, Attention]] = (
        (str(active), cut(active).runner.model, RecomputeAttention()) for active in ways
    )
    for name, found in compare(model, made, text, WINDOW).items():
        active = {} if name == "reference" else {"active_experts": int(name)}
        numbers = {
            "kl": found.kl,
            "perplexity": found.perplexity,
            "agreement": found.agreement,
        }
        runs.append(
            fact(PHASE if active else BEFORE, work, numbers, options.model or "", active)
        )
    return runs + loads(cut(4).runner.model, text, work, options.model or "")


def timed(
    engines: dict[tuple[str, int | None], PagedEngine],
    work: Workload,
    options: BenchOptions,
    facts: dict[str, Any],
) -> list[Run]:
    """Every engine on one workload, in alternating order, after a few tokens of the same requests."""
    named = {str(name): engine for name, engine in engines.items()}
    kept = alternate_engines(named, work, device=options.device, repeats=options.repeats)
    top, runs = ceilings(options.device, options.dtype), []
    for name, engine in engines.items():
        variant, active = name
        config = engine.runner.model.config
        more = facts if active is None else facts | {"active_experts": active}
        batch = min(len(work.items), engine.scheduler.rows.count)
        runs.append(
            summarize_generation(
                variant, work, kept[str(name)], model=options.model or "", config=config,
                dtype=options.dtype, top=top, batch=batch, options=more,
            )
        )  # fmt: skip
    return runs


def fact(
    variant: str,
    work: Workload,
    numbers: Sample,
    model: str,
    options: dict[str, Any],
    dtype: torch.dtype = torch.float32,
) -> Run:
    """Something that was counted, with no clock."""
    made = summarize(
        variant, work, Samples(kept=[numbers]), model=model, dtype=dtype, options=options
    )
    return replace(
        made, noise=None, metrics={name: Metric((value,)) for name, value in numbers.items()}
    )


@torch.inference_mode()
def loads(model: Model, text: list[int], work: Workload, name: str) -> list[Run]:
    """What share of a text's tokens each expert of a layer has, and how many experts a step reads."""
    chosen: list[Tensor] = []

    def note(layer: torch.nn.Module, given: tuple[Tensor]) -> None:
        assert isinstance(layer, Experts)
        chosen.append(layer.choose(given[0].flatten(0, -2))[1])

    layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    ids = torch.tensor(text[: len(text) // WINDOW * WINDOW]).view(-1, WINDOW)
    model(ids, torch.arange(WINDOW).expand(ids.shape), RecomputeAttention())
    for hook in hooks:
        hook.remove()
    assert model.config.experts is not None
    number = model.config.experts.count
    runs = []
    for layer, found in enumerate(chosen):
        shares = torch.bincount(found.flatten(), minlength=number) / len(found)
        runs.append(
            fact(
                PHASE,
                work,
                {f"expert_{e}": float(s) for e, s in enumerate(shares)},
                name,
                {"layer": layer},
            )
        )
    for batch in BATCHES[:6]:
        read = sum(distinct(found, batch) for found in chosen) / len(chosen)
        runs.append(
            fact(
                PHASE,
                work,
                {"experts_read": read},
                name,
                {"batch": batch, "active_experts": 4},
            )
        )
    return runs


def distinct(chosen: Tensor, batch: int) -> float:
    """Return how many experts `batch` tokens from all over a text choose together, on average."""
    steps = len(chosen) // batch
    return sum(different(chosen[step::steps][:batch]) for step in range(steps)) / steps


def different(chosen: Tensor) -> int:
    """Return how many experts are among some choices."""
    return int((torch.bincount(chosen.flatten()) > 0).sum())


# Bytes, counted for a shape.


def as_dense(config: ModelConfig) -> ModelConfig:
    """Return the dense model that multiplies a token with as many weights."""
    facts = config.experts
    assert facts is not None
    return replace(
        config,
        family="qwen3",
        experts=None,
        intermediate_size=facts.top_k * facts.intermediate_size,
    )


def counted() -> list[Run]:
    """Bytes of weights that a decode step reads for each of its tokens, in bfloat16, at even routing."""
    config = SHAPES[SHAPE.removeprefix("random:")]
    generator = torch.Generator().manual_seed(0)
    runs = []
    facts = config.experts
    assert facts is not None
    dense = as_dense(config)
    head = config.vocab_size * config.hidden_size
    for batch in BATCHES:
        work = uniform(f"step-of-{batch}", batch, 1, 1)
        logits = (
            torch.randn(batch, facts.count, generator=generator)
            for _ in range(config.num_layers)
        )
        read = (
            sum(different(route(each, facts.top_k, True)[1]) for each in logits)
            / config.num_layers
        )
        weights = {
            DENSE: decode_work(dense, torch.bfloat16, batch, 0).weight_bytes,
            PHASE: 2 * (layer_parameters(config, read) + head),
        }
        for variant, size in weights.items():
            sample = {"step_gigabytes": size / 1e9, "token_gigabytes": size / batch / 1e9}
            if variant == PHASE:
                sample["experts_read"] = read
            runs.append(fact(variant, work, sample, SHAPE, {"batch": batch}, torch.bfloat16))
    return runs


# A large model, on a GPU.


def on_gpu(options: BenchOptions) -> list[Run]:
    """The published workloads, the dense model first: each fills a good part of the memory."""
    name = (options.model or "").removeprefix("random:")
    sizes = {"max_rows": 256, "max_len": 4096, "step_tokens": 16_384, "drafter": "none"}
    runs = []
    for variant in (DENSE, PHASE):
        if variant == DENSE:
            dense = random_model(
                as_dense(SHAPES[name]), device=options.device, dtype=options.dtype
            )
            engine = engine_of("13", dense, **sizes)
            del dense
        else:  # by its name, so that no layer's experts are there twice
            engine = engine_of("16", options.model, device="cuda", dtype="bfloat16", **sizes)
        for load in ("single-512", "offline-256", "prefill-64x1024"):
            work = workload(load)
            if options.quick:
                work = work.first(8, tokens=8)
            runs += timed({(variant, None): engine}, work, options, {})
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    return runs


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """Left: bytes a token over the batch. Middle: chosen experts by layer. Right: what fewer cost."""
    layers = [run for run in evidence.runs if "layer" in run.options]
    figure, axes = panels(3 if layers else 1, height=3.4)
    steps = [run for run in evidence.runs if "token_gigabytes" in run.metrics]
    lines(steps, "batch", "token_gigabytes", axes=axes[0], log_x=True, log_y=True, phase=PHASE)
    most = {
        batch: evidence.one(PHASE, f"step-of-{batch}").median("token_gigabytes")
        / evidence.one(DENSE, f"step-of-{batch}").median("token_gigabytes")
        for batch in (1, 32, 256)
    }
    said = ", ".join(f"{times(factor)} at {batch}" for batch, factor in most.items())
    axes[0].set_title(f"Bytes a token against dense of equal activity: {said}")
    axes[0].set_ylabel("weights read for each token (GB)")
    if layers:
        _heat(layers, axes[1])
        _quality(evidence, axes[2])
    save(figure, out, evidence)


def _heat(layers: list[Run], axes: Axes) -> None:
    names = list(layers[0].metrics)
    grid = [[run.median(name) for name in names] for run in layers]
    axes.pcolormesh(grid, cmap="viridis", vmin=0.0, vmax=1.0)
    axes.invert_yaxis()
    axes.set_xticks(
        [place + 0.5 for place in range(len(names))],
        [str(place) for place in range(len(names))],
    )
    axes.set_xlabel("expert (dark: chosen by no token, yellow: by all)")
    axes.set_ylabel("layer")
    axes.grid(visible=False)
    largest = max(max(row) for row in grid)
    axes.set_title(
        f"{layers[0].model}, cut: the most loaded expert has {largest:.0%} of a text's tokens"
    )


def _quality(evidence: Evidence, axes: Axes) -> None:
    found = [run for run in evidence.find(PHASE) if "kl" in run.metrics]
    places = [int(run.options["active_experts"]) for run in found]
    axes.bar(places, [run.median("agreement") for run in found], color=colours([PHASE])[PHASE])
    for place, run in zip(places, found, strict=True):
        text = f"perplexity\n{number(run.median('perplexity'))}"
        axes.annotate(
            text, (place, run.median("agreement")), ha="center", va="bottom", fontsize=7
        )
    axes.set_ylim(0, 1.15)
    axes.set_xticks(places)
    axes.set_xlabel("active experts, of 8")
    axes.set_ylabel("same next token as the dense model")
    few, all_of_them = found[0], found[-1]
    axes.set_title(
        f"{places[0]} of 8 agree with the dense model on {few.median('agreement'):.0%}, "
        f"{places[-1]} of 8 on {all_of_them.median('agreement'):.0%}"
    )
