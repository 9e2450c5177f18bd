"""Which models a phase is measured with, unless the person asked for one."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.evidence import BenchOptions
from benchmarks.workloads import LEAST_VOCAB
from common.errors import UserError
from forward import Model, load_model


def targets(options: BenchOptions, *, published: bool = False) -> list[BenchOptions]:
    """The real default model on a CPU; on a GPU the shape of Qwen3-0.6B with random weights.

    published: on a GPU also GPT-2 in float32, the model of the published tables that phases 01 to 03 are
        compared with.
    """
    if options.model is not None:
        return [options]
    if options.device.type != "cuda":
        return [replace(options, model="smollm2")]
    gpt2 = replace(options, model="random:gpt2", dtype=torch.float32)
    return [gpt2] * published + [replace(options, model="random:qwen3-0.6b")]


def load_target(options: BenchOptions) -> Model:
    """The model of one target, on its device and in its dtype.

    Raises:
        UserError: its vocabulary is too small for the workloads, which are the same for every model.
    """
    name, dtype = options.model or "smollm2", str(options.dtype).removeprefix("torch.")
    model = load_model(name, device=str(options.device), dtype=dtype)
    if model.config.vocab_size < LEAST_VOCAB:
        raise UserError(
            f"--model is {name!r} with {model.config.vocab_size} token ids, "
            f"but the workloads of a benchmark need at least {LEAST_VOCAB}"
        )
    return model
