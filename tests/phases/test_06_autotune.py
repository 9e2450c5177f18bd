"""`--autotune`: the climb, what it writes, and that the defaults give way to it and to nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import triton_paged_attention
from common.events import generate
from common.sampling.params import SamplingParams
from forward.loading import load_model
from forward.shapes import SHAPES
from phases import find_phase
from phases.cli import main
from phases.commands import autotune as command
from phases.commands import benches, doctor
from triton_paged_attention import autotune, winners
from triton_paged_attention.autotune import neighbours, tune
from triton_paged_attention.autotune_shapes import Shape, shapes
from triton_paged_attention.tuning import DecodeConfig, GemvConfig, decode_config, gemv_config, prefill_config

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """An empty cache folder, and no look-ups kept from or for other tests; a GPU only where one is needed."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(winners, "_current_device", lambda: CPU)
    monkeypatch.setenv("LADDER_HOME", str(tmp_path))
    monkeypatch.delenv("LADDER_TUNING", raising=False)
    winners.forget()
    yield tmp_path
    winners.forget()


def fake_shape(default: Any = None, most_splits: int = 8) -> Shape:
    """Nothing to run: the fake timers look at the configuration."""
    default = default or DecodeConfig(64, 4, 3)
    at = {"pairs": 8, "d_pad": 64, "itemsize": 4}
    return Shape("decode", "fake", at, default, lambda: torch.ones(3), 2, most_splits)


def config_timer(cost: Any) -> Any:
    """A timer that asks `cost` about the configuration in use."""
    return lambda call: cost(winners._forced["decode"][1])


def distance(config: DecodeConfig) -> float:
    """Best at 2 warps, 32 keys and 4 splits; every step away from there costs half as much again."""
    steps = abs(config.num_warps - 2) + abs(config.block_n - 32) / 32 + abs(config.splits - 4)
    return float(1.5**steps)


def test_the_climb_ends_at_the_best_and_times_are_of_one_call() -> None:
    found = tune(fake_shape(), CPU, config_timer(distance))
    assert found.best.config == DecodeConfig(32, 2, 3, splits=4)
    assert found.best.seconds == 0.5  # the call runs over two copies of its data
    assert found.default.seconds == 1.5 ** (2 + 1 + 3) / 2
    assert len(found.trials) == len({trial.config for trial in found.trials}) <= autotune.MOST


def test_noise_does_not_beat_the_default() -> None:
    found = tune(fake_shape(), CPU, config_timer(lambda config: 1.0 if config.num_warps == 4 else 0.985))
    assert found.best is found.default
    assert json.loads(found.path.read_text())["winners"]["decode"][0]["config"] is None


def test_configurations_that_do_not_fit_or_differ_are_passed_over() -> None:
    def call() -> torch.Tensor:
        _, config = winners._forced["decode"]
        if config.num_stages > 3:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return torch.ones(3) * (1.5 if config.block_n == 128 else 1.0)

    found = tune(
        replace(fake_shape(), call=call), CPU, config_timer(lambda c: 1 / (c.num_stages + c.block_n))
    )
    why = {trial.why for trial in found.trials if trial.seconds is None}
    assert any("shared memory" in reason for reason in why)
    assert any(reason.startswith("its result differs") for reason in why)
    assert (found.best.config.num_stages, found.best.config.block_n) == (3, 64)


def test_splits_stay_within_the_workspace() -> None:
    found = tune(fake_shape(most_splits=2), CPU, config_timer(lambda config: 1 / config.splits))
    assert found.best.config.splits == 2


def test_neighbours_differ_in_one_field() -> None:
    start = GemvConfig(rows=1, block_k=512)
    for config in neighbours("gemv", start):
        assert sum(a != b for a, b in zip(asdict(config).values(), asdict(start).values(), strict=True)) == 1
    odd = DecodeConfig(splits=11)
    assert {c.splits for c in neighbours("decode", odd)} == {8, 11, 16}


def write(kind: str, at: dict[str, Any], config: Any) -> Path:
    return winners.save_winner(CPU, kind, at, {"config": asdict(config), "seconds": 1e-6})


def test_a_winner_comes_before_the_table_for_its_arguments_only() -> None:
    before = gemv_config(512, 256, False), gemv_config(512, 256, True)
    winner = GemvConfig(rows=8, block_k=256, num_warps=2)
    assert winner != before[0]
    write("gemv", {"rows": 512, "size": 256, "gated": False}, winner)
    assert (gemv_config(512, 256, False), gemv_config(512, 256, True)) == (winner, before[1])
    assert gemv_config.table(512, 256, False) == before[0]


def test_decode_takes_the_nearest_batch_and_never_more_splits_than_fit() -> None:
    few, many = DecodeConfig(32, 8, 2, splits=5), DecodeConfig(16, 8, 2)
    write("decode", {"pairs": 2, "d_pad": 64, "itemsize": 4}, few)
    write("decode", {"pairs": 64, "d_pad": 64, "itemsize": 4}, many)
    assert decode_config(1, 64, 4, CPU) == few
    assert decode_config(40, 64, 4, CPU) == many
    # 4 multiprocessors, so the workspace has room for 16 programs.
    assert decode_config(5, 64, 4, CPU) == replace(few, splits=3)
    assert decode_config(5, 128, 4, CPU) == decode_config.table(5, 128, 4, CPU)


def test_a_batch_whose_default_was_the_best_takes_no_other_batch_s_winner() -> None:
    many = DecodeConfig(16, 8, 2)
    write("decode", {"pairs": 64, "d_pad": 64, "itemsize": 4}, many)
    assert decode_config(8, 64, 4, CPU) == many
    tune(fake_shape(decode_config.table(8, 64, 4, CPU)), CPU, lambda call: 1.0)
    assert decode_config(8, 64, 4, CPU) == decode_config.table(8, 64, 4, CPU)
    assert decode_config(64, 64, 4, CPU) == many


def test_doctor_says_which_tuning_is_used() -> None:
    said = {what: found for what, found, _ in doctor.facts(CPU)}
    assert said["Kernel tuning"] == "the defaults"
    path = write("gemv", {"rows": 4, "size": 64, "gated": False}, GemvConfig(2, 64))
    said = {what: found for what, found, _ in doctor.facts(CPU)}
    assert said["Kernel tuning"] == f"found by --autotune: {path}"


def test_a_new_search_replaces_the_old_entry() -> None:
    at = {"rows": 4, "size": 64, "gated": False}
    write("gemv", at, GemvConfig(2, 64))
    path = write("gemv", at, GemvConfig(4, 64))
    assert [entry["config"]["rows"] for entry in json.loads(path.read_text())["winners"]["gemv"]] == [4]


@pytest.mark.parametrize("damage", ["off", "version", "garbage", "fields"])
def test_files_that_must_not_count(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    path = write("gemv", {"rows": 4, "size": 64, "gated": False}, GemvConfig(16, 64, 8))
    raw = json.loads(path.read_text())
    if damage == "off":
        monkeypatch.setenv("LADDER_TUNING", "off")
    elif damage == "version":
        path.write_text(json.dumps(raw | {"triton": "2.0.0"}))
    elif damage == "garbage":
        path.write_text("{")
    else:
        raw["winners"]["gemv"][0]["config"]["speed"] = 9
        path.write_text(json.dumps(raw))
    winners.forget()
    assert gemv_config(4, 64, False) == gemv_config.table(4, 64, False)


def test_a_bench_for_the_record_uses_the_defaults(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[GemvConfig] = []

    def measure(*_: Any) -> Any:
        seen.append(gemv_config(4, 64, False))
        raise ValueError("enough")

    write("gemv", {"rows": 4, "size": 64, "gated": False}, GemvConfig(16, 64, 8))
    monkeypatch.setenv("LADDER_TUNING", "on")  # so that it is put back
    monkeypatch.setattr(benches, "_measure", measure)
    with pytest.raises(ValueError, match="enough"):
        benches.bench("2", quick=True, device="cpu", dtype="auto", model=None, repeats=1)
    assert seen == [gemv_config.table(4, 64, False)]


# On the kernels themselves, in the interpreter or on the GPU that is there.


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run natively here")
    few = {
        "decode": {"block_n": (16, 32)},
        "single": {"splits": (1, 2, 4)},
        "prefill": {"block_m": (32, 128)},
        "gemv": {"rows": (1, 2)},
    }
    monkeypatch.setattr(autotune, "SPACE", few)


def test_every_shape_of_a_model_is_tuned_and_the_engine_uses_it(
    monkeypatch: pytest.MonkeyPatch, home: Path, capsys: Any
) -> None:
    interpreted(monkeypatch)
    times = iter(0.9**n for n in range(1000))  # whatever is tried next is faster
    monkeypatch.setattr(command.out, "width", 200)
    options = {"batches": (1, 2), "context": 20, "timer": lambda call: float(next(times))}
    phase = find_phase("6")
    assert phase is not None
    command.autotune(phase, "random:tiny", None, CPU, torch.float32, **options)
    out = capsys.readouterr().out
    assert "decode attention, 1 x 20" in out and "prefill attention" in out and "a layer of one token" in out
    assert "s for compiling" in out and str(home) in out
    entries = json.loads(winners.winners_path(CPU).read_text())["winners"]
    assert set(entries) == {"decode", "single", "prefill", "gemv"} and len(entries["decode"]) == 2
    d_pad = entries["prefill"][0]["at"]["d_pad"]
    assert prefill_config(d_pad, 4, CPU) != prefill_config.table(d_pad, 4, CPU)

    model = load_model("random:tiny", device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompts = [[1, 2, 3], [(7 * i) % 250 for i in range(20)]]
    tuned = generate(triton_paged_attention.load(model, max_len=32, max_rows=2), prompts, params)
    monkeypatch.setenv("LADDER_TUNING", "off")
    winners.forget()
    usual = generate(triton_paged_attention.load(model, max_len=32, max_rows=2), prompts, params)
    assert [c.token_ids for c in tuned] == [c.token_ids for c in usual]


def test_shapes_are_those_of_the_model() -> None:
    titles = {shape.kind: shape for shape in shapes(TINY, CPU, torch.float32, (2,), 20)}
    assert set(titles) == set(autotune.SPACE) == {"decode", "single", "prefill", "gemv"}
    assert titles["decode"].at["pairs"] == 2 * TINY.num_kv_heads
    assert titles["gemv"].at == {"rows": TINY.vocab_size, "size": TINY.hidden_size, "gated": False}


def test_what_is_tried_counts_for_its_own_arguments_only() -> None:
    tried = GemvConfig(16, 64, 8)
    with winners.using("gemv", {"rows": 4, "size": 64, "gated": False}, tried):
        assert gemv_config(4, 64, False) == tried
        assert gemv_config(4, 64, gated=True) == gemv_config.table(4, 64, True) != tried


def test_layers_without_a_step_of_one_token_have_nothing_of_it_tuned() -> None:
    """A gate with bias has no matrix-vector kernel; the output head has."""
    kinds = [shape.kind for shape in shapes(replace(TINY, mlp_bias=True), CPU, torch.float32, (2,), 20)]
    assert kinds == ["decode", "prefill", "gemv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["5", "--device", "cpu"], "no kernels to tune: 06 and 09 have"),
        (["6", "--device", "cpu"], "device is 'cpu', but"),
        (["9", "--device", "cpu"], "device is 'cpu', but"),
    ],
)
def test_where_there_is_nothing_to_tune(capsys: Any, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments, "--autotune"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "") and words in err and len(err.splitlines()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_search_on_the_gpu(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "MOST", 4)
    phase = find_phase("6")
    assert phase is not None
    cuda = torch.device("cuda")
    command.autotune(phase, "random:tiny", None, cuda, torch.bfloat16, batches=(1, 4), context=256)
    assert "configurations in" in capsys.readouterr().out
