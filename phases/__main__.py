"""The `ladder` command, also as `python -m phases`."""

import sys


def main() -> None:
    """Run `phases.cli`. Its imports take a moment, and Ctrl-C in that moment is no defect either."""
    try:
        from phases.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
