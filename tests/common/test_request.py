"""A request's tokens as numbers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from common.request import Request
from common.rules import check_prompt
from common.sampling.params import SamplingParams


@pytest.mark.parametrize("given", [True, False], ids=["checked before", "made here"])
def test_ids_are_the_known_tokens(given: bool) -> None:
    """Of the prompt, of the output, and across; the output grows, and the prompt is made once."""
    prompt = [4, 5, 6, 7]
    numbers = check_prompt(prompt, 10, 20, SamplingParams()) if given else None
    request = Request(0, list(prompt), 4, 20, SamplingParams(), numbers=numbers)
    for tokens in ([], [8], [8, 9, 3]):
        request.tokens[4:] = tokens
        for start, end in combinations(range(len(request.tokens) + 1), 2):
            found = request.ids(start, end)
            assert found.dtype == np.int64 and found.tolist() == request.tokens[start:end], (
                start,
                end,
            )
    assert request.ids(0, 4).base is not None, "a view of the prompt's numbers"
    assert request.ids(1, 3).base is request.ids(0, 2).base, "made anew for each"
