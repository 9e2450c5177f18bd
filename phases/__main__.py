"""The `ladder` command, also as `python -m phases`."""

import sys


def main() -> None:
    """Run the command line `phases.cli.main`; Ctrl-C during its imports also ends without a traceback."""
    try:
        from phases.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
