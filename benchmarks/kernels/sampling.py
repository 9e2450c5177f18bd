"""From logits to tokens: the sampler in torch, its kernels, and the argmax alone.

Workload `sampling-kernels`: random logits `[batch, vocab]` to tokens. `bandwidth_fraction` is the share of
the read ceiling at which the logits are read, once. On CUDA the vocabulary is Qwen3's, logits are in the
dtype asked for, and times are of graph replays; on a CPU it is SmolLM2's, in float32, by torch alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.kernels.harness import graph_seconds, read_once
from benchmarks.measure import alternate
from benchmarks.plotting import MARKERS, colours, lines, log_axis, panels, save, tick
from benchmarks.roofline import ceilings
from common.errors import UserError
from common.roofline import Ceilings
from common.sampling.params import SamplingParams
from common.sampling.sampler import Sampler
from cuda_graphs.sampling import DrawSettings, argmax_rows, draw_rows

NAME, PHASE = "sampling", "06_triton_paged_attention"
WORKLOAD = "sampling-kernels"
BATCHES = {"cuda": (1, 16, 64, 256), "cpu": (1, 16)}
VOCAB = {"cuda": 151_936, "cpu": 49_152}
SETS = 3
"""Logits that take turns, so that at large batches no cache holds them."""

WAYS = ("argmax_rows", "draw_rows", "torch argmax", "torch draw")
SamplerBackend = Callable[[Tensor], Tensor]


def run(options: BenchOptions) -> Evidence:
    """Every way of choosing at every batch size; that kernels and torch agree first."""
    kind = options.device.type
    if kind not in VOCAB:
        raise UserError(f"device is {kind!r}, but must be one of {', '.join(sorted(VOCAB))}")
    dtype = options.dtype if kind == "cuda" else torch.float32
    top = ceilings(options.device, dtype)
    batches = BATCHES[kind][:1] if options.quick else BATCHES[kind]
    runs = [run for batch in batches for run in _at(batch, VOCAB[kind], dtype, options, top)]
    return collect(NAME, runs, options.device, top.to_json())


def _at(
    batch: int, vocab: int, dtype: torch.dtype, options: BenchOptions, top: Ceilings
) -> Iterator[Run]:
    made = torch.Generator().manual_seed(batch)
    sets = [
        (3 * torch.randn(batch, vocab, generator=made)).to(options.device, dtype)
        for _ in range(SETS)
    ]
    choices = choosers(batch, vocab, options.device)
    work = batch * vocab * dtype.itemsize
    measure = _on_cuda if options.device.type == "cuda" else _on_cpu
    for variant, (samples, noise) in measure(choices, sets, options).items():
        middle = Metric(samples).median
        print(
            f"{batch} x {vocab} {variant}: {middle * 1e6:.1f} us, {work / middle / 1e9:.0f} GB/s",
            flush=True,
        )
        yield read_once(
            variant,
            WORKLOAD,
            samples,
            work,
            model="none",
            dtype=dtype,
            top=top,
            options={"batch": batch, "vocab": vocab},
            noise=noise,
        )


def choosers(batch: int, vocab: int, device: torch.device) -> dict[str, SamplerBackend]:
    """Ways from logits `[batch, vocab]` to tokens `[batch]`; every row has temperature 0.8."""
    sampler = Sampler(batch, vocab, device, seed=0)
    host = list(range(batch))
    for row in host:
        sampler.set_row(row, SamplingParams(temperature=0.8, seed=row))
    plan = sampler.plan(host).for_any_rows() if device.type == "cuda" else sampler.plan(host)
    rows, steps = torch.arange(batch, device=device), torch.full((batch,), 7, device=device)
    choices: dict[str, SamplerBackend] = {
        "torch draw": lambda x: sampler.sample(x.float(), rows, host, steps, plan).tokens,
        "torch argmax": lambda x: x.argmax(1),
    }
    if device.type == "cuda":
        choices["draw_rows"] = lambda x: draw_rows(
            x, DrawSettings(rows, steps, sampler.floats, sampler.ints)
        )
        choices["argmax_rows"] = argmax_rows
    return choices


Timed = dict[str, tuple[tuple[float, ...], dict[str, float] | None]]
"""Seconds of one choice, sample by sample, and how idle the machine was, by variant."""


def _on_cuda(
    choices: dict[str, SamplerBackend], sets: list[Tensor], options: BenchOptions
) -> Timed:
    for one, other, may_differ in (
        ("torch draw", "draw_rows", 1),
        ("torch argmax", "argmax_rows", 0),
    ):
        differ = int((choices[one](sets[0]) != choices[other](sets[0])).sum())
        if differ > may_differ:  # a near tie may go the other way
            raise UserError(
                f"batch is {len(sets[0])}, and {one} and {other} choose {differ} different tokens"
            )
    repeats = 3 if options.quick else 9
    return {
        variant: (
            tuple(graph_seconds([partial(choose, x) for x in sets], repeats=repeats)),
            None,
        )
        for variant, choose in choices.items()
    }


def _on_cpu(
    choices: dict[str, SamplerBackend], sets: list[Tensor], options: BenchOptions
) -> Timed:
    least = (
        0.02 if options.quick else 0.5
    )  # seconds a sample: enough to see whether others disturb it

    def sample(choose: SamplerBackend, _: int) -> dict[str, float]:
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < least:
            choose(sets[count % SETS])
            count += 1
        return {"seconds": (time.perf_counter() - begun) / count}

    measured = alternate(
        {v: partial(sample, choose) for v, choose in choices.items()}, options.repeats
    )
    return {
        variant: (tuple(one["seconds"] for one in samples.kept), samples.noise())
        for variant, samples in measured.items()
    }


def draw(evidence: Evidence, out: Path) -> None:
    """Time over the batch, and the share of the bandwidth."""
    figure, (left, right) = panels(2)
    choose_times(evidence.runs, left)
    ordered = sorted(evidence.runs, key=lambda run: WAYS.index(run.variant))
    lines(ordered, "batch", "bandwidth_fraction", axes=right, log_x=True, phase=PHASE)
    right.set_xlabel("rows")
    most = max(evidence.runs, key=lambda run: run.median("bandwidth_fraction"))
    right.set_title(
        f"Reading the logits once: {most.median('bandwidth_fraction'):.0%} at most"
    )
    save(figure, out, evidence)


def choose_times(runs: Sequence[Run], axes: Axes) -> None:
    """Microseconds of each way of choosing tokens, over the number of rows."""
    shown = colours(WAYS, PHASE)
    times: dict[str, list[float]] = {}
    for variant, marker in zip(WAYS, MARKERS, strict=False):
        found = sorted(
            (run for run in runs if run.variant == variant),
            key=lambda run: run.options["batch"],
        )
        rows = [run.options["batch"] for run in found]
        times[variant] = [run.median("seconds") * 1e6 for run in found]
        axes.plot(rows, times[variant], color=shown[variant], marker=marker, label=variant)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows, [tick(count) for count in rows])
    log_axis(axes)
    axes.set_ylim(bottom=0.2)  # room for the legend below the lines
    gain = times["torch draw"][-1] / times["draw_rows"][-1]
    axes.set_title(f"Drawing {rows[-1]} tokens: {gain:.0f} times faster than torch")
    axes.set_xlabel("rows")
    axes.set_ylabel("µs")
    axes.legend(loc="lower right", ncols=2)
