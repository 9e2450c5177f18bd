"""The roofline's ceilings in evidence: measured once, and kept.

The counts are in `benchmarks.model_work`, and the probes in `common.roofline`.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress

import torch

from benchmarks.measure import Watch
from benchmarks.model_work import Ceilings
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
    what = f"{device_name(device)} {torch.__version__} {torch.get_num_threads()} {dtype}"
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    path = cache_home() / "ceilings" / f"{device.type}-{digest}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        return Ceilings(**json.loads(path.read_text(encoding="utf-8"))["ceilings"])
    best, begun = Ceilings(0.0, 0.0), time.perf_counter()
    for _ in range(3):
        with Watch() as watch:
            read, matmul = probe_read(device), probe_matmul(device, dtype)
        best = Ceilings(max(best.read_bytes_per_s, read), max(best.matmul_flop_per_s, matmul))
        if not watch.noise.dirty:
            content = {"what": what, "ceilings": best.to_json()}
            with suppress(UserError), whole(path) as scratch:
                scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            break
        if time.perf_counter() - begun > 20:
            break
    return best
