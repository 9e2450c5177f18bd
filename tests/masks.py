"""Masks of kernels as the interpreter of Triton 3.9 takes them.

It refuses a mask of integers, and makes one itself where a block's mask is joined with a scalar's comparison:
`(i < SIZE) & (slot >= 0)`. Older interpreters take it, and compilers make the same machine code of it as of
`tl.where(slot >= 0, i < SIZE, False)`. The tests must find it with every version, so they check what the
loads and stores of the interpreter are given.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

PLACES = {"load": 1, "store": 2, "atomic_rmw": 3}
"""The mask among the arguments of each."""


def checked(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        assert np.asarray(given[place]).dtype == np.bool_, (
            "a mask must be made of booleans: write tl.where(scalar, mask, False) for mask & scalar"
        )
        return function(*given)

    return call


@pytest.fixture(scope="session", autouse=True)
def masks_of_booleans() -> Iterator[None]:
    """Check the mask of every load and store of Triton's interpreter, where that runs the kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton._C.libtriton import interpreter

    with pytest.MonkeyPatch.context() as patch:
        for name, place in PLACES.items():
            patch.setattr(interpreter, name, checked(getattr(interpreter, name), place))
        yield
