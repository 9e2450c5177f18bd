"""From logits to tokens: the sampler in torch, its kernels, and the argmax alone.

Workload `sampling-kernels`: random logits `[batch, vocab]` to tokens. `bandwidth_fraction` is the share of
the read ceiling at which the logits are read, once. The vocabulary is Qwen3's; times are of graph replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from torch import Tensor

from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.kernels.harness import graph_seconds, read_once
from benchmarks.model_work import Ceilings
from benchmarks.plotting import MARKERS, colours, lines, log_axis, panels, save, tick
from benchmarks.roofline import ceilings
from common.errors import UserError
from common.sampling.params import SamplingParams
from common.sampling.sampler import Sampler
from cuda_graphs.sampling import DrawSettings, argmax_rows, draw_rows

NAME, PHASE = "sampling", "06_triton_paged_attention"
WORKLOAD = "sampling-kernels"
BATCHES = (1, 16, 64, 256)
VOCAB = 151_936
SETS = 3
"""Logits that take turns, so that at large batches no cache holds them."""

WAYS = ("argmax_rows", "draw_rows", "torch argmax", "torch draw")
SamplerBackend = Callable[[Tensor], Tensor]


def run(options: BenchOptions) -> Evidence:
    """Every way of choosing at every batch size; that kernels and torch agree first."""
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but kernels are timed on 'cuda' only"
        )
    top = ceilings(options.device, options.dtype)
    batches = BATCHES[:1] if options.quick else BATCHES
    runs = [run for batch in batches for run in _at(batch, options, top)]
    return collect(NAME, runs, options.device, top.to_json())


def _at(batch: int, options: BenchOptions, top: Ceilings) -> Iterator[Run]:
    made = torch.Generator().manual_seed(batch)
    sets = [
        (3 * torch.randn(batch, VOCAB, generator=made)).to(options.device, options.dtype)
        for _ in range(SETS)
    ]
    choices = choosers(batch, options.device)
    # Of draws a near tie may go the other way.
    for one, other, most in (
        ("torch draw", "draw_rows", 1),
        ("torch argmax", "argmax_rows", 0),
    ):
        differ = int((choices[one](sets[0]) != choices[other](sets[0])).sum())
        if differ > most:
            raise UserError(
                f"batch is {batch}, and {one} and {other} choose {differ} different tokens"
            )
    work = batch * VOCAB * options.dtype.itemsize
    for variant, choose in choices.items():
        calls = [partial(choose, x) for x in sets]
        samples = graph_seconds(calls, repeats=3 if options.quick else 9)
        print(f"{batch} x {VOCAB} {variant}: {sorted(samples)[1] * 1e6:.1f} us", flush=True)
        yield read_once(
            variant,
            WORKLOAD,
            samples,
            work,
            model="none",
            dtype=options.dtype,
            top=top,
            options={"batch": batch, "vocab": VOCAB},
        )


def choosers(batch: int, device: torch.device) -> dict[str, SamplerBackend]:
    """Ways from logits `[batch, VOCAB]` to tokens `[batch]`; every row has temperature 0.8."""
    sampler = Sampler(batch, VOCAB, device, seed=0)
    host = list(range(batch))
    for row in host:
        sampler.set_row(row, SamplingParams(temperature=0.8, seed=row))
    plan = sampler.plan(host).for_any_rows()
    rows, steps = torch.arange(batch, device=device), torch.full((batch,), 7, device=device)
    settings = DrawSettings(rows, steps, sampler.floats, sampler.ints)
    return {
        "torch draw": lambda x: sampler.sample(x.float(), rows, host, steps, plan).tokens,
        "torch argmax": lambda x: x.argmax(1),
        "draw_rows": lambda x: draw_rows(x, settings),
        "argmax_rows": argmax_rows,
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
