"""The roofline's ceilings in evidence: measured once, and kept.

The counts are in `benchmarks.model_work`, and the probes in `common.roofline`.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.measure import Watch
from benchmarks.model_work import Ceilings
from common.console import err
from common.device import device_name
from common.errors import UserError
from common.files import whole
from common.paths import cache_home
from common.roofline import probe_matmul, probe_read


def ceilings(device: torch.device | str, dtype: torch.dtype) -> Ceilings:
    """This machine's ceilings for `dtype`, measured once (a few seconds) and then read from the cache.

    A probe that other processes disturbed is repeated, and not kept if it stays disturbed. A cache that
    cannot be written is no error.

    The cache file's name covers device, torch version and number of threads.
    """
    device = torch.device(device)
    path = _cache_file(device, dtype)
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Ceilings(**json.loads(path.read_text(encoding="utf-8"))["ceilings"])
    measured, clean = _probe(device, dtype)
    if not clean:
        return measured  # too low, because other processes ran: good enough for now, not to be kept
    content = {
        "device": device_name(device),
        "dtype": str(dtype),
        "ceilings": measured.to_json(),
    }
    try:
        with whole(path) as scratch:
            scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except UserError as error:
        line = f"the ceilings are measured each time: {error}"
        err.print(line, style="dim", markup=False, soft_wrap=True)
    return measured


def _probe(device: torch.device, dtype: torch.dtype) -> tuple[Ceilings, bool]:
    """The best of up to three probes, and whether the last of them had the machine to itself."""
    best, clean = Ceilings(0.0, 0.0), False
    begun = time.perf_counter()
    for _ in range(3):
        with Watch() as watch:
            read, matmul = probe_read(device), probe_matmul(device, dtype)
        best = Ceilings(max(best.read_bytes_per_s, read), max(best.matmul_flop_per_s, matmul))
        clean = not watch.noise.dirty
        if clean or time.perf_counter() - begun > 20:
            break
    return best, clean


def _cache_file(device: torch.device, dtype: torch.dtype) -> Path:
    what = f"{device_name(device)} {torch.__version__} {torch.get_num_threads()} {dtype}"
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    return cache_home() / "ceilings" / f"{device.type}-{digest}.json"
