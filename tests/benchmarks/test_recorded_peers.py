"""Other engines: files of their own, made from what was printed, compared at their best."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import server
from benchmarks.evidence import PEERS_FILE, RESULTS, ROOT, Metric, Run, collect, results
from benchmarks.loadtest.loops import LoadPlan
from benchmarks.loadtest.user import Outcome
from benchmarks.other_engines import ask_server, record, vllm_run
from benchmarks.recorded_peers import beside, load, versus
from benchmarks.records import server_lines
from benchmarks.tables import fill
from benchmarks.workloads import workload
from common.device import device_name
from common.errors import UserError
from common.text.tokenizer import Tokenizer

HERE = device_name(torch.device("cpu"))
H200 = RESULTS / "h200" / PEERS_FILE


def write(
    folder: Path, *peers: tuple[str, str, str, dict[str, list[float]]], **more: object
) -> None:
    """A file of peers: engine, version, workload, samples."""
    about = {
        "when": "2026-11-26",
        "machine": {"name": HERE},
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
        for run in load(device):
            assert run.when and run.flags and run.metrics
            assert run.workload_sha256 == "" and run.noise is None
            assert (record.RECORDED / run.log).is_file(), f"{run.variant}: its log is not kept"
        path = RESULTS / device / PEERS_FILE
        if path.exists():
            peers = json.loads(path.read_text(encoding="utf-8"))["peers"]
            assert all(peer["machine"]["name"] and peer["runs"] for peer in peers)


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


def ours(*rates: float, metric: str = "output_tokens_per_s") -> Run:
    """A run of phase 02 on workload w."""
    metrics = {metric: Metric(rates)}
    return Run("02_kv_cache", "w", "hash", "m", "random", "float32", metrics)


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ((105.0,), [100.0], "1.05×"),
        ((102.0,), [100.0], "level"),
        ((105.0,), [100.0, 93.0], "level"),
        ((101.0, 105.0, 109.0), [100.0], "level"),
        ((125.0, 126.0), [100.0, 93.0], "1.25×"),
    ],
)
def test_a_difference_within_the_spread_of_either_is_level(
    tmp_path: Path, mine: tuple[float, ...], theirs: list[float], said: str
) -> None:
    write(tmp_path, ("one", "1.0", "w", {"output_tokens_per_s": theirs}))
    run = ours(*mine)
    (best,) = beside(collect("02_kv_cache", [run], torch.device("cpu")), tmp_path)
    assert versus(run, best, "output_tokens_per_s") == said


def test_a_peer_on_another_processor_stands_beside_nothing(tmp_path: Path) -> None:
    write(tmp_path, ("one", "1.0", "w", {"output_tokens_per_s": [9.0]}), machine={"name": "x"})
    assert not beside(collect("02_kv_cache", [ours(1.0)], torch.device("cpu")), tmp_path), (
        "rates of two processors are compared"
    )


def test_of_times_the_least_is_the_best(tmp_path: Path) -> None:
    write(tmp_path, ("one", "1.0", "w", {"ttft_ms_p50": [9.0, 7.0, 8.0]}))
    run = ours(3.0, metric="ttft_ms_p50")
    (best,) = beside(collect("02_kv_cache", [run], torch.device("cpu")), tmp_path)
    assert best.median("ttft_ms_p50") == 7.0


def test_a_table_says_what_an_installation_lacked(tmp_path: Path) -> None:
    folder = tmp_path / RESULTS.relative_to(ROOT)
    write(folder, ("one", "1.0", "w", {"output_tokens_per_s": [50.0]}), lacks="a package")
    evidence = collect("02_kv_cache", [ours(100.0)], torch.device("cpu"))
    evidence.write(folder / "cpu" / "02_kv_cache.json")
    made = fill("<!-- table: peers cpu/02_kv_cache -->\n<!-- /table -->\n", tmp_path)
    assert made.splitlines()[3:] == [
        "| w | m | 50 (1.0) | 100 | 2.00× |",
        "",
        "one 1.0 of 2026-11-26 ran without: a package.",
        "<!-- /table -->",
    ]


def test_of_an_engine_that_ran_in_several_ways_its_defaults_are_compared(
    tmp_path: Path,
) -> None:
    folder = tmp_path / RESULTS.relative_to(ROOT)
    times = {"": [30.0, 40.0], ", computed": [900.0], ", hit on the GPU": [5.0]}
    write(folder, *(("one", "1.0", "w", {"ttft_ms_p50": each}) for each in times.values()))
    path = folder / "cpu" / PEERS_FILE
    raw = json.loads(path.read_text(encoding="utf-8"))
    for peer, way in zip(raw["peers"], times, strict=True):
        peer["runs"][0]["way"] = way
    path.write_text(json.dumps(raw), encoding="utf-8")
    mine = ours(10.0, metric="ttft_ms_p50")
    evidence = collect("02_kv_cache", [mine], torch.device("cpu"))
    evidence.write(folder / "cpu" / "02_kv_cache.json")
    made = fill("<!-- table: peers cpu/02_kv_cache -->\n<!-- /table -->\n", tmp_path)
    assert made.splitlines()[1].startswith(
        "| workload | model | one | one, computed | one, hit"
    )
    cells = "30 ms (1.0) | 900 ms (1.0) | 5 ms (1.0) | 10 ms | 3.00×"
    assert made.splitlines()[3] == f"| w | m | {cells} |"


def measured(folder: Path, **more: object) -> Path:
    """What `vllm_run.py` writes, and its log."""
    name = "single-512"
    rates = {"output_tokens_per_s": [1.0, 3.0, 2.0]}
    one = {"workload": name, "temperature": 0.0, "requests_sha256": workload(name).sha256}
    said = {
        "engine": "vLLM",
        "version": "0.33.0",
        "when": "2026-11-29",
        "machine": {"name": "NVIDIA H200", "cores": 16},
        "versions": {"torch": "2.14.0"},
        "flags": "load_format=dummy",
        "lacks": "a package",
        "log": "out.log",
        "model": "qwen3-8b",
        "dtype": "bfloat16",
        "batch_invariant": False,
        "runs": [{**one, "metrics": rates, "tokens_sha256": ["0" * 16]}],
        "ended": True,
        **more,
    }
    (folder / "out.log").write_text("INFO x\nloading 10%|█\n", encoding="utf-8")
    (folder / "out.json").write_text(json.dumps(said), encoding="utf-8")
    return folder / "out.json"


def test_what_vllm_run_wrote_becomes_a_peer_with_its_log(tmp_path: Path) -> None:
    kept = record.keep(measured(tmp_path), tmp_path)
    assert kept.name == "vllm-0.33.0-2026-11-29-qwen3-8b-bfloat16.json"
    assert kept.with_suffix(".log").read_text(encoding="utf-8") == "INFO x\n"
    peer = record.of_run(kept)
    assert (peer["lacks"], peer["log"]) == ("a package", f"{kept.stem}.log")
    (run,) = peer["runs"]
    assert (run["beside"], run["way"], run["workload"]) == ("09_cuda_graphs", "", "single-512")
    assert run["metrics"] == {"output_tokens_per_s": [1.0, 3.0, 2.0]}


@pytest.mark.parametrize(
    ("more", "phase", "way"),
    [
        ({"dtype": "fp8"}, "10_quant", " fp8"),
        ({"batch_invariant": True}, "18_batch_invariance", " batch-invariant"),
        ({"model": "qwen3-30b-a3b"}, "16_experts", ""),
    ],
)
def test_a_peer_stands_beside_the_phase_of_its_feature(
    tmp_path: Path, more: dict[str, object], phase: str, way: str
) -> None:
    (run,) = record.of_run(record.keep(measured(tmp_path, **more), tmp_path))["runs"]
    assert (run["beside"], run["way"]) == (phase, way)


def test_a_server_that_was_asked_stands_beside_13_with_its_users(tmp_path: Path) -> None:
    metrics = {"output_tokens_per_s": [9.0, 8.0, 7.0], "ttft_ms_p50": [1.0, 2.0, 3.0]}
    asked = {"workload": "one-user", "temperature": 0.0, "options": {"users": 1}}
    runs = [{**asked, "metrics": metrics}]
    kept = record.keep(measured(tmp_path, runs=runs, served=True), tmp_path)
    assert kept.stem.endswith("-served")
    (run,) = record.of_run(kept)["runs"]
    assert (run["beside"], run["way"], run["options"]) == (
        "13_serving",
        ", its server",
        {"users": 1},
    )
    assert run["metrics"] == metrics


def test_a_server_is_asked_without_seeds_and_its_first_round_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[LoadPlan] = []

    def answer(_: object, plan: LoadPlan, processes: int) -> list[Outcome]:
        plans.append(plan)
        assert processes == min(plan.users, 4)
        at = float(len(plans))
        return [Outcome(0.0, [at, 2 * at], 2, 2 * at, 200) for _ in plan.bodies]

    monkeypatch.setattr(server, "run", answer)
    out = measured(tmp_path, runs=[], served=True, ended=False)
    ask_server.main("http://127.0.0.1:1", str(out))
    first, *rounds = plans
    assert (first.users, len(rounds)) == (1, 8)
    assert all(body["seed"] is None for plan in plans for body in plan.bodies)
    prompts = [plan.bodies[0]["prompt"] for plan in rounds[:4]]
    assert len(set(map(tuple, prompts))) == 4, (
        "a prefix cache would find the last round's prompts"
    )
    said = json.loads(out.read_text(encoding="utf-8"))
    assert said["ended"]
    assert [one["options"] for one in said["runs"]] == [{"users": 256}, {"users": 1}]
    assert said["runs"][0]["metrics"]["ttft_ms_p50"] == [3000.0, 4000.0, 5000.0]


def test_what_vllm_needs_is_written_with_the_requests_and_tokenizers(tmp_path: Path) -> None:
    vllm_run.write(tmp_path)
    requests = json.loads((tmp_path / "requests.json").read_text(encoding="utf-8"))
    assert requests["offline-256"][-1] == workload("offline-256").sha256
    for shape in vllm_run.MODELS.iterdir():
        made = tmp_path / "models" / shape.name
        told = json.loads((made / "config.json").read_text(encoding="utf-8"))
        assert told == json.loads((shape / "config.json").read_text(encoding="utf-8"))
        size = told.get("text_config", told)["vocab_size"]
        assert Tokenizer(made).vocab_size == size, f"{shape.name}: a tokenizer of its own"
    assert (tmp_path / "vllm_run.py").exists()


def test_what_was_cut_off_or_had_other_requests_is_not_kept(tmp_path: Path) -> None:
    some = {
        "workload": "prefill-64x1024",
        "temperature": 0.0,
        "metrics": {"prompt_tokens_per_s": [1.0, 2.0]},
    }
    with pytest.raises(UserError, match="was cut off before"):
        record.keep(measured(tmp_path, ended=False, runs=[some]), tmp_path)
    whole = some | {"metrics": {"prompt_tokens_per_s": [1.0, 2.0, 3.0]}}
    begun = {"workload": "offline-256", "temperature": 0.0, "metrics": {}}
    kept = record.keep(measured(tmp_path, ended=False, runs=[whole, some, begun]), tmp_path)
    assert json.loads(kept.read_text(encoding="utf-8"))["runs"] == [whole]
    other = {
        "workload": "single-512",
        "temperature": 0.0,
        "requests_sha256": "x",
        "metrics": {},
    }
    with pytest.raises(UserError, match="had other requests"):
        record.keep(measured(tmp_path, runs=[other]), tmp_path)


def test_servers_stand_side_by_side_and_beside_a_busy_program_with_each_way_of_waiting() -> (
    None
):
    def one(variant: str, rate: float, busy: int) -> Run:
        about = {"neighbours": busy} if busy else {}
        metrics = {"output_tokens_per_s": Metric((rate,))}
        return Run(variant, "one stream", "", "m", "real", "q4_1", metrics, about)

    runs = [one("13_serving", 150.0, 0), one("llama-cpp-python 0.3", 100.0, 0)]
    runs += [one("llama-cpp-python 0.3, Q8_0", 60.0, 0)]
    runs += [one("13_serving", 90.0, 1), one("13_serving, passive", 100.0, 1)]
    runs += [one("llama-cpp-python 0.3", 50.0, 1), one("llama-cpp-python 0.3, Q8_0", 30.0, 1)]
    lines = server_lines(collect("peers", runs, torch.device("cpu")))
    assert lines == [
        ["", "this", "llama-cpp-python 0.3", "this over it", "it, Q8_0"],
        ["one stream: tokens a second", "150", "100", "1.50×", "60"],
        ["one stream, beside 1 busy program: tokens a second", "90", "50", "1.80×", "30"],
        [
            "one stream, beside 1 busy program, waiting: passive: tokens a second",
            *("100", "50", "2.00×", "30"),
        ],
    ]
