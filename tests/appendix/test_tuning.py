"""Tuning: the climb of `--autotune` and what it writes; the defaults give way to winners and to nothing else.

A rehearsal leaves nothing behind but compiled kernels, and leaves none out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import prefix_cache
from common.events import generate
from common.sampling.params import SamplingParams
from continuous.engine import Stats
from forward.loading import load_model
from forward.model import Model
from forward.shapes import SHAPES
from phases import find_phase, phase_named
from phases.appendix.latency.tables import GemvKey
from phases.appendix.tuning import autotune, lone, winners
from phases.appendix.tuning.autotune import SPACE, neighbours, tune
from phases.appendix.tuning.rehearsal import play, rehearse, scenes
from phases.appendix.tuning.shapes import Shape, shapes
from phases.appendix.tuning.winners import DECODING, PREFILLING, DecodeWinners, TunedWinners, trying
from phases.cli import main
from phases.commands import autotune as command
from phases.commands import benches, doctor
from phases.registry import load_engine
from triton_paged_attention import tables
from triton_paged_attention.tables import (
    DECODE,
    PREFILL,
    DecodeConfig,
    DecodeKey,
    PrefillConfig,
    PrefillKey,
    Table,
)

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty cache folder, and no look-ups kept from or for other tests."""
    monkeypatch.setenv("LADDER_HOME", str(tmp_path))
    monkeypatch.delenv("LADDER_TUNING", raising=False)
    monkeypatch.setattr(DECODE, "tuned", DECODING)
    monkeypatch.setattr(PREFILL, "tuned", PREFILLING)
    winners.forget()
    yield tmp_path
    winners.forget()


KEY = DecodeKey(pairs=8, d_pad=64, itemsize=4)


def fake_shape(default: DecodeConfig | None = None, most_splits: int = 8) -> Shape:
    """Nothing to run: the fake timers look at the configuration."""
    table: Table[DecodeKey, DecodeConfig] = Table(lambda key, device: default or DecodeConfig(64, 4, 3))
    return Shape(
        DecodeWinners("decode", table, DecodeConfig), KEY, CPU, "fake", lambda: torch.ones(3), 2, most_splits
    )


def climb(shape: Shape, cost: Callable[[DecodeConfig], float]) -> autotune.Found:
    """A search whose timer asks `cost` about the configuration in use."""
    return tune(shape, SPACE["decode"], lambda call: cost(shape.winners.table.lookup(KEY, CPU)))


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
        config = shape.winners.table.lookup(KEY, CPU)
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


def write(kind: TunedWinners[Any, Any], key: Any, config: Any) -> Path:
    return winners.save_winner(CPU, kind.kind, key._asdict(), {"config": asdict(config), "seconds": 1e-6})


def test_a_winner_comes_before_the_table_for_its_key_only() -> None:
    other = HEAD._replace(d_pad=128)
    before = PREFILL.lookup(HEAD, CPU), PREFILL.lookup(other, CPU)
    assert before[0] != WINNER
    write(PREFILLING, HEAD, WINNER)
    assert (PREFILL.lookup(HEAD, CPU), PREFILL.lookup(other, CPU)) == (WINNER, before[1])
    assert PREFILL.default(HEAD, CPU) == before[0]


def test_decode_takes_the_nearest_batch_and_never_more_splits_than_fit() -> None:
    few, many = DecodeConfig(32, 8, 2, splits=5), DecodeConfig(16, 8, 2)
    write(DECODING, DecodeKey(2, 64, 4), few)
    write(DECODING, DecodeKey(64, 64, 4), many)
    assert DECODE.lookup(DecodeKey(1, 64, 4), CPU) == few
    assert DECODE.lookup(DecodeKey(40, 64, 4), CPU) == many
    # 4 multiprocessors, so the workspace has room for 16 programs.
    assert DECODE.lookup(DecodeKey(5, 64, 4), CPU) == replace(few, splits=3)
    other = DecodeKey(5, 128, 4)
    assert DECODE.lookup(other, CPU) == DECODE.default(other, CPU)


def test_a_batch_whose_default_was_the_best_takes_no_other_batch_s_winner() -> None:
    many, large = DecodeConfig(16, 8, 2), KEY._replace(pairs=64)
    write(DECODING, large, many)
    assert DECODE.lookup(KEY, CPU) == many
    tune(replace(fake_shape(), winners=DECODING), SPACE["decode"], lambda call: 1.0)
    assert DECODE.lookup(KEY, CPU) == DECODE.default(KEY, CPU)
    assert DECODE.lookup(large, CPU) == many


def test_doctor_says_which_tuning_is_used() -> None:
    said = {what: found for what, found, _ in doctor.facts(CPU)}
    assert said["Kernel tuning"] == "the defaults"
    path = write(PREFILLING, HEAD, WINNER)
    said = {what: found for what, found, _ in doctor.facts(CPU)}
    assert said["Kernel tuning"] == f"found by --autotune: {path}"


def test_a_new_search_replaces_the_old_entry() -> None:
    write(PREFILLING, HEAD, WINNER)
    path = write(PREFILLING, HEAD, replace(WINNER, block_m=64))
    assert [entry["config"]["block_m"] for entry in json.loads(path.read_text())["winners"]["prefill"]] == [
        64
    ]


@pytest.mark.parametrize("damage", ["off", "version", "garbage", "fields"])
def test_files_that_must_not_count(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    path = write(PREFILLING, HEAD, WINNER)
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

    write(PREFILLING, HEAD, WINNER)
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
    monkeypatch.setattr(lone, "SPACE", {"lone": {"splits": (1, 2, 4)}, "gemv": {"rows": (1, 2)}})


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
    six, sizes = phase_named("06"), {"kernels": True, "max_len": 32, "max_rows": 2}
    tuned = generate(load_engine(six, model, **sizes), prompts, params)
    monkeypatch.setenv("LADDER_TUNING", "off")
    winners.forget()
    usual = generate(load_engine(six, model, **sizes), prompts, params)
    assert [c.token_ids for c in tuned] == [c.token_ids for c in usual]


def test_shapes_are_those_of_the_model() -> None:
    titles = {shape.winners.kind: shape for shape in shapes(TINY, CPU, torch.float32, (2,), 20)}
    assert set(titles) == set(SPACE)
    assert titles["decode"].key.pairs == 2 * TINY.num_kv_heads
    titles = {shape.winners.kind: shape for shape in lone.shapes(TINY, CPU, torch.float32, 20)}
    assert set(titles) == set(lone.SPACE)
    assert titles["gemv"].key == GemvKey(TINY.vocab_size, TINY.hidden_size, False)


def test_what_is_tried_counts_for_its_own_key_only() -> None:
    with trying(PREFILL, HEAD, WINNER):
        assert PREFILL.lookup(HEAD, CPU) == WINNER
        other = HEAD._replace(itemsize=2)
        assert PREFILL.lookup(other, CPU) == PREFILL.default(other, CPU) != WINNER
    assert PREFILL.lookup(HEAD, CPU) == PREFILL.default(HEAD, CPU)


def test_a_gate_with_bias_has_no_matrix_vector_kernel() -> None:
    found = lone.shapes(replace(TINY, mlp_bias=True), CPU, torch.float32, 20)
    assert not any(shape.key.gated for shape in found if shape.winners.kind == "gemv")


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


# The rehearsal.


@pytest.mark.parametrize("options", [{}, {"step_tokens": 7}, {"max_rows": 1}, {"max_len": 8}], ids=str)
@pytest.mark.slow
def test_an_engine_forgets_its_rehearsal(model: Model, options: dict[str, Any]) -> None:
    given = {"max_rows": 4, "max_len": 200, "step_tokens": 64, "cache_bytes": 1 << 20} | options
    plain, rehearsed = (prefix_cache.load(model, **given) for _ in range(2))
    assert rehearse(rehearsed) > 0
    assert rehearsed.stats == Stats() and rehearsed.idle
    assert rehearsed.cache.free == rehearsed.cache.allocator.count
    assert rehearsed.cache.allocator.free == rehearsed.cache.allocator.count, "the index remembers blocks"
    rehearsed.check_integrity()
    params = SamplingParams(max_tokens=5, temperature=0.9, seed=4, ignore_eos=True)
    prompts = [[1, 2, 3], [4]]
    found = [[c.token_ids for c in generate(engine, prompts, params)] for engine in (plain, rehearsed)]
    assert found[0] == found[1]
    assert rehearsed.cache.stats.hit_tokens == 0, "a rehearsed prompt is shared with a real one"


def test_scenes_have_steps_of_all_kinds(model: Model) -> None:
    engine = prefix_cache.load(model, max_rows=4, max_len=200, step_tokens=64, cache_bytes=1 << 20)
    played = scenes(engine)
    assert any(len(scene.lengths) == 1 for scene in played) and any(
        len(scene.lengths) > 4 for scene in played
    )
    totals = {sum(scene.lengths) % 16 == 0 for scene in played}
    assert totals == {True, False}, "kernels are compiled apart for numbers that 16 divides"
    for feature in ("temperature", "top_k", "repetition_penalty", "logprobs"):
        assert len({getattr(scene.params, feature) for scene in played}) > 1, feature


def test_scenes_are_played_as_they_are_written(model: Model) -> None:
    """A prompt that another scene's blocks hold in part is a short one, and its step one of another kind."""
    engine = prefix_cache.load(model, max_rows=4, max_len=200, step_tokens=64, cache_bytes=1 << 20)
    for scene in scenes(engine):
        engine.stats = Stats()
        play(engine, scene)
        assert engine.cache.stats.hit_tokens == 0, f"{scene.title}: its prompts are known from another scene"
        if scene.running:
            lengths = [min(length, 200 - scene.tokens - 1) for length in scene.lengths]
            expected = scene.running * (16 + 5) + sum(lengths) + len(lengths) * (scene.tokens - 1)
            assert engine.stats.computed_tokens == expected, scene.title


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("processors", [40, 132])
def test_every_number_of_splits_is_rehearsed(
    model: Model, kv_heads: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes beside a long prompt, 1 to as many as there are rows: none meets a kernel of its own."""
    monkeypatch.setattr(tables, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(tables, "shared_memory", lambda _: 232_448)
    engine = prefix_cache.load(model, max_rows=256, max_len=200, cache_bytes=1 << 20)

    def kernel(requests: int) -> tuple[int, int]:
        found = tables.decode_default(tables.DecodeKey(requests * kv_heads, 128, 2), torch.device("cpu"))
        return 1 << (found.splits - 1).bit_length(), found.num_warps

    played = {kernel(scene.running) for scene in scenes(engine) if scene.running}
    missing = [(count, *kernel(count)) for count in range(1, 257) if kernel(count) not in played]
    assert not missing, (
        f"decodes beside a prompt: the kernel of (requests, splits, warps) {missing[0]} is new"
    )


@pytest.mark.gpu
def test_nothing_is_compiled_after_the_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    engine = load_engine(
        phase_named("09"),
        "random:qwen3-0.6b",
        device="cuda",
        max_len=4096,
        graph_rows=16,
        graph_tokens=256,
        cache_bytes=8 << 30,
    )
    compiled: list[str] = []

    def note(*given: Any, **facts: Any) -> None:
        compiled.append(str(facts.get("repr") or given))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    generator = torch.Generator().manual_seed(0)
    for count, most in ((1, 50), (3, 900), (40, 300), (64, 1500), (90, 128), (80, 1024)):
        lengths = torch.randint(1, most, (count,), generator=generator).tolist()
        prompts = [torch.randint(1, 5000, (n,), generator=generator).tolist() for n in lengths]
        params = SamplingParams(max_tokens=6, temperature=0.6, seed=1, ignore_eos=True)
        generate(engine, prompts, params)
        generate(engine, prompts[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert compiled == [], f"{len(compiled)} kernels were compiled while requests waited"
