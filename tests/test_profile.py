"""`ladder profile`: the trace it writes, and what it reads out of one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.profile_command import summary
from benchmarks.trace import BETWEEN, read_trace, step_tables
from phases import PHASES
from phases.registry import KERNELS

SIZE = ["--model", "random:tiny", "--batch", "2", "--context", "6", "--steps", "2"]


# Of the others, `make test` tries those whose engine is made or stepped in another way.
QUICK = {4, 9, 11}
PROFILED = [
    one if one.number in QUICK else pytest.param(one, marks=pytest.mark.long)
    for one in PHASES
    if one.number >= 4
]


@pytest.mark.parametrize("phase", PROFILED, ids=lambda phase: phase.name)
@pytest.mark.slow
def test_every_phase_is_profiled(cli: Any, tmp_path: Path, phase: Any) -> None:
    if phase.number == KERNELS and torch.cuda.is_available():
        pytest.skip("kernels run natively here")
    code, out, _ = cli(
        "profile", str(phase.number), *SIZE, "--device", "cpu", "--output", str(tmp_path)
    )
    assert code == 0
    path = tmp_path / f"{phase.name}.json.gz"
    assert out.splitlines()[-1] == str(path)
    assert "traceEvents" in json.loads(gzip.decompress(path.read_bytes()))
    prefill, decode = step_tables(read_trace(path), on_device=False)
    assert (prefill.kind, prefill.steps) == ("prefill", 1)
    assert (decode.kind, decode.steps) == ("decode", 2)
    for table in (prefill, decode):
        assert 0 < table.busy <= table.wall
        assert sum(row.seconds for row in table.rows) == pytest.approx(table.wall, rel=1e-3)
        steps = f"{table.steps} step{'s' * (table.steps != 1)}"
        assert f"{table.kind}: {steps}, {table.launches / table.steps:,.1f} operators" in out
    names = {row.name for row in decode.rows}
    # A kernel that the interpreter runs is one row, with what it does inside.
    assert ("triton: decode_kernel" in names) == (phase.package == "triton_paged_attention")
    assert ("aten::embedding" in names) and BETWEEN in names


WRONG = {
    "batch": (["--batch", "0"], "--batch is 0, but must be between 1 and"),
    "context": (["--context", "1"], "--context is 1, but must be between 2 and"),
    "too long": (["--model", "random:tiny", "--context", "99999"], "random:tiny has at most"),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG.keys())
def test_wrong_input(cli: Any, arguments: list[str], words: str) -> None:
    code, out, err = cli("profile", "4", "--device", "cpu", *arguments)
    assert (code, out) == (2, "")
    assert words in err and len(err.splitlines()) == 1


# Traces by hand, in microseconds.


def event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": ts,
        "dur": dur,
        "tid": 1,
        "args": args,
    }


GPU_TRACE = [
    event("user_annotation", "step: prefill", 0, 100),
    event("user_annotation", "step: decode", 100, 50),
    event("user_annotation", "step: decode", 150, 50),
    event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
    event("kernel", "gemm", 20, 60, correlation=1),
    # Launched by the prefill, but run when the host is in the first decode already.
    event("cuda_driver", "cuLaunchKernelEx", 90, 5, correlation=2),
    event("kernel", "void at::native::softmax_kernel<float>(float*)", 110, 10, correlation=2),
    # One launch of a graph, two kernels that overlap, and a copy.
    event("cuda_runtime", "cudaGraphLaunch", 105, 5, correlation=3),
    event("kernel", "decode_kernel", 120, 10, correlation=3),
    event("kernel", "gemv_kernel", 125, 10, correlation=3),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 140, 1, correlation=3),
    event("cuda_runtime", "cudaGraphLaunch", 155, 5, correlation=4),
    event("kernel", "decode_kernel", 160, 10, correlation=4),
    event("cuda_runtime", "cudaLaunchKernel", 300, 5, correlation=5),  # after the last step
    event("kernel", "gemm", 310, 60, correlation=5),
    event("cpu_op", "aten::mm", 10, 20),
]


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    prefill, decode = step_tables(GPU_TRACE, on_device=True)
    assert {(row.name, row.calls) for row in prefill.rows} == {
        ("gemm", 1),
        ("softmax_kernel", 1),
    }
    assert (prefill.launches, prefill.copies) == (2, 0)
    assert (decode.steps, decode.launches, decode.copies) == (2, 3, 1)
    assert decode.rows[0].name == "decode_kernel"
    assert decode.rows[0].seconds == pytest.approx(20e-6)


def test_overlapping_kernels_keep_the_device_busy_once() -> None:
    _, decode = step_tables(GPU_TRACE, on_device=True)
    assert decode.wall == pytest.approx(100e-6)
    assert decode.busy == pytest.approx((15 + 1 + 10) * 1e-6)
    line = summary(decode, on_device=True)
    assert "1.5 kernels and 0.5 copies a step" in line and "GPU busy 26.0%" in line
    assert "0.050 ms a step" in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", ["5", "6", "9"])
def test_kernels_of_a_gpu(cli: Any, tmp_path: Path, number: str) -> None:
    code, out, _ = cli("profile", number, *SIZE, "--device", "cuda", "--output", str(tmp_path))
    assert code == 0
    (path,) = tmp_path.iterdir()
    for table in step_tables(read_trace(path), on_device=True):
        assert table.launches >= 1 and table.busy > 0
    assert "GPU busy" in out
    if number != "5":
        assert "decode_kernel" in out
