"""The `ladder` command, also as `python -m phases`."""

import os
import sys


def main() -> None:
    """Run the command line `phases.cli.main`; Ctrl-C during its imports also ends without a traceback."""
    # Or a file `random.py` in the user's folder would be imported by each process that this one starts.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        from phases.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
