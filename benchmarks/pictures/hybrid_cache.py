"""Phase 17: which blocks of one pool three requests have in three groups, and which slots a state has."""

from __future__ import annotations

from benchmarks.pictures.driving import scheduled
from benchmarks.pictures.svg import (
    Box,
    Cell,
    Lines,
    Picture,
    Text,
    cells,
    picture,
    row,
    table,
    titled,
    track,
)
from chunked_prefill import ChunkedScheduler
from common.models.config import DeltaConfig
from common.request import Request
from continuous.rows import RequestRows
from hybrid_cache import HybridCache, LayerGroups
from prefix_cache.radix import RadixIndex

P = 4
"""Tokens in a page."""
GROUPS = {None: "all keys", 12: "a window of 12", 6: "a window of 6"}
PROMPTS = {"a": 20, "b": 6, "c": 12}
SHOWN = (0, 3, 7, 11)
"""Steps."""
STATES = LayerGroups(1, {None: [[0]]}, DeltaConfig(1, 1, 1, 1, 2, (False, True)))
COMMON, OWN = 14, 9
"""Tokens that three prompts begin with, and those behind."""
CELL = 22


def load(layout: LayerGroups, step_tokens: int) -> tuple[HybridCache, ChunkedScheduler]:
    """A cache and its scheduler, for three requests; no model is needed for what they decide."""
    index = RadixIndex() if layout.states else None
    cache = HybridCache(3, 64, 43, P, index, layout, step_tokens=step_tokens)
    return cache, ChunkedScheduler(RequestRows(3, 64), cache, step_tokens=step_tokens)


def slots(cache: HybridCache, request: Request) -> dict[int, int]:
    """The state slots of a request's pages; some pages have none."""
    manager = cache.state_manager
    assert manager is not None
    found = enumerate(manager.blocks[0, cache.blocks_of(request.row)].tolist())
    return {page: slot for page, slot in found if slot != manager.pool.null}


def groups() -> Picture:
    """Tables of three groups at some steps: every number is a block of the same pool."""
    cache, scheduler = load(LayerGroups(1, {w: [[at]] for at, w in enumerate(GROUPS)}), 8)
    null = cache.block_pool.null
    prompts = [[at] * length for at, length in enumerate(PROMPTS.values())]
    columns = []
    for step, (works, requests) in enumerate(scheduled(scheduler, prompts, 12)):
        if step not in SHOWN:
            continue
        free = cache.block_pool.allocator.free
        lines: Lines = []
        for group, title in enumerate(GROUPS.values()):
            lines.append([Text(title, "", 0)])
            for who, request in zip(PROMPTS, requests, strict=True):
                fresh = {
                    token // P
                    for work in works
                    for token in range(work.start, work.start + work.count)
                    if work.request is request
                }
                blocks = []
                if request.row >= 0:
                    blocks = cache.blocks[group, cache.blocks_of(request.row)].tolist()
                while blocks and blocks[-1] == null:
                    blocks.pop()
                looks = [
                    "idle" if block == null else f"{'now' if page in fresh else 'kept'} {who}"
                    for page, block in enumerate(blocks)
                ]
                words = ["" if block == null else block for block in blocks]
                lines.append(
                    [Text(who, f"bold {who}"), cells(words, looks, 19, 22), Box(0, 22)]
                )
            lines.append([Box(0, 6)])
        columns.append(titled(f"step {step}: {free} blocks free", table(lines, label=4)))
    return picture(
        "Three requests in three groups, over one pool",
        row(*columns, gap=14),
        "now a: written in this step",
        "kept a: has a block",
        "idle: no block: given back",
    )


def states() -> Picture:
    """The slots of one request's pages over five steps."""
    cache, scheduler = load(STATES, 8)
    lines: Lines = [["", "page 0: 0 to 3", "page 1: 4 to 7", "page 2: 8 to 11"]]
    for works, (request,) in scheduled(scheduler, [list(range(6))], 5):
        cache.take_moves(works)
        start, end = works[0].start, works[0].start + works[0].count
        held = slots(cache, request)
        read, written = (start - 1) // P, (end - 1) // P
        label = f"decode token {start}" if start else f"prompt of {end} tokens"
        lines.append([label])
        for page in range(3):
            words, look = "", "idle"
            if page in held:
                words = f"slot {held[page]}: {min(end, (page + 1) * P)} tokens"
                look = "now a" if page == written or not start else "kept a"
            lines[-1].append(Cell(words, look, 112))
        says = f"reads slot {held.get(read)}" if read != written else "updated in place"
        lines[-1].append(Text(says if start else "", "soft"))
    return picture(
        "The slots of one request's states over five steps",
        table(lines, gap=12, down=8),
        "now a: written in this step",
        "kept a: a snapshot",
        "idle: no slot",
    )


def snapshots() -> Picture:
    """A strip of tokens for each of three prompts: what is found and computed, and where a state stays."""
    cache, scheduler = load(STATES, 32)
    assert cache.state_manager is not None
    common, own = f"the same {COMMON} tokens", "tokens of its own"
    heads = [(0.0, Text(common, "soft")), (CELL * COMMON, Text(f"| {own}", "soft"))]
    lines: Lines = [[Box(), track(heads)]]
    for at, who in enumerate("abc"):
        tokens = [*range(COMMON), *range(100 * (at + 1), 100 * (at + 1) + OWN)]
        for works, (request,) in scheduled(scheduler, [tokens], 1):  # one step
            cache.take_moves(works)
            found, known = request.cached_tokens, cache.state_manager.divergence[request.row]
            looks = ["kept"] * found + [f"now {who}"]
            words = Text(f"found {found}, known {known}", "soft")
            strip = cells([""] * len(tokens), looks, CELL, 24)
            lines.append([Text(f"prompt {at + 1}", f"bold {who}"), strip, words])
            ends = [min((page + 1) * P, len(tokens)) for page in slots(cache, request)]
            ends = [end for end in ends if end > found]  # not the state of the hit
            marks = [(CELL * end - 12.0, Text(f"↑{end}", f"mid {who}", CELL)) for end in ends]
            lines.append([Box(), track(marks)])
    return picture(
        "Three prompts that begin alike, and the snapshots that they leave",
        table(lines, gap=8, down=4),
        "kept: found: not computed",
        "now a: computed for this prompt",
        "↑ this prompt saves the state after so many tokens",
    )


PICTURES = {"groups": groups, "states": states, "snapshots": snapshots}
