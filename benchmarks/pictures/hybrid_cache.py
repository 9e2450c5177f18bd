"""Phase 17: three requests in three groups, and which blocks of one pool each of them has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.pictures.svg import INK, LINE, SOFT, STRONG, Kind, Picture
from chunked_prefill import ChunkedScheduler
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from hybrid_cache import HybridCache, LayerGroups

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
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
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
                cache.stock.books.free,
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
    found = [None if number == cache.stock.null else number for number in numbers]
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
            ("kept", "a", "kept"),
            ("idle", "", "given back, or never had"),
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


def pictures() -> dict[str, Picture]:
    """All of this lesson's pictures."""
    return {"groups": groups(record())}
