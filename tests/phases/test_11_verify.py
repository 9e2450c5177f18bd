"""Drafts that are verified: several tokens a step, and the same text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import continuous
import paged_cache
from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import RowCache
from continuous.engine import Engine
from continuous.rows import Rows
from continuous.scheduler import Scheduler
from continuous.seams import Drafter
from forward.model import Model
from speculative.speculation import verify
from tests.schedules import MAX_LEN, check

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [3, 3]]
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=7, temperature=1.0, seed=6, n=2, ignore_eos=True),
]


# A victim that is forgotten in the line would hang.
pytestmark = pytest.mark.timeout(20)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    engine = continuous.load(model, max_rows=4, max_len=64)
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


def paged_engine(model: Model) -> Engine:
    return paged_cache.load(model, max_rows=4, max_len=64, step_tokens=64, block_size=4, cache_bytes=1 << 20)


class Oracle(Drafter):
    """Drafts what will come, wrong from place `wrong` on."""

    def __init__(self, outputs: dict[tuple[int, int], list[int]], length: int, wrong: int) -> None:
        self.outputs, self.length, self.wrong = outputs, length, wrong

    def propose(self, request: Request, most: int) -> Sequence[int]:
        done = len(request.tokens) - request.prompt_len
        coming = self.outputs[request.index, request.sample][done : done + min(self.length, most)]
        return [token if place < self.wrong else (token + 1) % 257 for place, token in enumerate(coming)]


@pytest.mark.parametrize(("length", "wrong"), [(3, 0), (3, 1), (3, 2), (3, 9), (1, 9), (30, 30)])
def test_drafts_change_no_token(model: Model, expected: list[list[int]], length: int, wrong: int) -> None:
    engine = paged_engine(model)
    verify(engine)
    keys = [(0, 0), (1, 0), (2, 0), (2, 1)]
    engine.scheduler.drafter = Oracle(dict(zip(keys, expected, strict=True)), length, wrong)
    completions = engine.generate(PROMPTS, PARAMS)
    assert [completion.token_ids for completion in completions] == expected
    plain = paged_engine(model)
    plain.generate(PROMPTS, PARAMS)
    if wrong:
        assert engine.stats.steps < plain.stats.steps, "accepted drafts save no step"
    else:
        assert engine.stats.steps == plain.stats.steps, "wrong drafts cost steps"
    check(engine)


def test_what_a_wrong_draft_left_behind_does_not_count() -> None:
    table = Rows(2, MAX_LEN)
    scheduler = Scheduler(table, RowCache(MAX_LEN), step_tokens=20)
    request = Request(0, [1, 2, 3], 3, 20, SamplingParams(max_tokens=17))
    scheduler.add([request])
    (work,) = scheduler.schedule()
    request.tokens.append(4)
    scheduler.land(work)
    scheduler.drafter = Oracle({(0, 0): [4, 5, 6, 7, 8]}, 3, 9)
    (work,) = scheduler.schedule()
    assert (work.start, work.count, work.drafts) == (3, 4, (5, 6, 7))
    assert request.num_computed_tokens == 7 and request.placeholders == 1
    request.tokens += [5, 9]  # the first was right, and 9 was sampled in the place of the second
    scheduler.land(work, accepted=1)
    assert request.num_computed_tokens == 5 and request.placeholders == request.in_flight == 0


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_drafts_fit_the_budget_and_the_limit(budget: int) -> None:
    table = Rows(1, MAX_LEN)
    scheduler = Scheduler(table, RowCache(MAX_LEN), step_tokens=3)
    request = Request(0, [1, 2, 3], 3, 3 + budget, SamplingParams(max_tokens=budget))
    scheduler.add([request])
    (work,) = scheduler.schedule()
    request.tokens.append(4)
    scheduler.land(work)
    scheduler.drafter = Oracle({(0, 0): [4] * 9}, 9, 9)
    works = scheduler.schedule()
    # One token is sampled in any case, so a request that may have `left` more is drafted one less.
    left = budget - 1
    assert [len(work.drafts) for work in works] == ([min(2, left - 1)] if left else [])


def test_an_end_in_the_middle_of_accepted_tokens(model: Model, expected: list[list[int]]) -> None:
    engine = paged_engine(model)
    verify(engine)
    engine.scheduler.drafter = Oracle({(0, 0): expected[0]}, 6, 9)
    stop = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(expected[0][3],))
    (done,) = engine.generate(PROMPTS[:1], stop)
    assert done.token_ids == expected[0][: expected[0].index(expected[0][3]) + 1]
    assert done.finish_reason == "stop"
    check(engine)
