"""Phase 09: replayed steps give the same tokens, whatever pads them, and running ahead changes nothing.

On the CPU a graph's function is called instead of replayed, with the kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import cuda_graphs
import forward
import prefix_cache
from chunked_prefill import ChunkedScheduler
from common.errors import UserError
from common.events import Completion, generate
from common.sampling.params import SamplingParams
from continuous.batch import HostBatch
from continuous.rows import RequestRows
from continuous.runner import Forwarded
from continuous.work import Work
from cuda_graphs.batch import fixed_batch
from cuda_graphs.buckets import decode_sizes, smallest
from cuda_graphs.chunk_graph import Layout
from cuda_graphs.overlap import OverlappedLoop
from cuda_graphs.runner import GraphRunner
from cuda_graphs.staging import BUFFERS, Staging
from cuda_graphs.step_kernels import gather_inputs, scatter_tokens
from cuda_graphs.tables import DeviceTables
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import PagedCache, PagedEngine
from tests.equivalence.compare import assert_all_same
from tests.fakes import FakePending, FakeRunner
from tests.kernel_layers import only_attention
from tests.programs import environment

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
GPU = pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("poison")
# All but attention in torch: what a graph is made of is not tested here, and the interpreter is slow.
PLAIN = {"sampling": "torch"}


@pytest.fixture(scope="module")
def model() -> Model:
    return forward.load_model("random:tiny", device=DEVICE, dtype="float32")


def load(model: Model, **options: Any) -> PagedEngine:
    given: dict[str, Any] = {
        "max_rows": 5,
        "max_len": 120,
        "graph_tokens": 32,
        "cache_bytes": 4_000_000,
    }
    with only_attention():
        return cuda_graphs.load(
            model, kernels="triton", graphs=True, **{**PLAIN, **given, **options}
        )


def runner_of(engine: PagedEngine) -> GraphRunner:
    assert isinstance(engine.runner, GraphRunner)
    return engine.runner


# Sizes.


@pytest.mark.parametrize("most", [1, 2, 3, 8, 16, 17, 40, 256])
def test_every_batch_has_a_size_with_little_padding(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most, f"{sizes} end before {most}"
    for count in range(1, most + 1):
        size = smallest(sizes, count)
        assert size is not None, f"no graph of {sizes} holds {count} requests"
        assert count <= size < min(2 * count, count + 16), (
            f"{count} requests run in a graph of {size}"
        )
    assert smallest(sizes, most + 1) is None


# What goes in and out.


def test_tables_on_the_device_follow_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    host = np.zeros((6, 9), np.int32)
    tables = DeviceTables(host, torch.device(DEVICE))
    for turn in range(100):
        row, width = int(rng.integers(6)), int(rng.integers(1, 10))
        host[row, : rng.integers(1, 10)] = rng.integers(0, 100)
        others = rng.integers(0, 6, 3 * (turn % 2))  # none: a lone request
        rows = np.unique(np.append(others, row))
        tables.update(rows, width)
        for row in rows:
            same = tables.data[row, :width].tolist() == host[row, :width].tolist()
            assert same, f"row {row} is out of date, in a step of rows {rows.tolist()}"


def test_only_changed_entries_are_sent() -> None:
    host = np.zeros((4, 5), np.int32)
    tables = DeviceTables(host, torch.device("cpu"))
    sent: list[int] = []
    for row, value in (1, 7), (1, 7), (0, 1):
        host[row, : 3 if row else 1] = value
        tables.data.fill_(-1)  # what is written since then is not -1
        tables.update(np.array([0, 1]), 4)
        sent.append(int((tables.data != -1).sum()))
    assert sent == [3, 0, 1], f"of 3 new entries, none, and 1, so many were sent: {sent}"


def test_a_step_reads_its_inputs_from_rows_and_positions() -> None:
    device = torch.device(DEVICE)
    tokens = torch.arange(40, device=device).view(4, 10)
    tables = torch.tensor(
        [[3, 1, 9], [2, 0, 9], [9, 9, 9], [5, 4, 6]], dtype=torch.int32, device=device
    )
    rows, at = (
        torch.tensor([3, 0, 1, 0], device=device),
        torch.tensor([9, 0, 4, -1], device=device),
    )
    batch = fixed_batch(4, 3, device)
    written = ("input_ids", "positions", "slots", "context_lens", "block_tables")
    made = {name: vars(batch)[name].fill_(-7) for name in written}
    gather_inputs(rows, at, tokens, tables, 4, batch, decodes=True)
    wanted: dict[str, list[Any]] = {
        "input_ids": [39, 0, 14, 0],
        "positions": [9, 0, 4, 0],
        "slots": [6 * 4 + 1, 3 * 4, 0, -1],
        "context_lens": [10, 1, 5, 0],
        "block_tables": [[5, 4, 6], [3, -7, -7], [2, 0, -7], [-7, -7, -7]],
    }
    for name, want in wanted.items():
        got = made[name].tolist()
        assert got == want, f"{name} of rows {rows.tolist()} at {at.tolist()} are {got}"


def test_padding_writes_no_token() -> None:
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=DEVICE)
    rows, at = torch.tensor([2, 0, 0], device=DEVICE), torch.tensor([3, 0, -1], device=DEVICE)
    scatter_tokens(rows, at, torch.tensor([11, 12, 13], device=DEVICE), tokens)
    written = [[0, 12, 0, 0, 0], [0] * 5, [0, 0, 0, 0, 11]]
    assert tokens.tolist() == written, (
        f"12 and 11 are to be written, 13 is padding: {tokens.tolist()}"
    )


def test_the_layout_of_a_mixed_step_pads_everything() -> None:
    layout = Layout(tokens=8, requests=3, tiles=2)
    flat = np.full(layout.size, 99)
    works = [Work(Any, 1, 4, 1, (), (SimpleNamespace(row=1),)), Work(Any, 2, 0, 3)]  # type: ignore[arg-type]
    host = HostBatch.of(works, np.array([0, 2, 9]))
    layout.fill(flat, host, np.array([0]), np.array([[1, 1, 3, 0]]))
    padded = {
        "positions": [4, 0, 1, 2, -1, -1, -1, -1],
        "query_starts": [0, 1, 4, 4, 4],
        "context_lens": [5, 3, 0, 0],
        "members": [0, 3, 3, 3],
        "tiles": [1, 1, 3, 0, 3, 0, 0, 0],
    }
    for name, want in padded.items():
        got = layout.part(flat, name).tolist()
        assert got == want, f"{name} of two requests, padded to three and nobody, are {got}"
    assert 99 not in flat, "a place still has what was there before"


def test_staging_takes_its_buffers_in_turn() -> None:
    staging = Staging(4, torch.device(DEVICE))
    buffers = set()
    for turn in range(2 * BUFFERS):
        with staging.fill(3) as numbers:
            numbers[:] = turn
            buffers.add(numbers.__array_interface__["data"][0])
        assert staging.device[:3].tolist() == [turn] * 3
    assert len(buffers) == BUFFERS, f"{len(buffers)} of {BUFFERS} buffers are used"


def test_staging_waits_until_a_buffer_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, log = Staging(4, torch.device("cpu")), []
    event: Any = SimpleNamespace(
        synchronize=lambda: log.append("wait"),
        record=lambda: log.append(f"copied {staging.device.tolist()}"),
    )
    monkeypatch.setattr(staging, "_copied", [event] * BUFFERS)
    with staging.fill(2) as numbers:
        log.append("write")
        numbers[:] = 5
    assert log == ["wait", "write", "copied [5, 5, 0, 0]"], (
        f"a buffer is to wait, be written, copied: {log}"
    )


# Running ahead.


class Ordered(FakeRunner):
    """Notes when steps are launched and when their results are read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[str] = []

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> FakePending:
        pending = super().forward(works, masked=masked)
        number = sum(entry.startswith("launch") for entry in self.log)
        self.log.append(f"launch {number}")
        get = pending.get

        def noted() -> Any:
            self.log.append(f"read {number}")
            return get()

        pending.get = noted  # type: ignore[method-assign]
        return pending


def ahead(blocks: int = 40, **fails: bool) -> tuple[PagedEngine, Ordered]:
    rows, cache = RequestRows(4, 48), PagedCache(4, 48, blocks, 4)
    runner = Ordered(rows, cache)
    vars(runner).update(fails)
    engine = PagedEngine(ChunkedScheduler(rows, cache, step_tokens=64), runner)  # type: ignore[arg-type]
    engine.loop = OverlappedLoop()
    return engine, runner


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    engine, runner = ahead()
    engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    while not engine.idle:
        engine.step()
    wanted = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]
    assert runner.log == wanted, f"steps do not overlap: {', '.join(runner.log)}"


def test_nothing_is_scheduled_behind_the_last_allowed_token() -> None:
    engine, runner = ahead()
    engine.add([1, 2], SamplingParams(max_tokens=4, ignore_eos=True))
    while not engine.idle:
        engine.step()
    assert runner.computed == 2 + 3, (
        f"the last token is never computed, but {runner.computed} tokens were"
    )


def test_a_stop_token_is_seen_one_step_late_and_costs_one_token() -> None:
    engine, runner = ahead()
    free = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    (whole,) = engine.generate([[1, 2, 3]], free)
    before = runner.computed
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    (stopped,) = engine.generate([[1, 2, 3]], replace(free, stop_token_ids=(stop,)))
    assert (
        stopped.token_ids == whole.token_ids[: first + 1] and stopped.finish_reason == "stop"
    )
    assert runner.computed - before == 3 + first + 1
    while not engine.idle:
        engine.step()
    launched, read = (
        {entry.split()[1] for entry in runner.log if word in entry}
        for word in ("launch", "read")
    )
    assert launched == read, f"idle, with steps {sorted(launched - read)} on their way"
    engine.cache.check()


@pytest.mark.parametrize("where", ["fail_run", "fail_get"])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(where: str) -> None:
    engine, _ = ahead(**{where: True})
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert engine.generate([[1, 2, 3]], params)[0].finish_reason == "error"
    assert engine.generate([[1, 2, 3]], params)[0].finish_reason == "length"
    assert engine.idle and engine.cache.free == engine.cache.allocator.count


def test_an_abort_with_a_token_on_its_way() -> None:
    engine, _ = ahead()
    first, second = (
        engine.add([1, 2, n], SamplingParams(max_tokens=9, ignore_eos=True))[0] for n in (3, 4)
    )
    engine.step()
    assert first.in_flight == 1 and first.placeholders == 1, (
        "the token on its way is not counted"
    )
    engine.abort(first)
    while not engine.idle:
        engine.step()
    assert (first.finish_reason, first.output_ids) == ("abort", [])
    assert second.finish_reason == "length" and len(second.output_ids) == 9
    assert engine.cache.free == engine.cache.allocator.count


def test_a_preempted_request_waits_for_its_tokens() -> None:
    """Though there is room again: it would go on without those that are on their way."""
    engine, _ = ahead(blocks=5)
    scheduler, params = engine.scheduler, SamplingParams(max_tokens=10, ignore_eos=True)
    first, second = (engine.add([1, 2, 3, 4, 5, 6, n], params)[0] for n in (7, 8))
    engine.process_inbox()
    steps = [scheduler.schedule() for _ in range(3)]  # of which nobody has seen the end
    assert second.preemptions == 1 and second.in_flight == 2, (
        "the cache is full, and the second one is last"
    )
    engine.abort(first)
    engine.process_inbox()
    assert scheduler.schedule() == [], "it runs while two of its tokens are on their way"
    for number, works in enumerate(steps[:2]):
        (mine,) = (work for work in works if work.request is second)
        second.tokens.append(number)
        scheduler.finish_step(mine)
    (work,) = scheduler.schedule()
    assert work.request is second and work.count == 7 + 2


# Graphs.


def asks() -> tuple[list[list[int]], list[SamplingParams]]:
    """Decodes and chunks together, forks, every way to sample, and a prefix that is found again."""
    shared = [(7 * i) % 250 + 1 for i in range(34)]
    prompts = [
        [5, 6, 7],
        shared,
        [1, 2],
        [*shared, 4, 4],
        [9] * 47,
    ]  # the last goes on in a fourth block
    params = [
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=4, temperature=1.0, seed=3),
        SamplingParams(max_tokens=5, temperature=0.7, top_p=0.8, seed=1, n=2),
        SamplingParams(max_tokens=3, logprobs=2, presence_penalty=0.5),
        SamplingParams(max_tokens=3, logit_bias={7: 3.0}),
    ]
    return prompts, params


def truth(model: Model) -> list[Completion]:
    return generate(prefix_cache.load(model, max_rows=3, max_len=120), *asks())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_replayed_steps_give_the_same_tokens(model: Model, overlap: bool) -> None:
    engine = load(model, overlap=overlap)
    actual = generate(engine, *asks())
    for mine, theirs in zip(actual, truth(model), strict=True):
        where = f"prompt {mine.index}, sample {mine.sample}"
        assert mine.token_ids == theirs.token_ids, (
            f"{where}: {mine.token_ids}, not {theirs.token_ids}"
        )
        top, wanted = (
            [pair.top[0][0] for pair in one.logprobs or ()] for one in (mine, theirs)
        )
        assert top == wanted, f"{where}: the best tokens are {top}, not {wanted}"
    runner = runner_of(engine)
    # The prompt of 47 does not fit the largest mixed graph; all else is replayed.
    steps = engine.stats.steps
    assert steps - 3 <= runner.replays < steps, (
        f"{runner.replays} of {steps} steps were replayed"
    )
    engine.check_integrity()


@pytest.mark.parametrize("few", [16, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.slow
def test_a_chunk_of_one_token_is_no_decode(
    model: Model, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts token by token: nothing is sampled but behind the last one, there for two samples at once.

    few: requests with which the smaller graph copes; with 1, the two samples need the larger.
    """
    monkeypatch.setattr(cuda_graphs.executors, "SMALL_BATCH", few)
    prompts = [[5, 6], [8, 9, 10]][: 1 if few == 1 else 2]
    params = [
        SamplingParams(max_tokens=2, n=2, temperature=1.0, seed=n, ignore_eos=True)
        for n in range(2)
    ]
    params = params[: len(prompts)]
    engine = load(model, chunk_tokens=1, overlap=False)
    wanted = generate(prefix_cache.load(model, max_rows=5, max_len=120), prompts, params)
    actual = generate(engine, prompts, params)
    assert_all_same(model, wanted, actual, [one for one in params for _ in range(2)])
    assert runner_of(engine).replays == engine.stats.steps, "not every step was replayed"


@pytest.mark.slow
def test_capped_logits_are_drawn_from_as_capped() -> None:
    """The cap changes no greedy token; what is drawn at a low temperature depends on it."""
    capped = random_model(
        replace(SHAPES["tiny"], final_soft_cap=0.5), device=DEVICE, dtype=torch.float32
    )
    params = [
        SamplingParams(max_tokens=4, temperature=0.3, seed=n, ignore_eos=True)
        for n in range(2)
    ]
    prompts = [[5, 6, 7], [8, 9]]
    wanted = generate(prefix_cache.load(capped, max_rows=2, max_len=120), prompts, params)
    assert_all_same(
        capped,
        wanted,
        generate(load(capped, max_rows=2, graph_tokens=0), prompts, params),
        params,
    )


@pytest.mark.slow
def test_full_steps_are_replayed_and_half_full_ones_are_not(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs.executors, "full_step", lambda model, steps, most: steps)
    engine = load(
        model, max_rows=3, step_tokens=20, graph_tokens=4, overlap=False, prefix_cache=False
    )
    runner, replayed = runner_of(engine), list[tuple[int, bool]]()
    forward_ = runner.forward

    def counted(works: Sequence[Work], **options: Any) -> Forwarded:
        before = runner.replays
        step = forward_(works, **options)
        replayed.append((sum(work.count for work in works), runner.replays > before))
        return step

    monkeypatch.setattr(runner, "forward", counted)
    # Two in a full step and one whose end makes another one nearly full; then one that is half full.
    prompts = [[5 + n % 40 for n in range(length)] for length in (7, 31)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    plain = prefix_cache.load(model, max_rows=3, max_len=120)
    assert_all_same(model, generate(plain, prompts, params), generate(engine, prompts, params))
    assert_all_same(
        model, generate(plain, [[9] * 10], params), generate(engine, [[9] * 10], params)
    )
    sizes = [size for size, _ in replayed if size > 4]
    assert sizes == [20, 19, 10], (
        f"the test is about steps of 20, 19 and 10 tokens, not {sizes}"
    )
    for size, graph in replayed:
        assert graph == (size != 10), (
            f"a step of {size} of 20 tokens {'has' if graph else 'has no'} graph"
        )


@pytest.mark.slow
def test_steps_that_fit_no_graph_run_eagerly(model: Model) -> None:
    engine = load(model, graph_rows=1, graph_tokens=0)
    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(max_tokens=3)
    assert_all_same(
        model,
        generate(prefix_cache.load(model), prompts, params),
        generate(engine, prompts, params),
    )
    assert runner_of(engine).replays == 0
    generate(engine, prompts[:1], params)
    assert runner_of(engine).replays == 2


# What cannot be had.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": False}, "graphs is on, but needs kernels"),
        ({"kernels": "torch"}, "graphs is on, but needs kernels"),
        ({"graph_rows": 0}, "graph_rows is 0"),
        ({"graph_tokens": -1}, "graph_tokens is -1"),
        ({"max_rows": 0}, "max_rows is 0"),
    ],
)
def test_options_out_of_their_limits(
    model: Model, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        cuda_graphs.load(model, **{"kernels": True, "graphs": True, **options})


@pytest.mark.slow
def test_without_triton_it_runs_ahead_all_the_same() -> None:
    """Triton exists for Linux alone; nothing but the kernels may need it."""
    script = """
import sys
sys.modules["triton"] = None  # an import of it fails from here on
import cuda_graphs
from common.events import generate
from common.sampling.params import SamplingParams
engine = cuda_graphs.load("random:tiny", device="cpu", dtype="float32")
print(len(generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "4"


@pytest.mark.skipif(CUDA, reason="kernels run natively here")
@pytest.mark.slow
def test_its_kernels_are_interpreted_whatever_is_imported_first() -> None:
    script = """
import cuda_graphs.step_kernels
from triton.runtime.interpreter import InterpretedFunction
assert isinstance(cuda_graphs.step_kernels.gather_kernel, InterpretedFunction)
"""
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True)


# On a GPU.


@GPU
@pytest.mark.parametrize("index", [0, 1])
def test_graphs_on_a_gpu_give_the_tokens_of_the_cpu(index: int) -> None:
    """The second of two GPUs, too: kernels and captures go to the current device."""
    if index >= torch.cuda.device_count():
        pytest.skip("there is one GPU here")
    with torch.cuda.device(0):  # the current one again, afterwards
        graphs_give_the_tokens_of_the_cpu(f"cuda:{index}")


def graphs_give_the_tokens_of_the_cpu(device: str) -> None:
    on_gpu = forward.load_model("random:tiny", device=device, dtype="float32")
    on_cpu = copy.deepcopy(on_gpu).cpu()  # a seed gives other weights on another device
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 250, n).tolist() for n in (1, 5, 17, 64, 150, 3, 40, 9, 33)]
    params = [SamplingParams(max_tokens=n) for n in (40, 30, 1, 12, 20, 33, 5, 8, 25)]
    engine = cuda_graphs.load(on_gpu, max_rows=6, cache_bytes=4_000_000, step_tokens=64)
    assert_all_same(
        on_cpu,
        generate(forward.load(on_cpu), prompts, params),
        generate(engine, prompts, params),
    )
    assert runner_of(engine).replays > 0.9 * engine.stats.steps
    engine.check_integrity()


@GPU
def test_the_host_may_run_far_ahead_of_the_device() -> None:
    """Chunks in the middle of a prompt return nothing, so nothing holds the host back."""
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    prompts = [[(7 * i + n) % 250 + 1 for i in range(600)] for n in range(3)]
    params = SamplingParams(max_tokens=4)
    expected = generate(
        cuda_graphs.load(model, graphs=False, cache_bytes=8_000_000), prompts, params
    )
    engine = cuda_graphs.load(model, cache_bytes=8_000_000, step_tokens=32, graph_tokens=32)
    torch.cuda._sleep(200_000_000)  # a tenth of a second, in which everything is launched
    assert_all_same(model, expected, generate(engine, prompts, params))
    assert runner_of(engine).replays > 50


@GPU
@pytest.mark.alone
def test_capturing_stays_within_its_budget() -> None:
    model = forward.load_model("random:qwen3-0.6b", device="cuda", dtype="bfloat16")
    engine = cuda_graphs.load(model, max_rows=64, max_len=1024, cache_bytes=1 << 30)
    assert 0 < runner_of(engine).startup.bytes <= engine.memory_plan.reserved


@GPU
def test_sampled_tokens_do_not_depend_on_graphs_or_kernels() -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    prompts = [[n, n + 1, n + 2] for n in range(1, 9)]
    params = [SamplingParams(max_tokens=20, temperature=0.8, seed=n) for n in range(8)]
    options: dict[str, Any] = {"max_rows": 8, "cache_bytes": 4_000_000}
    made = [cuda_graphs.load(model, graphs=graphs, **options) for graphs in (True, False)]
    made.append(cuda_graphs.load(model, graphs=True, sampling="torch", **options))
    tokens = [[one.token_ids for one in generate(engine, prompts, params)] for engine in made]
    # A logit differs in its last bits between batch shapes, so a draw may fall on the other side of a border.
    same = sum(a == b == c for a, b, c in zip(*tokens, strict=True))
    assert same >= 7


@GPU
def test_the_host_does_not_wait_for_the_step_it_launches() -> None:
    model = forward.load_model("random:qwen3-0.6b", device="cuda", dtype="bfloat16")
    engine = cuda_graphs.load(
        model, max_rows=64, max_len=2048, cache_bytes=8 << 30, step_tokens=8192
    )
    for _ in range(64):
        engine.add([5] * 64, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(20):
        engine.step()
    works = engine.scheduler.schedule()
    started = time.perf_counter()
    pending = engine.sample(engine.forward(works))
    launched = time.perf_counter() - started
    assert pending is not None
    torch.cuda.synchronize()
    assert launched < time.perf_counter() - started - 1e-4
