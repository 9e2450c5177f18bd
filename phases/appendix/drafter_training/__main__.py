"""Train a model's head: the model writes the text, and the head learns to say what it says.

    python -m phases.appendix.drafter_training --minutes 17 --out phases/11_speculative/weights

One GPU in a few minutes, everything included. Writes the head and a model card, and tells loss
and acceptance over training. `ladder bench 11` measures how fast it drafts.
"""

import time

if __name__ == "__main__":
    started = time.monotonic()  # importing takes its share of the time, too
    from phases.appendix.drafter_training.run import main

    main(started=started)
