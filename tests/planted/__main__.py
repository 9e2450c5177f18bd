"""Plant the bugs of a phase, one after another, and report which of them its tests find.

    python -m tests.planted 02
    python -m tests.planted 02 --only masks-every-layer

A run over all bugs of a phase writes its part of `docs/planted_bugs.md`. The exit status is 1 when a bug
lives that should not, or no longer applies.

To add a phase, write `bugs_NN.py` beside this file with `BUGS`, a tuple of `planting.Bug`: the edit as old
and new text, and one sentence on the mistake. The tests tried are all `tests/phases/test_NN_*.py`. The first
two bugs are planted on every run of the test suite, so put two there that die early. A bug that nothing can
observe says why in `unseen`; everything else that lives asks for a better test. A good test says which
request, token or rule is wrong, since its message is all that a learner sees.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

from phases.course.nursery import Nursery
from tests.planted.planting import LIMIT, Bug, Outcome, bugs_of, phases, try_out
from tests.planted.report import PAGE, written


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("phases", nargs="+", choices=phases(), metavar="NN", help=", ".join(phases()))
    parser.add_argument("--only", metavar="NAME", help="plant this bug alone, and leave the page as it is")
    parser.add_argument("--jobs", type=int, default=1, help="how many bugs to try at once")
    arguments = parser.parse_args()
    chosen = {
        phase: [bug for bug in bugs_of(phase) if arguments.only in (None, bug.name)]
        for phase in arguments.phases
    }
    if not all(chosen.values()):
        parser.error(f"no bug is named {arguments.only!r} in one of these phases")
    bad = 0
    with ExitStack() as stack:
        nurseries = [stack.enter_context(Nursery()) for _ in range(arguments.jobs)]
        for phase, bugs in chosen.items():
            outcomes = run(phase, bugs, nurseries)
            bad += sum(outcome.verdict != "killed" and not bug.unseen for bug, outcome in outcomes.items())
            if arguments.only is None:
                page = PAGE.read_text(encoding="utf-8")
                PAGE.write_text(written(page, phase, outcomes), encoding="utf-8")
    return min(bad, 1)


def run(phase: str, bugs: list[Bug], nurseries: list[Nursery]) -> dict[Bug, Outcome]:
    """Try out the bugs, as many at once as there are nurseries, and print what becomes of each."""
    free: SimpleQueue[Nursery] = SimpleQueue()
    for nursery in nurseries:
        free.put(nursery)

    def tried(bug: Bug | None, limit: float) -> Outcome:
        nursery = free.get()
        try:
            return try_out(nursery, phase, bug, limit)
        finally:
            free.put(nursery)

    control = tried(None, 10 * LIMIT)
    if control.verdict != "survived":
        sys.exit(f"phase {phase}: {control.test} fails without any bug: {control.message}")
    print(f"phase {phase}: its tests pass in {control.seconds:.0f} s; now with {len(bugs)} bugs", flush=True)
    limit, outcomes = max(LIMIT, 2 * control.seconds), {}
    with ThreadPoolExecutor(len(nurseries)) as pool:
        for bug, outcome in zip(bugs, pool.map(lambda bug: tried(bug, limit), bugs), strict=True):
            outcomes[bug] = outcome
            by = f" by {outcome.test}" if outcome.test else ""
            said = f"{bug.name}{by}: {outcome.message}"
            print(f"  {outcome.verdict:9} {outcome.seconds:3.0f} s  {said}", flush=True)
    killed = sum(outcome.verdict == "killed" for outcome in outcomes.values())
    print(f"phase {phase}: {killed} of {len(bugs)} killed", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
