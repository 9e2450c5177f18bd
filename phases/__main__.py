"""`python -m phases` is the `ladder` command."""

from phases.cli import main

if __name__ == "__main__":
    main()
