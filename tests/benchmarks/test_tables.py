"""Evidence is complete, and tables, the front page and the lessons say what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from benchmarks import numbers
from benchmarks.evidence import (
    APPENDIX,
    RESULTS,
    ROOT,
    Evidence,
    Metric,
    Roofline,
    Run,
    collect,
    device_folder,
    results,
)
from benchmarks.gains import HEADLINES, factor_text, gain, gain_words, headline_of
from benchmarks.labels import metric_of
from benchmarks.numbers import NUMBER
from benchmarks.published import PUBLISHED
from benchmarks.recorded_peers import beside, versus
from benchmarks.tables import fill, fill_all, markdown_files
from common.errors import UserError
from phases import PHASES, Phase, find_phase
from phases.registry import import_phase, preset
from tests.prose import GENERATED, QUOTED, UNIT, WORKED


def run(variant: str, rate: float, **options: object) -> Run:
    metrics = {"output_tokens_per_s": Metric((rate,)), "ttft_ms_p50": Metric((1000 / rate,))}
    roofline = Roofline(1.0, rate / 1000)
    return Run(variant, "w", "hash", "m", "real", "float32", metrics, options, roofline)


def evidence(*runs: Run):
    return collect("02_kv_cache", runs, torch.device("cpu"))


def test_tables_in_the_repository_are_up_to_date():
    assert [str(path) for path in fill_all(write=False)] == [], (
        "run `python -m benchmarks.tables`"
    )


def test_every_row_of_a_table_says_something():
    """Of another engine, too: what it ran is what the table is about."""
    for path in markdown_files(ROOT):
        for table in re.findall(r"<!-- table: .*?<!-- /table -->", path.read_text(), re.S):
            empty = re.findall(r"^\|[^|]+\|[ |]*$", table, re.M)
            assert not empty, f"{path}: a row of blanks: {empty[0]}"


def test_evidence_in_the_repository_is_complete():
    """Every file can be read, lies where it belongs, and names commit, workload hash and samples."""
    for folder, by_phase in results().items():
        for name, found in by_phase.items():
            assert (found.folder, found.phase) == (folder, name)
            assert len(found.git["commit"]) == 40
            assert found.runs
            assert all(run.workload_sha256 and run.metrics for run in found.runs)


def test_a_table_is_made_from_the_evidence(tmp_path):
    runs = [
        run("01_forward", 10.0, batch=1),
        run("02_kv_cache", 55.0, batch=1),
        run("02_kv_cache", 5.0, batch=2),
    ]
    evidence(*runs).write(tmp_path / "benchmarks" / "results" / "cpu" / "02_kv_cache.json")
    marks = "<!-- table: cpu/02_kv_cache {} -->\n{}<!-- /table -->"
    words = "batch=1 columns=output_tokens_per_s,gain,roofline rows=batch"
    table = (
        "| variant | batch | output tokens per second | gain | share of roofline |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| 01_forward | 1 | 10 | 1.00× | 1% |\n"
        "| 02_kv_cache | 1 | 55 | 5.50× | 6% |\n"
    )
    filled = fill(f"before\n{marks.format(words, 'old')}\nafter", tmp_path)
    assert filled == f"before\n{marks.format(words, table)}\nafter"
    assert fill(filled, tmp_path) == filled
    example = f"```\n{marks.format(words, '')}\n```\n"
    assert fill(example, tmp_path) == example
    assert "| 01_forward | 10 |" in fill(
        marks.format('"workload=w" "variant=01_forward"', ""), tmp_path
    )
    for wrong, says in (
        ('"variant=a variant"', "variant=a"),
        ("batch=3", "no run of the evidence matches"),
        ("nonsense", "'nonsense'"),
    ):
        with pytest.raises(UserError, match=says):
            fill(marks.format(wrong, ""), tmp_path)


def test_gain_compares_the_same_work_with_the_phase_below():
    phase = find_phase("02")
    other_model = replace(run("01_forward", 1.0), model="other")
    found = evidence(
        other_model, run("01_forward", 10.0, batch=1), run("02_kv_cache", 52.0, batch=1)
    )
    known = gain(phase, found)
    assert (factor_text(known), gain_words(known.metric)) == (
        "5.2×",
        "output tokens per second",
    )
    assert gain(phase, evidence(other_model, run("02_kv_cache", 52.0))) is None
    assert gain(phase, None) is None
    assert factor_text(None) == ""


def test_a_gain_whose_samples_overlap_is_level():
    before, after = run("01_forward", 10.0), run("02_kv_cache", 11.0)
    name = "output_tokens_per_s"

    def sampled(one, *samples):
        return replace(one, metrics={**one.metrics, name: Metric(samples)})

    noisy = evidence(sampled(before, 9.0, 10.0, 12.0), sampled(after, 10.5, 11.0, 12.5))
    clear = evidence(sampled(before, 9.0, 10.0, 10.4), sampled(after, 10.5, 11.0, 12.5))
    assert factor_text(gain(find_phase("02"), noisy)) == "level"
    assert factor_text(gain(find_phase("02"), clear)) == "1.1×"


@pytest.mark.parametrize("phase", PHASES[4:], ids=lambda phase: phase.name)
def test_what_no_name_says_no_engine_has(phase: Phase) -> None:
    """An engine has later phases' and the appendix's features only if its variant is called so."""
    own = import_phase(phase).PRESET
    for kind in (*own.on, *own.fitting):
        assert not kind.__module__.startswith("phases.appendix"), (
            f"{phase.name} has {kind.name}"
        )
        assert kind.phase <= phase.number, f"{phase.name} has {kind.name} of a later phase"
    served = set(preset(phase).fitting) - set(own.fitting)
    assert all(kind.__module__.startswith("phases.appendix") for kind in served)


def test_benches_get_their_engines_by_name() -> None:
    """`engine_of` reads the name; a phase's own `load` has nothing else. No bench goes around them."""
    files = [*ROOT.glob("phases/*/bench.py"), *(ROOT / "benchmarks").rglob("*.py")]
    around = [
        path.name
        for path in files
        if path.name != "engines.py" and "load_engine" in path.read_text(encoding="utf-8")
    ]
    assert around == ["profile_command.py"], "a command's own steps"


def test_a_headline_of_the_appendix_is_called_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    phase = find_phase("09")
    runs = [run("08_prefix_cache", 10.0), run(phase.name, 30.0)]
    made = replace(evidence(*runs), phase=phase.name)
    assert factor_text(gain(phase, made)) == "3×"
    for hidden in ("", "all"):
        known = replace(made, appendix=hidden)
        assert factor_text(gain(phase, known)) == "3× with the appendix"
        known.write(tmp_path / "benchmarks" / "results" / "cpu" / "09_cuda_graphs.json")
        table = fill("<!-- table: cpu/09_cuda_graphs -->\n<!-- /table -->", tmp_path)
        assert "\n\nWith the appendix.\n" in table, "a table hides what its engines have"
    variant = phase.name + APPENDIX
    head = replace(headline_of(phase), variants=(variant,))
    monkeypatch.setitem(HEADLINES, phase.number, head)
    served = replace(made, runs=(runs[0], run(variant, 30.0)))
    assert factor_text(gain(phase, served)) == "3× with the appendix"


def test_no_recorded_headline_hides_the_appendix() -> None:
    for folder, by_phase in results().items():
        for phase in PHASES[8:]:
            found = gain(phase, by_phase.get(phase.name))
            if found is not None and by_phase[phase.name].appendix != "named":
                assert "with the appendix" in factor_text(found), f"{folder}/{phase.name}"
    heads = [line for line in PAGE.splitlines() if line.startswith("| workload | model |")]
    for line in heads:
        assert "with the appendix |" in line, (
            f"the front page hides what its engine has: {line}"
        )


PAGE = (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_number_of_the_front_page_is_typed_by_hand() -> None:
    bare = PAGE
    for pattern in (GENERATED, WORKED, NUMBER, QUOTED):
        bare = pattern.sub("~", bare)
    assert [found[0] for found in UNIT.finditer(bare)] == []


def test_a_number_is_read_again_whatever_stood_there() -> None:
    said = [
        numbers.fill(f"<!--n:17.single-->{text}<!--/n-->")
        for text in ("1", "2,000.5", "-15", "", "?")
    ]
    assert len(set(said)) == 1 and "-15" not in said[0]


def test_the_front_page_has_the_rates_of_the_evidence() -> None:
    evidence = Evidence.load(RESULTS / "h200" / "09_cuda_graphs.json")
    for workload in PUBLISHED:
        metric = metric_of(workload)
        others = beside(evidence, model="qwen3-0.6b", workload=workload)
        ours = [evidence.one(v, workload, model="qwen3-0.6b") for v in evidence.own().values()]
        least = min(ours, key=lambda run: run.median(metric))
        best = max(others, key=lambda run: run.median(metric))
        start = f"| {workload} | qwen3-0.6b |"
        (row,) = [line for line in PAGE.splitlines() if line.startswith(start)]
        rates = " | ".join(f"{run.median(metric):,.0f}" for run in ours)
        assert row.endswith(f"| {rates} | {versus(least, best, metric)} |")


LESSONS = [phase.folder / "README.md" for phase in PHASES]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.parent.name)
def test_what_others_published_has_its_source(lesson: Path) -> None:
    for paragraph in lesson.read_text(encoding="utf-8").split("\n\n"):
        if re.search(
            r"[Pp]ublished (for|a|by|\d)|[Pp]ublished (comparison|number|table)", paragraph
        ):
            assert "](http" in paragraph, f"no source: {paragraph}"


CEILINGS = ("read_bytes_per_s", "matmul_flop_per_s")


def test_a_machine_has_one_ceiling() -> None:
    """Ceilings belong to a machine, not to a run: two files of one machine differ by 10 % at most.

    On a CPU they are those of so many threads.
    """
    for folder, found in results().items():
        with_ceilings = [
            evidence for evidence in found.values() if evidence.machine["ceilings"]
        ]
        for one, other in combinations(with_ceilings, 2):
            if all(
                one.machine.get(fact) == other.machine.get(fact)
                for fact in ("name", "threads")
            ):
                for name in CEILINGS:
                    pair = sorted(
                        evidence.machine["ceilings"][name] for evidence in (one, other)
                    )
                    assert pair[1] <= 1.1 * pair[0], (
                        f"{folder}: {one.phase} and {other.phase}: {name} {pair}"
                    )


def test_reading_gives_back_what_was_written(tmp_path):
    metrics, roofline = {"output_tokens_per_s": Metric((10.0, 14.0, 11.0))}, Roofline(2.0, 0.5)
    run = Run(
        "02_kv_cache",
        "single-512",
        "abc",
        "m",
        "real",
        "float32",
        metrics,
        {"batch": 2},
        roofline,
    )
    evidence = collect("02_kv_cache", [run], torch.device("cpu"))
    path = evidence.write(tmp_path / "cpu" / "02_kv_cache.json")
    assert Evidence.load(path) == evidence
    assert results(tmp_path) == {"cpu": {"02_kv_cache": evidence}}


@pytest.mark.parametrize("content", ["", "[]", '{"phase": "x"}', '{"runs": [3]}'])
def test_another_file_is_named_in_the_error(tmp_path, content):
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"wrong\.json is no evidence file"):
        Evidence.load(path)
    with pytest.raises(UserError, match="does not exist"):
        Evidence.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    ("device", "name", "folder"),
    [
        ("cpu", "AMD EPYC 9R14", "cpu"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("cuda", "NVIDIA", "cuda"),
    ],
)
def test_device_folder(device, name, folder):
    assert device_folder(device, name) == folder
