"""Train the drafters of a model: it writes the text, a head and two layers learn to say what it says.

    python phases/11_speculative/train.py --minutes 4 --out phases/11_speculative/weights
    python phases/11_speculative/train.py --toy --minutes 0.5 --out build/toy

One GPU in a few minutes, generation and evaluation included; `--toy` is a random model on the CPU. Writes
both drafters, `training.json` (loss and acceptance over training, speeds at the end) and a model card.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), *(str(folder) for folder in sorted(root.glob("phases/[0-9]*")))]
    from benchmarks.workloads import CHAT_QUESTIONS
    from speculative.training.run import main

    main(CHAT_QUESTIONS)
