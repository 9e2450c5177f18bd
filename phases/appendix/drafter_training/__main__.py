"""Train a model's head: the model writes the text, and the head learns to say what it says.

    python -m phases.appendix.drafter_training --minutes 17 --out phases/11_speculative/weights
    python -m phases.appendix.drafter_training --toy --minutes 0.5 --out build/toy

One GPU in a few minutes, everything included; `--toy` is a random model on the CPU. Writes the head,
`training.json` (loss and acceptance over training) and a model card, and prints one line of JSON at the end.
`ladder bench 11` measures how fast it drafts.
"""

import time

if __name__ == "__main__":
    started = time.monotonic()  # importing takes its share of the time, too
    from phases.appendix.drafter_training.run import main

    main(started=started)
