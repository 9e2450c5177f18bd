"""The picture of a step: when the host and the device work, from a profiler's events."""

from __future__ import annotations

from pathlib import Path

from benchmarks.evidence import Evidence, Metric, Run
from benchmarks.step_times import SHOWN, VARIANTS, draw, joined, middle, without
from continuous.stats import STEP


def event(category: str, name: str, start: float, duration: float) -> dict[str, object]:
    return {"cat": category, "name": name, "ts": start, "dur": duration}


def test_intervals_that_touch_are_one() -> None:
    assert joined([(10, 20), (0, 5), (6, 9), (15, 17)]) == [(0, 20)]
    assert joined([(0, 5), (8, 9)]) == [(0, 5), (8, 9)]


def test_waiting_is_no_work() -> None:
    assert without([(0, 10), (12, 20)], [(2, 4), (8, 13), (19, 30)]) == [(0, 2), (4, 8), (13, 19)]
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
        assert rounded == [(100 * step + begin, 100 * step + end) for step in range(SHOWN)], lane


def test_a_panel_for_each_engine(tmp_path: Path) -> None:
    pieces = {"begin_ms": Metric((0.0, 1.0)), "end_ms": Metric((0.5, 1.5)), "busy_ms": Metric((1.0,))}
    runs = [
        Run(variant, "profile", "0" * 64, "qwen3-0.6b", "random", "bfloat16", pieces, {"lane": lane})
        for variant in VARIANTS
        for lane in ("host", "device")
    ]
    machine = {"device": "cuda", "name": "GPU"}
    draw(Evidence("step_times", "2026-11-27T00:00:00Z", {}, machine, {}, tuple(runs)), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
