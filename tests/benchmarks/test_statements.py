"""What the texts say in words about numbers is what the evidence says."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.evidence import ROOT, Evidence, results
from benchmarks.gains import gain
from phases import PHASES, find_phase

LESSONS = [phase.folder / "README.md" for phase in PHASES]


def said(path: Path) -> str:
    """The text of a page in one line, without the marks around generated numbers."""
    return " ".join(re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8")).split())


def rate(evidence: Evidence, variant: str, workload: str, **facts: object) -> float:
    return evidence.one(variant, workload, **facts).median("output_tokens_per_s")


def test_the_front_page_says_what_a_gain_costs() -> None:
    text = said(ROOT / "README.md")
    found = re.search(
        r"that of (\d+) tokens a step, and costs (\d+) % of throughput; "
        r"(\d+) tokens bring ([\d.]+)× and cost (\d+) %",
        text,
    )
    assert found, "README no longer says what phase 07's factor costs"
    seven = results()["h200"]["07_chunked_prefill"]
    before = seven.runs[0]
    chosen, small = (
        seven.one("07_chunked_prefill", before.workload, budget=int(budget)) for budget in found.group(1, 3)
    )
    headline = gain(find_phase("07"), seven)
    assert headline is not None and headline.after == chosen, (
        "the headline is of another budget than README says"
    )

    def cost(run: object) -> str:
        return f"{100 * (1 - run.median('output_tokens_per_s') / before.median('output_tokens_per_s')):.0f}"

    factor = before.median("itl_ms_p99") / small.median("itl_ms_p99")
    assert found.group(2, 4, 5) == (cost(chosen), f"{factor:.1f}", cost(small))
    nine = results()["h200"]["09_cuda_graphs"]
    many = rate(nine, "09_cuda_graphs", "offline-256", model="qwen3-0.6b") / rate(
        nine, "08_prefix_cache, kernels of 06", "offline-256", model="qwen3-0.6b"
    )
    assert f"with 256 requests it is {many:.1f}×" in text


def test_the_ladders_gains_on_the_gpu_are_of_one_model() -> None:
    """From 02 to 09; what fewer bits bring is a matter of larger models."""
    found = {
        phase.number: gain(phase, results()["h200"].get(phase.name)) for phase in PHASES if phase.number < 10
    }
    assert {one.after.model for one in found.values() if one} == {"qwen3-0.6b"}


def test_one_name_is_one_engine() -> None:
    """Phase 08 launches PyTorch's operators wherever its plain name stands, and phase 06's kernels never."""
    nine = results()["h200"]["09_cuda_graphs"]
    plain = rate(nine, "08_prefix_cache", "single-512", model="qwen3-0.6b")
    kernels = rate(nine, "08_prefix_cache, kernels of 06", "single-512", model="qwen3-0.6b")
    own = 1e3 / results()["h200"]["08_prefix_cache"].one("08_prefix_cache", "chat-serving-short").median(
        "itl_ms_p50"
    )
    assert abs(plain / own - 1) < 0.5 < kernels / plain - 1, (
        f"08_prefix_cache makes {plain:.0f} tokens a second in 09's evidence and {own:.0f} in its own"
    )


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.parent.name)
def test_what_others_published_has_its_source(lesson: Path) -> None:
    for paragraph in lesson.read_text(encoding="utf-8").split("\n\n"):
        if re.search(r"[Pp]ublished (for|a|by|\d)|[Pp]ublished (comparison|number|table)", paragraph):
            assert "](http" in paragraph, f"no source: {paragraph}"


def test_a_kernels_price_is_the_steps_over_their_number() -> None:
    text = said(find_phase("09").folder / "README.md")
    kernels, step, busy = re.search(
        r"steps, ([\d.]+) kernels and .*? a step, ([\d.]+) ms a step \(profiled\), GPU busy ([\d.]+)%", text
    ).groups()
    host = 1e3 * float(step) / float(kernels)
    device = host * float(busy) / 100
    prices = re.search(r"takes (\d+) µs to prepare and launch each of them, the GPU (\d+) µs to run it", text)
    assert prices.groups() == (f"{host:.0f}", f"{device:.0f}")


def test_what_a_wider_step_takes() -> None:
    """Lesson 03: sixteen columns take three times as long as one on the CPU, and hardly longer on a GPU."""
    lesson = find_phase("03").folder / "README.md"
    text = said(lesson)
    assert "On two CPU cores it takes some three times as long" in text and "hardly longer" in text
    cpu, gpu = (results()[device]["03_batching"] for device in ("cpu", "h200"))
    alone = cpu.one("02_kv_cache", "batch-64+64").median("itl_ms_p50")
    assert 2.5 < cpu.one("03_batching", "batch-64+64", requests=16).median("itl_ms_p50") / alone < 3.5
    for model in ("gpt2", "qwen3-0.6b"):
        one, many = (
            gpu.one("03_batching", model=model, workload="batch-64+128", requests=count).median("itl_ms_p50")
            for count in (1, 32)
        )
        assert many / one < 1.2, f"{model}: a step of 32 takes {many / one:.2f} times as long"
    rates = [
        run.median("output_tokens_per_s") for run in gpu.find(workload="skewed-outputs-small", model="gpt2")
    ]
    assert f"gains {100 * (rates[1] / rates[0] - 1):.0f} %" in text


CEILINGS = ("read_bytes_per_s", "matmul_flop_per_s")


def test_a_machine_has_one_ceiling() -> None:
    """Ceilings belong to a machine, not to a run: two files of one machine differ by 10 % at most."""
    for folder, found in results().items():
        for one, other in combinations(
            [evidence for evidence in found.values() if evidence.machine["ceilings"]], 2
        ):
            if one.machine["name"] == other.machine["name"]:
                for name in CEILINGS:
                    pair = sorted(evidence.machine["ceilings"][name] for evidence in (one, other))
                    assert pair[1] <= 1.1 * pair[0], f"{folder}: {one.phase} and {other.phase}: {name} {pair}"
