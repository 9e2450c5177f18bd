"""Phase 19: blocks come back from host memory and from files, and what comes back is what was computed."""

from __future__ import annotations

import gc
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import forward
import moving_blocks
from chunked_prefill import Chunked
from common.errors import UserError
from common.events import generate
from common.request import Request
from cuda_graphs import Overlap
from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES
from moving_blocks import MovingBlocks
from moving_blocks.cache import OffloadingCache
from moving_blocks.connector import ConnectorWorker, Transfer
from moving_blocks.disk import BlockFiles
from moving_blocks.host import HostBlock, HostTier
from moving_blocks.mover import CopyWorker, StreamWorker
from moving_blocks.names import BlockName, chain, namespace_of
from moving_blocks.rule import LoadRule, PrefillCost
from moving_blocks.tiers import TieredConnector
from paged_cache import BlockPool, KVFormat, PagedEngine, PagedSizes, Recipe, build
from prefix_cache import Prefix
from prefix_cache.cache import block_keys
from speculative import Speculate
from tests.schedules import failures_expected, greedy

pytestmark = pytest.mark.timeout(120)

SIZE = 4
"""Tokens of a block."""
ALWAYS = {"prefill_rate": 1.0, "load_rate": 1e6}
"""Rates with which loading always pays."""


@cache
def tiny(seed: int = 0) -> Model:
    config = replace(
        SHAPES["qwen3-0.6b"],
        num_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=61,
        max_position_embeddings=256,
        sliding_windows=(),
        eos_token_ids=(),
    )
    torch.manual_seed(seed)
    model = random_model(config, device="cpu", dtype=torch.float32)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.01 * seed)
    return model


def engine_of(
    model: Model | None = None,
    *,
    blocks: int = 60,
    host: int = 60,
    folder: Path | None = None,
    features: Sequence[Any] = (),
    rows: int = 4,
    index: str = "radix",
    block_size: int = SIZE,
    **options: Any,
) -> PagedEngine:
    """A small engine of phases 07, 08 and 19. blocks, host: of the cache and of host memory."""
    model = model or tiny()
    each = BlockPool.bytes_per_block(model.config, block_size, model.dtype)
    moving = MovingBlocks(
        host_bytes=host * each,
        disk_folder=None if folder is None else str(folder),
        **{**ALWAYS, **options},
    )
    sizes = PagedSizes(
        max_len=96,
        max_rows=rows,
        block_size=block_size,
        step_tokens=16,
        cache_bytes=blocks * each,
    )
    return build(Recipe(model, sizes, (Chunked(), Prefix(index=index), *features, moving)))


def connector_of(engine: PagedEngine) -> TieredConnector:
    connector = engine.cache.connector
    assert isinstance(connector, TieredConnector)
    return connector


def finish(engine: PagedEngine) -> None:
    """Step until nothing is left to do, and check that nothing leaks."""
    disk, steps = connector_of(engine).disk, 0
    while not engine.idle and steps < 3000:
        engine.step()
        # While a thread has a file, how many steps there are depends on how busy the machine is.
        steps += disk is None or not disk.pending
    assert engine.idle, "the engine does not come to an end"
    settle(engine)
    check(engine)


def settle(engine: PagedEngine) -> None:
    """Wait until the disk's threads have done what they were given."""
    connector = connector_of(engine)
    until = time.monotonic() + 100
    while connector.disk is not None and connector.disk.pending:
        assert time.monotonic() < until, "a file is not finished"
        connector.poll()
        time.sleep(0.001)


def check(engine: PagedEngine) -> None:
    engine.cache.check()
    check_host(connector_of(engine).host)
    if engine.idle and not connector_of(engine).busy:
        assert engine.cache.free == engine.cache.allocator.count, "blocks are lost"


def check_host(host: HostTier) -> None:
    used = [block.slot for block in host._blocks.values()]
    unpinned = {block.digest for block in host._blocks.values() if not block.pins}
    assert len({*used, *host._free}) == len(used) + len(host._free), "a slot is used twice"
    assert unpinned == set(host._unpinned), "blocks without pins are those that may be evicted"


def serve(
    engine: PagedEngine, *prompts: Sequence[int], count: int = 4, salt: str = ""
) -> list[list[int]]:
    requests = [engine.add(prompt, greedy(count), salt=salt)[0] for prompt in prompts]
    finish(engine)
    assert all(request.finish_reason == "length" for request in requests)
    return [request.output_ids for request in requests]


@cache
def right(prompt: tuple[int, ...], count: int = 4, model: Model | None = None) -> list[int]:
    """What phase 01 says."""
    params = greedy(count)
    return generate(forward.load(model or tiny()), [list(prompt)], params)[0].token_ids


def prompt_of(seed: int, length: int = 30) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 61) for _ in range(length)]


class Slow(ConnectorWorker):
    """Copies that take a while: they are made when something waits for them, or after some polls.

    What does not wait where it must sees old bytes, and its text is wrong. hang: loads that nothing waits for
    never end.
    """

    def __init__(self, inner: CopyWorker, polls: int = 3, *, hang: bool = False) -> None:
        self.inner = inner
        self.polls = polls
        self.hang = hang
        self.loads: list[SlowCopy] = []
        self.waits = 0

    def start_copy(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        to_host: bool,
        after: Sequence[Transfer] = (),
        gently: bool = False,
    ) -> Transfer:
        for copy in after:
            self.wait_for(copy)
        action = partial(self.inner.start_copy, blocks, slots, to_host=to_host)
        if to_host:
            return SlowCopy(self, action)
        self.loads.append(SlowCopy(self, action, slots, self.hang, gently))
        return self.loads[-1]

    def wait_for(self, transfer: Transfer) -> None:
        assert isinstance(transfer, SlowCopy)
        self.waits += 1
        transfer.run()


class SlowCopy(Transfer):
    """sources: slots that must not change until the copy is done, even if a step waits for it before."""

    def __init__(
        self,
        worker: Slow,
        action: Callable[[], object],
        sources: Sequence[int] = (),
        hang: bool = False,
        gently: bool = False,
    ) -> None:
        self.gently = gently
        self.left = worker.polls
        self.action: Callable[[], object] | None = action
        self.hang = hang
        self.sources = list(sources)
        self.host = worker.inner.host
        self.before = self.host[self.sources].clone()

    def run(self) -> None:
        if self.action is not None:
            self.action()
            self.action = None

    def done(self) -> bool:
        self.left -= 1
        if self.left >= 0 or self.hang:
            return False
        self.run()
        self.check()
        self.before, self.sources = self.before[:0], []
        return True

    def check(self) -> None:
        assert torch.equal(self.host[self.sources], self.before), (
            "a slot that is read has changed"
        )


def slow(engine: PagedEngine, polls: int = 3, *, hang: bool = False) -> Slow:
    """Make an engine's copies slow."""
    connector = connector_of(engine)
    assert isinstance(connector.worker, CopyWorker)
    connector.worker = made = Slow(connector.worker, polls, hang=hang)
    return made


# Names.


def names_of(tokens: Sequence[int], namespace: bytes = b"n", salt: str = "") -> list[bytes]:
    keys = block_keys(tokens, SIZE)
    return [name.digest for name in chain(namespace, salt, keys)]


def test_a_name_covers_all_tokens_before_it() -> None:
    first, second = names_of([1, 2, 3, 4, 5, 6, 7, 8]), names_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert first[0] != second[0]
    assert first[1] != second[1], "the second block's own tokens are the same"
    assert first == names_of([1, 2, 3, 4, 5, 6, 7, 8])
    assert all(len(name) == 16 for name in first)


def test_a_name_is_the_same_however_it_is_built_up() -> None:
    keys = block_keys(prompt_of(1), SIZE)
    whole = list(chain(b"n", "s", keys))
    begun = list(chain(b"n", "s", keys[:3]))
    assert begun + list(chain(b"n", "s", keys[3:], begun)) == whole
    assert [name.position for name in whole] == list(range(len(keys)))


def test_a_name_depends_on_salt_and_namespace() -> None:
    """a15: whatever partitions the cache partitions the tiers."""
    tokens = prompt_of(2)
    found = [
        names_of(tokens),
        names_of(tokens, b"m"),
        names_of(tokens, salt="a"),
        names_of(tokens, b"", salt="na"),
        names_of(tokens, b"na"),
    ]
    assert len({name for names in found for name in names}) == sum(map(len, found))


def pool_of(model: Model, size: int = SIZE, kv: KVFormat | None = None) -> BlockPool:
    return BlockPool(
        model.config, 4, size, device=torch.device("cpu"), dtype=model.dtype, kv=kv
    )


def test_a_namespace_covers_model_weights_and_format() -> None:
    """a13: a block of another model, dtype, layout or size is never a hit."""
    model = tiny()
    scales = torch.ones(2, 2, 2)
    formats = [
        namespace_of(model, pool_of(model)),
        namespace_of(tiny(1), pool_of(tiny(1))),
        namespace_of(model, pool_of(model, 2 * SIZE)),
        namespace_of(model, pool_of(model, kv=KVFormat(torch.bfloat16))),
        namespace_of(model, pool_of(model, kv=KVFormat(torch.int8, scales))),
        namespace_of(model, pool_of(model, kv=KVFormat(torch.int8, 2 * scales))),
        namespace_of(model, pool_of(model, kv=KVFormat(layout="turned"))),
        namespace_of(model, pool_of(model), "another order of sums"),
    ]
    assert len(set(formats)) == len(formats)
    assert namespace_of(model, pool_of(model)) == formats[0]


# Host memory.


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("offload", ["evicted", "computed"])
def test_an_evicted_prefix_comes_back(index: str, offload: str) -> None:
    engine = engine_of(blocks=24, host=100, index=index, offload=offload)
    prompts = [prompt_of(seed, 40) for seed in range(4)]
    for _ in range(2):
        for prompt in prompts:
            assert serve(engine, prompt) == [right(tuple(prompt))]
    stats, computed = connector_of(engine).stats, engine.stats.computed_tokens
    assert stats.loaded >= 3 * 9, f"{stats}"
    assert computed < 4 * 44 + 4 * (4 + 8), f"{computed} tokens were computed"


def test_a_prefix_that_fits_is_not_moved() -> None:
    engine = engine_of(blocks=60)
    for _ in range(3):
        serve(engine, prompt_of(1))
    assert vars(connector_of(engine).stats) == {
        name: 0 for name in vars(connector_of(engine).stats)
    }


@pytest.mark.parametrize("length", [39, 40, 41, 43])
def test_a_load_leaves_a_token_to_compute(length: int) -> None:
    """a11: prompts that end before, on and behind the edge of a block."""
    leaves_a_token(length)


def leaves_a_token(length: int) -> None:
    engine = engine_of()
    prompt = prompt_of(3, length)
    serve(engine, prompt)
    engine.cache.forget()
    (request,) = engine.add(prompt, greedy(4))
    finish(engine)
    assert request.cached_tokens == (length - 1) // SIZE * SIZE
    assert request.output_ids == right(tuple(prompt))


def test_the_next_turn_finds_what_was_generated() -> None:
    engine = engine_of()
    prompt = prompt_of(4, 20)
    (answer,) = serve(engine, prompt, count=13)
    engine.cache.forget()
    turn = [*prompt, *answer, 7]
    (request,) = engine.add(turn, greedy(3))
    finish(engine)
    assert request.cached_tokens == 32
    assert request.output_ids == right(tuple(turn), 3)


def test_samples_of_one_prompt_load_it_once() -> None:
    engine = engine_of()
    prompt = prompt_of(5, 33)
    serve(engine, prompt)
    engine.cache.forget()
    requests = engine.add(prompt, greedy(4, n=3))
    finish(engine)
    assert [request.output_ids for request in requests] == [right(tuple(prompt))] * 3
    assert connector_of(engine).stats.loaded == 8


def test_requests_that_share_a_prefix_load_it_once() -> None:
    engine = engine_of(blocks=40)
    base = prompt_of(6, 32)
    serve(engine, [*base, 1])
    engine.cache.forget()
    slow(engine)
    long = engine.add(prompt_of(7, 20), greedy(40))  # so that something runs
    engine.step()
    prompts = [[*base, seed] for seed in range(1, 4)]
    requests = [engine.add(prompt, greedy(4))[0] for prompt in prompts]
    finish(engine)
    assert [each.output_ids for each in requests] == [right(tuple(each)) for each in prompts]
    assert long[0].output_ids == right(tuple(prompt_of(7, 20)), 40)
    assert connector_of(engine).stats.loaded == 8


def test_salts_do_not_meet_in_host_memory() -> None:
    """a15 in the second tier."""
    salts_in_host_memory()


def salts_in_host_memory() -> None:
    engine = engine_of()
    prompt = prompt_of(8)
    serve(engine, prompt, salt="a")
    engine.cache.forget()
    serve(engine, prompt, salt="b")
    assert connector_of(engine).stats.loaded == 0
    engine.cache.forget()
    serve(engine, prompt, salt="a")
    assert connector_of(engine).stats.loaded == 7


def test_the_least_recently_used_end_leaves_host_memory_first() -> None:
    engine = engine_of(host=12)
    old, new = prompt_of(9, 29), prompt_of(10, 29)
    for prompt in (old, new):
        serve(engine, prompt)
        engine.cache.forget()
        engine.step()
        connector_of(engine).poll()
    connector = connector_of(engine)
    left = [
        [connector.host.get(digest) is not None for digest in digests_in(engine, prompt)]
        for prompt in (old, new)
    ]
    assert all(left[1])
    kept = sum(left[0])
    assert left[0] == [True] * kept + [False] * (len(left[0]) - kept), f"{left[0]}"
    assert 0 < kept < len(left[0])


def must(block: HostBlock | None) -> HostBlock:
    assert block is not None, "no slot is free"
    return block


def test_slots_are_given_to_the_least_recently_used() -> None:
    tier = HostTier(4, 8, torch.device("cpu"))
    blocks = [must(tier.allocate(bytes([number]))) for number in range(4)]
    assert tier.allocate(b"none is free") is None
    tier.unpin(blocks)
    tier.pin(blocks[3:])
    tier.touch([b"\0", b"\1"])
    order = [must(tier.allocate(bytes([number]))).slot for number in range(10, 13)]
    assert order == [blocks[2].slot, blocks[1].slot, blocks[0].slot]
    assert tier.allocate(b"the last is pinned") is None
    assert tier.get(b"\3") is blocks[3] and tier.get(b"\0") is None
    tier.fail(blocks[3])
    assert tier.get(b"\3") is None and tier.allocate(b"still pinned") is None
    tier.unpin(blocks[3:])
    assert must(tier.allocate(b"free again")).slot == blocks[3].slot
    check_host(tier)


def digests_in(engine: PagedEngine, tokens: Sequence[int], salt: str = "") -> list[bytes]:
    keys = block_keys(tokens, SIZE)
    return [name.digest for name in chain(engine.cache.namespace, salt, keys)]


def test_a_block_is_not_reused_while_it_is_copied() -> None:
    """a2: the step that writes to a block waits for the copy that reads it."""
    reuse_while_copied()


def reuse_while_copied() -> None:
    for offload in ("evicted", "computed"):
        engine = engine_of(blocks=16, host=100, offload=offload, rows=2)
        worker = slow(engine, polls=50)
        prompts = [prompt_of(seed, 44) for seed in range(5)]
        for _ in range(2):
            assert serve(engine, *prompts) == [right(tuple(prompt)) for prompt in prompts]
        assert worker.waits > 0


def test_a_load_does_not_hold_up_others() -> None:
    """Requests that run get a token at every step while another one's blocks come."""
    engine = engine_of(blocks=40)
    prompt = prompt_of(11, 40)
    serve(engine, prompt)
    engine.cache.forget()
    slow(engine, polls=10)
    (running,) = engine.add(prompt_of(12, 8), greedy(30))
    for _ in range(2):
        engine.step()
    (waiting,) = engine.add(prompt, greedy(2))
    before = len(running.tokens)
    for _ in range(8):
        engine.step()
    assert len(running.tokens) == before + 8
    assert waiting.row < 0 and waiting.finish_reason is None
    finish(engine)
    assert waiting.cached_tokens == 36


def test_nothing_waits_if_nothing_else_runs() -> None:
    """Then the device alone waits for the copy: the request is admitted in the same step."""
    engine = engine_of()
    prompt = prompt_of(13, 40)
    serve(engine, prompt)
    engine.cache.forget()
    slow(engine, polls=1000)
    (request,) = engine.add(prompt, greedy(2))
    engine.step()
    assert request.cached_tokens == 36 and len(request.tokens) == 41
    finish(engine)


def test_no_request_overtakes_one_that_waits_for_room() -> None:
    engine = engine_of(blocks=24, host=60, rows=4)
    large = prompt_of(14, 72)
    serve(engine, large)
    engine.cache.forget()
    (running,) = engine.add(prompt_of(15, 30), greedy(20))
    engine.step()
    (first,) = engine.add(large, greedy(4))
    engine.step()
    later = [engine.add(prompt_of(20 + number, 24), greedy(8))[0] for number in range(6)]
    finish(engine)
    assert running.finish_reason == first.finish_reason == "length"
    assert first.cached_tokens == 68
    assert all(first.first_token < each.first_token for each in later)  # type: ignore[operator]


def test_a_load_begins_beside_the_step_before_it() -> None:
    """Two sessions come back: the second one's blocks come while the first one's prompt is computed."""
    engine = engine_of()
    prompts = [prompt_of(seed, 40) for seed in (61, 62)]
    serve(engine, *prompts)
    engine.cache.forget()
    worker = slow(engine, polls=4)
    requests = [engine.add(prompt, greedy(4))[0] for prompt in prompts]
    engine.step()
    assert len(requests[0].tokens) == 41, "the first request waits for the second one's blocks"
    assert [load.gently for load in worker.loads] == [False, True], (
        "the second request's load begins only after the step of the first"
    )
    finish(engine)
    assert [request.cached_tokens for request in requests] == [36, 36]
    assert [r.output_ids for r in requests] == [right(tuple(prompt)) for prompt in prompts]


def test_a_load_may_take_as_long_as_all_that_it_brings_takes_to_compute() -> None:
    """What was cached when a request came may be evicted before there is room: it waits for that too."""
    engine = engine_of(blocks=26, rows=4)
    large = prompt_of(63, 72)
    serve(engine, large)
    connector = connector_of(engine)
    connector.clock = clock = Clock()
    (grows,) = engine.add(prompt_of(64, 32), greedy(12))
    (stays,) = engine.add(prompt_of(65, 2), greedy(40))
    while not connector.stats.saved:
        engine.step()
    (request,) = engine.add(large, greedy(4))
    cached = connector._num_cached(request)
    engine.step()
    (wait,) = connector.waiting.values()
    worker = slow(engine, hang=True)
    while wait.load is None:
        engine.step()
    assert grows.finish_reason and stays.finish_reason is None
    assert len(wait.load.blocks) > 17 - cached, "nothing was evicted: the test has no case"
    clock.now += connector.rule.compute_seconds(SIZE * cached, 72) + 0.1
    engine.step()
    assert request in connector.waiting, "it stopped waiting sooner than it can be computed"
    worker.hang = wait.load.transfer.hang = False  # type: ignore[attr-defined]
    finish(engine)
    assert request.cached_tokens == 68 and not connector.stats.expired_requests
    assert request.output_ids == right(tuple(large))


def test_a_request_of_the_whole_cache_is_loaded() -> None:
    engine = engine_of(blocks=24, host=60)
    prompt = prompt_of(16, 92)
    for _ in range(3):
        assert serve(engine, prompt, count=3) == [right(tuple(prompt), 3)]
        engine.cache.forget()
        engine.step()


def test_slots_stay_as_they_are_until_their_copy_is_done(tmp_path: Path) -> None:
    """The host may go on while the device still reads: a file must not be read into these slots."""
    slots_stay(tmp_path)


def slots_stay(tmp_path: Path) -> None:
    prompts = [prompt_of(seed, 40) for seed in (37, 38)]
    serve(engine_of(folder=tmp_path / "blocks"), *prompts)
    engine = engine_of(folder=tmp_path / "blocks", host=9)
    worker = slow(engine, polls=60)
    requests = [engine.add(prompt, greedy(4))[0] for prompt in prompts[:1]]
    while not requests[0].output_ids:
        engine.step()
    requests += engine.add(prompts[1], greedy(4))
    (copy,) = worker.loads
    while copy.left > 0 and not engine.idle:
        engine.step()
        copy.check()
    finish(engine)
    assert [each.output_ids for each in requests] == [right(tuple(each)) for each in prompts]
    assert all(block.pins == 0 for block in connector_of(engine).host._blocks.values())


# The rule.


def test_loading_pays_from_some_length_on() -> None:
    rule = LoadRule(PrefillCost(1.0, 0.0), 10, compute_rate=1000.0, host_rate=1e6)
    assert rule.compute_seconds(0, 100) == pytest.approx(0.1)
    assert rule.should_load(0, 64, 65, 4)
    assert not rule.should_load(0, 64, 65, 100_000)
    few = LoadRule(
        PrefillCost(1.0, 0.0), 10, compute_rate=1000.0, host_rate=1e6, step_seconds=0.2
    )
    assert not few.should_load(0, 64, 100, 4), (
        "a step takes as long with a few tokens as with 100"
    )
    assert few.should_load(0, 640, 700, 40)


def test_attention_makes_long_prompts_worth_loading() -> None:
    """Bytes grow with the length, and computing with its square."""
    rule = LoadRule(PrefillCost(1.0, 0.01), 16, compute_rate=1e6, host_rate=0.9e6)
    assert not rule.should_load(0, 1024, 1040, 64 * 16)
    assert rule.should_load(0, 32768, 32784, 2048 * 16)


def test_a_disk_is_slower_than_memory_and_is_measured() -> None:
    rule = LoadRule(
        PrefillCost(1.0, 0.0), 1000, compute_rate=1e4, host_rate=1e9, disk_rate=1e9
    )
    assert rule.should_load(0, 64, 65, 16, from_disk=16)
    for _ in range(200):
        rule.on_read(16, 10.0)
    assert rule.disk_rate == pytest.approx(1600, rel=0.01)
    assert not rule.should_load(0, 64, 65, 16, from_disk=16)
    assert rule.should_load(0, 64, 65, 16, from_disk=0)


def test_beside_other_requests_a_load_must_pay_at_half_the_rate() -> None:
    rule = LoadRule(PrefillCost(1.0, 0.0), 1000, compute_rate=1e4, host_rate=1e6)
    assert rule.load_seconds(100) == pytest.approx(0.1, rel=0.01)
    assert rule.load_seconds(100, gently=True) == pytest.approx(0.2, rel=0.01)
    assert rule.should_load(0, 1600, 1601, 100)
    assert not rule.should_load(0, 1600, 1601, 100, gently=True)


def test_only_copies_beside_other_requests_are_gentle() -> None:
    engine = engine_of(blocks=40, offload="computed")
    worker = slow(engine, polls=0)
    prompt = prompt_of(39, 40)
    serve(engine, prompt)
    engine.cache.forget()
    serve(engine, prompt)
    assert [each.gently for each in worker.loads] == [False]
    engine.cache.forget()
    engine.add(prompt_of(40, 8), greedy(30))
    for _ in range(2):
        engine.step()
    serve(engine, prompt)
    assert [each.gently for each in worker.loads] == [False, True]


def test_a_load_waits_for_the_save_into_its_slots() -> None:
    """A slot is found as soon as its save has begun."""
    load_after_save()


def load_after_save() -> None:
    engine = engine_of(offload="computed")
    slow(engine, polls=1000)
    prompt = prompt_of(41, 40)
    (request,) = engine.add(prompt, greedy(4))
    while request.finish_reason is None:
        engine.step()
    engine.cache.forget()
    (request,) = engine.add(prompt, greedy(4))
    engine.step()
    assert request.cached_tokens == 36
    finish(engine)
    assert request.output_ids == right(tuple(prompt))


def test_where_computing_is_faster_nothing_is_loaded() -> None:
    engine = engine_of(prefill_rate=1e9, load_rate=1e-6)
    prompt = prompt_of(17)
    serve(engine, prompt)
    engine.cache.forget()
    assert serve(engine, prompt) == [right(tuple(prompt))]
    assert connector_of(engine).stats.loaded == 0


def test_rates_are_measured_at_the_start_and_leave_no_trace() -> None:
    engine = engine_of(prefill_rate=None, load_rate=None)
    rule = connector_of(engine).rule
    assert 0 < rule.step_seconds < 60 and rule.compute_rate > 0 and rule.host_rate > 0
    assert engine.stats.computed_tokens == 0 and engine.cache.stats.lookup_tokens == 0
    assert engine.cache.allocator.free == engine.cache.allocator.count
    assert not connector_of(engine).host._blocks


def test_operations_of_a_prompt_add_up() -> None:
    cost = PrefillCost.of(tiny().config)
    assert cost.between(0, 10) + cost.between(10, 50) == pytest.approx(cost.between(0, 50))
    assert cost.per_token == 2 * 2 * (32 * 8 * (4 + 2 * 2 + 4) + 3 * 32 * 48)
    assert cost.per_pair == 4 * 2 * 4 * 8


# Late, lost and aborted.


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_waits_no_longer_than_computing_takes() -> None:
    """a7: a copy that never reports. The request is computed, and a late report is taken."""
    never_reports()


def never_reports() -> None:
    engine = engine_of(blocks=50)
    prompt = prompt_of(18, 40)
    serve(engine, prompt)
    engine.cache.forget()
    worker = slow(engine, hang=True)
    connector = connector_of(engine)
    connector.clock = clock = Clock()
    engine.add(prompt_of(19, 8), greedy(60))
    engine.step()
    (request,) = engine.add(prompt, greedy(4))
    for _ in range(5):
        engine.step()
    assert request.row < 0, "its blocks are on their way"
    clock.now += 100  # at a token a second
    for _ in range(20):
        engine.step()
    assert request.output_ids == right(tuple(prompt))
    assert request.cached_tokens == 0 and connector.stats.expired_requests == 1
    (load,) = connector.loads
    assert len(engine.cache.connector.held_blocks()) == 9
    worker.hang = load.transfer.hang = False  # type: ignore[attr-defined]
    finish(engine)
    assert not connector.loads


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_abort_at_any_stage_leaves_nothing(
    steps: int, on_disk: bool, tmp_path: Path
) -> None:
    """a8."""
    abort_after(steps, tmp_path / "blocks" if on_disk else None)


def abort_after(steps: int, folder: Path | None) -> None:
    engine = engine_of(blocks=40, folder=folder)
    prompt = prompt_of(21, 40)
    serve(engine, prompt)
    if folder is not None:
        engine = engine_of(blocks=40, folder=folder)
    engine.cache.forget()
    slow(engine, polls=3)
    engine.add(prompt_of(22, 8), greedy(12))
    engine.step()
    (request,) = engine.add(prompt, greedy(20))
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    finish(engine)
    assert request.finish_reason == "abort"
    assert not connector_of(engine).waiting and not connector_of(engine).loads
    assert all(block.pins == 0 for block in connector_of(engine).host._blocks.values())
    assert serve(engine, prompt) == [right(tuple(prompt))]


def test_only_computed_blocks_are_saved(tmp_path: Path) -> None:
    """a4: a step that fails, and a prompt that is aborted half way, leave no block behind."""
    only_computed(tmp_path)


def only_computed(folder: Path) -> None:
    engine = engine_of(folder=folder / "a")
    prompt = prompt_of(23, 60)
    engine.add(prompt, greedy(4))
    engine.step()
    forward_ = engine.runner.forward

    def fail(*args: Any, **options: Any) -> Any:
        engine.runner.attention.pool.data.fill_(3.0)  # type: ignore[attr-defined]
        raise RuntimeError("the device is gone")

    engine.runner.forward = fail  # type: ignore[method-assign]
    with failures_expected():
        engine.step()
    engine.runner.forward = forward_  # type: ignore[method-assign]
    finish(engine)
    saved = [digest for digest in digests_in(engine, prompt) if has(engine, digest)]
    assert saved == digests_in(engine, prompt[:16])
    engine = engine_of(folder=folder / "a")
    assert serve(engine, prompt) == [right(tuple(prompt))]


def has(engine: PagedEngine, digest: bytes) -> bool:
    connector = connector_of(engine)
    on_disk = connector.disk is not None and connector.disk.files.contains(digest)
    return on_disk or connector.host.get(digest) is not None


# Files.


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def restarted(tmp_path: Path, **options: Any) -> PagedEngine:
    return engine_of(folder=tmp_path / "blocks", **options)


def test_a_restarted_engine_finds_its_blocks(tmp_path: Path) -> None:
    prompt = prompt_of(24, 40)
    serve(restarted(tmp_path), prompt)
    engine = restarted(tmp_path)
    (request,) = engine.add(prompt, greedy(4))
    finish(engine)
    assert request.cached_tokens == 36
    assert request.output_ids == right(tuple(prompt))
    assert connector_of(engine).stats.read == 9
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files_in(folder))


def test_more_blocks_than_host_memory_has_are_loaded_as_far_as_they_go(tmp_path: Path) -> None:
    prompt = prompt_of(25, 60)
    serve(restarted(tmp_path), prompt)
    engine = restarted(tmp_path, host=5)
    (request,) = engine.add(prompt, greedy(4))
    finish(engine)
    assert request.cached_tokens == 20
    assert request.output_ids == right(tuple(prompt))


def test_a_block_that_fails_is_computed_by_all_who_share_it(tmp_path: Path) -> None:
    """a5: two requests with one prefix, of which a block in the middle is damaged."""
    damaged_and_shared(tmp_path)


def damaged_and_shared(tmp_path: Path) -> None:
    base = prompt_of(26, 40)
    engine = restarted(tmp_path)
    serve(engine, base)
    digest = digests_in(engine, base)[4]
    path = tmp_path / "blocks" / f"{digest.hex()}.kv"
    content = bytearray(path.read_bytes())
    content[-3] ^= 64
    path.write_bytes(content)
    engine = restarted(tmp_path)
    prompts = [[*base, 1, 2], [*base, 3], [*base, 4, 5, 6]]
    assert serve(engine, *prompts) == [right(tuple(prompt)) for prompt in prompts]
    assert connector_of(engine).stats.unread == 1
    engine = restarted(tmp_path)
    assert serve(engine, prompts[0]) == [right(tuple(prompts[0]))]
    assert connector_of(engine).stats.unread == 0, "it was written again"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)


def flip_tokens(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[17 + 16 + 16 + 16 + 2] ^= 1
    path.write_bytes(content)


def flip_checksum(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[17 + 16 + 16 + 16 + 4 * SIZE] ^= 1
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(path.stat().st_size))


def other_block(path: Path) -> None:
    other = next(each for each in path.parent.iterdir() if each != path)
    path.write_bytes(other.read_bytes())


def link(path: Path) -> None:
    target = path.parent.parent / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unreadable(path: Path) -> None:
    path.unlink()


DAMAGE = [
    cut,
    empty,
    flip_header,
    flip_tokens,
    flip_checksum,
    foreign,
    other_block,
    link,
    folder_instead,
    pipe,
    unreadable,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_a_miss_with_one_line_in_the_log(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(27, 40)
    engine = restarted(tmp_path)
    serve(engine, prompt)
    digest = digests_in(engine, prompt)[3]
    engine = restarted(tmp_path)  # which has seen the file
    damage(tmp_path / "blocks" / f"{digest.hex()}.kv")
    caplog.clear()
    assert serve(engine, prompt) == [right(tuple(prompt))]
    assert connector_of(engine).stats.unread == 1
    lines = [each for each in caplog.records if "is computed again" in each.message]
    assert len(lines) == 1 and digest.hex() in lines[0].message


def test_a_process_that_is_killed_leaves_a_whole_file_or_none(tmp_path: Path) -> None:
    """a3: the file gets its name last, when all of it is on the disk."""
    killed_while_writing(tmp_path, pytest.MonkeyPatch())


def killed_while_writing(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    files = BlockFiles(tmp_path / "blocks", 1 << 20, 1000)
    name = next(chain(b"n", "", [b"abcd"]))
    content = memoryview(random.Random(2).randbytes(1000))

    class Killed(BaseException):
        pass

    def kill(*args: Any, **options: Any) -> None:
        raise Killed

    for call in ("fsync", "utime", "replace"):
        with patch.context() as inner:
            inner.setattr(f"moving_blocks.disk.os.{call}", kill)
            with pytest.raises(Killed):
                files.write(name, content)
        assert not files.path(name.digest).exists(), f"killed at {call}"
        assert not BlockFiles(tmp_path / "blocks", 1 << 20, 1000).contains(name.digest)
    assert files.write(name, content)
    target = bytearray(1000)
    assert files.read(name, memoryview(target)) and bytes(target) == bytes(content)


def test_what_a_dead_process_left_half_written_is_swept(tmp_path: Path) -> None:
    """a16."""
    stale_files(tmp_path / "blocks")


def stale_files(folder: Path) -> None:
    BlockFiles(folder, 1 << 20, 1000)
    stale, young = folder / "abc.tmp", folder / "def.tmp"
    notes = folder / "notes.txt"
    for path in (stale, young, notes):
        path.write_bytes(b"x")
    os.utime(stale, (1.0, 1.0))
    os.utime(notes, (1.0, 1.0))
    BlockFiles(folder, 1 << 20, 1000)
    assert files_in(folder) == [young, notes], "only what is ours and old is removed"


def written(files: BlockFiles, count: int, seed: int = 0) -> list[BlockName]:
    keys = [bytes([seed, number, 0, 0]) for number in range(count)]
    names = list(chain(b"n", "", keys))
    for name in names:
        assert files.write(name, memoryview(bytes(1000)))
    return names


def test_files_stay_within_their_budget_and_the_oldest_ends_go_first(tmp_path: Path) -> None:
    files = BlockFiles(tmp_path / "blocks", 12_000, 1000)
    old = written(files, 5, seed=1)
    files.touch([name.digest for name in old])
    new = written(files, 7, seed=2)
    size = sum(path.stat().st_size for path in files_in(files.folder))
    assert size <= 12_000 and files.used == size
    left = [files.path(name.digest).exists() for name in old]
    assert all(files.path(name.digest).exists() for name in new)
    assert 0 < sum(left) < 5 and left == sorted(left, reverse=True), f"{left}"


def test_a_request_that_ends_makes_its_files_young_from_the_last_one_on(
    tmp_path: Path,
) -> None:
    engine = restarted(tmp_path)
    prompt = prompt_of(35, 40)
    serve(engine, prompt)
    connector = connector_of(engine)
    assert connector.disk is not None
    paths = [connector.disk.files.path(digest) for digest in digests_in(engine, prompt)]
    for path in paths:
        os.utime(path, (1.0, 1.0))
    serve(engine, prompt)
    until = time.monotonic() + 100
    ages = [0]
    while (
        min(ages) < 10**18 or ages != sorted(ages, reverse=True)
    ) and time.monotonic() < until:
        time.sleep(0.001)
        ages = [path.stat().st_mtime_ns for path in paths]
    assert min(ages) > 10**18 and ages == sorted(ages, reverse=True), f"{ages}"


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    one, other = (BlockFiles(tmp_path / "blocks", 1 << 20, 1000) for _ in range(2))
    names = written(one, 3)
    assert all(other.contains(name.digest) for name in names)
    assert other.read(names[1], memoryview(bytearray(1000)))
    one.path(names[2].digest).unlink()
    assert not other.read(names[2], memoryview(bytearray(1000)))
    assert not other.contains(names[2].digest)


def test_a_full_disk_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    engine = restarted(tmp_path)
    monkeypatch.setattr("moving_blocks.disk.os.fsync", full)
    prompt = prompt_of(28)
    assert serve(engine, prompt) == [right(tuple(prompt))]
    assert files_in(tmp_path / "blocks") == []
    engine.cache.forget()
    assert serve(engine, prompt) == [right(tuple(prompt))]
    assert connector_of(engine).stats.loaded == 7, "host memory has them"


def test_waiting_for_another_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for the files, then for its load: together no longer than computing takes."""
    prompt = prompt_of(66, 40)
    serve(restarted(tmp_path), prompt)
    engine = restarted(tmp_path)
    connector = connector_of(engine)
    connector.clock = clock = Clock()
    engine.add(prompt_of(67, 8), greedy(60))
    engine.step()
    slow(engine, hang=True)
    (request,) = engine.add(prompt, greedy(4))
    monkeypatch.setattr(connector, "_is_on_disk", lambda name: False)
    connector.expect(request)
    most = connector.waiting[request].deadline
    engine.step()
    clock.now += 0.75 * most
    monkeypatch.undo()
    until = time.monotonic() + 60
    while request in connector.waiting and connector.waiting[request].load is None:
        engine.step()
        assert time.monotonic() < until, "its files are not read"
    assert connector.waiting[request].deadline <= most + 1e-3, "it may wait twice as long"
    clock.now = most + 1
    while request.finish_reason is None:
        engine.step()
    assert request.output_ids == right(tuple(prompt))


def test_a_disk_that_never_answers_makes_nobody_wait_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """a12: one block of many never comes."""
    never_answers(tmp_path, monkeypatch)


def never_answers(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(29, 40)
    engine = restarted(tmp_path)
    serve(engine, prompt)
    engine = restarted(tmp_path)
    gate = threading.Event()
    connector = connector_of(engine)
    assert connector.disk is not None
    read = BlockFiles._read
    stuck = digests_in(engine, prompt)[5]

    def hang(self: BlockFiles, path: Path, name: BlockName, target: memoryview) -> None:
        if name.digest == stuck:
            gate.wait(60)
        read(self, path, name, target)

    patch.setattr(BlockFiles, "_read", hang)
    try:
        computed_meanwhile(engine, prompt)
    finally:
        gate.set()
    settle(engine)
    check_host(connector.host)
    engine.cache.forget()
    assert serve(engine, prompt) == [right(tuple(prompt))]


def never_answers_alone(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        never_answers(tmp_path, patch)


def computed_meanwhile(engine: PagedEngine, prompt: list[int]) -> None:
    connector = connector_of(engine)
    connector.clock = clock = Clock()
    (request,) = engine.add(prompt, greedy(4))
    engine.step()
    until = time.monotonic() + 100
    while connector.stats.read < 8 and time.monotonic() < until:
        engine.step()
    assert request.row < 0
    clock.now += 100  # at a token a second
    for _ in range(200):
        engine.step()
        if engine.idle:
            break
    assert request.output_ids == right(tuple(prompt)) and request.cached_tokens == 20
    assert engine.cache.free == engine.cache.allocator.count


def test_salts_do_not_meet_on_a_disk(tmp_path: Path) -> None:
    """a15 in the third tier."""
    salts_on_a_disk(tmp_path)


def salts_on_a_disk(tmp_path: Path) -> None:
    prompt = prompt_of(30)
    serve(restarted(tmp_path), prompt, salt="a")
    engine = restarted(tmp_path)
    serve(engine, prompt, salt="b")
    serve(engine, prompt)
    assert connector_of(engine).stats.read == 0
    serve(engine, prompt, salt="a")
    assert connector_of(engine).stats.read == 7


def test_another_model_finds_nothing_of_this_one(tmp_path: Path) -> None:
    """a13."""
    other_weights(tmp_path)


def other_weights(tmp_path: Path) -> None:
    prompt = prompt_of(31)
    serve(restarted(tmp_path), prompt)
    for engine in (restarted(tmp_path, model=tiny(1)), restarted(tmp_path, block_size=8)):
        (answer,) = serve(engine, prompt)
        assert answer == right(tuple(prompt), 4, engine.runner.model)
        assert connector_of(engine).stats.read == 0


CHILD = """
import sys
from tests.phases.test_19_moving_blocks import connector_of, engine_of, prompt_of, serve
from pathlib import Path
engine = engine_of(folder=Path(sys.argv[1]))
serve(engine, prompt_of(32, 40))
print(connector_of(engine).stats.read, connector_of(engine).stats.written)
"""


@pytest.mark.slow
def test_processes_with_other_hash_seeds_hit_each_others_files(tmp_path: Path) -> None:
    """a14."""
    other_hash_seeds(tmp_path, CHILD)


@pytest.mark.slow
def test_names_of_pythons_hash_would_not_be_found(tmp_path: Path) -> None:
    """a14 planted: the processes differ in nothing but the seed."""
    fault = "import moving_blocks.names as names\n"
    fault += "names.digest_of = lambda *parts: (hash(parts) % 2**64).to_bytes(16, 'little')\n"
    with pytest.raises(AssertionError, match="'9', '0'"):
        other_hash_seeds(tmp_path, fault + CHILD)


def other_hash_seeds(tmp_path: Path, child: str) -> None:
    found = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", child, str(tmp_path / "blocks")],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0][0] == "0" and int(found[0][1]) >= 10
    assert found[1] == ["9", "0"]


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(UserError, match=r"disk_folder is .* but must be a folder of your own"):
        engine_of(folder=folder)
    for wrong in ("a\0b", "~nobody-of-this-name/x"):
        with pytest.raises(UserError, match="disk_folder"):
            engine_of(folder=Path(wrong))
    link_ = tmp_path / "link"
    folder.chmod(0o700)
    link_.symlink_to(folder)
    with pytest.raises(UserError, match="disk_folder"):
        engine_of(folder=link_)
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(UserError, match="disk_folder"):
        engine_of(folder=file)


# Options, and what is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_bytes": 0}, "host_bytes is 0, but must be at least 1"),
        ({"host_bytes": 1.5}, "host_bytes is 1.5, but must be an integer"),
        ({"disk_bytes": -1}, "disk_bytes is -1, but must be at least 1"),
        ({"disk_folder": ""}, "disk_folder is '', but must name a folder"),
        (
            {"offload": "never"},
            "offload is 'never', but must be one of auto, evicted, computed",
        ),
        ({"prefill_rate": 0}, "prefill_rate is 0.0, but must be above 0"),
        ({"load_rate": "fast"}, "load_rate is 'fast', but must be a number"),
    ],
)
def test_a_wrong_option_names_itself_and_its_limit(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        MovingBlocks(**options)


def test_host_memory_must_have_room_for_a_block(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="host_bytes is 1, but must be at least 1024, which one"
    ):
        moving_blocks.load(tiny(), host_bytes=1, block_size=4)
    with pytest.raises(UserError, match="disk_bytes is 1, but one block takes"):
        moving_blocks.load(tiny(), disk_folder=str(tmp_path / "a"), disk_bytes=1, block_size=4)


def windowed() -> Model:
    config = replace(tiny().config, sliding_windows=(8, None))
    return random_model(config, device="cpu", dtype=torch.float32)


def test_layers_with_windows_are_refused_by_name() -> None:
    """a6: a hybrid cache's numbers are pages, and no blocks."""
    windows_are_refused()


def windows_are_refused() -> None:
    with pytest.raises(UserError, match=r"host_bytes .* cannot be moved: .*hybrid_cache"):
        moving_blocks.load(windowed(), host_bytes=1 << 20)
    engine = moving_blocks.load(windowed(), max_len=96)  # without an option it does nothing
    assert not isinstance(engine.cache, OffloadingCache)


def test_without_a_prefix_cache_nothing_can_be_found() -> None:
    with pytest.raises(UserError, match="cannot be moved: prefix_cache is off"):
        moving_blocks.load(tiny(), host_bytes=1 << 20, prefix_cache=False, hybrid_cache=False)


def test_ranks_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="tensor_parallel"):
        moving_blocks.load(tiny(), host_bytes=1 << 20, tensor_parallel=2)


def test_speculation_and_overlap_go_with_it(tmp_path: Path) -> None:
    engine = restarted(
        tmp_path, features=(Overlap(), Speculate(drafter="ngram")), blocks=30, rows=3
    )
    prompts = [[1, 2, 3, 4] * 8 + [seed] for seed in range(6)]
    for _ in range(2):
        assert serve(engine, *prompts, count=12) == [right(tuple(p), 12) for p in prompts]
        engine.cache.forget()
    assert connector_of(engine).stats.loaded >= 8


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_eight_bit_keys_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    from quant import Quant

    prompt = prompt_of(33, 40)
    answers = []
    for _ in range(2):
        engine = restarted(tmp_path, features=(Quant(kv_cache=kind),))
        answers += serve(engine, prompt, count=8)
    assert answers[0] == answers[1]
    assert connector_of(engine).stats.read == 9


# Each of these faults makes the test beside it fail: a test that cannot fail shows nothing.


def plant_no_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredConnector, "blocks_allocated", lambda self, blocks: None)


def plant_no_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredConnector, "_saves_of", lambda self, used: [])


def plant_no_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadRule, "compute_seconds", lambda self, start, end: 1e12 * (end - start))


def plant_lost_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredConnector, "held_blocks", lambda self: [])


def plant_blind_reader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("moving_blocks.disk.checksum_of", lambda header, content: bytes(16))


def plant_early_save(patch: pytest.MonkeyPatch) -> None:
    grow = OffloadingCache.grow

    def save_at_once(self: OffloadingCache, request: Request, upto: int) -> bool:
        done = grow(self, request, upto)
        names = list(chain(self.namespace, request.salt, self.keys_of(request)))
        self.connector.save_blocks(names, self.blocks_of(request.row)[: len(names)])
        return done

    patch.setattr(OffloadingCache, "grow", save_at_once)


def plant_name_without_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("moving_blocks.feature.namespace_of", lambda *parts: b"all the same")


def plant_final_name_first(patch: pytest.MonkeyPatch) -> None:
    def make(suffix: str, dir: Path) -> tuple[int, str]:
        path = dir / (next(chain(b"n", "", [b"abcd"])).digest.hex() + ".kv")
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o600), str(path)

    patch.setattr("moving_blocks.disk.mkstemp", make)


def plant_pins_end_with_the_host(patch: pytest.MonkeyPatch) -> None:
    finish_load = TieredConnector._finish_load

    def unpin(self: TieredConnector, load: Any) -> None:
        finish_load(self, load)
        self.host.unpin(load.sources)
        load.sources = []

    patch.setattr(TieredConnector, "_finish_load", unpin)


def plant_abort_forgotten(patch: pytest.MonkeyPatch) -> None:
    def poll(self: TieredConnector) -> None:
        waiting, self.waiting = self.waiting, {}
        old_poll(self)
        self.waiting = waiting

    old_poll = TieredConnector.poll
    patch.setattr(TieredConnector, "poll", poll)


def plant_last_token_too(patch: pytest.MonkeyPatch) -> None:
    def keys(self: OffloadingCache, request: Request) -> list[Any]:
        return block_keys(request.ids(0, len(request.tokens)), self.block_size)

    patch.setattr(OffloadingCache, "_keys_of", keys)


def plant_names_without_salt(patch: pytest.MonkeyPatch) -> None:
    def without(namespace: bytes, salt: str, *more: Any) -> Iterator[BlockName]:
        return chain(namespace, "", *more)

    patch.setattr("moving_blocks.cache.chain", without)
    patch.setattr("moving_blocks.tiers.chain", without)


def plant_no_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("moving_blocks.disk.STALE_SECONDS", 1e12)


def plant_pages_taken_for_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MovingBlocks, "why_not", staticmethod(lambda builder: ""))


def plant_fresh_blocks_wiped(patch: pytest.MonkeyPatch) -> None:
    begin = OffloadingCache.begin_load

    def forget_to_keep(self: OffloadingCache, *args: Any) -> Any:
        cursor, cached, blocks = begin(self, *args)
        self._fresh += blocks
        return cursor, cached, blocks

    patch.setattr(OffloadingCache, "begin_load", forget_to_keep)


def stained_pool(tmp_path: Path) -> None:
    engine = engine_of()
    prompt = prompt_of(36, 40)
    serve(engine, prompt)
    engine.cache.forget()
    engine.runner.attention.pool.stained = True  # type: ignore[attr-defined]
    assert serve(engine, prompt) == [right(tuple(prompt))]
    assert connector_of(engine).stats.loaded == 9


def test_a_loaded_block_is_not_wiped(tmp_path: Path) -> None:
    """After a NaN, blocks are wiped when they get a new owner; a load is no owner that needs it."""
    stained_pool(tmp_path)


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Path], None]]] = {
    "a2 the step does not wait for copies": (plant_no_wait, lambda _: reuse_while_copied()),
    "a1 a load does not wait for the save into its slots": (
        plant_no_order,
        lambda _: load_after_save(),
    ),
    "a3 a file has its name at once": (
        plant_final_name_first,
        lambda path: killed_while_writing(path, pytest.MonkeyPatch()),
    ),
    "a4 blocks are saved when they are reserved": (plant_early_save, only_computed),
    "a5 a checksum is not compared": (plant_blind_reader, damaged_and_shared),
    "a7 a request waits for ever": (plant_no_deadline, lambda _: never_reports()),
    "a7 blocks of a load are not held": (plant_lost_hold, lambda _: never_reports()),
    "a6 pages of layers with windows are taken for blocks": (
        plant_pages_taken_for_blocks,
        lambda _: windows_are_refused(),
    ),
    "a8 an aborted request keeps its blocks": (
        plant_abort_forgotten,
        lambda path: abort_after(1, path / "blocks"),
    ),
    "a11 the last token is loaded as well": (
        plant_last_token_too,
        lambda _: leaves_a_token(40),
    ),
    "a12 a lost block is waited for": (
        plant_no_deadline,
        never_answers_alone,
    ),
    "a15 a salt is in no name in host memory": (
        plant_names_without_salt,
        lambda _: salts_in_host_memory(),
    ),
    "a15 a salt is in no name on a disk": (plant_names_without_salt, salts_on_a_disk),
    "a16 nobody sweeps": (plant_no_sweep, lambda path: stale_files(path / "blocks")),
    "a13 names do not cover the weights": (plant_name_without_weights, other_weights),
    "slots are free before the copy is done": (plant_pins_end_with_the_host, slots_stay),
    "loaded blocks are wiped": (plant_fresh_blocks_wiped, stained_pool),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, experiment = PLANTED[fault]
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        experiment(tmp_path)


# Random schedules.


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts of few kinds, so that beginnings are shared."""
    length = rng.randrange(1, 60)
    common = rng.randrange(length + 1)
    base = prompt_of(rng.randrange(3), 60)
    return base[:common] + [rng.randrange(1, 4) for _ in range(length - common)]


def play(seed: int, folder: Path) -> list[TieredConnector]:
    """Serve random requests with tiny tiers, slow copies, damaged files, aborts, a jumping clock, and engines
    that are left in the middle of their work.
    """
    rng = random.Random(seed)
    on_disk = rng.random() < 0.6
    made: dict[str, Any] = {
        "blocks": rng.randrange(24, 45),
        "host": rng.choice([1, 4, 12, 40]),
        "folder": folder / f"{seed}" if on_disk else None,
        "index": rng.choice(["radix", "hash"]),
        "offload": rng.choice(["evicted", "computed"]),
        "disk_bytes": rng.choice([20_000, 60_000, 1 << 20]),
        "features": [Overlap()] if rng.random() < 0.5 else [],
        "rows": rng.randrange(1, 5),
    }
    requests: list[tuple[Request, list[int], int]] = []
    connectors: list[TieredConnector] = []
    for life in range(2 if on_disk else 1):  # the second is a restart
        engine = engine_of(**made)
        worker = slow(engine, rng.randrange(6))
        connectors.append(connector_of(engine))
        connectors[-1].clock = clock = Clock()
        for _ in range(rng.randrange(10, 30)):
            action = rng.random()
            if action < 0.45:
                prompt, count = random_prompt(rng), rng.randrange(1, 9)
                request = engine.add(prompt, greedy(count), salt=rng.choice(["", "", "b"]))[0]
                requests.append((request, prompt, count))
            elif action < 0.8:
                for _ in range(rng.randrange(1, 6)):
                    engine.step()
                    check(engine)
            elif action < 0.87 and requests:
                engine.abort(rng.choice(requests)[0])
            elif action < 0.92:
                engine.cache.forget()
            elif action < 0.96:
                clock.now += 10 ** rng.uniform(-3, 3)
            elif on_disk and (found := files_in(folder / f"{seed}")):
                damage_bytes(rng, rng.choice(found))
            worker.hang = False
        if on_disk and life == 0 and rng.random() < 0.3:
            requests = [each for each in requests if each[0].finish_reason is not None]
            continue  # as if it were killed; its threads still write while the next one reads
        finish(engine)
    for request, prompt, count in requests:
        assert request.finish_reason in ("length", "abort"), f"{request.error}"
        expected = right(tuple(prompt), count)
        output = request.output_ids
        assert output == expected[: len(output)], f"request {request.id}"
        assert request.finish_reason == "abort" or len(output) == count
    return connectors


def damage_bytes(rng: random.Random, path: Path) -> None:
    try:
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])
    except (OSError, ValueError, IndexError):
        return  # it was evicted meanwhile, or is empty


def play_all(seeds: Iterator[int] | range, folder: Path) -> None:
    loaded = read = 0
    for seed in seeds:
        try:
            connectors = play(seed, folder)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        loaded += sum(each.stats.loaded for each in connectors)
        read += sum(each.stats.read for each in connectors)
    # a load waits for a thread, so how many there are depends on the machine; none would test nothing
    assert loaded > 0 and read > 0, f"{loaded} loaded, {read} read in {seeds}"


def test_any_schedule_says_what_phase_01_says(tmp_path: Path) -> None:
    play_all(range(40), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_five_hundred_schedules_say_what_phase_01_says(tmp_path: Path) -> None:
    play_all(range(1000, 1500), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_rounds_take_no_more_memory_than_a_hundred(tmp_path: Path) -> None:
    """a16."""
    engine = engine_of(blocks=24, host=20, folder=tmp_path / "blocks", disk_bytes=60_000)
    process = psutil.Process()
    sizes = []
    for number in range(1000):
        serve(engine, prompt_of(number % 7, 40), count=2)
        if number % 100 == 99:
            gc.collect()
            sizes.append(process.memory_info().rss)
    assert sizes[-1] < sizes[1] + (4 << 20), f"{sizes}"
    assert not connector_of(engine).waiting
    assert len(connector_of(engine)._name_of) <= 24


# On a GPU, and its kernel in the interpreter.


def moved_by_kernel(device: str, dtype: torch.dtype, width: int) -> None:
    from moving_blocks.kernels import move

    generator = torch.Generator().manual_seed(width)
    pool = torch.randn(6, 20, width, generator=generator).to(dtype).to(device)
    host = torch.randn(9, 6, width, generator=generator).to(dtype)
    if device == "cuda":
        host = host.pin_memory()
    blocks, slots = [17, 0, 5], [8, 3, 0]
    index = torch.tensor([blocks, slots], device=device)
    before = host.clone()
    move(pool, host, index, to_host=True)
    if device == "cuda":
        torch.cuda.synchronize()
    for block, slot in zip(blocks, slots, strict=True):
        before[slot] = pool[:, block].cpu()
    assert torch.equal(host, before), "the slots of these blocks have changed, and no other"
    other, wanted = torch.zeros_like(pool), torch.zeros_like(pool)
    move(other, host, index, to_host=False)
    wanted[:, blocks] = pool[:, blocks]
    assert torch.equal(other, wanted)


FORMATS = [
    (torch.float32, 64),
    (torch.bfloat16, 4096 + 8),
    (torch.float16, 12),
    (torch.int8, 7),
]


@pytest.mark.parametrize(("dtype", "width"), FORMATS)
def test_a_kernel_moves_blocks_in_the_interpreter(dtype: torch.dtype, width: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here")
    moved_by_kernel("cpu", dtype, width)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width"), [*FORMATS, (torch.bfloat16, 64 * 1024)])
def test_a_kernel_moves_blocks_on_a_gpu(dtype: torch.dtype, width: int) -> None:
    moved_by_kernel("cuda", dtype, width)


def gpu_worker() -> tuple[BlockPool, torch.Tensor, StreamWorker]:
    pool = BlockPool(tiny().config, 64, 16, device=torch.device("cuda"), dtype=torch.bfloat16)
    size = pool.data[:, :, 0].numel() * pool.data.element_size()
    host = torch.zeros(64, size, dtype=torch.uint8).pin_memory()
    return pool, host, StreamWorker(pool, host)


class Hasty(torch.cuda.Stream):
    """A planted fault: it waits for no other stream."""

    def wait_stream(self, stream: Any) -> None:
        return None


@pytest.mark.gpu
@pytest.mark.parametrize("planted", [False, True])
def test_a_save_waits_for_the_kernel_that_writes(planted: bool) -> None:
    """a1: the copy reads what the step before has written, however slow that step is."""
    pool, host, worker = gpu_worker()
    worker.start_copy(
        range(64), range(64), to_host=True
    )  # compiles, and keeps pinned memory for the next list
    torch.cuda.synchronize()
    if planted:
        worker.save_stream = Hasty()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    pool.data.fill_(3.0)
    transfer = worker.start_copy(range(64), range(64), to_host=True)
    assert planted or not transfer.done()
    torch.cuda.synchronize()
    right_ = bool((host.view(torch.bfloat16) == 3.0).all())
    assert right_ is not planted


@pytest.mark.gpu
@pytest.mark.alone  # other programs' copies would take their part of the bus
@pytest.mark.parametrize("to_host", [False, True])
def test_a_gentle_copy_leaves_half_of_the_bus(to_host: bool) -> None:
    """It takes as long as its rate says, and moves the same."""
    pool = BlockPool(
        tiny().config, 4096, 256, device=torch.device("cuda"), dtype=torch.float32
    )
    size = pool.data[:, :, 0].numel() * pool.data.element_size()
    host = torch.zeros(4096, size, dtype=torch.uint8).pin_memory()
    worker, numbers = StreamWorker(pool, host), range(4096)
    pool.data.fill_(3.0)
    seconds = []
    for rate in (math.inf, 2e9, 2e9):  # the first of each kind compiles
        worker.gentle_rate = rate
        torch.cuda.synchronize()
        started = time.perf_counter()
        worker.start_copy(numbers, numbers, to_host=to_host, gently=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    wanted = 4096 * size / 2e9
    assert 0.9 * wanted < seconds[2] < 1.3 * wanted, f"{seconds}"
    value = 3.0 if to_host else 0.0
    assert bool((pool.data == value).all()) and bool((host.view(torch.float32) == value).all())


@pytest.mark.gpu
def test_a_step_waits_for_the_copy_that_reads_its_blocks() -> None:
    """a2 on streams: a save that is slow to begin still reads what was there."""
    pool, host, worker = gpu_worker()
    worker.start_copy([0], [0], to_host=True)
    pool.data.fill_(3.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(worker.save_stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    worker.wait_for(worker.start_copy(range(64), range(64), to_host=True))
    pool.data.fill_(5.0)
    torch.cuda.synchronize()
    assert bool((host.view(torch.bfloat16) == 3.0).all())


@pytest.mark.gpu
def test_a_load_follows_the_save_into_its_slot_and_a_step_waits_for_it() -> None:
    pool, _, worker = gpu_worker()
    pool.data[:, :, :32] = 7.0
    with torch.cuda.stream(worker.save_stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    save = worker.start_copy(range(32), range(32), to_host=True)
    load = worker.start_copy(range(32, 64), range(32), to_host=False, after=[save])
    worker.wait_for(load)
    seen = pool.data[:, :, 32:].clone()
    torch.cuda.synchronize()
    assert bool((seen == 7.0).all()) and load.done()


@pytest.mark.gpu
def test_an_engine_on_a_gpu_loads_what_it_saved() -> None:
    model = forward.load_model("random:tiny", device="cuda", dtype="float32")
    each = BlockPool.bytes_per_block(model.config, 16, model.dtype)
    engine = moving_blocks.load(
        model,
        max_len=512,
        block_size=16,
        cache_bytes=40 * each,
        host_bytes=200 * each,
        **ALWAYS,
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 200) for _ in range(300)] for _ in range(5)]
    first = [serve(engine, prompt, count=8)[0] for prompt in prompts]
    second = [serve(engine, prompt, count=8)[0] for prompt in prompts]
    assert second == first and connector_of(engine).stats.loaded >= 3 * 18
    together = serve(engine, *prompts, count=8)
    assert together == first


def test_an_engine_that_is_dropped_ends_its_threads(tmp_path: Path) -> None:
    gc.collect()
    before = threading.active_count()
    engine = restarted(tmp_path)
    serve(engine, prompt_of(34))
    assert threading.active_count() == before + 3
    del engine
    gc.collect()
    assert threading.active_count() == before
