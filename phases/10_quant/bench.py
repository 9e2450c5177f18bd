"""Phase 10 against phase 09: fewer bits, how much faster, and what they cost in quality.

Speed is measured on workloads, quality on the first part of the text that `benchmarks/texts/README.md` names.
GPTQ and AWQ are calibrated on its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cuda_graphs
import quant
from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.measure import Sample, Samples, alternate, summarize, time_generation
from benchmarks.plotting import COLOURS, GREY, bars, number, panels, save
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target
from benchmarks.workloads import Item, Workload, uniform, workload
from common.models.hub import model_folder
from common.text.tokenizer import Tokenizer
from forward import Model, load_model
from forward.attention import Attention, RecomputeAttention
from forward.surgery import clone
from paged_cache import PagedEngine
from phases import ROOT
from quant.calibrate import samples
from quant.feature import HEADS
from quant.formats import SCHEMES
from quant.kv import KV_DTYPES, kv_format
from quant.loading import Quantize
from quant.methods import quantize_model
from quant.quality import StoredAttention, compare

PHASE, BEFORE = "10_quant", "09_cuda_graphs"
SCHEMES_ON_CPU = ("int8", "w8a8", "int4")
SCHEMES_ON_GPU = ("fp8", "int4")
TEXT = ROOT / "benchmarks" / "texts" / "news_from_nowhere.txt"
TOKENS = 20_480
"""Of the text that quality is measured on."""
PIECES, LENGTH = 16, 512
"""Of the text that methods are calibrated on."""
WAYS: dict[str, tuple[str, str, int]] = {
    "fp8": ("fp8", "rtn", 0),
    "fp8-block": ("fp8-block", "rtn", 0),
    "fp8 gptq": ("fp8", "gptq", 0),
    "int8": ("int8", "rtn", 0),
    "w8a8": ("w8a8", "rtn", 0),
    "int4": ("int4", "rtn", 128),
    "int4 gptq": ("int4", "gptq", 128),
    "int4 awq": ("int4", "awq", 128),
    "int4/32": ("int4", "rtn", 32),
}
"""Name of a variant of the model -> scheme, method, size of groups."""
QUALITY_MODELS = ("smollm2", "gemma3-270m")


def run(options: BenchOptions) -> Evidence:
    """On a CPU speed and quality of the small models; on a GPU the speed of large ones."""
    runs: list[Run] = []
    if options.device.type == "cuda":
        names = [options.model] if options.model else ["random:qwen3-0.6b", "random:qwen3-8b"]
        for name in names:
            runs += on_gpu(replace(options, model=name))
            torch.cuda.empty_cache()
    else:
        runs += on_cpu(replace(options, model=options.model or "smollm2"))
        for name in [options.model] if options.model else QUALITY_MODELS:
            runs += quality(replace(options, model=name))
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


# Speed.


def on_cpu(options: BenchOptions) -> list[Run]:
    """One request, and 16 at a time."""
    model = load_target(options)
    engines = {BEFORE: cuda_graphs.load(model, max_rows=16, max_len=512)}
    for scheme in SCHEMES_ON_CPU:
        engines[f"{PHASE} {scheme}"] = quant.load(model, quantization=scheme, max_rows=16, max_len=512)
    runs = []
    for batch, output in ((1, 48), (16, 16)):
        work = uniform(f"decode-{batch}x32+{output}", batch, 32, 4 if options.quick else output)
        runs += timed(engines, work, options, {"batch": batch})
    long = uniform("prompt-1x384", 1, 64 if options.quick else 384, 1)
    return runs + timed(engines, long, options, {"batch": 1})


def on_gpu(options: BenchOptions) -> list[Run]:
    """The published workloads."""
    model = load_target(options)
    sizes = {"max_rows": 256, "max_len": 4096, "step_tokens": 16_384}
    runs = []
    for name in ("single-512", "offline-256", "prefill-64x1024"):
        work = workload(name)
        if options.quick:
            items = tuple(Item(item.prompt, min(item.max_tokens, 8)) for item in work.items[:8])
            work = replace(work, name=f"{name}[:8]", items=items)
        ways: dict[str, dict[str, Any] | None] = {BEFORE: None}
        ways |= {f"{PHASE} {scheme}": {"quantization": scheme} for scheme in SCHEMES_ON_GPU}
        ways[f"{PHASE} fp8, fp8 keys"] = {"quantization": "fp8", "kv_cache": "fp8"}
        for variant, way in ways.items():
            runs += timed({variant: _engine(model, way, sizes)}, work, options, {})
            torch.cuda.empty_cache()
    return runs


def _engine(model: Model, way: dict[str, Any] | None, sizes: dict[str, int]) -> PagedEngine:
    if way is None:
        return cuda_graphs.load(model, **sizes)
    return quant.load(model, **way, **sizes)


def timed(
    engines: dict[str, PagedEngine], work: Workload, options: BenchOptions, facts: dict[str, Any]
) -> list[Run]:
    """Every engine on one workload, in alternating order."""

    def sample(engine: PagedEngine, repeat: int) -> Sample:
        found = time_generation(engine, work.cold(repeat), options.device)
        found["weight_bytes"] = float(engine.ledger.weights)
        return found

    kept = alternate(
        {name: partial(sample, engine) for name, engine in engines.items()}, options.repeats, log=print
    )
    return [
        summarize(name, work, found, model=options.model or "", dtype=options.dtype, options=facts)
        for name, found in kept.items()
    ]


# Quality.


def quality(options: BenchOptions) -> list[Run]:
    """KL divergence, perplexity and agreement with the model in float32, for every way to fewer bits."""
    name = options.model or "smollm2"
    folder = model_folder(name)
    reference = load_model(str(folder), device=str(options.device), dtype="float32")
    tokens = Tokenizer(folder).encode(TEXT.read_text(encoding="utf-8"))
    count = 1024 if options.quick else TOKENS
    texts = samples(tokens[count:], 2 if options.quick else PIECES, LENGTH)
    work = Workload(f"news-from-nowhere-{count}", (Item(tuple(tokens[:count]), 1),))
    others: dict[str, tuple[Model, Attention]] = {}
    for way, (scheme, method, group) in WAYS.items():
        print(f"{name}: {way}", flush=True)
        model, wanted = clone(reference), SCHEMES[scheme]
        quantize_model(model, wanted.with_group(group) if group else wanted, method, texts)  # type: ignore[arg-type]
        head = SCHEMES[HEADS.get(scheme, scheme)]  # as the engine has it whose speed is measured
        others[way] = (Quantize(None, head).finish(model), RecomputeAttention())
    for kind in KV_DTYPES:
        others[f"keys {kind}"] = (reference, StoredAttention(kv_format(reference, kind)))
    runs = []
    for way, found in compare(reference, others, tokens[:count]).items():
        numbers = {"kl": found.kl, "perplexity": found.perplexity, "agreement": found.agreement}
        made = summarize(
            f"{PHASE} {way}" if way in others else BEFORE,
            work,
            Samples(kept=[numbers]),
            model=name,
            dtype=torch.float32,
            options={"tokens": found.tokens},
        )
        runs.append(replace(made, noise=None, metrics={key: Metric((v,)) for key, v in numbers.items()}))
    return runs


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """Speed in bars; and where there is quality, what each way costs."""
    works = list(dict.fromkeys(run.workload for run in evidence.runs if "output_tokens_per_s" in run.metrics))
    speeds = [(model, work) for model in models(evidence) for work in works if _speed(evidence, model, work)]
    tests = [model for model in models(evidence) if _quality(evidence, model)]
    traded = _traded(evidence)
    figure, axes = panels(len(speeds) + len(tests) + bool(traded), rows=2)
    for place, (model, work) in zip(axes, speeds, strict=False):
        metric = "prompt_tokens_per_s" if work.startswith("pr") else "output_tokens_per_s"
        bars(_speed(evidence, model, work), metric, axes=place, gain=False, colour=colour, label=label)
        place.set_title(f"{model}: {work}")
    for place, model in zip(axes[len(speeds) :], tests, strict=False):
        found = _quality(evidence, model)
        for row, run in enumerate(found):
            place.barh(row, run.median("kl"), height=0.62, color=colour(run), alpha=0.9)
            text = f" {run.median('kl'):.2g}, agrees {run.median('agreement'):.1%}"
            place.annotate(text, (run.median("kl"), row), fontsize=7, va="center")
        place.set_yticks(range(len(found)), [label(run) for run in found])
        place.invert_yaxis()
        place.set_xscale("log")
        place.set_xlim(right=place.get_xlim()[1] * 30)
        place.set_xlabel("KL divergence to float32 (nats a token)")
        place.set_title(f"{model}: {number(found[0].options['tokens'])} tokens")
    if traded:
        for name, speed, kl in traded:
            axes[-1].plot(speed, kl, "o", color=COLOURS[1 if "int4" in name else 0])
            axes[-1].annotate(f" {name}", (speed, kl), fontsize=7)
        axes[-1].set_yscale("log")
        axes[-1].margins(x=0.25)
        axes[-1].set_xlabel("output tokens per second, one request")
        axes[-1].set_ylabel("KL divergence")
        axes[-1].set_title("quality against speed")
    save(figure, out, evidence)


def _traded(evidence: Evidence) -> list[tuple[str, float, float]]:
    """Name, tokens a second of one request, and divergence, of each way that has both."""
    speeds = {
        label(run): run.median("output_tokens_per_s")
        for run in evidence.find(batch=1)
        if run.workload.startswith("decode")
    }
    found = []
    for run in _quality(evidence, "smollm2"):
        scheme = WAYS.get(label(run), ("", "", 0))[0]
        if scheme in speeds and "/" not in label(run):
            found.append((label(run), speeds[scheme], run.median("kl")))
    return found


def models(evidence: Evidence) -> list[str]:
    """In the order of the file."""
    return list(dict.fromkeys(run.model for run in evidence.runs))


def _speed(evidence: Evidence, model: str, work: str) -> Sequence[Run]:
    found = evidence.find(model=model, workload=work)
    return [run for run in found if "output_tokens_per_s" in run.metrics]


def _quality(evidence: Evidence, model: str) -> list[Run]:
    found = [run for run in evidence.find(model=model) if run.metrics.get("kl")]
    return [run for run in found if run.median("kl") > 0]


def label(run: Run) -> str:
    """A variant's name, short."""
    return run.variant.replace(f"{PHASE} ", "")


def colour(run: Run) -> str:
    """Four bits, eight bits, and phase 09."""
    if run.variant == BEFORE:
        return GREY
    return COLOURS[1 if "int4" in run.variant else 2 if "keys" in run.variant else 0]
