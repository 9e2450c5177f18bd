"""`python -m phases.appendix.drafter_training`."""

from phases.appendix.drafter_training.train import main

if __name__ == "__main__":
    main()
