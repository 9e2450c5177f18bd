"""Phase 07: one budget a step; decodes never wait for a prompt, and prompts never wait for ever."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chunked_prefill
from common.errors import UserError
from common.events import generate
from common.request import Request
from forward.model import Model
from paged_cache import BlockPool, PagedCache
from tests.fuzz.machines import machine, paged_engine
from tests.schedules import (
    SCHEDULES,
    finish,
    greedy,
    operations,
    play,
    play_seeds,
)

# A victim that is forgotten in the line would hang.
pytestmark = pytest.mark.timeout(20)


def fake(
    rows: int = 8,
    *,
    max_len: int = 400,
    blocks: int = 1000,
    block_size: int = 4,
    **options: Any,
) -> Any:
    cache = PagedCache(rows, max_len, blocks, block_size)
    return paged_engine(cache, rows, max_len=max_len, **options)


@pytest.mark.timeout(120)
@SCHEDULES
@given(script=operations, seed=st.integers(0, 999))
@pytest.mark.slow
def test_any_schedule(script: list[Any], seed: int) -> None:
    engine, runner = machine("07", random.Random(seed))
    play(engine, runner, script)
    assert runner.most_in_step <= engine.scheduler.step_tokens


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_many_schedules() -> None:
    for engine, runner in play_seeds(range(80), partial(machine, "07")):
        most = engine.scheduler.step_tokens
        assert runner.most_in_step <= most, (
            f"{runner.most_in_step} tokens in one step of {most}"
        )


def step(engine: Any) -> dict[Request, int]:
    """One step; how many tokens of each request it computes."""
    engine.process_inbox()
    works = engine.scheduler.schedule()
    engine.collect(engine.sample(engine.forward(works)))
    engine.take_outputs()
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
        assert all(counts[request] == 1 for request in decoding), (
            "a decode waited for a prompt"
        )
        assert sum(counts.values()) <= 32
    assert steps == 8  # 27 tokens a step
    assert runner.most_in_step == 32


def begun(engine: Any, count: int, *, output: int = 1, **options: Any) -> list[Request]:
    """Requests of one prompt token that decode."""
    requests = [engine.add([1], greedy(100), **options)[0] for _ in range(count)]
    while any(len(request.output_ids) < output for request in requests):
        step(engine)
    return requests


def test_the_quarter_that_is_kept_is_rounded_down() -> None:
    engine, _ = fake(12, step_tokens=7)
    decoding = begun(engine, 6)
    (prompt,) = engine.add([2] * 20, greedy(1))
    for _ in range(2):
        counts = step(engine)
        served = [request.id for request in decoding if request in counts]
        assert len(served) == 6, (
            f"a quarter of 7 tokens is 1, and 6 decodes fit; only {served} were served"
        )
        assert counts[prompt] == 1


def test_a_budget_too_small_for_a_quarter_keeps_one_token() -> None:
    engine, _ = fake(12, step_tokens=3)
    begun(engine, 4)
    (prompt,) = engine.add([2] * 4, greedy(1))
    counts = [step(engine).get(prompt, 0) for _ in range(4)]
    assert counts == [1, 1, 1, 1], f"the prompt computed {counts} tokens in four steps"


def test_newcomers_pass_only_prompts_of_larger_rank() -> None:
    engine, _ = fake(step_tokens=12, chunk_tokens=4, policy="priority")
    engine.add([5] * 20, greedy(1), priority=5)
    assert list(step(engine).values()) == [4]
    for priority in (8, 3, 7):
        engine.add([priority] * 20, greedy(1), priority=priority)
    order = [request.priority for request in step(engine)]
    assert order == [3, 5, 7], (
        f"12 tokens, 4 for each of priorities {order}: 5 runs and passes 7, 3 passes 5"
    )
    order = [request.priority for request in step(engine)]
    assert order == [3, 5, 7], f"in the next step, 4 tokens for each of priorities {order}"


def test_a_decode_is_preempted_before_a_prompt_of_smaller_rank() -> None:
    """Decodes are served first, so the end of the queue is not who matters least."""
    engine, _ = fake(4, step_tokens=8, chunk_tokens=4, policy="priority", blocks=5, max_len=20)
    (decode,) = engine.add([9] * 4, greedy(9), priority=9)
    (prompt,) = engine.add([2] * 16, greedy(2), priority=0)
    assert step(engine) == {prompt: 4, decode: 4}  # four blocks and one, of five
    assert step(engine) == {prompt: 4}, (
        "the decode found no room, and the prompt was not served"
    )
    assert (decode.preemptions, prompt.preemptions) == (1, 0), (
        "a priority-0 prompt lost its blocks to a 9"
    )
    while not engine.idle:
        step(engine)


def test_who_has_been_served_is_not_preempted() -> None:
    """Decodes take turns, so one of larger rank may be in the step already when another lacks room."""
    engine, _ = fake(4, step_tokens=16, blocks=3, max_len=12)
    first, second = (engine.add([1] * length, greedy(3))[0] for length in (4, 5))
    step(engine)  # one block and two, of three
    order = engine.scheduler.order
    engine.scheduler.order = lambda running: order(running)[::-1]
    assert step(engine) == {second: 1}
    assert (first.preemptions, second.preemptions) == (1, 0), (
        "request 1 was preempted where it was served"
    )
    while not engine.idle:
        step(engine)


def test_siblings_do_not_fork_before_every_chunk_has_landed() -> None:
    engine, _ = fake(step_tokens=8)
    first, *_ = engine.add([1] * 12, greedy(3, n=3, seed=1))
    engine.process_inbox()
    scheduler = engine.scheduler
    works = scheduler.schedule()
    assert scheduler.schedule() == [], "siblings fork, though the first chunk may still fail"
    assert len(scheduler.running) == 1 and len(first.siblings) == 2
    engine.collect(engine.sample(engine.forward(works)))
    (work,) = scheduler.schedule()
    assert (work.start, work.count, len(work.sampled_requests)) == (8, 4, 3)


def test_a_prompt_advances_though_decodes_just_fill_the_budget() -> None:
    engine, _ = fake(12, step_tokens=4)
    decoding = begun(engine, 4)
    (prompt,) = engine.add([2] * 4, greedy(1))
    turns = [step(engine) for _ in range(4)]
    assert [turn.get(prompt, 0) for turn in turns] == [1] * 4, (
        "the prompt got nothing of the budget"
    )
    served = {request.id: sum(request in turn for turn in turns) for request in decoding}
    assert set(served.values()) == {3}, (
        f"of 4 steps with 3 decodes each, requests were in {served}"
    )


def test_a_prompt_advances_though_decodes_could_take_the_whole_budget() -> None:
    engine, _ = fake(12, step_tokens=8)
    decoding = begun(engine, 10)
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
    # Six decodes a step for ten requests in turn: each gets 12 of 20.
    assert set(served.values()) == {12}


def test_new_requests_get_in_though_decodes_could_take_the_whole_budget() -> None:
    engine, _ = fake(12, step_tokens=4)
    begun(engine, 8)
    (single,) = engine.add([3], greedy(1))
    assert step(engine)[single] == 1


def test_the_whole_budget_is_used_when_nobody_waits() -> None:
    engine, _ = fake(4, step_tokens=4)
    begun(engine, 4, output=2)
    engine.add([1], greedy(1))  # waits for a row, which no budget can give
    served = {request.id: tokens for request, tokens in step(engine).items()}
    assert served == dict.fromkeys(range(4), 1), (
        f"four decodes, four tokens, none can begin: {served}"
    )


def test_the_whole_budget_is_used_when_the_next_in_line_has_no_room() -> None:
    engine, _ = fake(6, step_tokens=4, blocks=6, block_size=4)
    decoding = [engine.add([1], greedy(3))[0] for _ in range(4)]
    while any(len(request.output_ids) < 1 for request in decoding):
        step(engine)
    waiting = engine.add([1] * 16, greedy(1))[0]  # a row is free, but four blocks are not
    before = [request.num_computed_tokens for request in decoding]
    assert sum(step(engine).values()) == 4 and waiting.row < 0
    assert [request.num_computed_tokens for request in decoding] == [
        count + 1 for count in before
    ]


def test_chunks_of_several_prompts_side_by_side() -> None:
    engine, _ = fake(step_tokens=32, chunk_tokens=10)
    prompts = [engine.add([n] * 25, greedy(1))[0] for n in (1, 2, 3, 4)]
    assert [step(engine).get(prompt, 0) for prompt in [prompts[0]]] == [10]
    assert [prompt.num_computed_tokens for prompt in prompts] == [10, 10, 10, 2]


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
    hook = model.lm_head.register_forward_pre_hook(
        lambda _, args: rows.append(args[0].shape[0])
    )
    generate(engine, [[1] * 50], greedy(3))
    hook.remove()
    assert rows == [1, 1, 1]
    assert (
        engine.stats.computed_tokens == 50 + 2
    )  # chunks cost no token more than a whole prompt


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
    finish(engine)
    assert len(request.output_ids) == 1 and request.finish_reason == "length"


def test_a_chunked_prompt_that_is_preempted_or_aborted_gives_its_blocks_back(
    model: Model,
) -> None:
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
    finish(engine)
    engine.check_integrity()
    assert engine.scheduler.rows.free == 64


def test_aborting_a_sibling_before_the_fork() -> None:
    engine, _ = fake(step_tokens=8)
    first, second, third = engine.add([1] * 20, greedy(3, n=3, seed=1))
    step(engine)
    assert second.row >= 0  # it has a row, and waits for the prompt
    engine.abort(second)
    engine.process_inbox()
    assert second.row < 0
    finish(engine)
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == (
        "length",
        "abort",
        "length",
    )
    assert engine.scheduler.rows.free == 8


def test_aborting_the_first_before_the_fork_aborts_its_siblings() -> None:
    engine, _ = fake(step_tokens=8)
    requests = engine.add([1] * 20, greedy(3, n=3, seed=1))
    step(engine)
    engine.abort(requests[0])
    engine.process_inbox()
    assert {request.finish_reason for request in requests} == {"abort"}
    finish(engine)
    assert engine.scheduler.rows.free == 8 and engine.scheduler.cache.free == 1000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"step_tokens": 1}, "step_tokens is 1"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"chunk_tokens": 2.5}, "chunk_tokens is 2.5, but must be an integer"),
    ],
)
def test_bad_options(model: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        chunked_prefill.load(model, **options)
    assert generate(chunked_prefill.load(model, chunk_tokens=1), [[1, 2]], greedy(1))[
        0
    ].token_ids
