"""The pictures of the front page: three bars, and a terminal in which `ladder demo` ran.

python -m benchmarks.front bars
python -m benchmarks.front demo      # runs it: some minutes
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.evidence import FIGURES, RESULTS, ROOT, Evidence
from benchmarks.plotting import colours, measured_once, number, times
from common.files import whole

NINE = RESULTS / "h200" / "09_cuda_graphs.json"
WORKLOADS = (("offline-256", "256 requests"), ("single-512", "one request"))
WIDTH = 96
"""Characters of the terminal."""
SHOWN = 44
"""Its last lines, at most."""


def bars(out: Path = FIGURES / "front.svg") -> None:
    """Output tokens per second of three engines on one GPU, a panel for each workload."""
    from matplotlib import pyplot

    evidence = Evidence.load(NINE)
    ours = evidence.phase
    peers = [v for v in dict.fromkeys(run.variant for run in evidence.runs) if "vLLM" in v]
    names = [*peers, ours]
    shown = colours(names)
    figure, axes = pyplot.subplots(1, len(WORKLOADS), figsize=(9.0, 2.1), layout="constrained")
    for axis, (workload, words) in zip(axes, WORKLOADS, strict=True):
        runs = [evidence.one(name, workload, model="qwen3-0.6b") for name in names]
        rates = [run.median("output_tokens_per_s") for run in runs]
        labels = [f"{run.variant}\n(measured once)" if measured_once(run) else "this engine" for run in runs]
        drawn = axis.barh(labels, rates, color=[shown[name] for name in names], height=0.7)
        axis.bar_label(drawn, labels=[number(rate) for rate in rates], padding=3)
        axis.invert_yaxis()
        best = max(peers, key=lambda name: rates[names.index(name)])
        factor = times(rates[-1] / rates[names.index(best)])
        axis.set_title(
            f"{words}: {factor} {best.rsplit(' ', 1)[0]}'s tokens a second", fontsize=9, loc="left"
        )
        axis.set_xlim(0, 1.2 * max(rates))
        axis.xaxis.set_visible(False)
        axis.grid(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    with whole(out) as scratch:
        figure.savefig(scratch, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def demo(out: Path = FIGURES / "demo.svg") -> None:
    """Run `ladder demo` and keep what it printed as a picture."""
    from rich.console import Console
    from rich.text import Text

    told = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "phases", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=told, stdout=subprocess.PIPE, check=True)
    lines = done.stdout.decode().rstrip().splitlines()
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print("$ make demo", style="bold")
    told_first, tail = lines[:2], lines[-SHOWN:]  # the question, and as many whole rungs as there is room for
    begins = next((at for at, line in enumerate(tail) if "──" in line), 0)
    for line in [*told_first, "...", *tail[begins:], ""]:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="Inference Ladder")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)  # fonts from elsewhere: the reader's will do
    with whole(out) as scratch:
        scratch.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    {"bars": bars, "demo": demo}[sys.argv[1]]()
