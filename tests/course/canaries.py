"""Tests that must fail. They run beside a student's code, in a file of a name that it cannot know."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import pytest
import torch

ZERO, ONE = torch.zeros(1), torch.ones(1)


def wrong() -> None:
    raise ValueError


def raises() -> None:
    with pytest.raises(ValueError):
        pass


def holds(value: object) -> None:
    assert value


WRONG: list[Callable[[], object]] = [
    wrong,
    raises,
    lambda: holds([1] == [2]),
    lambda: holds(all([False])),
    lambda: holds(torch.equal(ZERO, ONE)),
    lambda: holds(math.isclose(1, 2)),
    lambda: holds(pytest.approx(2.0) == 1.0),
    lambda: torch.testing.assert_close(ZERO, ONE),
    lambda: numpy.testing.assert_allclose([0], [1]),
]


@pytest.mark.xfail(strict=True)
@pytest.mark.parametrize("at", range(len(WRONG)))
def test_canary(at: int) -> None:
    WRONG[at]()
