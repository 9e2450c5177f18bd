"""Phase 14, tensor parallel: in ranks the same tokens come out, and a rank that is lost ends the engine."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import parallel
import serving
from common.errors import UserError
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.metadata import SamplingFlags
from common.sampling.ops import NAN_TOKEN
from common.sampling.params import SamplingParams
from common.sampling.sampler import SamplerBackend
from cuda_graphs.capture import Capturer
from forward.loading import load_model
from forward.shapes import SHAPES
from paged_cache.memory import weight_bytes
from parallel import worker_group
from parallel.launch import leave, store_folder, together
from parallel.ranks import Ranks
from parallel.sampler import RankSamplerBackend
from parallel.shard import Shard, Slice
from parallel.worker_group import WorkerLostError
from tests import structured_kit
from tests.guidance_kit import served
from tests.programs import environment
from tests.ranks_kit import (
    PLACE,
    PROMPTS,
    SIZES,
    SMALL,
    TIGHT,
    end_worker_groups,
    in_ranks,
    same,
    tokens_of,
    write_checkpoint,
)
from tests.servers import wait_until
from tests.test_process import running


@pytest.fixture(scope="module", autouse=True)
def _end_worker_groups() -> Iterator[None]:
    """On a busy machine a process may take a while between its connections' end and its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_group, "LOSS_SECONDS", 30.0)
        yield
    end_worker_groups()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in files: 8 heads, 2 key/value heads, tied embeddings, an odd vocabulary, biases."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder)
    return folder


# Who has what.


def test_heads_and_sizes_that_do_not_divide_are_refused_before_anything_starts() -> None:
    heads = "tensor_parallel is {}, but must divide the model's num_{}heads, which"
    tiny = "random:tiny"
    for model, size, more, says in (
        (tiny, 2, {}, heads.format(2, "kv_")),
        (tiny, 4, {}, heads.format(4, "")),
        (tiny, 0, {}, "tensor_parallel is 0, but must be"),
        ("random:gpt2", 2, {}, "tensor_parallel is 2, but gpt2 is not cut"),
        (
            tiny,
            3,
            {"drafter": "head"},
            "tensor_parallel is 3, but drafter 'head' reads a whole vocabulary",
        ),
    ):
        with pytest.raises(UserError, match=says):
            parallel.load(model, tensor_parallel=size, **SMALL, **more)
    with pytest.raises(UserError, match="so model must be a name"):
        parallel.load(load_model("random:tiny", **PLACE), tensor_parallel=3, **SIZES)


def test_a_shard_is_cut_where_its_shape_says() -> None:
    last = Shard(3, 4)
    name = "layers.0.self_attn."
    assert last.cut(name + "q_proj.weight", (64, 32), (16, 32), 8) == Slice(0, 48, 16)
    assert last.cut(name + "o_proj.weight", (32, 64), (32, 16), 8) == Slice(1, 48, 16)
    assert last.cut(name + "k_proj.weight", (16, 32), (8, 32), 2) == Slice(0, 8, 8), (
        "rank 3 has head 1"
    )
    assert Shard(1, 4).cut(name + "k_proj.weight", (16, 32), (8, 32), 2) == Slice(0, 0, 8)
    assert last.cut("norm.weight", (32,), (32,), 2) is None
    assert last.cut("lm_head.weight", (257, 32), (65, 32), 2) == Slice(0, 195, 65)
    assert last.vocabulary(257) == (195, 62, 65)
    with pytest.raises(
        UserError, match="groups of weights that share a scale must stay together"
    ):
        last.cut("layers.0.mlp.down_proj.weight_scale", (64, 3), (64, 1), 2)
    assert last.first_alone(name + "o_proj.bias") and not last.first_alone(
        name + "q_proj.bias"
    )


def _own_weights(ranks: Any, model: str) -> dict[str, tuple[int, ...]]:
    from parallel.loading import load_part

    part = load_part(model, device="cpu", dtype="float32", weight_loader=None, ranks=ranks)
    return {name: tuple(tensor.shape) for name, tensor in part.state_dict().items()} | {
        "bytes": (weight_bytes(part),)
    }


@pytest.mark.slow
def test_no_rank_holds_the_whole(llama: Path) -> None:
    whole = load_model(str(llama), **PLACE)
    for found in parallel.together(2, _own_weights, str(llama)):
        assert found["layers.0.self_attn.q_proj.weight"] == (64, 64)
        assert found["layers.0.self_attn.o_proj.linear.weight"] == (64, 64)
        assert found["layers.1.mlp.down_proj.linear.weight"] == (64, 64)
        assert found["embed_tokens.weight"] == (130, 64), (
            "259 tokens are 130 a rank, and one place is empty"
        )
        assert found["bytes"][0] < 0.53 * weight_bytes(whole), (
            "a rank of two has about half of the weights"
        )


# The same tokens.


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    return tokens_of(serving.load(str(llama), **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_give_the_tokens_of_one(
    llama: Path, expected: list[list[int]], size: int
) -> None:
    same(in_ranks(str(llama), size, SMALL), expected, f"{size} ranks of files")


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "size"), [("tiny-window", 2), ("tiny-window", 4)])
def test_random_weights_are_those_of_one_rank(shape: str, size: int) -> None:
    """`tiny` has 6 heads and 3 key/value heads; in 4 ranks of `tiny-window` two share a key/value head."""
    model = f"random:{shape}"
    same(
        in_ranks(model, size, SMALL),
        tokens_of(serving.load(model, **SMALL)),
        f"{size} ranks of {shape}",
    )


FEATURES: dict[str, dict[str, Any]] = {
    "tight": TIGHT,
    "plain": SMALL | {"overlap": False, "prefix_cache": False, "chunked_prefill": False},
    "int4": SMALL | {"quantization": "int4", "group_size": 16},
    "int8 keys": SMALL | {"kv_cache": "int8"},
    "drafts": SMALL | {"speculate": True, "draft_adaptive": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())
def test_every_feature_in_two_ranks(llama: Path, options: dict[str, Any]) -> None:
    model = str(llama)
    same(in_ranks(model, 2, options), tokens_of(serving.load(model, **options)), "two ranks")


@pytest.mark.slow
def test_grammars_in_two_ranks() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    bound: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 1.0,
        "grammar": Grammar.json_schema(schema),
    }
    params = [SamplingParams(seed=seed, **bound) for seed in (1, 2)]
    params.append(SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True))
    prompts = [[5, 6, 7], [9, 8], [1, 2, 3, 4]]
    options = SMALL | {"tokenizer": structured_kit.tokenizer()}
    wanted = tokens_of(served("random:tiny-window", **options), prompts, params)
    same(in_ranks("random:tiny-window", 2, options, prompts, params), wanted, "grammars")


@pytest.mark.slow
def test_a_grammar_that_fails_ends_its_request_on_every_rank() -> None:
    bound: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 1.0,
        "grammar": Grammar.regex("[a-z]*"),
    }
    options = SMALL | {"tokenizer": structured_kit.tokenizer()}
    engine: Any = parallel.load("random:tiny-window", tensor_parallel=2, **options)
    first, second = (
        engine.add([5, 6, seed], SamplingParams(seed=seed, **bound))[0] for seed in (1, 2)
    )
    take_failed, error = (
        engine.grammar_manager.pop_failed_requests,
        RuntimeError("no way on"),
    )

    def failed() -> list[tuple[Request, Exception]]:
        return take_failed() + [(first, error)] * (len(first.output_ids) == 3)

    engine.grammar_manager.pop_failed_requests = failed
    while not engine.idle:
        engine.step()
    assert (first.finish_reason, first.error) == ("error", error) and 3 <= len(
        first.output_ids
    ) <= 4
    assert second.finish_reason in ("length", "stop"), second.error
    assert engine.cache.free == engine.cache.allocator.count
    engine.loop.close()


@pytest.mark.slow
def test_aborts_reach_every_rank(llama: Path) -> None:
    engine: Any = parallel.load(str(llama), tensor_parallel=2, **SMALL)
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    some = [engine.add(prompt, long)[0] for prompt in PROMPTS]
    for step in range(12):
        engine.step()
        if step in (2, 5, 6):
            engine.abort(some[step % len(some)])
    while not engine.idle:
        engine.step()
    assert [request.finish_reason for request in some].count("abort") == 3
    assert engine.cache.free == engine.cache.allocator.count
    engine.loop.close()


@pytest.mark.slow
def test_a_closed_engine_leaves_the_next_one_alone(
    llama: Path, expected: list[list[int]]
) -> None:
    """The next one has the same processes, which would take the steps of both."""
    first: Any = parallel.load(str(llama), tensor_parallel=2, **SMALL)
    first.loop.close()
    second: Any = parallel.load(str(llama), tensor_parallel=2, **SMALL)
    with pytest.raises(WorkerLostError, match="the engine is closed"):
        tokens_of(first)
    same(tokens_of(second), expected, "beside a closed engine")
    second.loop.close()


# A rank that is lost.


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_ends_the_engine(llama: Path, number: int) -> None:
    engine: Any = parallel.load(str(llama), tensor_parallel=2, **SMALL)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.loop.workers.members[0].process.send_signal(number)
    begun = time.monotonic()
    with pytest.raises(WorkerLostError, match="rank 1 has ended"):
        while time.monotonic() - begun < 20:
            engine.step()
    assert time.monotonic() - begun < 10, "an engine that has lost a rank ends within 10 s"
    assert not engine.idle, "an idle engine would never tell that it is broken"
    with pytest.raises(WorkerLostError):
        engine.step()


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(llama: Path) -> None:
    program = (
        "import parallel, sys, time\n"
        f"engine = parallel.load({str(llama)!r}, tensor_parallel=2, device='cpu', dtype='float32', "
        f"**{SIZES!r}, cache_bytes=1 << 20)\n"
        "print(engine.loop.workers.members[0].process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
    ) as leader:
        assert leader.stdout is not None
        other = int(leader.stdout.readline())
        leader.kill()
    end = time.monotonic() + 10
    while time.monotonic() < end and running(other):
        time.sleep(0.05)
    assert not running(other), "rank 1 outlives the process that started it"


def test_sizes_of_the_vocabulary() -> None:
    for vocab in (1, 7, 256, 257):
        for size in (1, 2, 3, 4):
            parts = [Shard(rank, size).vocabulary(vocab) for rank in range(size)]
            each = -(-vocab // size)
            assert [first for first, _, _ in parts] == [
                min(vocab, rank * each) for rank in range(size)
            ]
            assert sum(count for _, count, _ in parts) == vocab
            assert len({room for _, _, room in parts}) == 1


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_nan_is_told_though_each_rank_sees_a_part(kernels: str) -> None:
    kind = RankSamplerBackend
    if kernels == "triton":
        pytest.importorskip("triton")
        from parallel.reduce_argmax import TritonRankSamplerBackend as kind
    same = SimpleNamespace(rank=0, size=2, gather=lambda part: torch.stack([part, part]))
    device = "cuda" if kernels == "triton" and torch.cuda.is_available() else "cpu"
    backend = kind(same, SamplerBackend(), vocab_size=8)  # type: ignore[arg-type]
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 3.0, torch.nan, 2.0]], device=device)
    plan: Any = SimpleNamespace(features=SamplingFlags(0), draws=(), wanted=None)
    none: Any = None
    tokens = backend.choose(none, logits, none, none, plan, masked=False)
    assert backend.report(logits, tokens).tolist() == [1, NAN_TOKEN], (
        "request 1: its logits are not a number on a rank, and it goes on with a token"
    )


def test_the_configuration_of_a_part() -> None:
    whole = SHAPES["tiny-window"]
    own = Shard(0, 4).config(whole)
    changed = {name for name, value in asdict(own).items() if asdict(whole)[name] != value}
    assert changed == {"num_heads", "num_kv_heads", "intermediate_size"}
    assert (own.num_heads, own.num_kv_heads, own.intermediate_size) == (1, 1, 20)


# What is only needed on GPUs, as far as a CPU can tell.


def test_graphs_are_destroyed_before_the_ranks_part() -> None:
    """NCCL's communicators wait for the graphs that they are in."""
    seen: list[str] = []
    graph = SimpleNamespace(reset=lambda: seen.append("graph"))
    capturer = Capturer(torch.device("cpu"))
    capturer._graphs.append(graph)  # type: ignore[arg-type]
    workers: Any = SimpleNamespace(
        reason="lost",
        broadcast=seen.append,
        kill=lambda: seen.append("crew"),
        size=0,
        awaited=nullcontext,
    )
    leave(workers, SimpleNamespace(close=lambda: seen.append("ranks")), capturer.release)  # type: ignore[arg-type]
    assert seen == ["graph", "crew"], "a lost crew has nobody to part from, but its graphs end"
    capturer.release()
    assert seen.count("graph") == 1


@pytest.mark.slow
def test_who_does_not_wait_for_a_lost_rank_is_not_ended(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program or a notebook that has an engine, and does something else."""
    ended = threading.Event()
    monkeypatch.setattr(worker_group, "LAST_RESORT", 0.2)
    monkeypatch.setattr(worker_group.os, "_exit", lambda code: ended.set())
    engine: Any = parallel.load(str(llama), tensor_parallel=2, **SMALL)
    engine.loop.workers.members[0].process.kill()
    wait_until(lambda: bool(engine.loop.workers.reason), "the loss is not noticed")
    assert not ended.wait(1.5), (
        "nobody was waiting for rank 1, and the whole program ends with it"
    )
    with pytest.raises(WorkerLostError, match="rank 1 has ended"):
        engine.step()


@pytest.mark.slow
def test_a_rank_that_cannot_begin_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "PROGRAM", "import sys; sys.exit(7)")
    end_worker_groups()
    begun = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"rank 1 has ended \(exit code 7\)"):
        parallel.load("random:tiny-window", tensor_parallel=2, **SMALL)
    assert time.monotonic() - begun < 20, "rank 0 waits for a rank that has never begun"


def test_a_loss_closes_nothing_that_another_thread_may_be_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closed by both, its number would be another file's by the second time."""
    monkeypatch.setattr(worker_group, "PROGRAM", "import time; time.sleep(60)")
    workers = worker_group.WorkerGroup(3)
    workers.lose("rank 2 has ended")
    assert [member.process.wait(10) for member in workers.members] == [-signal.SIGKILL] * 2
    assert not any(member.connection.closed for member in workers.members)
    workers.kill()
    assert all(member.connection.closed for member in workers.members)


@pytest.mark.slow
def test_a_function_of_a_program_goes_to_every_rank(tmp_path: Path) -> None:
    """It is sent as its text, since the ranks do not run the program again."""
    program = tmp_path / "program.py"
    program.write_text(
        "import parallel\n\ndef twice(ranks, number):\n    return number * 2 + ranks.rank\n\n"
        "print(parallel.together(2, twice, 20))\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[40, 41]", done.stderr[-500:]


def _has_begun(ranks: Any) -> int:
    return int(ranks.rank)


def _fails_on_the_second(ranks: Any) -> int:
    if ranks.rank == 1:
        raise ValueError("this rank is wrong")
    return int(ranks.smallest(0))


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    end_worker_groups()  # or the process would write where its standard error was when it began
    assert parallel.together(2, _has_begun) == [0, 1]
    begun = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"rank 1 has (ended \(exit code 1\)|gone)"):
        parallel.together(2, _fails_on_the_second)
    assert time.monotonic() - begun < 30
    assert "ValueError: this rank is wrong" in capfd.readouterr().err, "nobody says why"


def _quantized(ranks: Any, model: str, scheme: str) -> dict[str, Any]:
    from parallel.loading import load_part
    from quant import Quant
    from quant.linear import QuantLinear

    weight_loader = Quant(quantization=scheme, group_size=16).weight_loader()
    part = load_part(
        model, device="cpu", dtype="float32", weight_loader=weight_loader, ranks=ranks
    )
    return {
        name.replace(".linear", ""): layer.weight.dequantize().numpy()
        for name, layer in part.named_modules()
        if isinstance(layer, QuantLinear)
    }


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantized_parts_are_those_of_the_whole(llama: Path, scheme: str) -> None:
    from quant import Quant
    from quant.linear import QuantLinear

    whole = load_model(
        str(llama),
        **PLACE,
        weight_loader=Quant(quantization=scheme, group_size=16).weight_loader(),
    )
    parts = parallel.together(2, _quantized, str(llama), scheme)
    for name, layer in whole.named_modules():
        if isinstance(layer, QuantLinear) and name != "lm_head":
            dim = 1 if name.endswith(("o_proj", "down_proj")) else 0
            found = torch.cat([torch.from_numpy(part[name]) for part in parts], dim)
            assert torch.equal(found, layer.weight.dequantize()), (
                f"{name}: another weight in parts"
            )


def test_ranks_meet_by_a_file_that_only_this_user_can_reach():
    folder = store_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert together(2, sockets_of, device="cpu") == [True, True]


def sockets_of(ranks: Ranks) -> bool:
    """Whether all that listens in this rank does so on the loopback."""
    found = psutil.Process().net_connections("inet")
    return all(
        each.laddr.ip == "127.0.0.1" for each in found if each.status == psutil.CONN_LISTEN
    )
