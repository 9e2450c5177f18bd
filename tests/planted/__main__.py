"""Plant the bugs of a phase, one after another, and report which of them its tests find.

    python -m tests.planted 02
    python -m tests.planted 02 --only masks-every-layer

A run over all bugs of a phase writes its part of `docs/planted_bugs.md`. The exit status is 1 when a bug
lives that should not, or no longer applies.

To add a phase, write `bugs_NN.py` beside this file with `BUGS`, a tuple of `planting.Bug`: the edit as old
and new text, and one sentence on the mistake. The tests tried are all `tests/phases/test_NN_*.py`. The first
bug is planted on every run of the test suite, so put one there that dies early. A bug that nothing can
observe says why in `unseen`; everything else that lives asks for a better test. A good test says which
request, token or rule is wrong, since its message is all that a learner sees.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

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
    bad = 0
    for phase in arguments.phases:
        bugs = [bug for bug in bugs_of(phase) if arguments.only in (None, bug.name)]
        if not bugs:
            parser.error(f"phase {phase} has no bug {arguments.only!r}")
        outcomes = run(phase, bugs, arguments.jobs)
        bad += sum(outcome.verdict != "killed" and not bug.unseen for bug, outcome in outcomes.items())
        if arguments.only is None:
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(written(page, phase, outcomes), encoding="utf-8")
    return min(bad, 1)


def run(phase: str, bugs: list[Bug], jobs: int) -> dict[Bug, Outcome]:
    """Try out the bugs, printing what becomes of each."""
    control = try_out(phase, limit=10 * LIMIT)
    if control.verdict != "survived":
        sys.exit(f"phase {phase}: {control.test} fails without any bug: {control.message}")
    print(f"phase {phase}: its tests pass in {control.seconds:.0f} s; now with {len(bugs)} bugs", flush=True)
    limit = max(LIMIT, 2 * control.seconds)
    with ThreadPoolExecutor(jobs) as pool:
        tried = pool.map(lambda bug: try_out(phase, bug, limit), bugs)
        outcomes = {}
        for bug, outcome in zip(bugs, tried, strict=True):
            outcomes[bug] = outcome
            by = f" by {outcome.test}" if outcome.test else ""
            print(
                f"  {outcome.verdict:9} {outcome.seconds:3.0f} s  {bug.name}{by}: {outcome.message}",
                flush=True,
            )
    killed = sum(outcome.verdict == "killed" for outcome in outcomes.values())
    print(f"phase {phase}: {killed} of {len(bugs)} killed")
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
