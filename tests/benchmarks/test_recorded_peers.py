"""Other engines: files of their own, made from what was printed, compared at their best."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import PEERS_FILE, RESULTS, Metric, Run, collect, results
from benchmarks.other_engines import record
from benchmarks.recorded_peers import beside, load
from benchmarks.records import server_lines
from common.errors import UserError

H200 = RESULTS / "h200" / PEERS_FILE


def write(
    folder: Path, *peers: tuple[str, str, str, dict[str, list[float]]], **more: object
) -> None:
    """A file of peers: engine, version, workload, samples."""
    about = {
        "when": "2026-11-26",
        "machine": {"name": "x"},
        "flags": "",
        "log": "a.log",
        **more,
    }
    run = {"beside": "02_kv_cache", "model": "m", "weights": "random", "dtype": "bfloat16"}
    found = [
        {"engine": engine, "version": version, **about}
        | {"runs": [{**run, "workload": workload, "metrics": rates}]}
        for engine, version, workload, rates in peers
    ]
    (folder / "cpu").mkdir(parents=True, exist_ok=True)
    (folder / "cpu" / PEERS_FILE).write_text(json.dumps({"peers": found}), encoding="utf-8")


def test_the_file_is_what_the_engines_printed() -> None:
    for device in ("cpu", "h200"):
        written = (RESULTS / device / PEERS_FILE).read_text(encoding="utf-8")
        assert written == record.text(device), (
            "run `python -m benchmarks.other_engines.record`"
        )
    for device in results():
        for peer in load(device):
            assert peer.when and peer.flags and peer.machine
            assert peer.runs and all(
                run.workload_sha256 == "" and run.noise is None for run in peer.runs
            )
            assert (record.RECORDED / peer.log).is_file(), f"{peer.name}: its log is not kept"


@pytest.mark.parametrize("field", ["git", "commit", "workload_sha256", "noise"])
def test_a_peer_has_nothing_of_ours(tmp_path: Path, field: str) -> None:
    write(tmp_path, ("one", "1.0", "w", {"output_tokens_per_s": [1.0]}), **{field: "x"})
    with pytest.raises(UserError, match=f"one has {field}, which only our evidence has"):
        load("cpu", tmp_path)
    text = H200.read_text(encoding="utf-8")
    assert not re.search(r"\b[0-9a-f]{40,64}\b", text), "a commit or a hash in a file of peers"


def test_the_best_of_any_version_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        ("two", "2.0", "w", {"output_tokens_per_s": [10.0, 12.0]}),
        ("two", "3.0", "w", {"output_tokens_per_s": [11.0, 11.0]}),
        ("one", "1.0", "w", {"output_tokens_per_s": [20.0]}),
    )
    metrics = {"output_tokens_per_s": Metric((30.0,))}
    run = Run("02_kv_cache", "w", "hash", "m", "random", "float32", metrics)
    evidence = collect("02_kv_cache", [run], torch.device("cpu"))
    found = beside(evidence, tmp_path)
    assert {run.variant: run.median("output_tokens_per_s") for run in found} == {
        "two 2.0": 12.0,
        "one 1.0": 20.0,
    }
    assert beside(evidence, tmp_path, workload="another") == []


def test_servers_stand_side_by_side_and_beside_a_busy_program_with_each_way_of_waiting() -> (
    None
):
    def one(variant: str, rate: float, busy: int) -> Run:
        about = {"neighbours": busy} if busy else {}
        metrics = {"output_tokens_per_s": Metric((rate,))}
        return Run(variant, "one stream", "", "m", "real", "q4_1", metrics, about)

    runs = [one("13_serving", 150.0, 0), one("llama-cpp-python 0.3", 100.0, 0)]
    runs += [one("13_serving", 90.0, 1), one("13_serving, passive", 100.0, 1)]
    runs += [one("llama-cpp-python 0.3", 50.0, 1)]
    lines = server_lines(collect("peers", runs, torch.device("cpu")))
    assert lines == [
        ["", "this", "llama-cpp-python 0.3", "this over it"],
        ["one stream: tokens a second", "150", "100", "1.50×"],
        ["one stream, beside 1 busy program: tokens a second", "90", "50", "1.80×"],
        [
            "one stream, beside 1 busy program, waiting: passive: tokens a second",
            *("100", "50", "2.00×"),
        ],
    ]
