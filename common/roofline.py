"""Measure a machine's roofline: bytes read from memory, and FLOPs of matrix products, each a second.

A short probe measures them, since data sheets state what no kernel reaches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from common.device import synchronize

WARM_UPS = 3
"""Calls before those that are timed."""


def time_call(
    function: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    floor: float,
) -> list[float]:
    """Return the seconds of each of `repeats` or more calls of a function, for kernels and probes.

    On CUDA each call is timed by events on the device, so launch costs before it do not count. floor: seconds
    to spend at least, by more calls than `repeats` if need be. Three calls before them are not timed.
    """
    for _ in range(WARM_UPS):
        function()
    synchronize(device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < repeats or time.perf_counter() - begun < floor:
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            before = time.perf_counter()
            function()
            synchronize(device)
            times.append(time.perf_counter() - before)
    return times


def probe_read(device: torch.device) -> float:
    """Return the bytes per second at which `device` reads a large tensor: the best of several sums over it.

    The tensor is far larger than the caches: 1 GiB on CUDA, 256 MiB elsewhere.
    """
    size = 2**30 if device.type == "cuda" else 2**28
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    # A sum is arithmetic too, and may not be what reads fastest: on a CPU a product with two vectors is (one
    # vector takes MKL's single-threaded path, see `forward.cpu_linear`).
    matrix, vectors = data.view(-1, 4096), torch.ones(2, 4096, device=device)
    candidates = [
        lambda: data.sum(),
        lambda: torch.mv(matrix, vectors[0]),
        lambda: torch.mm(matrix, vectors.t()),
    ]
    best = min(min(time_call(read, device, repeats=8, floor=0.3)) for read in candidates)
    return data.numel() * 4 / best


def probe_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOPs per second of a matrix product of two `n x n` matrices: the best of several.

    n is 8,192 on CUDA, else 1,024.
    """
    n = 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    synchronize(device)
    best = min(time_call(lambda: a @ b, device, repeats=8, floor=0.5))
    return 2.0 * n**3 / best
