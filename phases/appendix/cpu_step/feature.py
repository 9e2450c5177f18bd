"""The step in one call as a feature of an engine; it is compiled once for this processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from common.console import err
from common.errors import UserError
from common.paths import cache_home
from paged_cache import Feature, PagedRunner, Parts
from paged_cache.attention import TorchPagedAttention

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC", "-x", "c++")


@dataclass(frozen=True)
class CpuStep(Feature):
    """Decode steps of few requests are one call of compiled C++."""

    name: ClassVar[str] = "cpu_step"
    phase: ClassVar[int] = 9

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On a CPU with registers of 16 numbers, around PyTorch's layers."""
        wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
        return device.type == "cpu" and wide and others.get("kernels") is None

    def install(self, parts: Parts) -> None:
        """Meet the engine when its layers are what they will be."""
        if parts.model.device.type != "cpu":
            raise UserError(f"cpu_step is True, but must be False on {parts.model.device.type}")
        parts.stages["connect"].append(connect)


def connect(parts: Parts) -> None:
    """Add the plan, where the engine's parts are those that the step computes."""
    from phases.appendix.cpu_step.plan import OneCall, Unsupported

    runner, compiled = parts.engine.runner, library()
    assert isinstance(runner, PagedRunner)
    if compiled is not None and type(runner.attention) is TorchPagedAttention:
        with suppress(Unsupported):
            runner.plans = [OneCall(compiled, runner), *runner.plans]


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled step; None, and a line on standard error, where it cannot be had.

    Its name in the cache folder says source, compiler, and what `native` means to it here.
    """
    command = [os.environ.get("CXX", "g++"), *FLAGS]
    try:
        native = subprocess.run([*command, "-E", "-###", os.devnull], capture_output=True, check=True).stderr
        name = hashlib.sha256(SOURCE.read_bytes() + native).hexdigest()[:16]
        path = cache_home() / "compiled" / f"step-{name}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, SOURCE, "-o", unfinished], capture_output=True, check=True)
            unfinished.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        err.print(f"decode steps stay hundreds of calls of PyTorch: {error}", markup=False, soft_wrap=True)
        return None
