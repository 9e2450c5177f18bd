"""Random callers against every scheduling phase: samples, priorities, tenants, drafts, aborts, failing steps.

    LADDER_FUZZ=20000 pytest tests/fuzz -m long

plays that many scripts for each kind of engine, other ones than the phases' own tests. A failure names its
seed; `machine(kind, random.Random(seed))` and `random_script` make the same again in every process.
"""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.fuzz.machines import MACHINES, machine
from tests.schedules import play_seeds

FIRST = 200
"""The first seed that no test of a phase plays."""
SCRIPTS = int(os.environ.get("LADDER_FUZZ", "1000"))


@pytest.mark.long
@pytest.mark.timeout(0)  # as long as it was asked for
@pytest.mark.parametrize("kind", MACHINES)
def test_many_scripts(kind: str) -> None:
    preemptions = drafted = accepted = 0
    for engine, runner in play_seeds(range(FIRST, FIRST + SCRIPTS), partial(machine, kind)):
        preemptions += engine.scheduler.preemptions
        drafted, accepted = drafted + runner.drafted, accepted + runner.accepted
    if kind != "04":  # or the scripts have become too easy
        assert preemptions > 0, f"{kind}: nobody was preempted in {SCRIPTS} scripts"
        assert 0 < accepted < drafted, f"{kind}: {accepted} of {drafted} drafts were accepted"
