"""From logits to tokens: the sampler in torch, its kernels, and the argmax alone.

Workload `sampling-kernels`: random logits `[batch, vocab]` to tokens. `bandwidth_fraction` is the share of
the read ceiling at which the logits are read, once. On CUDA the vocabulary is Qwen3's, logits are in the
dtype asked for, and times are of graph replays; on a CPU it is SmolLM2's, in float32, by torch alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.evidence import BenchOptions, Evidence, Metric, Roofline, Run, collect
from benchmarks.kernels.harness import graph_seconds
from benchmarks.measure import alternate
from benchmarks.roofline import Ceilings, ceilings
from common.errors import UserError

NAME = "sampling"
WORKLOAD = "sampling-kernels"
BATCHES = {"cuda": (1, 16, 64, 256), "cpu": (1, 16)}
VOCAB = {"cuda": 151_936, "cpu": 49_152}
SETS = 3
"""Logits that take turns, so that at large batches no cache holds them."""

Chooser = Callable[[Tensor], Tensor]


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


def _at(batch: int, vocab: int, dtype: torch.dtype, options: BenchOptions, top: Ceilings) -> Iterator[Run]:
    made = torch.Generator(options.device).manual_seed(batch)
    shape = {"device": options.device, "generator": made}
    sets = [torch.randn(batch, vocab, **shape).mul_(3).to(dtype) for _ in range(SETS)]  # type: ignore[call-overload]
    choices = choosers(batch, vocab, options.device)
    work = batch * vocab * dtype.itemsize
    for variant, samples in _seconds(choices, sets, options).items():
        middle = Metric(samples).median
        print(
            f"{batch} x {vocab} {variant}: {middle * 1e6:.1f} us, {work / middle / 1e9:.0f} GB/s", flush=True
        )
        yield Run(
            variant=variant,
            workload=WORKLOAD,
            workload_sha256=hashlib.sha256(repr((WORKLOAD, batch, vocab)).encode()).hexdigest(),
            model="none",
            weights="random",
            dtype=str(dtype).removeprefix("torch."),
            options={"batch": batch, "vocab": vocab},
            metrics={
                "seconds": Metric(samples),
                "bandwidth_fraction": Metric(tuple(work / s / top.read_bytes_per_s for s in samples)),
            },
            roofline=Roofline(work / top.read_bytes_per_s, work / top.read_bytes_per_s / middle),
        )


def _seconds(
    choices: dict[str, Chooser], sets: list[Tensor], options: BenchOptions
) -> dict[str, tuple[float, ...]]:
    """Samples of the time of one choice, by variant."""
    if options.device.type == "cuda":
        for pair in (("torch draw", "draw_rows"), ("torch argmax", "argmax_rows")):
            wanted, got = (choices[variant](sets[0]) for variant in pair)
            if int((wanted != got).sum()) > (pair[0] == "torch draw"):  # one near tie may go the other way
                raise UserError(f"batch is {len(sets[0])}, and {pair} choose different tokens")
        repeats = 3 if options.quick else 9
        return {
            variant: tuple(graph_seconds([partial(choose, x) for x in sets], repeats=repeats))
            for variant, choose in choices.items()
        }

    def sample(choose: Chooser, repeat: int) -> dict[str, float]:
        del repeat
        seconds = _timed(choose, sets)
        return {"seconds": seconds}

    kept = alternate(
        {variant: partial(sample, choose) for variant, choose in choices.items()}, repeats=options.repeats
    )
    return {variant: samples.metrics["seconds"] for variant, samples in kept.items()}
