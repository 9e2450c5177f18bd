"""Train a model's head: the model writes the text, and the head learns to say what it says.

    python phases/11_speculative/train.py --minutes 4 --out phases/11_speculative/weights
    python phases/11_speculative/train.py --toy --minutes 0.5 --out build/toy

One GPU in a few minutes, everything included; `--toy` is a random model on the CPU. Writes the head,
`training.json` (loss and acceptance over training) and a model card, and prints one line of JSON at the end.
`ladder bench 11` measures how fast it drafts.
"""

import sys
import time
from pathlib import Path

if __name__ == "__main__":
    started = time.monotonic()  # importing takes its share of the time, too
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), *(str(folder) for folder in sorted(root.glob("phases/[0-9]*")))]
    from speculative.training.run import main

    main(started=started)
