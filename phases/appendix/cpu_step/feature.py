"""Decode steps of at most 16 requests as one call of `step.cpp`, without copies of weights or cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from ctypes import CDLL, c_int64
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from common.console import err
from continuous.runner import Forwarded
from continuous.work import Work
from paged_cache import EngineBuilder, Feature, PagedRunner, find
from paged_cache.attention import PagedBatch, TorchPagedAttention
from phases.appendix.cpu_step.build import load_library
from phases.appendix.cpu_step.operators import SIDE, Program
from triton_paged_attention import Kernels

CAPABLE = torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")
SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-x",
    "c++",
)
_by_row = attrgetter("row")
# Requests in such a step; PyTorch's products of matrices are the faster ones for more.
MOST = 16


def whole_tiles(count: int) -> int:
    """Return the rows of a workspace for `count` tokens: 1, or `count` rounded up to a multiple of `SIDE`."""
    return 1 if count == 1 else -(-count // SIDE) * SIDE


def call_step(
    call: Any,
    operators: Any,
    space: Tensor,
    count: int,
    positions: Tensor | None = None,
    tables: Tensor | None = None,
    half: bool = False,
) -> None:
    """Run a C array of operators over the first `count` rows of a workspace, which they change in place.

    call: the C function. operators: the array of `Operator`. space: `[rows, columns]` float32, the workspace.
    positions, tables: positions and block tables of the requests; None if no operator is attention.
    half: whether the KV cache has half precision.
    """
    addresses = [
        0 if tensor is None else tensor.data_ptr() for tensor in (space, positions, tables)
    ]
    columns = 0 if tables is None else tables.shape[1]
    sizes = [len(operators), count, space.shape[1], columns, half, torch.get_num_threads()]
    call(operators, *map(c_int64, [*addresses, *sizes]))


class OneCall:
    """An executor of decode steps in one call of C++: a model's `Program` over a workspace.

    Raises:
        NotImplementedError: the model has something that `step.cpp` does not compute.
    """

    order: ClassVar[int] = 0

    def __init__(self, library: CDLL, runner: PagedRunner) -> None:
        self.runner = runner
        self.call = library.run
        self.program = Program(runner.model, runner.attention.pool)

    def supports(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return True if a step has at most `MOST` requests that each compute and sample one token.

        None: another executor runs the step. works: the step's requests with the tokens that each computes.
        masked: whether a grammar masks the logits, which makes no difference here.
        """
        one_each = all(work.count == 1 == len(work.sampled_requests) for work in works)
        return True if one_each and len(works) <= MOST else None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Compute the hidden states and logits of a step, whose tokens the runner samples afterwards.

        works: the step's requests, one token each; they are returned in the order of their rows.
        ticket: what `supports` returned.
        """
        program, works = self.program, sorted(works, key=_by_row)
        self.runner.refresh(works)
        batch = cast(PagedBatch, self.runner.prepare(works))
        count, tables = len(works), batch.block_tables.contiguous()
        space = torch.zeros(whole_tiles(count), program.width)
        x = program.model.embed_tokens(batch.input_ids)
        scale = program.config.hidden_size**0.5 if program.gemma else 1
        space[:count, : x.shape[1]] = x * torch.tensor(scale, dtype=x.dtype)
        turns = [turn for rope in program.ropes for turn in rope(batch.positions)]
        joined = torch.cat(turns, -1)[:, 0]
        space[:count, program.rope : program.rope + joined.shape[-1]] = joined
        half = x.dtype == torch.bfloat16
        call_step(self.call, program.operators, space, count, batch.positions, tables, half)
        hidden = space[:count, program.h : program.h + x.shape[1]].to(x.dtype)
        return Forwarded(works, batch, hidden, logits=space[:count, program.logits :])


@dataclass(frozen=True)
class CpuStep(Feature):
    """Run decode steps of at most 16 requests as one call of compiled C++."""

    name = "cpu_step"
    phase = 9

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True on a CPU with AVX2 or AVX-512, unless `others` (those switched on) have Triton's."""
        return device.type == "cpu" and CAPABLE and find(others, Kernels) is None

    def install(self, builder: EngineBuilder) -> None:
        """Register the compiled step as an executor of decode steps, if the model is on the CPU.

        Models and caches that `step.cpp` cannot compute keep PyTorch's step.
        """
        if builder.model.device.type == "cpu":
            builder.executors[OneCall] = one_call


def one_call(runner: PagedRunner) -> OneCall | None:
    """Return the compiled step for a runner; None: without a compiler, or for a model it cannot compute."""
    compiled = library()
    if compiled is not None and type(runner.attention) is TorchPagedAttention:
        with suppress(NotImplementedError):
            return OneCall(compiled, runner)
    return None


def instructions() -> str:
    """Return the name of the vector instructions that compiled steps use here; "" without a compiler."""
    compiled = library()
    if compiled is None:
        return ""
    return {16: "AVX-512", 8: "AVX2"}.get(compiled.register_width(), "registers of 16 bytes")


@cache
def library() -> CDLL | None:
    """Return the compiled library; None, after a line on standard error, if it cannot be compiled."""
    command = [os.environ.get("CXX", "g++"), *FLAGS, *os.environ.get("CXXFLAGS", "").split()]
    try:
        return load_library(SOURCE, command)
    except (OSError, subprocess.SubprocessError) as error:
        err.print(
            f"decode steps stay hundreds of calls of PyTorch, and a GGUF file's weights are float32: {error}",
            markup=False,
            soft_wrap=True,
        )
        return None
