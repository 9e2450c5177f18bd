"""The picture of a step: when the host and the device work, from a profiler's events."""

from __future__ import annotations

from benchmarks.step_times import SHOWN, middle, pieces
from continuous.stats import STEP


def event(category: str, name: str, start: float, duration: float) -> dict[str, object]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


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
        begins, ends = pieces(lanes[lane])
        steps = range(SHOWN)
        assert [round(1e3 * at) for at in begins] == [100 * step + begin for step in steps]
        assert [round(1e3 * at) for at in ends] == [100 * step + end for step in steps]
