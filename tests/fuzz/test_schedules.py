"""Random callers against every scheduling phase: samples, priorities, tenants, drafts, aborts, failing steps.

    LADDER_FUZZ=20000 pytest tests/fuzz -m slow

plays that many scripts for each kind of engine, other ones than the suite's own. A failure names its seed;
`machine(kind, random.Random(seed))` and `random_script` make the same again in every process.
"""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.fuzz.machines import MACHINES, machine
from tests.schedules import play_seeds

SHORT = 60
LONG = int(os.environ.get("LADDER_FUZZ", "1000"))


def fuzz(kind: str, seeds: range) -> None:
    preemptions = drafted = accepted = 0
    for engine, runner in play_seeds(seeds, partial(machine, kind)):
        preemptions += engine.scheduler.preemptions
        drafted, accepted = drafted + runner.drafted, accepted + runner.accepted
    if kind != "04":  # or the scripts have become too easy
        assert preemptions > 0, f"{kind}: nobody was preempted in {len(seeds)} scripts"
        assert 0 < accepted < drafted, f"{kind}: {accepted} of {drafted} drafts were accepted"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.slow
def test_a_few_scripts(kind: str) -> None:
    fuzz(kind, range(SHORT))


@pytest.mark.slow
@pytest.mark.timeout(0)  # as long as it was asked for
@pytest.mark.parametrize("kind", MACHINES)
def test_many_scripts(kind: str) -> None:
    fuzz(kind, range(SHORT, SHORT + LONG))
