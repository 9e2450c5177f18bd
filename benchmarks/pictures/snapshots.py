"""Phase 17: three prompts that begin alike, and the places of a text at which a state is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pictures.svg import SOFT, STRONG, Kind, Picture
from common.models.config import DeltaConfig
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.rows import RequestRows
from continuous.work import Work
from hybrid_cache import HybridCache, LayerGroups
from prefix_cache.radix import RadixIndex

P, STEP_TOKENS = 4, 32
BLOCKS = 64
"""Tokens in a page and of a step, blocks of the pool."""
COMMON, OWN = 14, 9
"""Tokens that all prompts begin with, and those behind."""
LAYOUT = LayerGroups(1, {None: [[0]]}, DeltaConfig(1, 1, 1, 1, 2, (False, True)))
CELL = 24


@dataclass(frozen=True)
class Prompt:
    """What became of a prompt.

    found: tokens behind which it begins. known: tokens that the tree knows.
    saved: tokens behind which its pages have a state when it is computed.
    """

    found: int
    known: int
    saved: Sequence[int]


def record() -> list[Prompt]:
    """Compute three prompts one after the other; no model is needed for that."""
    cache = HybridCache(3, 64, BLOCKS, P, RadixIndex(), LAYOUT, step_tokens=STEP_TOKENS)
    rows = RequestRows(3, 64)
    manager = cache.state_manager
    assert manager is not None
    prompts = []
    for at in range(3):
        tokens = [*range(COMMON), *(100 * (at + 1) + own for own in range(OWN))]
        request = Request(at, tokens, len(tokens), 64, SamplingParams())
        found = request.num_computed_tokens = request.cached_tokens = cache.lookup(request)
        rows.acquire(request)
        assert cache.reserve(request, len(tokens))
        known = manager.divergence[request.row]
        while (start := request.num_computed_tokens) < len(tokens):
            end = min(start + STEP_TOKENS, len(tokens))
            cache.take_moves([Work(request, request.row, start, end - start)])
            request.num_computed_tokens = end
            cache.commit(request, end)
        pages = enumerate(cache.blocks_of(request.row))
        saved = [
            min((place + 1) * P, len(tokens))
            for place, page in pages
            if int(manager.blocks[0, page]) != manager.pool.null
        ]
        prompts.append(Prompt(found, known, saved))
        cache.release(request)
        rows.release(request)
    return prompts


def prompts(found: Sequence[Prompt]) -> Picture:
    """A strip of tokens for each prompt: what is found, what is computed, and where a state stays."""
    high = 74
    left = 84
    picture = Picture(
        "Three prompts that begin alike, and the snapshots that they leave",
        "; ".join(
            f"prompt {at + 1} knows {one.known} tokens, begins behind {one.found}, "
            f"and has states behind {list(one.saved)}"
            for at, one in enumerate(found)
        ),
        height=high * len(found) + 62,
    )
    common = left + CELL * COMMON
    picture.text(left, 20, f"the same {COMMON} tokens", fill=SOFT)
    picture.text(common + 6, 20, "tokens of its own", fill=SOFT)
    for line, one in enumerate(found):
        y = 34 + high * line
        who = "abc"[line]
        picture.text(12, y + 16, f"prompt {line + 1}", bold=True, fill=STRONG[who])
        for token in range(COMMON + OWN):
            shared = token < one.found
            kind: Kind = "kept" if shared else "now"
            picture.cell(left + CELL * token, y, CELL, 24, kind, "" if shared else who)
        for place in one.saved:
            x = left + CELL * place
            picture.line([(x, y + 44), (x, y + 25)], STRONG[who], tip=True)
            picture.text(x, y + 56, str(place), "middle", size=11)
        words = f"found {one.found}, known {one.known}"
        picture.text(left + CELL * (COMMON + OWN) + 6, y + 16, words, size=11, fill=SOFT)
    picture.line([(common, 26), (common, 34 + high * len(found) - 8)], SOFT, dash="3 3")
    bottom = picture.height - 14
    picture.legend(
        12,
        bottom,
        [("kept", "", "found: not computed"), ("now", "a", "computed for this prompt")],
    )
    picture.text(392, bottom + 1, "↑ the state after so many tokens is saved", fill=SOFT)
    return picture


def pictures() -> dict[str, Picture]:
    """The one of these prompts."""
    return {"snapshots": prompts(record())}
