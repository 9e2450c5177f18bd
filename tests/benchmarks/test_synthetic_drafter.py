"""The drafter of benchmarks whose drafts count as right by decree."""

from __future__ import annotations

import pytest

from benchmarks.synthetic_drafter import Synthetic


@pytest.mark.parametrize("accept", [0.0, 1.0, 2.5, 3.0])
def test_synthetic_acceptance_is_what_was_asked_for(accept: float) -> None:
    source = Synthetic(accept)
    right = [source.agree([0] * 4, [7] * 3) for _ in range(40)]
    assert sum(right) / len(right) == pytest.approx(accept, abs=0.05)
