"""The cost of scheduling can be measured for every phase that schedules."""

from __future__ import annotations

import pytest

from benchmarks.scheduling_cost import PHASES, build, cost


@pytest.mark.parametrize("phase", PHASES)
def test_steps_of_a_stub_model_are_timed(phase: str) -> None:
    found = cost(build(phase, 3, 40), 4)
    assert found.total > 0 and found.schedule > 0, f"{phase}: a step of no model took no time"
