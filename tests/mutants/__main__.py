"""Make mutants of a phase and report those that survive its tests: `python -m tests.mutants 05`."""

from __future__ import annotations

import argparse
import sys

from phases import ROOT
from tests.mutants.making import choose
from tests.mutants.trying import bench, table, target


def main() -> int:
    """Run the command line; returns the exit status, 1 where a mutant survives."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "targets", nargs="+", metavar="NN", help="a phase, an entry of the appendix, or common"
    )
    parser.add_argument("--count", type=int, default=20, help="how many mutants of each")
    parser.add_argument("--seed", type=int, default=0, help="another number chooses other mutants")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="those whose file, function or kind has this text"
    )
    arguments = parser.parse_args()
    alive = 0
    for name in arguments.targets:
        try:
            aim = target(name)
        except LookupError as error:
            parser.error(str(error))
        with bench(aim) as tests:
            print(f"{name}: the tests take {tests.control:.0f} s without a mutant", flush=True)
            rows = []
            for mutant in choose(ROOT, aim.files, arguments.count, arguments.seed):
                if arguments.only in f"{mutant.file}:{mutant.line} {mutant.label}":
                    outcome = tests.try_out(mutant)
                    rows.append((mutant, outcome))
                    place = f"{mutant.file}:{mutant.line} {mutant.label}"
                    print(
                        f"  {outcome.verdict:9} {outcome.seconds:3.0f} s  {place}  [{outcome.test}]",
                        flush=True,
                    )
        survivors = sum(outcome.verdict == "survived" for _, outcome in rows)
        alive += survivors
        print(f"{name}: {len(rows) - survivors} of {len(rows)} killed\n\n{table(rows)}\n", flush=True)
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
