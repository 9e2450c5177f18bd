"""`tests.compiled` as tests call it: a program of its own, since there Triton must not be interpreting."""

from __future__ import annotations

import subprocess
import sys

from phases import ROOT
from tests.programs import environment


def spilled(capability: int, *options: str) -> list[int]:
    """Bytes that registers could not hold, of each kernel that these options ask for; all have compiled."""
    call = [sys.executable, "-m", "tests.compiled", str(capability), *options]
    done = subprocess.run(
        call, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [int(line.split()[-1]) for line in done.stdout.splitlines()]
