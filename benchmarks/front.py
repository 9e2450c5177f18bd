"""The front page's moving picture: the live page of a server. `python -m benchmarks.front` records it.

It needs a Chromium on PATH, and the packages pillow and playwright.
"""

from __future__ import annotations

import io
import json
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.evidence import FIGURES
from common.files import whole

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
    page()
