"""The picture of a step: when the host and the device work, from a profiler's events."""

from __future__ import annotations

from benchmarks.step_times import SHOWN, middle, without
from continuous.stats import STEP


def event(category: str, name: str, start: float, duration: float) -> dict[str, object]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


def test_waiting_is_no_work() -> None:
    assert without([(0, 10), (12, 20)], [(2, 4), (8, 13), (19, 30)]) == [
        (0, 2),
        (4, 8),
        (13, 19),
    ]
    assert without([(0, 10)], [(0, 10)]) == []


def test_each_lane_has_its_own_work_of_the_steps_in_the_middle() -> None:
    events = [event("user_annotation", STEP + "prefill", 0, 900)]
    for step in range(SHOWN + 2):
        start = 1000 + 100 * step
        events += [
            event("user_annotation", STEP + "decode", start, 30),
            event("cuda_runtime", "cudaGraphLaunch", start + 20, 20),
            event("cuda_runtime", "cudaEventSynchronize", start + 40, 50),
            event("kernel", "matmul", start + 40, 50),
            event("python_function", "not a lane's", start, 100),
        ]
    lanes = middle(events)
    for lane, begin, end in (("host", 0, 40), ("device", 40, 90)):
        rounded = [(round(1000 * low), round(1000 * high)) for low, high in lanes[lane]]
        assert rounded == [(100 * step + begin, 100 * step + end) for step in range(SHOWN)], (
            lane
        )
