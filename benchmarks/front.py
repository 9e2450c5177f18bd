"""The pictures of the front page: bars, a terminal in which `ladder demo` ran, the live page of a server.

python -m benchmarks.front bars
python -m benchmarks.front demo      # runs it: some minutes
python -m benchmarks.front page      # the live page, moving: a server, and a Chromium on PATH (playwright)
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.evidence import FIGURES, RESULTS, ROOT, Evidence, Run
from benchmarks.plotting import colours, number
from benchmarks.recorded_peers import Best, beside, versus
from common.files import whole

NINE = RESULTS / "h200" / "09_cuda_graphs.json"
MODEL = "qwen3-0.6b"
WORKLOADS = (
    ("single-512", "one request", "output_tokens_per_s"),
    ("offline-256", "256 requests", "output_tokens_per_s"),
    ("prefill-64x1024", "64 prompts", "prompt_tokens_per_s"),
)
WIDTH = 96
"""Characters of the terminal."""
RUNGS = 4
"""How many phases' answers are shown before the table."""


def bars(out: Path = FIGURES / "front.svg") -> None:
    """Tokens per second on one GPU, beside the best of each other engine: a panel for each workload."""
    from matplotlib import pyplot

    evidence = Evidence.load(NINE)
    figure, axes = pyplot.subplots(1, len(WORKLOADS), figsize=(9.0, 2.3), layout="constrained")
    named: list[Best] = []
    for axis, (workload, words, metric) in zip(axes, WORKLOADS, strict=True):
        others = beside(evidence, model=MODEL, workload=workload)
        mine = [evidence.one(v, workload, model=MODEL) for v in evidence.own().values()]
        runs = [*others, *mine]
        named += others
        shown = colours([run.variant for run in runs])
        rates = [run.median(metric) for run in runs]
        drawn = axis.barh(
            [
                *(run.variant for run in others),
                *(name.replace(", ", ",\n") for name in evidence.own()),
            ],
            rates,
            color=[shown[run.variant] for run in runs],
            height=0.7,
        )
        axis.bar_label(drawn, labels=[number(rate) for rate in rates], padding=3, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.invert_yaxis()
        axis.set_title(
            f"{words}: {_against(others, mine[-1], metric)}", fontsize=8.5, loc="left", x=-0.5
        )
        axis.set_xlim(0, 1.35 * max(rates))
        axis.xaxis.set_visible(False)
        axis.grid(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.supxlabel(_small_print(evidence, named), fontsize=7, color="#606060")
    with whole(out) as scratch:
        figure.savefig(scratch, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _against(others: Sequence[Best], ours: Run, metric: str) -> str:
    best = max(others, key=lambda run: run.median(metric))
    factor = versus(ours, best, metric)
    return f"level with {best.variant}" if factor == "level" else f"{factor} {best.variant}"


def _small_print(evidence: Evidence, named: Iterable[Best]) -> str:
    """Machine, model, and what was measured when: ours with its commit, others with their dates."""
    said = ", ".join(dict.fromkeys(f"{run.variant} of {run.when}" for run in named))
    return (
        f"tokens a second on one {evidence.machine['name']}: {MODEL}'s shape, random weights, bfloat16.\n"
        f"This engine: {evidence.phase} of {evidence.when[:10]}, {evidence.git['commit'][:8]}, torch "
        f"{evidence.versions['torch']}; the best version of each other: {said}"
    )


def demo(out: Path = FIGURES / "demo.svg") -> None:
    """Run `ladder demo` and keep what it printed as a picture: the first phases' answers, and the table."""
    told = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "phases", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=told, stdout=subprocess.PIPE, check=True)
    draw_terminal(done.stdout.decode(), out)


def draw_terminal(printed: str, out: Path) -> None:
    """Draw what the demo printed: its beginning up to some whole rungs, then its end from its table on."""
    from rich.console import Console
    from rich.text import Text

    lines = printed.rstrip().splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    rules = [at for at, line in enumerate(plain) if "──" in line and at + 1 < len(lines)]
    summary = next(at for at in rules if set(plain[at].strip()) == {"─"})
    ends = next((at for at in rules if at > summary and "over HTTP" in plain[at]), len(lines))
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print("$ make demo", style="bold")
    for line in [*lines[: rules[RUNGS]], "...", *lines[summary:ends]]:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="Inference Ladder")
    svg = re.sub(
        r"@font-face \{.*?\}", "", svg, flags=re.S
    )  # fonts from elsewhere: the reader's will do
    with whole(out) as scratch:
        scratch.write_text(svg, encoding="utf-8")


QUESTION = "Give me three reasons to visit Paris."
OTHERS = (
    "Why is the sky blue?",
    "Write a poem about the sea.",
    "Name five rivers.",
    "What do bees make?",
    "Explain what a lighthouse is for.",
    "Why is the sea salty?",
)
CACHE = 1 << 26
"""Bytes: few enough blocks for a picture."""
FRAMES = 30
APART = 0.6
SIZE = (1180, 800)
COLOURS = 48
"""Of the moving picture: frames, seconds between two (shown in half of that), window in pixels, colours."""


def page(out: Path = FIGURES / "page.gif") -> None:
    """Ask a question on the page of a server that answers others meanwhile, and keep what it shows."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from benchmarks.server import Server

    path = next(
        found for name in ("chromium", "google-chrome") if (found := shutil.which(name))
    )
    with (
        Server("smollm2", drafter="ngram", cache_bytes=CACHE) as server,
        sync_playwright() as started,
    ):
        url = f"http://{server.target.host}:{server.target.port}"
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        window = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
        window.goto(url)
        window.evaluate("document.getElementById('temperature').value = 0")
        window.keyboard.type(QUESTION)
        frames = [window.screenshot()]
        window.keyboard.press("Enter")
        with ThreadPoolExecutor(len(OTHERS)) as pool:
            for at in range(FRAMES):
                if at % 3 == 1 and at // 3 < len(OTHERS):
                    pool.submit(_ask, url, OTHERS[at // 3])
                window.wait_for_timeout(1000 * APART)
                frames.append(window.screenshot())
        browser.close()
    shots = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    images = [shot.quantize(COLOURS, dither=Image.Dither.NONE) for shot in shots]
    with whole(out) as scratch:
        images[0].save(
            scratch, save_all=True, append_images=images[1:], duration=int(500 * APART), loop=0
        )


def _ask(url: str, question: str) -> None:
    """Send one question, as another client would."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 80,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        answer.read()


if __name__ == "__main__":
    {"bars": bars, "demo": demo, "page": page}[sys.argv[1]]()
