"""Names of devices and number formats, checked without importing PyTorch."""

from __future__ import annotations

import re

from common.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


def check_device(device: object) -> tuple[str, str]:
    """Return (kind, index) of a device's name: `cuda:1` -> `("cuda", "1")`, `cpu` -> `("cpu", "")`.

    device: a name or a `torch.device`.

    Raises:
        UserError: the name is none of auto, cpu, cuda, cuda:INDEX, mps.
    """
    name = str(device)
    if not re.fullmatch("auto|cpu|mps(:0)?|cuda(:[0-9]{1,9})?", name):
        raise UserError(
            f"device is {name!r}, but it must be auto, cpu, cuda, cuda:INDEX or mps"
        )
    kind, _, index = name.partition(":")
    return kind, index


def check_dtype(name: str) -> str:
    """Return `name` unchanged. Raises `UserError` unless it is auto, float32, bfloat16 or float16."""
    if name not in ("auto", *DTYPES):
        raise UserError(f"dtype is {name!r}, but it must be one of auto, {', '.join(DTYPES)}")
    return name
