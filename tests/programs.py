"""What a program that a test starts finds around it."""

from __future__ import annotations

import os
import sys


def environment(**more: str) -> dict[str, str]:
    """This process's, with its packages, and as a user has it: nothing says who runs Triton's kernels."""
    usual = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return usual | {"PYTHONPATH": os.pathsep.join(sys.path)} | more
