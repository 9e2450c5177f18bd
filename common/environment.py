"""Environment variables that libraries read while PyTorch is imported, set before that; the user's values
win.

PyTorch's threads come from GNU's OpenMP. A thread that waits for others spins before it sleeps, by default
for 300,000 turns (some 1 to 10 ms): alone that is the fastest way to begin the next operator, but beside
another program it burns the very processor that the thread waited for has lost (`ladder bench neighbours`).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

QUIET = {"KINETO_LOG_LEVEL": "99"}
"""Turns off the profiler's own log, which says when it began and ended."""
SPIN = {"GOMP_SPINCOUNT": "10000"}
"""Turns that a waiting thread spins before it sleeps."""
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables of which either, given by the user, decides how threads wait; then `SPIN` is not set."""


def limit_threads_and_noise(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of `QUIET` and `SPIN` that the user has not set. Call it before PyTorch
    is imported.
    """
    made = dict(QUIET)
    if not any(name in environment for name in WAITING):
        made |= SPIN
    for name, value in made.items():
        environment.setdefault(name, value)
