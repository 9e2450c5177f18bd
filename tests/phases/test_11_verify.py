"""Drafts in the scheduler of phase 04: what they take of a step, and what is left of wrong ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.request import Request
from common.sampling.params import SamplingParams
from continuous.cache import RowCache
from continuous.rows import Rows
from continuous.scheduler import Scheduler
from continuous.seams import Drafter
from tests.schedules import MAX_LEN


class Oracle(Drafter):
    """Drafts what will come."""

    def __init__(self, coming: list[int], length: int) -> None:
        self.coming, self.length = coming, length

    def propose(self, request: Request, most: int) -> Sequence[int]:
        done = len(request.tokens) - request.prompt_len
        return self.coming[done : done + min(self.length, most)]


def test_what_a_wrong_draft_left_behind_does_not_count() -> None:
    table = Rows(2, MAX_LEN)
    scheduler = Scheduler(table, RowCache(MAX_LEN), step_tokens=20)
    request = Request(0, [1, 2, 3], 3, 20, SamplingParams(max_tokens=17))
    scheduler.add([request])
    (work,) = scheduler.schedule()
    request.tokens.append(4)
    scheduler.land(work)
    scheduler.drafter = Oracle([4, 5, 6, 7, 8], 3)
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
    scheduler.drafter = Oracle([4] * 9, 9)
    works = scheduler.schedule()
    # One token is sampled in any case, so a request that may have `left` more is drafted one less.
    left = budget - 1
    assert [len(work.drafts) for work in works] == ([min(2, left - 1)] if left else [])
