"""Phase 07: one budget a step; decodes never wait for a prompt, and prompts never wait for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunked_prefill
import forward
import paged_cache
from chunked_prefill import ChunkedScheduler
from common.errors import UserError
from common.events import generate
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.policies import POLICIES
from continuous.rows import Rows
from forward.model import Model
from paged_cache import BlockPool, PagedCache
from tests.schedules import MAX_LEN, SCHEDULES, fake_engine, operations, play, random_script


@pytest.fixture(scope="module")
def model() -> Model:
    return forward.load_model("random:tiny", device="cpu", dtype="float32")


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **options)


def fake(
    rows: int = 8,
    *,
    step_tokens: int,
    chunk_tokens: int | None = None,
    max_len: int = 400,
    policy: str = "fcfs",
    blocks: int = 1000,
    block_size: int = 4,
    overlap: bool = False,
) -> Any:
    def scheduler(table: Rows) -> ChunkedScheduler:
        cache = PagedCache(rows, max_len, blocks, block_size)
        return ChunkedScheduler(
            table, cache, step_tokens=step_tokens, chunk_tokens=chunk_tokens, policy=POLICIES[policy]
        )

    return fake_engine(scheduler, rows, overlap=overlap, max_len=max_len)


@SCHEDULES
@given(
    script=operations,
    rows=st.integers(3, 6),
    block_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare=st.integers(0, 20),
    step_tokens=st.integers(2, 20),
    chunk_tokens=st.integers(1, 20),
    overlap=st.booleans(),
)
def test_any_schedule(
    script: list[Any],
    rows: int,
    block_size: int,
    spare: int,
    step_tokens: int,
    chunk_tokens: int,
    overlap: bool,
) -> None:
    engine, runner = fake(
        rows,
        step_tokens=step_tokens,
        chunk_tokens=chunk_tokens,
        max_len=MAX_LEN,
        blocks=-(-MAX_LEN // block_size) + spare,
        block_size=block_size,
        overlap=overlap,
    )
    play(engine, runner, script)
    assert runner.most_in_step <= step_tokens


def test_many_schedules() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 3, 4, 8])
        engine, runner = fake(
            rng.randrange(3, 7),
            step_tokens=rng.randrange(2, 21),
            chunk_tokens=rng.randrange(1, 21),
            policy=rng.choice(list(POLICIES)),
            max_len=MAX_LEN,
            blocks=-(-MAX_LEN // block_size) + rng.randrange(21),
            block_size=block_size,
            overlap=seed % 2 == 0,
        )
        play(engine, runner, random_script(rng))


def step(engine: Any) -> dict[Request, int]:
    """One step; how many tokens of each request it computes."""
    engine.take_in()
    works = engine.scheduler.schedule()
    engine.collect(engine.launch(works))
    engine.drain()
    return {work.request: work.count for work in works}


def test_a_long_prompt_takes_what_decodes_leave() -> None:
    engine, runner = fake(step_tokens=32)
    decoding = [engine.add([1] * 4, greedy(60))[0] for _ in range(5)]
    step(engine)
    (long,) = engine.add([2] * 200, greedy(5))
    steps = 0
    while not long.output_ids:
        counts = step(engine)
        steps += 1
        assert all(counts[request] == 1 for request in decoding), "a decode waited for a prompt"
        assert sum(counts.values()) <= 32
    assert steps == 8  # 27 tokens a step
    assert runner.most_in_step == 32


def test_without_chunks_everybody_waits_for_the_prompt() -> None:
    """What the budget buys: the most that stands between two tokens."""

    def longest_step(load: Any, **options: Any) -> int:
        engine = load("random:tiny", device="cpu", dtype="float32", **options)
        most = []
        engine.runner.model.register_forward_pre_hook(lambda _, args: most.append(args[0].numel()))
        engine.add([1] * 4, greedy(60))
        engine.step()
        engine.add([2] * 500, greedy(5))
        while not engine.idle:
            engine.step()
        return max(most)

    assert longest_step(paged_cache.load) == 501
    assert longest_step(chunked_prefill.load, step_tokens=64) == 64


def test_a_prompt_advances_though_decodes_could_take_the_whole_budget() -> None:
    engine, _ = fake(12, step_tokens=8)
    decoding = [engine.add([1], greedy(150))[0] for _ in range(10)]
    while any(not request.output_ids for request in decoding):
        step(engine)
    (prompt,) = engine.add([2] * 40, greedy(3))
    served = {request: 0 for request in decoding}
    steps = 0
    while not prompt.output_ids:
        counts = step(engine)
        steps += 1
        assert counts.get(prompt, 2) == 2, "a quarter of the budget is the prompt's"
        for request in decoding:
            served[request] += counts.get(request, 0)
    assert steps == 20
    # Six decodes a step for ten requests in turn: everybody gets 12 of 20.
    assert set(served.values()) == {12}


def test_new_requests_get_in_though_decodes_could_take_the_whole_budget() -> None:
    engine, _ = fake(12, step_tokens=4)
    decoding = [engine.add([1], greedy(100))[0] for _ in range(8)]
    while any(not request.output_ids for request in decoding):
        step(engine)
    (single,) = engine.add([3], greedy(1))
    assert step(engine)[single] == 1


def test_the_whole_budget_is_used_when_nobody_waits() -> None:
    engine, _ = fake(4, step_tokens=4)
    decoding = [engine.add([1], greedy(50))[0] for _ in range(4)]
    while any(len(request.output_ids) < 2 for request in decoding):
        step(engine)
    engine.add([1], greedy(1))  # waits for a row, which no budget can give
    assert step(engine) == {request: 1 for request in decoding}


def test_the_whole_budget_is_used_when_the_next_in_line_has_no_room() -> None:
    engine, _ = fake(6, step_tokens=4, blocks=6, block_size=4)
    decoding = [engine.add([1], greedy(3))[0] for _ in range(4)]
    while any(len(request.output_ids) < 1 for request in decoding):
        step(engine)
    waiting = engine.add([1] * 16, greedy(1))[0]  # a row is free, but four blocks are not
    before = [request.num_computed_tokens for request in decoding]
    assert sum(step(engine).values()) == 4 and waiting.row < 0
    assert [request.num_computed_tokens for request in decoding] == [count + 1 for count in before]


def test_chunks_of_several_prompts_side_by_side() -> None:
    engine, _ = fake(step_tokens=32, chunk_tokens=10)
    prompts = [engine.add([n] * 25, greedy(1))[0] for n in (1, 2, 3, 4)]
    assert [step(engine).get(prompt, 0) for prompt in [prompts[0]]] == [10]
    assert [prompt.num_computed_tokens for prompt in prompts] == [10, 10, 10, 2]


def test_first_come_first_served_among_prompts() -> None:
    engine, _ = fake(step_tokens=10)
    first, second = (engine.add([n] * 25, greedy(1))[0] for n in (1, 2))
    computed = []
    while not second.output_ids:
        step(engine)
        computed.append((first.num_computed_tokens, second.num_computed_tokens))
    assert computed == [(10, 0), (20, 0), (25, 5), (25, 15), (25, 25)]


def test_shortest_first_lets_short_prompts_pass() -> None:
    engine, _ = fake(step_tokens=10, policy="shortest_first")
    long = engine.add([1] * 60, greedy(1))[0]
    step(engine)
    short = engine.add([2] * 10, greedy(1))[0]
    step(engine)
    step(engine)
    assert short.finish_reason == "length" and not long.output_ids


def test_only_the_last_chunk_is_sampled(model: Model) -> None:
    engine = chunked_prefill.load(model, step_tokens=16)
    rows: list[int] = []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    generate(engine, [[1] * 50], greedy(3))
    hook.remove()
    assert rows == [1, 1, 1]
    assert engine.stats.computed_tokens == 50 + 2  # chunks cost no token more than a whole prompt


def test_decodes_and_chunks_are_one_forward_pass(model: Model) -> None:
    engine = chunked_prefill.load(model, step_tokens=16)
    engine.add([1] * 3, greedy(20))
    engine.step()
    engine.add([2] * 40, greedy(2))
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, args: passes.append(args[0].numel()))
    for _ in range(3):
        engine.step()
    hook.remove()
    assert passes == [16, 16, 11]


def test_a_prompt_longer_than_the_budget_and_the_old_step_limit() -> None:
    engine, _ = fake(step_tokens=2, max_len=300)
    (request,) = engine.add([1] * 299, greedy(9))
    while not engine.idle:
        engine.step()
    assert len(request.output_ids) == 1 and request.finish_reason == "length"


def test_a_chunked_prompt_that_is_preempted_or_aborted_gives_its_blocks_back(model: Model) -> None:
    memory = 12 * BlockPool.bytes_per_block(model.config, 8, model.dtype)
    engine = chunked_prefill.load(model, block_size=8, cache_bytes=memory, step_tokens=8)
    engine.add([1] * 30, greedy(40))
    (second,) = engine.add([2] * 50, greedy(5, n=2))[:1]
    while second.row < 0:
        engine.step()
    assert second.prefilling and engine.scheduler.rows.free == 64 - 3
    while second.row >= 0 and second.prefilling:
        engine.step()
    engine.abort(second)
    while not engine.idle:
        engine.step()
    engine.check_integrity()
    assert engine.scheduler.rows.free == 64


def test_aborting_a_sibling_before_the_fork() -> None:
    engine, _ = fake(step_tokens=8)
    first, second, third = engine.add([1] * 20, greedy(3, n=3, seed=1))
    step(engine)
    assert second.row >= 0  # it has a row, and waits for the prompt
    engine.abort(second)
    engine.take_in()
    assert second.row < 0
    while not engine.idle:
        engine.step()
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("length", "abort", "length")
    assert engine.scheduler.rows.free == 8


def test_aborting_the_first_before_the_fork_aborts_its_siblings() -> None:
    engine, _ = fake(step_tokens=8)
    requests = engine.add([1] * 20, greedy(3, n=3, seed=1))
    step(engine)
    engine.abort(requests[0])
    engine.take_in()
    assert {request.finish_reason for request in requests} == {"abort"}
    while not engine.idle:
        engine.step()
    assert engine.scheduler.rows.free == 8 and engine.scheduler.cache.free == 1000


@pytest.mark.parametrize(
    ("options", "says"),
    [({"step_tokens": 1}, "step_tokens is 1"), ({"chunk_tokens": 0}, "chunk_tokens is 0")],
)
def test_bad_options(model: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        chunked_prefill.load(model, **options)
