"""Memory that nobody has written is full of NaN, so that whoever reads it is found out.

A fresh page of memory is zeros, and what a mask leaves undefined is often zero, too: code that reads either
passes most of its tests, and gives wrong tokens once in a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

NUMBERS = {torch.bool: True, torch.uint8: 0xA5, torch.int8: -91, torch.int16: -23131}
"""What a place nobody has written holds, where it cannot hold NaN; wider integers hold -2**30."""


def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, one of torch's ways to get memory as it is, with its result filled."""

    def made(*args: Any, **options: Any) -> Tensor:
        tensor = make(*args, **options)
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.fill_(float("nan"))
        return tensor.fill_(NUMBERS.get(tensor.dtype, -(2**30)))

    return made


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its kind return; on a GPU as well, and inside graphs at every replay."""
    # Torch notes once in a process which functions `with torch.device(...)` is about: not these here.
    _device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(Tensor, name, poisoned(getattr(Tensor, name)))
