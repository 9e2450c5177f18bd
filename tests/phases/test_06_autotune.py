"""`--autotune`: the climb, what it writes, and that the defaults give way to it and to nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from phases.appendix.latency import tuning as latency
from phases.appendix.latency.tables import GemvKey
from phases.cli import main
from phases.commands import autotune as command
from phases.commands import benches, doctor
from triton_paged_attention.tuning import autotune, winners
from triton_paged_attention.tuning.autotune import SPACE, neighbours, tune
from triton_paged_attention.tuning.shapes import Shape, shapes
from triton_paged_attention.tuning.tables import (
    DECODE,
    PREFILL,
    DecodeConfig,
    DecodeKey,
    DecodeTable,
    PrefillConfig,
    PrefillKey,
)
from triton_paged_attention.tuning.winners import Table

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache folder, and no look-ups kept from or for other tests."""
    monkeypatch.setenv("LADDER_HOME", str(tmp_path))
    monkeypatch.delenv("LADDER_TUNING", raising=False)
    winners.forget()
    yield tmp_path
    winners.forget()


KEY = DecodeKey(pairs=8, d_pad=64, itemsize=4)


def fake_shape(default: DecodeConfig | None = None, most_splits: int = 8) -> Shape:
    """Nothing to run: the fake timers look at the configuration."""
    table = DecodeTable("decode", DecodeConfig, lambda key, device: default or DecodeConfig(64, 4, 3))
    return Shape(table, KEY, CPU, "fake", lambda: torch.ones(3), 2, most_splits)


def climb(shape: Shape, cost: Callable[[DecodeConfig], float]) -> autotune.Found:
    """A search whose timer asks `cost` about the configuration in use."""
    return tune(shape, SPACE["decode"], lambda call: cost(shape.table.lookup(KEY, CPU)))


def distance(config: DecodeConfig) -> float:
    """Best at 2 warps, 32 keys and 4 splits; every step away from there costs half as much again."""
    steps = abs(config.num_warps - 2) + abs(config.block_n - 32) / 32 + abs(config.splits - 4)
    return float(1.5**steps)


def test_the_climb_ends_at_the_best_and_times_are_of_one_call() -> None:
    found = climb(fake_shape(), distance)
    assert found.best.config == DecodeConfig(32, 2, 3, splits=4)
    assert found.best.seconds == 0.5  # the call runs over two copies of its data
    assert found.default.seconds == 1.5 ** (2 + 1 + 3) / 2
    assert len(found.trials) == len({trial.config for trial in found.trials}) <= autotune.MOST


def test_noise_does_not_beat_the_default() -> None:
    found = climb(fake_shape(), lambda config: 1.0 if config.num_warps == 4 else 0.985)
    assert found.best is found.default
    assert json.loads(found.path.read_text())["winners"]["decode"][0]["config"] is None


def test_configurations_that_do_not_fit_or_differ_are_passed_over() -> None:
    shape = fake_shape()

    def call() -> torch.Tensor:
        config = shape.table.lookup(KEY, CPU)
        if config.num_stages > 3:
            raise triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")
        return torch.ones(3) * (1.5 if config.block_n == 128 else 1.0)

    found = climb(replace(shape, call=call), lambda c: 1 / (c.num_stages + c.block_n))
    why = {trial.why for trial in found.trials if trial.seconds is None}
    assert any("shared memory" in reason for reason in why)
    assert any(reason.startswith("its result differs") for reason in why)
    assert (found.best.config.num_stages, found.best.config.block_n) == (3, 64)


def test_splits_stay_within_the_workspace() -> None:
    found = climb(fake_shape(most_splits=2), lambda config: 1 / config.splits)
    assert found.best.config.splits == 2


def test_neighbours_differ_in_one_field() -> None:
    start = PrefillConfig(64, 64)
    for config in neighbours(SPACE["prefill"], start):
        assert sum(a != b for a, b in zip(asdict(config).values(), asdict(start).values(), strict=True)) == 1
    odd = DecodeConfig(splits=11)
    assert {c.splits for c in neighbours(SPACE["decode"], odd)} == {8, 11, 16}


HEAD = PrefillKey(d_pad=64, itemsize=4)
WINNER = PrefillConfig(32, 32, 4, 4)


def write(table: Table[Any, Any], key: Any, config: Any) -> Path:
    return winners.save_winner(CPU, table.kind, key._asdict(), {"config": asdict(config), "seconds": 1e-6})


def test_a_winner_comes_before_the_table_for_its_key_only() -> None:
    other = HEAD._replace(d_pad=128)
    before = PREFILL.lookup(HEAD, CPU), PREFILL.lookup(other, CPU)
    assert before[0] != WINNER
    write(PREFILL, HEAD, WINNER)
    assert (PREFILL.lookup(HEAD, CPU), PREFILL.lookup(other, CPU)) == (WINNER, before[1])
    assert PREFILL.default(HEAD, CPU) == before[0]


def test_decode_takes_the_nearest_batch_and_never_more_splits_than_fit() -> None:
    few, many = DecodeConfig(32, 8, 2, splits=5), DecodeConfig(16, 8, 2)
    write(DECODE, DecodeKey(2, 64, 4), few)
    write(DECODE, DecodeKey(64, 64, 4), many)
    assert DECODE.lookup(DecodeKey(1, 64, 4), CPU) == few
    assert DECODE.lookup(DecodeKey(40, 64, 4), CPU) == many
    # 4 multiprocessors, so the workspace has room for 16 programs.
    assert DECODE.lookup(DecodeKey(5, 64, 4), CPU) == replace(few, splits=3)
    other = DecodeKey(5, 128, 4)
    assert DECODE.lookup(other, CPU) == DECODE.default(other, CPU)


def test_a_batch_whose_default_was_the_best_takes_no_other_batch_s_winner() -> None:
    many, large = DecodeConfig(16, 8, 2), KEY._replace(pairs=64)
    write(DECODE, large, many)
    assert DECODE.lookup(KEY, CPU) == many
    tune(replace(fake_shape(), table=DECODE), SPACE["decode"], lambda call: 1.0)
    assert DECODE.lookup(KEY, CPU) == DECODE.default(KEY, CPU)
    assert DECODE.lookup(large, CPU) == many


def test_doctor_says_which_tuning_is_used() -> None:
    said = {what: found for what, found, _ in doctor.facts(CPU)}
    assert said["Kernel tuning"] == "the defaults"
    path = write(PREFILL, HEAD, WINNER)
    said = {what: found for what, found, _ in doctor.facts(CPU)}
    assert said["Kernel tuning"] == f"found by --autotune: {path}"


def test_a_new_search_replaces_the_old_entry() -> None:
    write(PREFILL, HEAD, WINNER)
    path = write(PREFILL, HEAD, replace(WINNER, block_m=64))
    assert [entry["config"]["block_m"] for entry in json.loads(path.read_text())["winners"]["prefill"]] == [
        64
    ]


@pytest.mark.parametrize("damage", ["off", "version", "garbage", "fields"])
def test_files_that_must_not_count(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    path = write(PREFILL, HEAD, WINNER)
    raw = json.loads(path.read_text())
    if damage == "off":
        monkeypatch.setenv("LADDER_TUNING", "off")
    elif damage == "version":
        path.write_text(json.dumps(raw | {"triton": "2.0.0"}))
    elif damage == "garbage":
        path.write_text("{")
    else:
        raw["winners"]["prefill"][0]["config"]["speed"] = 9
        path.write_text(json.dumps(raw))
    winners.forget()
    assert PREFILL.lookup(HEAD, CPU) == PREFILL.default(HEAD, CPU)


def test_a_bench_for_the_record_uses_the_defaults(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[PrefillConfig] = []

    def measure(*_: Any) -> Any:
        seen.append(PREFILL.lookup(HEAD, CPU))
        raise ValueError("enough")

    write(PREFILL, HEAD, WINNER)
    monkeypatch.setenv("LADDER_TUNING", "on")  # so that it is put back
    monkeypatch.setattr(benches, "_measure", measure)
    with pytest.raises(ValueError, match="enough"):
        benches.bench("2", quick=True, record=False, device="cpu", dtype="auto", model=None, repeats=1)
    assert seen == [PREFILL.default(HEAD, CPU)]


# On the kernels themselves, in the interpreter or on the GPU that is there.


def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run natively here")
    monkeypatch.setattr(
        autotune, "SPACE", {"decode": {"block_n": (16, 32)}, "prefill": {"block_m": (32, 128)}}
    )
    monkeypatch.setattr(latency, "SPACE", {"lone": {"splits": (1, 2, 4)}, "gemv": {"rows": (1, 2)}})


@pytest.mark.long
def test_every_shape_of_a_model_is_tuned_and_the_engine_uses_it(
    monkeypatch: pytest.MonkeyPatch, home: Path, capsys: Any
) -> None:
    interpreted(monkeypatch)
    times = iter(0.9**n for n in range(1000))  # whatever is tried next is faster
    monkeypatch.setattr(command.out, "width", 200)
    options = {"batches": (1, 2), "context": 20, "timer": lambda call: float(next(times))}
    phase = find_phase("9")
    assert phase is not None
    command.autotune(phase, "random:tiny", None, CPU, torch.float32, **options)
    out = capsys.readouterr().out
    assert "decode attention, 1 x 20" in out and "prefill attention" in out and "a layer of one token" in out
    assert "s for compiling" in out and str(home) in out
    entries = json.loads(winners.winners_path(CPU).read_text())["winners"]
    assert set(entries) == {"decode", "lone", "prefill", "gemv"} and len(entries["decode"]) == 2
    key = PrefillKey(**entries["prefill"][0]["at"])
    assert PREFILL.lookup(key, CPU) != PREFILL.default(key, CPU)

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
    assert set(titles) == set(SPACE)
    assert titles["decode"].key.pairs == 2 * TINY.num_kv_heads
    titles = {shape.kind: shape for shape in latency.shapes(TINY, CPU, torch.float32, 20)}
    assert set(titles) == set(latency.SPACE)
    assert titles["gemv"].key == GemvKey(TINY.vocab_size, TINY.hidden_size, False)


def test_what_is_tried_counts_for_its_own_key_only() -> None:
    with PREFILL.override(HEAD, WINNER):
        assert PREFILL.lookup(HEAD, CPU) == WINNER
        other = HEAD._replace(itemsize=2)
        assert PREFILL.lookup(other, CPU) == PREFILL.default(other, CPU) != WINNER
    assert PREFILL.lookup(HEAD, CPU) == PREFILL.default(HEAD, CPU)


def test_a_gate_with_bias_has_no_matrix_vector_kernel() -> None:
    found = latency.shapes(replace(TINY, mlp_bias=True), CPU, torch.float32, 20)
    assert not any(shape.key.gated for shape in found if shape.kind == "gemv")


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
