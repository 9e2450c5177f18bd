"""The cost of scheduling can be measured without a model."""

from __future__ import annotations

from benchmarks.scheduling_cost import build, cost


def test_steps_of_a_stub_model_are_timed() -> None:
    found = cost(build(3, 40), 4)
    assert found.total > 0 and found.schedule > 0, "a step of no model took no time"
