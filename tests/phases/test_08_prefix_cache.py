"""Phase 08: what was computed is found again, by whoever may see it, and forgotten in the right order."""

from __future__ import annotations

import random
import tracemalloc
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chunked_prefill
import prefix_cache
from common.events import generate
from forward.model import Model
from paged_cache import BlockPool, PagedEngine
from prefix_cache import HashIndex, PrefixCache, PrefixIndex, RadixIndex
from prefix_cache.cache import block_keys
from tests.fuzz.machines import INDEXES, machine, paged_engine
from tests.schedules import (
    MAX_LEN,
    SCHEDULES,
    failures_expected,
    finish,
    greedy,
    operations,
    play,
    play_seeds,
)

MAKE: dict[str, Any] = {name.removeprefix("08 "): make for name, make in INDEXES.items()}
BOTH = pytest.mark.parametrize("index", ["radix", "hash"])


# A victim that is forgotten in the line would hang.
pytestmark = pytest.mark.timeout(20)


def fake(
    index: PrefixIndex,
    *,
    rows: int = 4,
    blocks: int = 100,
    block_size: int = 4,
    watermark: float = 0.01,
    **options: Any,
) -> Any:
    cache = PrefixCache(rows, MAX_LEN, blocks, block_size, index, watermark=watermark)
    return paged_engine(cache, rows, **options)


def run(engine: Any, *asked: Any) -> list[Any]:
    requests = [request for prompt, params in asked for request in engine.add(prompt, params)]
    finish(engine)
    return requests


@pytest.mark.timeout(120)
@pytest.mark.parametrize("index", MAKE)
@SCHEDULES
@given(script=operations, seed=st.integers(0, 999))
@pytest.mark.slow
def test_any_schedule(index: str, script: list[Any], seed: int) -> None:
    engine, runner = machine(f"08 {index}", random.Random(seed))
    play(engine, runner, script)
    # Everything is evictable again, and evicting it leaves nothing.
    cache: Any = engine.scheduler.cache
    evicted = cache.index.evict(cache.allocator.count)
    assert (
        sorted(evicted) == sorted(set(evicted))
        and cache.index.evictable == 0
        and cache.index.blocks() == []
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.slow
def test_many_schedules(kind: str) -> None:
    engines = [engine for engine, _ in play_seeds(range(50), partial(machine, kind))]
    hits = sum(engine.scheduler.cache.stats.hit_tokens > 0 for engine in engines)  # type: ignore[attr-defined]
    assert hits > 12, f"only {hits} of 50 scripts find anything in the cache"


# Hits.


@BOTH
def test_a_full_block_aligned_hit_computes_its_last_block_again(index: str) -> None:
    engine, runner = fake(MAKE[index](), block_size=4)
    (first,) = run(engine, ([1, 2, 3, 4, 5, 6, 7, 8], greedy(3, seed=1)))
    before = runner.computed
    (second,) = run(engine, ([1, 2, 3, 4, 5, 6, 7, 8], greedy(3, seed=1)))
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    assert runner.computed - before == 4 + 2
    assert second.output_ids == first.output_ids


@BOTH
@pytest.mark.parametrize(
    ("length", "found"), [(1, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (13, 12)]
)
def test_hits_are_whole_blocks_and_leave_a_token_to_compute(
    index: str, length: int, found: int
) -> None:
    engine, _ = fake(MAKE[index](), block_size=4)
    run(engine, (list(range(1, 15)), greedy(1)))
    (request,) = run(engine, (list(range(1, 1 + length)), greedy(1)))
    assert request.cached_tokens == found, (
        f"{index}: of the {length} tokens of request 1, {request.cached_tokens} were found: hits are "
        f"whole blocks of 4, and the last token is computed, so {found} must be"
    )


@BOTH
def test_generated_tokens_are_found_by_the_next_turn(index: str) -> None:
    engine, _ = fake(MAKE[index](), block_size=4)
    (first,) = run(engine, ([1] * 6, greedy(11, seed=1)))
    history = [*first.tokens, 2, 3, 4]
    (second,) = run(engine, (history, greedy(2)))
    # 17 tokens were known and 16 computed: the last sampled one never was.
    assert second.cached_tokens == 16, (
        f"{index}: {second.cached_tokens} tokens of request 1 were found, but 16 of request 0 were computed"
    )


@BOTH
def test_the_second_of_two_that_compute_the_same_uses_the_firsts_blocks(index: str) -> None:
    engine, _ = fake(MAKE[index](), block_size=4)
    requests = [engine.add([1] * 13, greedy(6, seed=seed))[0] for seed in (0, 1)]
    engine.step()
    cache = engine.scheduler.cache
    tables = [cache.blocks_of(request.row) for request in requests]
    same = tables[0][:3] == tables[1][:3] and tables[0][3:] != tables[1][3:]
    assert same, f"requests 0 and 1 share their three full blocks and no other: {tables}"
    used = cache.allocator.count - cache.allocator.free
    assert used == 5, (
        f"three shared blocks and one of each request are 5, but {used} are in use"
    )
    cache.check()
    finish(engine)


@BOTH
def test_tenants_do_not_see_each_others_prefixes(index: str) -> None:
    engine, _ = fake(MAKE[index](), block_size=4)
    prompt = [1] * 12

    def cached(salt: str) -> int:
        (request,) = engine.add(prompt, greedy(1), salt=salt)
        finish(engine)
        return request.cached_tokens

    found = [cached(salt) for salt in ("a", "a", "b", "", "b")]
    assert found == [0, 8, 0, 0, 8], (
        f"tenants a, a, b, none, b found {found} tokens of one prompt"
    )


@BOTH
def test_samples_of_one_prompt(index: str) -> None:
    engine, runner = fake(MAKE[index](), block_size=4, rows=4)
    requests = run(engine, ([1] * 10, greedy(5, n=3, seed=1)))
    assert runner.computed == 10 + 3 * 4
    assert len({tuple(request.output_ids) for request in requests}) == 3
    engine.scheduler.cache.check()


@BOTH
def test_work_shrinks_and_is_counted(model: Model, index: str) -> None:
    rng = random.Random(2)
    shared = [rng.randrange(1, 257) for _ in range(160)]
    prompts = [shared + [rng.randrange(1, 257) for _ in range(20)] for _ in range(6)]
    plain = chunked_prefill.load(model)
    engine = prefix_cache.load(model, index=index)
    expected = [generate(plain, [prompt], greedy(4))[0].token_ids for prompt in prompts]
    actual = [generate(engine, [prompt], greedy(4))[0].token_ids for prompt in prompts]
    assert actual == expected
    stats = engine.cache.stats  # type: ignore[attr-defined]
    assert (
        plain.stats.computed_tokens - engine.stats.computed_tokens
        == stats.hit_tokens
        == 5 * 160
    )
    assert stats.lookup_tokens == 6 * 180 and stats.hit_rate == pytest.approx(
        5 * 160 / (6 * 180)
    )
    assert stats.evicted_blocks == 0
    engine.check_integrity()


@BOTH
def test_eviction_makes_room_and_forgets_the_oldest(model: Model, index: str) -> None:
    memory = 12 * BlockPool.bytes_per_block(model.config, 8, model.dtype)
    engine: PagedEngine = prefix_cache.load(
        model, index=index, block_size=8, cache_bytes=memory
    )
    prompts = [[n] * 33 for n in range(1, 7)]
    for prompt in prompts:
        generate(engine, [prompt], greedy(2))
    stats = engine.cache.stats  # type: ignore[attr-defined]
    assert stats.evicted_blocks > 0
    before = stats.hit_tokens
    generate(engine, [prompts[-1]], greedy(1))
    assert stats.hit_tokens - before == 32, f"{index}: the newest prompt was evicted"
    generate(engine, [prompts[0]], greedy(1))
    assert stats.hit_tokens - before == 32, f"{index}: the oldest prompt was not evicted"
    engine.check_integrity()


def test_a_failed_step_commits_nothing() -> None:
    for moment in ("fail_run", "fail_get"):
        engine, runner = fake(RadixIndex(), block_size=4)
        setattr(runner, moment, True)
        with failures_expected():
            (failed,) = run(engine, ([1] * 12, greedy(2)))
        (again,) = run(engine, ([1] * 12, greedy(2)))
        assert failed.finish_reason == "error" and again.cached_tokens == 0


@BOTH
def test_siblings_do_not_share_a_chunk_that_fails_later(index: str) -> None:
    """The second chunk is scheduled while the first is on its way, but nobody forks before it has landed."""
    engine, runner = fake(MAKE[index](), step_tokens=8, overlap=True)
    runner.fail_get = True
    with failures_expected():
        requests = run(engine, ([1] * 12, greedy(3, n=3, seed=1)))
    ends = [request.finish_reason for request in requests]
    assert ends == ["error"] * 3, f"the first chunk failed, but the samples end with {ends}"
    (again,) = run(engine, ([1] * 12, greedy(2)))
    assert again.cached_tokens == 0, "a chunk that failed is found in the cache"


@BOTH
def test_forked_siblings_pin_their_prompt(index: str) -> None:
    made = MAKE[index]()
    engine, _ = fake(made, blocks=100)
    one, two = engine.add([1] * 9, greedy(6, n=2, seed=1))
    engine.step()
    engine.abort(one)
    engine.step()
    assert one.row < 0 <= two.row and made.evictable == 0, (
        "the prompt is free, though request 1 runs"
    )
    assert made.match(block_keys([1] * 8, 4), "").unpinned == 0
    finish(engine)
    assert made.evictable == len(made.blocks()) > 0


@BOTH
def test_a_forked_cursor_goes_its_own_way(index: str) -> None:
    made = MAKE[index]()
    first = grow(made, "ab", 0)
    second = made.fork(first)
    first, held, new = made.extend(first, keys("c"), [2])
    second, *other = made.extend(second, keys("d"), [3])
    assert (held, new) == ([2], [2]) and other == [[3], [3]]
    made.detach(first)
    assert made.evictable == 1 and made.match(keys("abd"), "").unpinned == 0
    made.detach(second)
    assert made.evictable == 4 and sorted(made.evict(9)) == [0, 1, 2, 3]


@BOTH
def test_siblings_commit_each_block_in_its_place(index: str) -> None:
    """A child forks where two blocks are in the index already, and goes on from there."""
    made, prompt = MAKE[index](), list(range(1, 13))
    engine, _ = fake(made, step_tokens=8)
    run(engine, (prompt, greedy(3, n=2, seed=1)))
    blocks = made.blocks()
    assert len(blocks) == len(set(blocks)) == 3, (
        f"12 tokens are 3 blocks, but the index holds {blocks}"
    )
    found = made.match(block_keys(prompt[:8] + prompt[:4], 4), "").blocks
    assert len(found) == 2, "the beginning of the prompt is found again after its second block"


@BOTH
def test_a_hit_that_has_to_be_pinned_is_no_room(index: str) -> None:
    """Blocks that nobody uses count as free, but not for the one who is going to use them."""
    engine, _ = fake(MAKE[index](), blocks=8, watermark=0.0)
    run(engine, ([1] * 16, greedy(1)))  # leaves four blocks
    engine.add([2] * 9, greedy(3))
    engine.step()  # takes three of the other four
    (late,) = engine.add(
        [1] * 23, greedy(1)
    )  # six blocks, of which four are found and two are not there
    engine.step()
    assert late.row < 0, "request 2 was let in on blocks that it pins itself"
    finish(engine)
    assert late.cached_tokens == 16 and late.finish_reason == "length"


@BOTH
def test_what_others_hold_already_needs_no_room(index: str) -> None:
    engine, _ = fake(MAKE[index](), blocks=7, watermark=0.0)
    engine.add([1] * 17, greedy(3))
    engine.step()  # five blocks of 7
    (late,) = engine.add([1] * 17, greedy(2))  # five as well, but four of them are there
    engine.step()
    assert late.row >= 0 and late.cached_tokens == 16, (
        "request 1 needs one block, and two are free"
    )


@BOTH
def test_only_what_is_missing_is_evicted(index: str) -> None:
    engine, _ = fake(MAKE[index](), blocks=6, watermark=0.0)
    run(engine, ([1] * 9, greedy(1)))  # leaves two blocks
    run(engine, ([2] * 17, greedy(1)))  # needs five, of which four are free
    evicted = engine.scheduler.cache.stats.evicted_blocks
    assert evicted == 1, f"one block of five was missing, but {evicted} were evicted"
    (again,) = run(engine, ([1] * 9, greedy(1)))
    assert again.cached_tokens == 4, "the beginning of the first prompt was evicted too"


@BOTH
def test_the_integrity_check_sees_a_stray_user(model: Model, index: str) -> None:
    engine = prefix_cache.load(model, index=index)
    engine.add([1] * 20, greedy(3))
    engine.step()
    engine.cache.tables[0, 0] ^= 1  # the request now claims somebody else's block
    with pytest.raises(AssertionError):
        engine.check_integrity()


# Admission.


@BOTH
def test_admission_leaves_room_for_those_that_run(index: str) -> None:
    """Who is alone may have the whole pool, and what others have left behind."""
    engine, _ = fake(MAKE[index](), blocks=10, watermark=0.2)
    engine.add([1] * 4, greedy(9))
    engine.step()
    (large,) = engine.add([2] * 32, greedy(2))
    engine.step()
    assert large.row < 0  # 8 of the 8 free blocks, but 2 are kept
    finish(engine)
    (larger,) = run(engine, ([3] * 37, greedy(3)))
    assert large.finish_reason == larger.finish_reason == "length"


@BOTH
def test_a_prompt_that_yields_after_a_preemption_lets_nobody_in(index: str) -> None:
    """A prompt lets one of lower rank pass, but not into the room that this step's preemption has made."""
    engine, _ = fake(MAKE[index](), blocks=7, chunk_tokens=4, policy="priority")
    decode, prompt, victim = (
        engine.add([n] * length, greedy(2), priority=n)[0]
        for n, length in ((2, 4), (3, 12), (4, 12))
    )
    engine.step()  # 1, 3 and 3 blocks of 7
    (newcomer,) = engine.add([1] * 4, greedy(2), priority=1)
    engine.step()  # the decode needs a second block, and two of the victim's three are left
    assert [request.preemptions for request in (decode, prompt, victim)] == [0, 0, 1]
    assert prompt.prefilling and newcomer.row < 0
    engine.step()
    assert newcomer.row >= 0


# The indexes by themselves.


def keys(text: str) -> list[bytes]:
    return block_keys([ord(character) for character in text], 1)


def grow(index: Any, text: str, first: int, salt: str = "") -> Any:
    """Insert `text` as blocks `first ..`, one character each; returns the cursor."""
    cursor = index.attach([], salt)
    cursor, _, _ = index.extend(cursor, keys(text), list(range(first, first + len(text))))
    return cursor


@pytest.mark.parametrize("index", MAKE)
def test_match_shares_beginnings(index: str) -> None:
    made = MAKE[index]()
    first = grow(made, "abcd", 0)
    second, held, new = made.extend(made.attach([], ""), keys("abxy"), [10, 11, 12, 13])
    if index != "weak hash":
        assert held == [0, 1, 12, 13] and new == [12, 13]
        assert made.match(keys("abcz"), "").blocks == [0, 1, 2]
        assert made.match(keys("abxyz"), "").blocks == [0, 1, 12, 13]
    assert made.match(keys("b"), "").blocks == made.match(keys("abcd"), "other").blocks == []
    made.detach(first)
    made.detach(second)
    assert made.evictable == len(made.blocks())


@BOTH
def test_pinned_blocks_are_never_evicted(index: str) -> None:
    made = MAKE[index]()
    made.detach(grow(made, "abcdef", 0))
    cursor = made.attach(keys("abc"), "")
    assert made.evictable == 3 and made.match(keys("abcd"), "").unpinned == 1
    assert sorted(made.evict(10)) == [3, 4, 5]
    assert made.match(keys("abcdef"), "").blocks == [0, 1, 2]
    made.detach(cursor)
    assert made.evict(10) == [2, 1, 0]


@BOTH
def test_least_recently_used_goes_first_and_ends_before_beginnings(index: str) -> None:
    made = MAKE[index]()
    for at, text in enumerate(("aaa", "bbb", "ccc")):
        made.detach(grow(made, text, 10 * at))
    made.detach(made.attach(keys("aa"), ""))  # used again, but for its last block
    order = [made.evict(1) for _ in range(9)]
    wanted = [[2], [12], [11], [10], [22], [21], [20], [1], [0]]
    assert order == wanted, (
        "one block at a time, the least recently used, its end before its beginning"
    )
    assert made.evictable == 0


def test_the_radix_tree_forgets_empty_tenants_and_stale_leaves() -> None:
    made = RadixIndex()
    tracemalloc.start()
    for turn in range(2000):
        made.detach(made.attach([], f"tenant {turn}"))
        made.detach(grow(made, "ab", 0, "one"))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [root.salt for root in made.roots] == ["one"] and kept < 60_000, (
        f"{kept} bytes for one leaf"
    )
    made.evict(2)
    assert made.roots == []


def test_collisions_are_counted_and_never_served() -> None:
    made = HashIndex(lambda data: 7)
    cursor, held, new = made.extend(made.attach([], ""), keys("ab"), [0, 1])
    assert (held, new, made.collisions) == ([0, 1], [0], 1)
    assert made.match(keys("b"), "").blocks == [] and made.match(keys("ab"), "").blocks == [0]
    assert made.match(keys("aa"), "").blocks == [0], "a block is found without its past"
    made.detach(cursor)


def test_a_collision_does_not_open_another_tenants_tree() -> None:
    """Same tokens, same hash, other salt: nothing wrong would be served, but a clock would tell."""
    made = HashIndex(lambda data: 7)
    cursor = grow(made, "a", 0, "one")
    for salt, found in (("two", []), ("one", [0])):
        blocks = made.match(keys("a"), salt).blocks
        assert blocks == found, (
            f"salt {salt!r} finds blocks {blocks} of salt 'one', not {found}"
        )
    other, held, new = made.extend(made.attach([], "two"), keys("a"), [1])
    assert (held, new, made.collisions) == ([1], [], 1)
    made.detach(cursor)
    made.detach(other)
    assert made.evict(1) == [0] and made.evictable == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("index", ["radix", "hash"])
@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["insert", "insert", "attach", "detach", "evict"]),
            st.text("ab", min_size=0, max_size=6),
            st.integers(0, 5),
        ),
        max_size=40,
    )
)
def test_an_index_against_a_plain_dictionary(
    index: str, actions: list[tuple[str, str, int]]
) -> None:
    """The model: which text each block continues, and when it was last let go."""
    made = MAKE[index]()
    held: dict[str, int] = {}  # text -> its last block
    cursors: list[tuple[Any, str]] = []
    numbers = iter(range(10_000))

    def pinned(text: str) -> bool:
        return any(end.startswith(text) for _, end in cursors)

    for action, text, number in actions:
        if action == "insert":
            cursor, own = made.attach([], ""), [next(numbers) for _ in text]
            cursor, found, new = made.extend(cursor, keys(text), own)
            for at, block in enumerate(own):
                known = held.setdefault(text[: at + 1], block)
                assert found[at] == known, (
                    f"{text[: at + 1]!r} is in block {known}, not in {found[at]}"
                )
                assert (block in new) == (known == block), (
                    f"block {block} of {text!r}: is it the index's?"
                )
            cursors.append((cursor, text))
        elif action == "attach":
            known = max(n for n in range(len(text) + 1) if n == 0 or text[:n] in held)
            match = made.match(keys(text), "")
            assert match.blocks == [held[text[: n + 1]] for n in range(known)]
            assert match.unpinned == sum(not pinned(text[: n + 1]) for n in range(known))
            cursors.append((made.attach(keys(text[:known]), ""), text[:known]))
        elif action == "detach" and cursors:
            cursor, _ = cursors.pop(number % len(cursors))
            made.detach(cursor)
        elif action == "evict":
            before = sum(not pinned(text) for text in held)
            gone = made.evict(number)
            assert len(gone) == min(number, before), (
                f"{before} can go, {number} are wanted, {len(gone)} went"
            )
            for block in gone:
                text = next(t for t, b in held.items() if b == block)
                more = any(t != text and t.startswith(text) for t in held)
                assert not pinned(text) and not more, (
                    f"block {block} of {text!r} is still needed"
                )
                del held[text]
        assert sorted(made.blocks()) == sorted(held.values()), (
            f"blocks of the index after {action} {text!r}"
        )
        free = sum(not pinned(text) for text in held)
        assert made.evictable == free, (
            f"{free} blocks can go after {action} {text!r}, not {made.evictable}"
        )
