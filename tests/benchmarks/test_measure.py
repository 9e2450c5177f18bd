"""Measuring: order of samples, dirty samples taken again, metrics that add up."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time

import pytest

from benchmarks.measure import (
    ENOUGH_SECONDS,
    Beside,
    Noise,
    Sample,
    alternate,
    kept_out,
    request_metrics,
)
from common.collector import SELDOM
from common.events import Completion, TokenEvent

CLEAN = Noise()
DIRTY = Noise(other_cpu=0.5)
WORSE = Noise(other_cpu=0.9)


class Noises:
    """Stands in for `Watch`: hands out the given noises, one a sample, and then clean ones."""

    def __init__(self, *noises: Noise) -> None:
        self.left = list(noises)

    def __call__(self) -> Noises:
        return self

    def __enter__(self) -> Noises:
        self.noise = self.left.pop(0) if self.left else CLEAN
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def noises(monkeypatch):
    def use(*values: Noise) -> None:
        monkeypatch.setattr("benchmarks.measure.Watch", Noises(*values))
        monkeypatch.setattr(
            "benchmarks.measure.TRIES", 4
        )  # a quick benchmark here may have lowered it

    return use


def recorder(calls: list[tuple[str, int]], name: str):
    def run(repeat: int) -> dict[str, float]:
        calls.append((name, repeat))
        return {"seconds": float(len(calls))}

    return run


def test_evidence_names_what_ran_beside_it_and_not_its_own_processes(tmp_path):
    for name in ("stranger", "child"):
        (tmp_path / name).symlink_to("/usr/bin/yes")
    orphan = ["sh", "-c", f"{tmp_path}/stranger > /dev/null 2> /dev/null & echo $!"]
    stranger = int(subprocess.run(orphan, capture_output=True, check=True).stdout)
    child = subprocess.Popen([tmp_path / "child"], stdout=subprocess.DEVNULL)
    try:
        beside, seen = Beside(), {"busy": {}}
        for _ in range(30):  # on a busy machine it may have had no turn yet
            if "stranger" not in seen["busy"]:
                time.sleep(1)
                seen = beside.seen()
    finally:
        os.kill(stranger, signal.SIGKILL)
        child.kill()
        child.wait()
    assert "stranger" in seen["busy"], seen
    assert "child" not in seen["busy"], seen
    assert len(seen["load"]) == 2


def test_long_samples_are_taken_less_often(noises):
    """What takes longer than what is enough is not sampled again; without a word, all is."""
    noises()
    took = {"short": 1.0, "long": ENOUGH_SECONDS / 1.5, "longest": 47.0}
    variants = {name: lambda _, s=seconds: {"seconds": s} for name, seconds in took.items()}
    samples = alternate(variants, 3, warm={}, enough=ENOUGH_SECONDS)
    counts = {name: len(found.kept) for name, found in samples.items()}
    assert counts == {"short": 3, "long": 2, "longest": 1}
    assert {len(found.kept) for found in alternate(variants, 3, warm={}).values()} == {3}


def test_order_alternates_after_a_warm_up(noises):
    noises()
    calls: list[tuple[str, int]] = []
    samples = alternate({name: recorder(calls, name) for name in "ab"}, repeats=3)
    assert [name for name, _ in calls] == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert [sample["seconds"] for sample in samples["a"].kept] == [3.0, 6.0, 7.0]


def test_no_call_gets_a_number_twice(noises):
    """Warm-ups and samples taken again included: the engine's prefix cache must not know the tokens."""
    noises(DIRTY, WORSE)
    calls: list[tuple[str, int]] = []
    alternate({name: recorder(calls, name) for name in "ab"}, repeats=2, settle=0.0)
    numbers = [number for _, number in calls]
    assert len(numbers) == 8 and numbers == sorted(set(numbers)), (
        f"a number came twice: {calls}"
    )


def test_a_dirty_sample_is_taken_again(noises):
    noises(DIRTY, WORSE, CLEAN)
    calls: list[tuple[str, int]] = []
    lines: list[str] = []
    samples = alternate(
        {"a": recorder(calls, "a")}, repeats=2, warm={}, settle=0.0, log=lines.append
    )["a"]
    assert [sample["seconds"] for sample in samples.kept] == [3.0, 4.0]
    assert samples.discarded == 2
    assert samples.noise() == {"other_cpu": 0.0, "switches_per_s": 0.0, "discarded": 2}
    assert [("dirty" in line) for line in lines] == [True, True, False, False]


def test_a_program_that_the_bench_started_makes_no_sample_dirty(noises):
    switched = Noise(switches_per_s=1000.0)
    noises(switched, Noise(0.5, 1000.0), CLEAN)
    samples = alternate({"a": recorder([], "a")}, repeats=2, warm={}, settle=0.0, beside=True)[
        "a"
    ]
    assert [sample["seconds"] for sample in samples.kept] == [1.0, 3.0]
    assert samples.discarded == 1
    assert samples.noise()["switches_per_s"] == switched.switches_per_s


def test_after_the_last_try_the_least_dirty_is_kept(noises):
    noises(WORSE, DIRTY, WORSE)
    calls: list[tuple[str, int]] = []
    samples = alternate({"a": recorder(calls, "a")}, repeats=1, warm={}, tries=3, settle=0.0)[
        "a"
    ]
    assert [sample["seconds"] for sample in samples.kept] == [2.0]
    assert samples.noise()["other_cpu"] == 0.5
    assert samples.discarded == 2


def completion(index: int, prompt: int, arrival: float, times: list[float]) -> Completion:
    found = Completion(index, 0, [1] * prompt, arrival)
    for number, time_ in enumerate(times):
        last = number + 1 == len(times)
        found.add(TokenEvent(index, 7, "length" if last else None, time_))
    return found


def test_request_metrics_by_hand():
    found = request_metrics(
        [completion(0, 5, 0.0, [0.1, 0.2, 0.4]), completion(1, 3, 1.0, [1.3])], seconds=2.0
    )
    assert found["output_tokens_per_s"] == 2.0
    assert found["prompt_tokens_per_s"] == 4.0
    assert found["ttft_ms_p50"] == pytest.approx(200.0)
    assert found["itl_ms_p50"] == pytest.approx(150.0)
    assert found["e2e_ms_mean"] == pytest.approx(350.0)


def test_a_sample_that_fails_leaves_nothing_frozen():
    gc.unfreeze()

    def fails(number: int) -> Sample:
        raise RuntimeError("no memory left")

    with pytest.raises(RuntimeError, match="no memory left"):
        alternate({"one": fails}, 1, warm={})
    assert gc.get_freeze_count() == 0, "objects stay out of the collector's sight for ever"


def test_the_collector_is_kept_out_for_a_while_and_no_longer() -> None:
    gc.unfreeze()
    before = gc.get_threshold()
    with pytest.raises(KeyError), kept_out():
        assert gc.get_freeze_count() > 1000, "what is there is looked at again"
        assert gc.get_threshold() == (*before[:2], SELDOM), (
            "everything is looked through as often as ever"
        )
        raise KeyError
    assert gc.get_freeze_count() == 0, "objects stay out of the collector's sight for ever"
    assert gc.get_threshold() == before
