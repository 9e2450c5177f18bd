"""Prove the exercises of phases, and write the README beside this: `python -m tests.course 05`.

For each exercise the reference must pass within 60 seconds, the blank must fail, and so must every one of at
least five planted mistakes. The exit status is 1 when one of these is not so.
"""

from __future__ import annotations

import argparse
import sys

from phases import PHASES
from phases.course.exercises import exercises
from phases.course.fork_server import ForkServer
from tests.course.proof import PAGE, list_them, prove, slip_fails, written
from tests.course.slips import slips_of


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.course", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "which", nargs="+", metavar="NN or NN.M", help="a phase, or one exercise"
    )
    parser.add_argument(
        "--list", action="store_true", help="only list the exercises in the phases' lessons"
    )
    parser.add_argument("--only", metavar="NAME", help="plant this mistake alone")
    arguments = parser.parse_args()
    if arguments.list:
        for phase in PHASES:
            if f"{phase.number:02d}" in arguments.which:
                list_them(phase)
        return 0
    bad = 0
    with ForkServer() as server:
        for which in arguments.which:
            chosen = [one for one in exercises() if which in (one.id, one.id[:2])]
            if not chosen:
                parser.error(f"there is no exercise {which}")
            for exercise in chosen:
                if arguments.only:
                    for slip in slips_of(exercise):
                        if slip.name == arguments.only:
                            print(slip_fails(exercise, slip, server))
                    continue
                proof = prove(exercise, server)
                bad += len(proof.wrong)
                print(f"{exercise.id} {exercise.title}: {proof.seconds:.0f} s", flush=True)
                for fate in proof.fates:
                    print(
                        f"  {fate.name}: {fate.found}{fate.how} {fate.message[:150]!r}",
                        flush=True,
                    )
                for line in proof.wrong:
                    print(f"  WRONG {line}", flush=True)
                PAGE.write_text(
                    written(PAGE.read_text(encoding="utf-8"), [proof]), encoding="utf-8"
                )
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
