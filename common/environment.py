"""Settings that libraries read while PyTorch is imported: made here, once, before that. The user's own win.

PyTorch's threads come from GNU's OpenMP. A thread that waits for others spins before it sleeps, by default
for 300,000 turns (some 1 to 10 ms): alone that is the fastest way to begin the next operator, but beside
another program it burns the very processor that the thread waited for has lost (`ladder bench neighbours`).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

QUIET = {"KINETO_LOG_LEVEL": "99"}
"""The profiler's own log: `ladder profile` prints what it found, not when it began."""
SPIN = {"GOMP_SPINCOUNT": "10000"}
"""Turns that a waiting thread spins."""
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Either one, given by the user, says how threads wait."""


def limit_threads_and_noise(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what the user has not set. Later than the import of PyTorch it changes nothing."""
    made = dict(QUIET)
    if not any(name in environment for name in WAITING):
        made |= SPIN
    for name, value in made.items():
        environment.setdefault(name, value)
