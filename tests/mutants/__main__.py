"""Make mutants of a phase and report those that survive its tests: `python -m tests.mutants 05`."""

from __future__ import annotations

import argparse
import sys

from phases import ROOT
from tests.mutants.making import choose
from tests.mutants.trying import bench, target


def main() -> int:
    """Run the command line; returns the exit status, 1 where a mutant survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    targets = "a phase, an entry of the appendix, or common"
    only = "those whose file, function or kind has this text"
    parser.add_argument("targets", nargs="+", metavar="NN", help=targets)
    parser.add_argument("--count", type=int, default=20, help="how many mutants of each")
    parser.add_argument(
        "--seed", type=int, default=0, help="another number chooses other mutants"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help=only)
    arguments = parser.parse_args()
    alive = 0
    for name in arguments.targets:
        try:
            aim = target(name)
        except LookupError as error:
            parser.error(str(error))
        with bench(aim) as tests:
            print(f"{name}: the tests take {tests.control:.0f} s without a mutant", flush=True)
            survivors, tried = list[str](), 0
            for mutant in choose(ROOT, aim.files, arguments.count, arguments.seed):
                place = f"{mutant.file}:{mutant.line} {mutant.label}"
                if arguments.only in place:
                    outcome, tried = tests.try_out(mutant), tried + 1
                    said = f"{outcome.verdict:9} {outcome.seconds:3.0f} s  {place}"
                    print(f"  {said}  [{outcome.test}]", flush=True)
                    survivors += [place] * (outcome.verdict == "survived")
        alive += len(survivors)
        print(
            "\n".join(
                (
                    f"{name}: {tried - len(survivors)} of {tried} killed; survivors:",
                    *survivors,
                    "",
                )
            )
        )
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
