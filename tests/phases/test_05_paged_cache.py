"""Phase 05: blocks are counted, shared, copied on write, preempted and given back, each exactly once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import continuous
import paged_cache
from common.errors import UserError
from common.events import generate
from common.options import option
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from continuous.work import Work
from forward.attention import LayerSpec
from forward.loading import load_model
from forward.model import Model
from forward.shapes import SHAPES
from paged_cache import (
    BlockAllocator,
    BlockPool,
    EngineBuilder,
    Feature,
    PagedCache,
    Preset,
    Recipe,
    TorchPagedAttention,
    build,
)
from paged_cache.memory import plan_cache, weight_bytes
from paged_cache.pool import KVFormat
from paged_cache.reference import paged_attention
from tests.dispatch import Operations
from tests.fakes import expected_tokens
from tests.fuzz.machines import machine, paged_engine
from tests.paged_batches import prepared, step_of
from tests.schedules import (
    MAX_LEN,
    SCHEDULES,
    failures_expected,
    finish,
    greedy,
    name_of,
    operations,
    play,
    play_seeds,
)

# A victim that is forgotten in the line would hang.
pytestmark = pytest.mark.timeout(20)


def block_bytes(model: Model, blocks: int, block_size: int = 16) -> int:
    return blocks * BlockPool.bytes_per_block(model.config, block_size, model.dtype)


def fake(
    rows: int, blocks: int, block_size: int = 4, *, watermark: float = 0.0, **options: Any
) -> Any:
    cache = PagedCache(rows, MAX_LEN, blocks, block_size, watermark=watermark)
    return paged_engine(cache, rows, chunked=False, **options)


@pytest.mark.timeout(120)
@SCHEDULES
@given(script=operations, seed=st.integers(0, 999))
def test_any_schedule(script: list[Any], seed: int) -> None:
    engine, runner = machine("05", random.Random(seed))
    play(engine, runner, script)
    assert runner.most_in_step <= MAX_LEN


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_many_schedules() -> None:
    preempted = sum(
        engine.scheduler.preemptions > 0
        for engine, _ in play_seeds(range(80), partial(machine, "05"))
    )
    assert preempted > 10, f"only {preempted} of 80 scripts preempt anybody"


# The allocator.


def test_allocator_counts_users() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(3)
    assert len(set(blocks)) == 3 and allocator.free == 1
    allocator.retain(blocks[:2])
    allocator.release(blocks)
    assert allocator.free == 2 and allocator.refs[blocks[0]] == 1
    allocator.check(blocks[:2])
    allocator.release(blocks[:2])
    assert allocator.free == 4
    allocator.check([])


def test_allocator_refuses_nonsense() -> None:
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        allocator.allocate(2)
    with pytest.raises(
        AssertionError, match=f"block {1 - block} is free and cannot be retained"
    ):
        allocator.retain([1 - block])
    allocator.release([block])
    with pytest.raises(AssertionError, match="once too often"):
        allocator.release([block])


def test_the_integrity_check_sees_a_leak_and_a_stray_user(model: Model) -> None:
    engine = paged_cache.load(model, cache_bytes=block_bytes(model, 8))
    generate(engine, [[1] * 20], greedy(3))
    engine.check_integrity()
    leaked = engine.cache.allocator.allocate(1)
    with pytest.raises(AssertionError, match="has 0 users, but 1 are booked"):
        engine.check_integrity()
    engine.cache.allocator.release(leaked)
    engine.add([1] * 20, greedy(3))
    engine.step()
    engine.cache.tables[0, 0] ^= 1  # the request now claims somebody else's block
    with pytest.raises(AssertionError, match="users, but"):
        engine.check_integrity()


# Admission, growth and preemption.


def test_admission_counts_blocks_promised_in_the_same_step() -> None:
    engine, _ = fake(4, 5)
    first, second, third = (engine.add([1] * 12, greedy(1))[0] for _ in range(3))
    engine.process_inbox()
    works = engine.scheduler.schedule()
    assert [work.request for work in works] == [first]  # three blocks each, five in all
    engine.collect(engine.sample(engine.forward(works)))
    assert engine.scheduler.cache.free == 5
    finish(engine)
    assert (
        engine.scheduler.preemptions == 0
        and third.finish_reason == second.finish_reason == "length"
    )


def test_admission_leaves_room_for_those_that_run() -> None:
    engine, _ = fake(4, 10, watermark=0.2)
    engine.add([1] * 4, greedy(9))
    engine.step()
    (large,) = engine.add(
        [1] * 32, greedy(2)
    )  # not 1, or it could come and go in the one step
    engine.step()
    assert large.row < 0  # 8 of the 8 free blocks, but 2 are kept
    finish(engine)
    assert large.finish_reason == "length"


def test_a_request_that_runs_alone_may_have_the_whole_pool() -> None:
    engine, _ = fake(4, 10, watermark=0.2)
    (large,) = engine.add(
        [1] * 37, greedy(3)
    )  # all 10 blocks at once; nobody runs for whom 2 must be kept
    finish(engine)
    assert large.finish_reason == "length"


def test_the_room_of_a_preempted_request_is_not_given_away_in_the_same_step() -> None:
    engine, _ = fake(3, 5, policy="priority")
    first, victim = (engine.add([1] * (4 * n), greedy(4), priority=n)[0] for n in (2, 3))
    engine.step()  # 2 and 3 blocks of 5
    (newcomer,) = engine.add([1] * 4, greedy(2), priority=1)
    engine.step()  # the first needs a third block, and two of the victim's three are left
    assert (first.preemptions, victim.preemptions) == (0, 1), (
        "request 0 needs a third block for token 8: request 1, the last by rank, is preempted once"
    )
    assert newcomer.row < 0, "request 2 got blocks in the step that took them from request 1"
    engine.step()
    assert newcomer.row >= 0, "request 2 fits, but is not admitted in the next step"


def test_preemption_takes_the_youngest_and_loses_no_token() -> None:
    engine, runner = fake(2, 12)
    old, young = (engine.add([1] * 20, greedy(20, seed=seed))[0] for seed in (0, 1))
    finish(engine)
    assert (old.preemptions, young.preemptions) == (0, 1), (
        f"requests 0 and 1 were preempted {old.preemptions} and {young.preemptions} times: "
        "the youngest is, and once"
    )
    assert old.finished < young.finished
    # All tokens but the last of each, and what the young one had computed before it was preempted.
    again = runner.computed - 2 * 39
    assert 20 < again < 40


def test_preemption_is_counted_and_gives_everything_back() -> None:
    engine, _ = fake(4, 24)
    first, second = (engine.add([n + 1] * 4, greedy(6, seed=n))[0] for n in range(2))
    engine.step()
    scheduler = engine.scheduler
    pending = engine.sample(engine.forward(scheduler.schedule()))
    held = scheduler.cache.free
    scheduler.preempt(first)
    assert first.preemptions == 1 and scheduler.preemptions == 1, "a preemption is not counted"
    assert (
        first.row < 0 and first.num_computed_tokens == 0 and scheduler.cache.free == held + 2
    )
    assert scheduler.running == [second] and scheduler.waiting == [first]
    (later,) = engine.add([3] * 2, greedy(2))
    engine.process_inbox()
    works = scheduler.schedule()
    assert [work.request for work in works] == [second], (
        "its token is in flight, and nobody overtakes it"
    )
    engine.collect(pending)
    engine.collect(engine.sample(engine.forward(works)))
    # Back before the request that came after it, with both tokens that it had got.
    works = scheduler.schedule()
    assert [(w.request, w.start, w.count) for w in works] == [
        (second, 6, 1),
        (first, 0, 6),
        (later, 0, 2),
    ]
    engine.collect(engine.sample(engine.forward(works)))
    finish(engine)
    assert first.output_ids == expected_tokens([1] * 4, first.params, 0, MAX_LEN)


def test_a_preempted_request_keeps_its_place_in_line() -> None:
    engine, _ = fake(3, 12)
    _, young, late = (engine.add([1] * n, greedy(20))[0] for n in (20, 20, 4))
    while young.preemptions == 0:
        engine.step()
    waited = 0
    while young.row < 0:
        assert late.row < 0  # nobody overtakes it
        engine.step()
        waited += 1
    finish(engine)
    assert waited > 3 and young.finished < late.finished


def test_the_last_by_rank_is_preempted_though_another_is_nearer() -> None:
    engine, _ = fake(3, 5)
    first, second, third = (engine.add([1] * n, greedy(4))[0] for n in (4, 5, 5))
    engine.step()  # 1, 2 and 2 blocks of 5; in the next step the first needs another
    engine.step()
    preempted = [request.id for request in (first, second, third) if request.preemptions]
    assert preempted == [third.id], (
        f"requests {preempted} were preempted, but request 2 is the last by rank"
    )
    assert len(second.output_ids) == 2, (
        "request 1 was not served in the step that preempted another"
    )


def test_preemption_goes_on_until_there_is_room() -> None:
    engine, _ = fake(4, 3)
    (first,) = engine.add([1] * 4, greedy(4))
    siblings = engine.add([2] * 8, greedy(3, n=2))
    engine.step()  # one block, and two that the siblings share
    engine.step()  # the first needs another; preempting one sibling frees none
    assert [sibling.preemptions for sibling in siblings] == [1, 1]
    assert first.preemptions == 0 and len(first.output_ids) == 2, "the first was not served"
    finish(engine)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_preemption_gives_the_same_tokens(model: Model, sampling: dict[str, Any]) -> None:
    rng = random.Random(1)
    prompts = [
        [rng.randrange(1, 257) for _ in range(rng.randrange(20, 60))] for _ in range(10)
    ]
    params = SamplingParams(max_tokens=40, ignore_eos=True, **sampling)
    roomy = paged_cache.load(model, max_rows=10)
    tight = paged_cache.load(model, max_rows=10, cache_bytes=block_bytes(model, 14))
    expected, actual = generate(roomy, prompts, params), generate(tight, prompts, params)
    assert roomy.scheduler.preemptions == 0 and tight.scheduler.preemptions > 3
    for one, right in zip(actual, expected, strict=True):
        assert one.token_ids == right.token_ids, (
            f"request {one.index}, {sampling}: other tokens when some are preempted"
        )
    tight.check_integrity()


def test_a_cache_of_two_blocks(model: Model) -> None:
    engine = paged_cache.load(model, block_size=8, cache_bytes=block_bytes(model, 2, 8))
    prompts = [[1] * 10, [2] * 3, [3] * 16, [4]]
    params = [greedy(7), greedy(14), greedy(1), greedy(16)]
    expected = generate(continuous.load(model), prompts, params)
    actual = generate(engine, prompts, params)
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]
    engine.check_integrity()


def test_what_can_never_fit_is_rejected_at_once(model: Model) -> None:
    engine = paged_cache.load(model, block_size=8, cache_bytes=block_bytes(model, 2, 8))
    with pytest.raises(UserError, match="may need 17 tokens of cache"):
        engine.add([1] * 10, greedy(8))
    engine.add([1] * 10, greedy(7))
    small = paged_cache.load(model, step_tokens=20)
    with pytest.raises(UserError, match="compute 21 tokens at once after a preemption"):
        small.add([1] * 10, greedy(12))
    small.add([1] * 10, greedy(11))


# Samples that share their prompt.


def test_samples_share_the_prompt_and_copy_the_last_block() -> None:
    engine, runner = fake(4, 20)
    requests = engine.add([1] * 10, greedy(4, n=3, seed=5))
    engine.step()
    cache = engine.scheduler.cache
    assert runner.computed == 10
    assert (
        cache.allocator.count - cache.free == 3
    )  # two full blocks and a partial one, for three requests
    tables = [cache.blocks_of(request.row) for request in requests]
    assert tables[0] == tables[1] == tables[2]
    engine.step()
    tables = [cache.blocks_of(request.row) for request in requests]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert cache.allocator.count - cache.free == 5
    finish(engine)
    assert len({tuple(request.output_ids) for request in requests}) == 3
    assert cache.free == 20


def test_samples_of_a_block_aligned_prompt_copy_nothing() -> None:
    engine, _ = fake(4, 20)
    requests = engine.add([1] * 8, greedy(3, n=2, seed=5))
    engine.step()
    works = engine.scheduler.schedule()
    cache = engine.scheduler.cache
    assert cache.take_copies() == []
    tables = [cache.blocks_of(request.row) for request in requests]
    assert tables[0][:2] == tables[1][:2] and tables[0][2] != tables[1][2] and len(works) == 2


def admitted(rows: RequestRows, number: int, length: int) -> Request:
    request = Request(number, [1] * length, length, 40, SamplingParams())
    rows.acquire(request)
    return request


def test_the_first_to_write_copies_and_the_last_keeps_the_original() -> None:
    rows, cache = RequestRows(3, 40), PagedCache(3, 40, 12, 4)
    parent, one, two = (admitted(rows, number, 6) for number in range(3))
    assert cache.reserve(parent, 6)
    for child in (one, two):
        cache.fork(parent, child, 6)
    full, shared = cache.blocks_of(0)
    assert [cache.blocks_of(row) for row in (1, 2)] == [[full, shared]] * 2
    for writer, users in ((parent, 2), (one, 1)):
        assert cache.reserve(writer, 7)
        own = cache.blocks_of(writer.row)[1]
        assert own != shared, (
            f"{name_of(writer)} writes into a block that {users} others share"
        )
        assert cache.take_copies() == [(shared, own)] and cache.allocator.refs[shared] == users
    assert cache.reserve(two, 7)
    assert cache.take_copies() == [], (
        "the last user of a block copies it, though nobody else has it"
    )
    assert cache.blocks_of(2) == [full, shared] and cache.allocator.refs[full] == 3
    assert cache.free == 12 - 4
    cache.check()


def test_a_fork_shares_no_more_than_the_prompt() -> None:
    """Blocks that the parent has beyond the prompt, for drafts, are its own."""
    rows, cache = RequestRows(2, 40), PagedCache(2, 40, 8, 4)
    parent, child = (admitted(rows, number, 6) for number in range(2))
    assert cache.reserve(parent, 14)
    cache.fork(parent, child, 6)
    assert cache.blocks_of(1) == cache.blocks_of(0)[:2]
    assert [cache.allocator.refs[block] for block in cache.blocks_of(0)] == [2, 2, 1, 1]


def test_copies_for_who_has_left_are_forgotten() -> None:
    """Or its block would be the target of two copies in one step, of which one wins by chance."""
    engine, runner = fake(5, 24)
    engine.add([1] * 6, greedy(5, n=2, seed=1))
    engine.step()
    runner.fail_run = True
    with failures_expected():
        engine.step()  # copied a block for the first, and then the step was never launched
    cache = engine.scheduler.cache
    assert engine.scheduler.idle and cache.free == 24
    assert cache.take_copies() == [], "a block is copied for requests that have left"


def test_samples_wait_until_there_are_rows_for_all() -> None:
    engine, _ = fake(3, 20)
    engine.add([1] * 3, greedy(6))
    engine.step()
    several = engine.add([2] * 3, greedy(2, n=3))
    engine.step()
    assert all(request.row < 0 for request in several)
    finish(engine)
    assert [request.finish_reason for request in several] == ["length"] * 3


def test_copies_read_before_anything_is_written() -> None:
    """Block 1 is copied to 2 and block 2 to 0 in one step: 0 gets what 2 had before."""
    pool = BlockPool(SHAPES["tiny"], 3, 4, device=torch.device("cpu"), dtype=torch.float32)
    for block in range(3):
        pool.data[:, :, block] = block
    pool.copy([(1, 2), (2, 0)])
    assert [int(pool.layers[1][0][block].unique()) for block in range(3)] == [2, 1, 1]


# Attention.


def scatter(cache: PagedCache, rng: random.Random) -> None:
    """Give all blocks back in another order, so that no table counts up."""
    blocks = cache.allocator.allocate(cache.allocator.count)
    rng.shuffle(blocks)
    cache.allocator.release(blocks)


@pytest.mark.parametrize("seed", range(12))
def test_torch_attention_equals_the_reference(seed: int) -> None:
    """Random mixes of prompts, chunks and decodes, with windows, over scattered blocks.

    Every other pool keeps keys and values over a scale of each head.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    block_size = rng.choice([1, 4, 16])
    heads = 6
    kv_heads = rng.choice([1, 2, 6])
    size = 8
    config = replace(SHAPES["tiny"], num_heads=heads, num_kv_heads=kv_heads, head_dim=size)
    rows, cache = RequestRows(12, 200), PagedCache(12, 200, 2000 // block_size, block_size)
    scatter(cache, rng)
    scales = 0.5 + torch.rand(config.num_layers, 2, kv_heads) if seed % 2 else None
    kv, cpu = KVFormat(scales=scales), torch.device("cpu")
    pool = BlockPool(
        config, cache.allocator.count, block_size, device=cpu, dtype=torch.float32, kv=kv
    )
    pool.data.normal_()
    spans = [
        rng.choice(
            [(0, rng.randrange(1, 40)), (rng.randrange(1, 150), rng.choice([1, 1, 7, 30]))]
        )
        for _ in range(rng.randrange(1, 12))
    ]
    batch = step_of(rows, cache, spans)
    attention = TorchPagedAttention(pool)
    attention.begin(batch)
    tokens = len(batch.positions)
    for window in (None, 9, 33):
        layer = LayerSpec(1, heads, kv_heads, size, 0.3, window)
        q = torch.randn(tokens, heads, size)
        k, v = (torch.randn(tokens, kv_heads, size) for _ in "kv")
        actual = attention(layer, q, k, v)
        stored = pool.data[1].flatten(1, 2)[:, batch.slots]  # [2, T, KH, D]
        stored = stored if scales is None else stored * scales[1, :, None, :, None]
        torch.testing.assert_close(
            stored, torch.stack((k, v)), msg="keys or values are not in their slots"
        )
        expected = paged_attention(
            q, pool.layers[1], batch.block_tables, batch.query_starts, batch.context_lens,
            scale=0.3, sliding_window=window,
        )  # fmt: skip
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_slots_of_a_pool_beyond_two_thousand_million_tokens() -> None:
    rows, cache = RequestRows(1, 40), PagedCache(1, 40, 10, 16)
    request = admitted(rows, 0, 20)
    cache.tables[0, :2] = 150_000_000, 150_000_001
    batch = prepared(rows, cache, [Work(request, 0, 15, 3)])
    wanted = [150_000_000 * 16 + 15, 150_000_001 * 16, 150_000_001 * 16 + 1]
    assert batch.slots.tolist() == wanted, "slots overflow 32 bits"


def test_attention_has_no_loop_over_requests(model: Model) -> None:
    """Sixty requests at one context are gathered by one call for keys and one for values in each layer."""
    engine = paged_cache.load(model, max_rows=60)
    pool = engine.runner.attention.pool.data.untyped_storage().data_ptr()  # type: ignore[attr-defined]

    def gathers(name: str, args: Any) -> bool | None:
        return (
            True
            if name == "index_select" and args[0].untyped_storage().data_ptr() == pool
            else None
        )

    for _ in range(60):
        engine.add([1] * 30, greedy(3))
    for expected in (
        0,
        2 * model.config.num_layers,
    ):  # prompts read this step's keys, not the cache
        with Operations(gathers) as found:
            engine.step()
        assert len(found.names) == expected, (
            f"the cache is read by {len(found.names)} calls, not {expected}"
        )


def test_what_an_earlier_request_left_in_a_block_is_not_seen(model: Model) -> None:
    engine = paged_cache.load(model, max_rows=4)
    prompts = [[1] * 9, [5] * 3, [6] * 33]
    expected = generate(engine, prompts, greedy(6))
    engine.runner.attention.pool.data.fill_(1e3)  # type: ignore[attr-defined]
    actual = generate(engine, prompts, greedy(6))
    assert [one.token_ids for one in actual] == [one.token_ids for one in expected]


def test_the_nan_of_one_request_reaches_no_later_owner_of_its_blocks(model: Model) -> None:
    """Token 50 is NaN. Then two samples share a block, of which one gets a copy in a wiped block."""
    broken = load_model("random:tiny", device="cpu", dtype="float32")
    broken.embed_tokens.weight.data[50] = float("nan")
    engine = paged_cache.load(broken, max_rows=4)
    (bad,) = generate(engine, [[50] * 100], greedy(2))
    assert bad.finish_reason == "error", "request 0 has NaN, but no error"
    prompts = [[1, 2, 3], [9] * 20]
    params = greedy(6, n=2, seed=1)
    wanted = generate(paged_cache.load(model, max_rows=4), prompts, params)
    for one, right in zip(generate(engine, prompts, params), wanted, strict=True):
        assert one.token_ids == right.token_ids, (
            f"request {one.index}, sample {one.sample}: tokens are wrong, since a block had held NaN"
        )


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_the_nan_of_one_request_reaches_no_other_of_its_step(bad: int) -> None:
    """Their contexts differ, so that the blocks of two are padded."""
    config = SHAPES["tiny"]
    heads, kv_heads = config.num_heads, config.num_kv_heads
    size = config.head_dim
    rows, cache = RequestRows(3, 64), PagedCache(3, 64, 32, 4)
    pool = BlockPool(config, 32, 4, device=torch.device("cpu"), dtype=torch.float32)
    batch = step_of(rows, cache, [(5, 1), (9, 1), (30, 1)])
    pool.data[:, :, cache.blocks_of(bad)] = float("nan")
    attention = TorchPagedAttention(pool)
    attention.begin(batch)
    assert len(attention._others) == 1, "the three are no group, so that none is padded"
    q = torch.randn(3, heads, size)
    k, v = torch.randn(2, 3, kv_heads, size)
    out = attention(LayerSpec(0, heads, kv_heads, size, 0.3), q, k, v)
    for other in {0, 1, 2} - {bad}:
        assert out[other].isfinite().all(), (
            f"request {other} reads a block of request {bad}, whose keys are NaN"
        )


# Memory.


def test_ledger(model: Model) -> None:
    plan = {"block_size": 16, "step_tokens": 2048, "rows": 4, "max_len": 100}
    memory_plan = plan_cache(model, cache_bytes=block_bytes(model, 10) + 5, **plan)
    assert (memory_plan.blocks, memory_plan.tokens, memory_plan.cache) == (
        10,
        160,
        block_bytes(model, 10),
    )
    assert memory_plan.weights == weight_bytes(model)
    assert memory_plan.rows > 4 * (8 * 100 + 4 * 7) and memory_plan.rows < 1 << 20
    for word in ("weights", "activations", "cache", "blocks", "tokens", "160"):
        assert word in str(memory_plan)
    assert plan_cache(model, cache_bytes=block_bytes(model, 1), **plan).blocks == 1
    assert plan_cache(model, **plan).blocks == 4 * 7 + 1  # no more than the rows can fill
    with pytest.raises(UserError, match="one block of 16 tokens takes"):
        plan_cache(model, cache_bytes=100, **plan)
    with pytest.raises(UserError, match=r"cache_bytes is 10{18}, but only \d+ bytes are free"):
        plan_cache(model, cache_bytes=10**18, **plan)
    with pytest.raises(
        UserError, match=r"max_rows is 65536, which takes \d+ bytes for requests of 16777216"
    ):
        plan_cache(model, **{**plan, "rows": 1 << 16, "max_len": 1 << 24})


# Features.


class WidePool(BlockPool):
    pass


@dataclass(frozen=True)
class Wide(Feature):
    """A feature of one option, which brings a pool."""

    name: ClassVar[str] = "wide"
    phase: ClassVar[int] = 5

    width: int = option(1, "of the pool")

    def install(self, builder: EngineBuilder) -> None:
        builder.pool.replace(self, WidePool)


def test_an_option_needs_its_feature() -> None:
    preset, cpu = Preset(on=[Wide]), torch.device("cpu")
    assert preset.choose({"width": 3}, cpu).features == (Wide(3),)
    assert preset.choose({"wide": False}, cpu).features == ()
    with pytest.raises(UserError, match="max_rows is 0"):
        preset.choose({"max_rows": 0}, cpu)
    with pytest.raises(UserError, match="width is 3, but wide is off on cpu"):
        preset.choose({"wide": False, "width": 3}, cpu)


def test_a_part_is_brought_once(model: Model) -> None:
    builder = EngineBuilder(Recipe(model))
    Wide().install(builder)
    with pytest.raises(UserError, match="each brings its own pool"):
        Wide().install(builder)
    with pytest.raises(UserError, match="wide is given twice"):
        build(Recipe(model, features=(Wide(), Wide())))
    attention: Any = build(Recipe(model, features=(Wide(),))).runner.attention
    assert type(attention.pool) is WidePool, "the pool of feature wide is not used"
