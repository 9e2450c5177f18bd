"""Phase 17: which blocks of one pool three requests have in three groups, and which slots a state has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pictures import snapshots
from benchmarks.pictures.driving import exactly
from benchmarks.pictures.svg import INK, LINE, SOFT, STRONG, Kind, Picture
from chunked_prefill import ChunkedScheduler
from common.models.config import DeltaConfig
from common.request import Request
from continuous.rows import RequestRows
from hybrid_cache import HybridCache, LayerGroups
from prefix_cache.radix import RadixIndex

P = 4
STEP_TOKENS = 8
BLOCKS = 43
"""Tokens in a page, tokens of a step, and blocks of the pool, the null block included."""
LAYOUT = LayerGroups(1, {None: [[0]], 12: [[1]], 6: [[2]]})
NAMES = ("all keys", "a window of 12", "a window of 6")
PROMPTS = {"a": 20, "b": 6, "c": 12}
OUTPUT = 12
SHOWN = (0, 3, 7, 11)
"""Steps."""
CELL, COLUMN = 19, 186
STATES = LayerGroups(1, {None: [[1]]}, DeltaConfig(1, 1, 1, 1, 4, (True, False)))
PROMPT = 6
DECODES = 4
PAGES = 3
"""Tokens and pages of the request whose slots are drawn."""


@dataclass(frozen=True)
class Moment:
    """What stands where when a step has been scheduled.

    blocks: of each group and request, by place: the block, or None where it was given back.
    fresh: places that the step writes to, from and to, of each request.
    computed: tokens of each request that are computed once the step has run.
    free: blocks of the pool.
    """

    blocks: Sequence[Mapping[str, list[int | None]]]
    fresh: Mapping[str, tuple[int, int]]
    computed: Mapping[str, int]
    free: int


def record() -> list[Moment]:
    """Schedule three requests to their ends, and note every step; no model is needed for that."""
    cache = HybridCache(3, 64, BLOCKS, P, None, LAYOUT, step_tokens=STEP_TOKENS)
    scheduler = ChunkedScheduler(RequestRows(3, 64), cache, step_tokens=STEP_TOKENS)
    requests: dict[str, Request] = {}
    for at, (name, length) in enumerate(PROMPTS.items()):
        params = exactly(OUTPUT)
        requests[name] = Request(at, [at] * length, length, length + OUTPUT, params)
        scheduler.add([requests[name]])
    moments = []
    while not scheduler.idle:
        works = scheduler.schedule()
        names = {name: one for name, one in requests.items() if one.row >= 0}
        moments.append(
            Moment(
                [
                    {name: _blocks(cache, group, one) for name, one in names.items()}
                    for group in range(len(NAMES))
                ],
                {
                    name: (work.start // P, (work.start + work.count - 1) // P + 1)
                    for work in works
                    for name, one in names.items()
                    if one is work.request
                },
                {name: one.num_computed_tokens for name, one in names.items()},
                cache.block_pool.allocator.free,
            )
        )
        for work in works:
            for request in work.sampled_requests:
                request.tokens.append(0)
            scheduler.finish_step(work)
            if len(work.request.tokens) == work.request.limit:
                work.request.finish_reason = "length"
                scheduler.leave(work.request)
    return moments


def _blocks(cache: HybridCache, group: int, request: Request) -> list[int | None]:
    """A request's blocks in a group, as far as it has computed or reserved; no block behind that."""
    numbers = cache.blocks[group, cache.blocks_of(request.row)].tolist()
    found = [None if number == cache.block_pool.null else number for number in numbers]
    while found and found[-1] is None:
        found.pop()
    return found


def groups(moments: Sequence[Moment]) -> Picture:
    """Tables of three groups at some steps: every number is a block of the same pool."""
    picture = Picture(
        "Three requests in three groups, over one pool",
        "; ".join(
            f"step {at}: {moments[at].free} of {BLOCKS - 1} blocks are free, computed "
            + ", ".join(f"{name} {count}" for name, count in moments[at].computed.items())
            for at in SHOWN
        ),
        height=356,
    )
    for column, at in enumerate(SHOWN):
        moment, left = moments[at], 14 + COLUMN * column
        picture.text(left, 24, f"step {at}", bold=True)
        picture.text(left + 54, 24, f"{moment.free} of {BLOCKS - 1} blocks free", fill=SOFT)
        for group, name in enumerate(NAMES):
            top = 40 + 94 * group
            picture.text(left, top + 12, name, fill=INK)
            for line, (who, blocks) in enumerate(moment.blocks[group].items()):
                _line(
                    picture,
                    left,
                    top + 18 + 22 * line,
                    who,
                    blocks,
                    moment.fresh.get(who, (0, 0)),
                )
        if column:
            picture.line([(left - 8, 12), (left - 8, 318)], LINE)
    picture.legend(
        14,
        340,
        [
            ("now", "a", "written in this step"),
            ("kept", "a", "has a block"),
            ("idle", "", "no block: given back, or never had"),
        ],
    )
    return picture


def _line(
    picture: Picture,
    left: float,
    top: float,
    who: str,
    blocks: list[int | None],
    fresh: tuple[int, int],
) -> None:
    """A request's places in one group."""
    picture.text(left, top + 14, who, bold=True, fill=STRONG[who])
    for place, block in enumerate(blocks):
        x = left + 12 + CELL * place
        if block is None:
            picture.cell(x, top, CELL, 20, "idle")
        else:
            kind: Kind = "now" if fresh[0] <= place < fresh[1] else "kept"
            picture.cell(x, top, CELL, 20, kind, who, str(block))


@dataclass(frozen=True)
class StateStep:
    """One step of a request whose layers keep a state.

    computed: tokens of the request that are computed once the step has run.
    slots: of each page, the slot, or None.
    read, written: pages whose slots the step reads and writes; -1 reads none.
    """

    start: int
    computed: int
    slots: Sequence[int | None]
    read: int
    written: int


def record_states() -> list[StateStep]:
    """Schedule one request, and note the slots of its pages at every step."""
    cache = HybridCache(1, 64, BLOCKS, P, RadixIndex(), STATES, step_tokens=STEP_TOKENS)
    scheduler = ChunkedScheduler(RequestRows(1, 64), cache, step_tokens=STEP_TOKENS)
    params = exactly(DECODES + 1)
    request = Request(0, list(range(PROMPT)), PROMPT, PROMPT + DECODES + 1, params)
    scheduler.add([request])
    assert cache.state_manager is not None
    null = cache.state_manager.pool.null
    steps: list[StateStep] = []
    while len(steps) <= DECODES:
        (work,) = scheduler.schedule()
        cache.take_moves([work])
        pages = cache.tables[0, :PAGES].tolist()[: len(cache.blocks_of(0))]
        slots = [int(cache.state_manager.blocks[0, page]) for page in pages]
        found = [None if slot == null else slot for slot in slots]
        end = work.start + work.count
        steps.append(StateStep(work.start, end, found, (work.start - 1) // P, (end - 1) // P))
        request.tokens.append(10 + len(steps))
        scheduler.finish_step(work)
    return steps


def states(steps: Sequence[StateStep]) -> Picture:
    """The slots of one request's pages over five steps."""
    picture = Picture(
        "The slots of one request's states over five steps",
        "; ".join(
            f"after {step.computed} tokens the pages have the slots {list(step.slots)}"
            for step in steps
        ),
        height=62 + 40 * len(steps),
    )
    width = 120
    for page in range(PAGES):
        first = page * P
        picture.text(190 + width * page, 24, f"page {page}", bold=True)
        picture.text(242 + width * page, 24, f"{first} .. {first + P - 1}", fill=SOFT)
    for line, step in enumerate(steps):
        top = 36 + 40 * line
        decode = step.computed == step.start + 1
        label = f"decode token {step.start}" if decode else f"prompt of {step.computed} tokens"
        picture.text(14, top + 19, label, fill=INK)
        for page in range(PAGES):
            slot = step.slots[page] if page < len(step.slots) else None
            x = 190 + width * page
            if slot is None:
                picture.cell(x, top, 104, 28, "idle")
                continue
            behind = min(step.computed, (page + 1) * P)
            kind: Kind = "now" if page == step.written else "kept"
            if not decode:
                kind = "now"
            picture.cell(x, top, 104, 28, kind, "a", f"slot {slot}: {behind} tokens")
        if decode and step.read != step.written:
            picture.text(
                190 + width * PAGES, top + 19, f"reads slot {step.slots[step.read]}", fill=SOFT
            )
        elif decode:
            picture.text(190 + width * PAGES, top + 19, "updated in place", fill=SOFT)
    picture.legend(
        14,
        52 + 40 * len(steps),
        [
            ("now", "a", "written in this step"),
            ("kept", "a", "a snapshot"),
            ("idle", "", "no slot"),
        ],
    )
    return picture


def pictures() -> dict[str, Picture]:
    """All of this lesson's pictures."""
    drawn = {"groups": groups(record()), "states": states(record_states())}
    return drawn | snapshots.pictures()
