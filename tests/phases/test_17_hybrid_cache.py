"""Phase 17: layers that remember differently share one pool, and nothing is read that was given back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import forward
import hybrid_cache
from chunked_prefill import Chunked, ChunkedScheduler
from common.events import Completion, generate
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.engine import Engine
from continuous.policies import POLICIES
from continuous.rows import RequestRows
from continuous.work import Work
from cuda_graphs import Graphs, Overlap
from forward.loading import load_model, random_model
from forward.model import Model
from hybrid_cache import Hybrid, HybridCache, HybridPool, LayerGroups
from hybrid_cache.windows.manager import SingleTypeManager, SlidingWindowManager
from paged_cache import BlockPool, KVFormat, PagedSizes, Recipe, build
from paged_cache.scheduler import PagedScheduler
from prefix_cache import HashIndex, Prefix, PrefixCache, RadixIndex
from speculative import Speculate
from tests.equivalence.compare import TIE, assert_all_same
from tests.fakes import NOTHING, FakeDrafter, FakeRunner, OneAhead, fingerprint, must
from tests.ranks_kit import end_worker_groups
from tests.schedules import MAX_LEN, greedy, play_seeds
from triton_paged_attention import Kernels

pytestmark = pytest.mark.timeout(120)

LAYOUTS = {
    "like gemma": LayerGroups(1, {5: [[0], [1]], None: [[2]]}),
    "windows only": LayerGroups(2, {7: [[0, 1]]}),
    "two windows": LayerGroups(1, {3: [[0]], None: [[1], [2]], 12: [[3]]}),
}


class GroupRunner(FakeRunner):
    """A `FakeRunner` with a model of what each group must hold for a query: the keys in its window.

    It looks for them as the device does, by its own copy of where pages have their blocks. A block that was
    given back is nowhere, or holds what its next owner wrote.
    """

    cache: HybridCache

    def __init__(self, rows: RequestRows, cache: HybridCache) -> None:
        super().__init__(rows, cache)
        self.places = cache.blocks.copy()

    def forward(self, works: Sequence[Work], *, masked: bool = False) -> Any:
        if not self.fail_run and (moves := self.cache.take_moves(works)) is not None:
            self.places[:, moves.pages] = moves.blocks
        return super().forward(works, masked=masked)

    def _compute(self, work: Work, written: dict[tuple[int, int], Work]) -> list[list[int]]:
        name, tokens = f"request {work.request.id}, row {work.row}", self.tokens[work.row]
        end = work.start + work.count
        tokens.update(enumerate(work.drafts, start=end - len(work.drafts)))
        prints, print_ = list[int](), 0
        for position in range(end):
            print_ = fingerprint(print_, tokens[position])
            prints.append(print_)
        group = 0
        for manager in self.cache.attention_managers:
            for _ in manager.groups:
                self._compute_group(name, group, manager, work, prints, written)
                group += 1
        return self._choose(work, prints[end - len(work.drafts) - 1 :])

    def _compute_group(
        self,
        name: str,
        group: int,
        manager: SingleTypeManager,
        work: Work,
        prints: list[int],
        written: dict[tuple[int, int], Work],
    ) -> None:
        oldest = (
            max(0, work.start - manager.window + 1)
            if isinstance(manager, SlidingWindowManager)
            else 0
        )
        for position in range(oldest, len(prints)):
            page, offset = super().slot(work, position)
            block = int(self.places[group, page])
            must(
                block != manager.pool.null,
                f"{name}: token {position} was given back in group {group}",
            )
            if position < work.start:
                held, _ = self.slots.get((block, offset), NOTHING)
                right = fingerprint(prints[position], group)
                must(
                    held == right,
                    f"{name}: the keys of token {position} are not in group {group}",
                )
                continue
            must(
                (block, offset) not in written,
                f"{name} writes token {position} where another has written",
            )
            users = self.cache.allocator.refs[page]
            must(
                users <= max(1, len(work.sampled_requests)),
                f"{name}: token {position} goes to a page of {users}",
            )
            written[block, offset] = work
            self.slots[block, offset] = fingerprint(prints[position], group), self.steps


def smallest_pool(layout: LayerGroups, block_size: int, step_tokens: int) -> int:
    """Blocks that just hold the longest request, the null block included."""
    cache = HybridCache(1, MAX_LEN, 4000, block_size, None, layout, step_tokens=step_tokens)
    return sum(manager.max_blocks(MAX_LEN) for manager in cache.attention_managers) + 1


def nothing_leaks(engine: Any) -> None:
    cache = engine.scheduler.cache
    assert cache.block_pool.pinned == 0, (
        f"nobody is left, but {cache.block_pool.pinned} blocks are pinned"
    )
    cache.forget()
    assert cache.block_pool.allocator.free == cache.block_pool.allocator.count, (
        "blocks are lost"
    )
    assert not cache.block_pool.skipped and not cache.block_pool.finished


def machine(
    rng: random.Random,
    layouts: Sequence[LayerGroups] = tuple(LAYOUTS.values()),
    kind: Any = GroupRunner,
    drafts: bool = False,
) -> tuple[Engine, Any]:
    """A random engine that just holds the longest request, and a little more."""
    layout = rng.choice(layouts)
    table = RequestRows(rng.randrange(3, 7), MAX_LEN)
    chunked = rng.random() < 0.8
    block_size, step_tokens = (
        rng.choice([1, 2, 3, 4, 8]),
        rng.randrange(2, 30) if chunked else MAX_LEN,
    )
    blocks = smallest_pool(layout, block_size, step_tokens) + rng.randrange(20)
    index: Any = rng.choice([RadixIndex, HashIndex, lambda: None])()
    cache = HybridCache(
        table.count, MAX_LEN, blocks, block_size, index, layout, step_tokens=step_tokens
    )
    scheduling: Any = ChunkedScheduler if chunked else PagedScheduler
    policy = POLICIES[rng.choice(list(POLICIES))]
    runner = kind(table, cache)
    engine = Engine(scheduling(table, cache, step_tokens=step_tokens, policy=policy), runner)
    if drafts:
        engine.scheduler.drafter = FakeDrafter(rng.randrange(1 << 30))
    elif rng.random() < 0.5:
        engine.loop = OneAhead()
    return engine, runner


def random_steps(seeds: int, drafts: bool) -> None:
    steps = preempted = hits = 0
    for engine, runner in play_seeds(range(seeds), lambda rng: machine(rng, drafts=drafts)):
        steps += runner.steps
        preempted += engine.scheduler.preemptions
        hits += engine.scheduler.cache.stats.hit_tokens > 0  # type: ignore[attr-defined]
        nothing_leaks(engine)
        assert not drafts or runner.drafted >= runner.accepted
    assert steps > 17 * seeds and min(preempted, hits) > seeds // 10, (steps, preempted, hits)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_some_thousand_random_steps_leak_nothing(drafts: bool) -> None:
    random_steps(120, drafts)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drafts", [False, True])
def test_a_hundred_thousand_random_steps_leak_nothing(drafts: bool) -> None:
    random_steps(5300, drafts)


# Engines. Blocks that nobody holds are full of NaN.

FEATURES: dict[str, list[Any]] = {
    "alone": [Hybrid()],
    "chunks": [Chunked(), Hybrid()],
    "prefixes": [Chunked(), Prefix(), Hybrid()],
    "hashes": [Chunked(), Prefix(index="hash"), Hybrid()],
    "overlap": [Chunked(), Prefix(), Overlap(), Hybrid()],
    "drafts": [Chunked(), Prefix(), Overlap(), Speculate(draft_adaptive=False), Hybrid()],
}


@cache
def windowed() -> Model:
    return load_model("random:tiny-window", device="cpu", dtype="float32")


@cache
def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths far below and above the window of 24, repetitions for drafts, and samples of one prompt."""
    rng = random.Random(1)
    text = [rng.randrange(1, 257) for _ in range(150)]
    prompts = [text[:n] for n in (1, 23, 24, 25, 90, 150)] + [
        [7, 8, 9] * 30,
        text[:60] + [3] * 40,
    ]
    params = [greedy(40) for _ in prompts]
    params[4] = SamplingParams(max_tokens=30, n=3, temperature=0.8, seed=5, ignore_eos=True)
    return prompts, params


@cache
def truth() -> list[Completion]:
    return generate(forward.load(windowed()), *asked())


def hybrid(features: Sequence[Any], blocks: int, block_size: int = 4, **options: Any) -> Any:
    """An engine with as much memory as so many blocks of all layers take; free blocks are poisoned."""
    sizes = {
        "max_rows": 4,
        "max_len": 256,
        "step_tokens": 40 if len(features) > 1 else 256,
    } | options
    cache_bytes = blocks * BlockPool.bytes_per_block(
        windowed().config, block_size, torch.float32
    )
    room = PagedSizes(block_size=block_size, cache_bytes=cache_bytes, **sizes)
    engine = build(Recipe(windowed(), room, tuple(features)))
    runner = engine.runner
    pool, block_pool = runner.attention.pool, engine.cache.block_pool  # type: ignore[attr-defined]
    allocator = block_pool.allocator
    pool.stained = True  # a block with NaN is wiped for its next owner
    regroup = pool.regroup

    def poison(moves: Any) -> None:
        regroup(moves)
        free = [block for block in range(allocator.count) if allocator.refs[block] == 0]
        pool.data[:, :, free] = float("nan")
        assert not pool.data[:, :, block_pool.null].any(), (
            "something was written to the null block"
        )

    runner.attention.pool.regroup = poison  # type: ignore[attr-defined]
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("on", FEATURES)
def test_an_engine_gives_phase_01s_tokens(on: str) -> None:
    engine = hybrid(FEATURES[on], blocks=50 if on == "alone" else 34)
    for _ in range(2):  # the second time prompts are found
        assert_all_same(windowed(), truth(), generate(engine, *asked()), asked()[1])
        engine.check_integrity()
    assert engine.scheduler.preemptions > 0 or on == "alone"
    if on not in ("alone", "chunks"):
        assert engine.cache.stats.hit_tokens > 0
    nothing_leaks(engine)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True])
def test_kernels_and_graphs_give_phase_01s_tokens(graphs: bool) -> None:
    features: list[Any] = [Chunked(), Prefix(), Kernels(), Overlap(), Hybrid()]
    if graphs:
        features.append(Graphs(graph_rows=2, graph_tokens=32, sampling="torch"))
    engine = hybrid(features, blocks=80, step_tokens=24)
    prompts, params = asked()
    (found,) = generate(engine, [prompts[3]], [replace(params[3], max_tokens=4)])
    (expected,) = (one for one in truth() if one.index == 3)
    assert found.token_ids == expected.token_ids[:4]
    assert not graphs or engine.runner.replays > 0
    nothing_leaks(engine)


def test_a_model_without_windows_keeps_the_cache_it_has(model: Model) -> None:
    engine = hybrid_cache.load(model, max_rows=2, max_len=64)
    assert type(engine.cache) is PrefixCache


def test_one_request_of_the_greatest_length_fits_by_default() -> None:
    """The default cache is of all that rows can fill, and has room for the null block beside it."""
    engine = hybrid_cache.load(windowed(), max_rows=1, max_len=64)
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    (found,) = generate(engine, [[3] * 40], [params])
    assert (len(found.token_ids), found.finish_reason) == (24, "length")


# Real weights.


@pytest.mark.slow
@pytest.mark.timeout(600)  # a real model, and seen to take 72 s beside other tests
@torch.inference_mode()
def test_gemma_far_beyond_its_window(gemma3_folder: Path) -> None:
    """2,100 tokens are four windows of 512: after every prefix transformers chooses the same token."""
    transformers = pytest.importorskip("transformers")
    model = load_model(str(gemma3_folder), device="cpu", dtype="float32")
    rng = random.Random(0)
    prompt = [2, *(rng.randrange(1000, 50_000) for _ in range(2099))]
    params = greedy(8)
    engine = build(
        Recipe(model, PagedSizes(max_rows=2, max_len=2200), (Chunked(), Prefix(), Hybrid()))
    )
    first, again = (generate(engine, [prompt], params)[0].token_ids for _ in range(2))
    assert first == again and isinstance(engine.cache, HybridCache)
    assert engine.cache.stats.hit_tokens == 2096, "the second time the prompt is found"
    layout = LayerGroups.of(model.config)
    assert [len(groups) for groups in layout.by_window.values()] == [5, 1] and layout.size == 3
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        gemma3_folder, dtype=torch.float32
    ).eval()
    logits = oracle(torch.tensor([prompt + first[:-1]]), logits_to_keep=len(first)).logits[0]
    chosen = logits.gather(1, torch.tensor(first).unsqueeze(1)).squeeze(1)
    assert (logits.amax(dim=1) - chosen <= TIE).all()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_keep_the_same_blocks() -> None:
    """Every rank schedules alike, so each gives back the same pages of its own heads."""
    try:
        options: dict[str, Any] = {
            "max_rows": 4,
            "max_len": 128,
            "step_tokens": 40,
            "block_size": 4,
        }
        options |= {"device": "cpu", "dtype": "float32", "drafter": "none"}
        prompts, params = [[9] * 70, list(range(1, 60))], greedy(20)
        engine = hybrid_cache.load("random:tiny-window", tensor_parallel=2, **options)
        found = [one.token_ids for one in engine.generate(prompts, params)]
        assert isinstance(engine.cache, HybridCache)
        alone = hybrid_cache.load("random:tiny-window", **options)
        assert found == [one.token_ids for one in alone.generate(prompts, params)]
    finally:
        end_worker_groups()


# Rules, one by one: pages of 4 tokens, a window of 6, and all keys.

RULES = LayerGroups(1, {6: [[0], [1]], None: [[2]]})


class CacheAlone:
    """A cache without an engine, and requests whose steps finish at once."""

    def __init__(
        self, layout: LayerGroups = RULES, blocks: int = 100, index: Any = RadixIndex
    ) -> None:
        self.rows = RequestRows(4, 64)
        self.cache = HybridCache(4, 64, blocks, 4, index and index(), layout, step_tokens=8)

    def add(self, tokens: Sequence[int], limit: int = 64) -> Request:
        request = Request(0, list(tokens), len(tokens), limit, SamplingParams(ignore_eos=True))
        assert self.cache.fits(request)
        found = self.cache.lookup(request)
        request.num_computed_tokens, request.cached_tokens = found, found
        self.rows.acquire(request)
        assert self.cache.reserve(request, len(request.tokens))
        return request

    def compute(self, request: Request, upto: int) -> None:
        """Step by step, as many tokens as a step has."""
        while request.num_computed_tokens < upto:
            end = min(upto, request.num_computed_tokens + 8)
            request.tokens += [0] * (end - len(request.tokens))
            assert self.cache.reserve(request, end)
            request.num_computed_tokens = end
            self.cache.commit(request, upto=end)
            self.cache.check()

    def end(self, request: Request) -> None:
        self.cache.release(request=request)
        self.rows.release(request)

    def kept(self, request: Request, manager: int = 0) -> list[bool]:
        """Whether each page of a request has blocks of a kind."""
        return [
            self.cache.managers[manager].has_blocks(page)
            for page in self.cache.blocks_of(request.row)
        ]


def test_a_window_keeps_what_its_next_query_sees() -> None:
    books = CacheAlone()
    window, full = books.cache.managers
    for start in range(60):
        oldest = max(0, start - 5)
        assert (
            window.first_needed_page(start) == oldest // 4
            and full.first_needed_page(start) == 0
        )
    request = books.add([1] * 9)
    for upto in range(9, 40):
        books.compute(request, upto)
        first, end = window.ranges[request.row]
        assert first * 4 <= max(0, upto - 6) and end * 4 >= upto, (
            f"token {upto - 1} does not see its window"
        )
        assert end - first <= 4, "a window holds more than itself and a step"


def test_a_long_prompt_reserves_a_window_and_a_step() -> None:
    books = CacheAlone()
    request = books.add([1] * 40)
    window, full = books.cache.managers
    assert window.ranges[request.row] == (0, 4) and full.ranges[request.row] == (
        0,
        10,
    )  # 5 + 8 tokens, and 40
    assert books.cache.block_pool.pinned == 2 * 4 + 10
    most = 0
    for upto in range(8, 41, 8):
        books.compute(request, upto)
        most = max(most, books.cache.block_pool.pinned)
    assert most <= window.max_blocks(40) + full.max_blocks(40) == 2 * 4 + 10
    assert not CacheAlone(blocks=18).cache.holds(40) and CacheAlone(blocks=19).cache.holds(40)


def test_a_hit_of_a_window_is_matched_from_the_right() -> None:
    books = CacheAlone()
    tokens = list(range(1, 33))
    first = books.add(tokens)
    books.compute(first, 32)
    pages = books.cache.blocks_of(first.row)
    books.end(first)
    window = books.cache.managers[0]
    assert books.cache.lookup(Request(1, [*tokens, 7], 33, 64, SamplingParams())) == 32
    window.evict(pages[2])  # no hit from 5 pages on needs it: position 20 sees 15 to 20
    assert (
        window.find_longest_cache_hit(pages) == 8
        and window.find_longest_cache_hit(pages[:5]) == 5
    )
    assert (
        window.find_longest_cache_hit(pages[:4]) == 2
        and window.find_longest_cache_hit(pages[:3]) == 2
    )
    window.evict(pages[7])
    assert books.cache.lookup(Request(1, [*tokens, 7], 33, 64, SamplingParams())) == 28
    second = books.add([*tokens, 7])
    assert second.cached_tokens == 28
    books.compute(second, 33)


@pytest.mark.parametrize("seed", range(20))
def test_all_managers_can_use_a_hit(seed: int) -> None:
    rng = random.Random(seed)
    books = CacheAlone(LayerGroups(1, {3: [[0]], 10: [[1]], None: [[2]]}))
    request = books.add(list(range(1, 49)))
    books.compute(request, 48)
    pages = books.cache.blocks_of(request.row)
    books.end(request)
    small, large, _ = books.cache.managers
    for manager in (small, large):
        for page in pages:
            if rng.random() < 0.3:
                manager.evict(page)

    def usable(length: int) -> bool:
        return all(
            manager.has_blocks(page)
            for manager in (small, large)
            for page in pages[manager.first_needed_page(4 * length) : length]
        )

    found, longest = (
        books.cache.find_longest_cache_hit(pages),
        max(n for n in range(len(pages) + 1) if usable(n)),
    )
    assert found == longest, (
        f"all three kinds have what {longest} of 12 pages need, but agree on {found}"
    )


def test_pages_before_the_window_stay_for_hits_only() -> None:
    books, alone = CacheAlone(), CacheAlone(index=None)
    for one in (books, alone):
        request = one.add([1] * 32)
        one.compute(request, 32)
        assert one.cache.reserve(request, 33)
        window = one.cache.managers[0]
        assert window.ranges[request.row][0] == window.first_needed_page(32)
        kept = one.kept(request)
        assert kept[window.first_needed_page(32) :] == [True] * len(
            kept[window.first_needed_page(32) :]
        )
        assert all(kept) == (one is books), "only an index can find what is kept"
        assert len(one.cache.block_pool.skipped) == (
            window.first_needed_page(32) if one is books else 0
        )


def test_a_shared_page_without_blocks_gets_them() -> None:
    books = CacheAlone()
    first, second = books.add([5] * 12), books.add([5] * 12)
    for request in (first, second):  # both compute the prompt before either lands
        assert books.cache.reserve(request, 12)
        request.num_computed_tokens = 12
    books.cache.commit(first, 12)
    books.compute(first, 28)
    pool, window = books.cache.block_pool, books.cache.managers[0]
    while pool.skipped:
        pool.evict_oldest(pool.skipped)
    assert books.kept(first) == [False] * 3 + [True] * 4
    books.cache.commit(second, 12)
    assert books.cache.blocks_of(second.row)[:3] == books.cache.blocks_of(first.row)[:3]
    assert books.kept(second)[1:3] == [True, True] and window.ranges[second.row][0] <= 1
    books.cache.check()
    for request in (first, second):
        books.end(request)
    books.cache.check()


def test_each_layer_has_its_own_scales() -> None:
    config, place = windowed().config, {"device": torch.device("cpu"), "dtype": torch.float32}
    heads = config.num_kv_heads
    scales = torch.arange(1.0, 1 + config.num_layers * 2 * heads).view(
        config.num_layers, 2, heads
    )
    kv, layout = KVFormat(torch.int8, scales), LayerGroups.of(config)
    pool = HybridPool(config, 8, 4, kv=kv, layout=layout, rows=2, max_len=32, **place)  # type: ignore[arg-type]
    for layer, own in enumerate(pool.layers):
        assert own.k_scale is not None and own.v_scale is not None
        assert torch.equal(own.k_scale, scales[layer, 0]) and torch.equal(
            own.v_scale, scales[layer, 1]
        )
        assert own.k.dtype == torch.int8 and own.k.shape == (24, 4, heads, config.head_dim)
    assert pool.layers[0].k.data_ptr() == pool.layers[2].k.data_ptr(), (
        "one pool for all groups"
    )


@pytest.mark.parametrize(
    ("windows", "size", "groups"),
    [
        ((512,) * 15 + (None,) * 3, 3, [5, 1]),
        ((512,) * 22 + (None,) * 4, 4, [6, 1]),
        ((128, None) * 12, 12, [1, 1]),
        ((64,) * 5, 5, [1]),
        ((64,) * 5 + (None,) * 6, 6, [1, 1]),
    ],
)
def test_layers_in_groups(
    windows: tuple[int | None, ...], size: int, groups: list[int]
) -> None:
    config = replace(windowed().config, num_layers=len(windows), sliding_windows=windows)
    layout = LayerGroups.of(config)
    assert (
        layout.size == size and [len(found) for found in layout.by_window.values()] == groups
    )
    assert sorted(layer for group in layout.groups for layer in group) == list(
        range(len(windows))
    )
    assert layout.full_attention_only == (set(windows) == {None})


def test_a_model_of_windows_only() -> None:
    """Mistral's first model: no layer keeps everything, so a request of any length holds a window."""
    config = replace(windowed().config, sliding_windows=(8, 8, 8))
    model, params = random_model(config, device="cpu", dtype=torch.float32), greedy(30)
    (plain,) = generate(forward.load(model), [[3] * 50], params)
    sizes = PagedSizes(block_size=4, max_rows=1, step_tokens=16)
    engine: Any = build(Recipe(model, sizes, (Chunked(), Prefix(), Hybrid())))
    (request,) = engine.add([3] * 50, params)
    while not engine.idle:
        engine.step()
        assert engine.cache.block_pool.pinned <= 7
    assert request.output_ids == plain.token_ids


def test_experts_with_windows_and_sinks() -> None:
    """gpt-oss's shape: a window in every other layer, sinks, and a mixture of experts."""
    model = load_model("random:tiny-gpt-oss", device="cpu", dtype="float32")
    prompts, params = [[5] * 70, list(range(1, 100))], greedy(12)
    plain = generate(forward.load(model), prompts, params)
    engine = hybrid_cache.load(model, max_rows=2, max_len=128, block_size=4, step_tokens=32)
    assert isinstance(engine.cache, HybridCache)
    assert_all_same(model, plain, generate(engine, prompts, params), [params] * 2)
    nothing_leaks(engine)


def test_drafts_may_be_more_than_a_chunk() -> None:
    """A step verifies as many drafts as it has tokens, whatever a chunk of a prompt may be."""
    features = [Chunked(chunk_tokens=2), Speculate(draft_adaptive=False), Hybrid()]
    prompts, params = [[7, 8, 9] * 20], greedy(40)
    found = generate(hybrid(features, blocks=60), prompts, params)
    assert_all_same(windowed(), generate(forward.load(windowed()), prompts, params), found)
