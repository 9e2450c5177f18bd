"""The documentation site builds without a warning, asks nobody for anything, and can be searched."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from phases import PHASES, ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
HTML = ROOT / "build" / "site" / "html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    pytest.importorskip("furo", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "site" / "build.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, f"`make docs` fails:\n{(done.stdout + done.stderr)[-3000:]}"
    return HTML


def test_every_phase_has_its_lesson_notebook_and_reference(site: Path) -> None:
    for phase in PHASES:
        for page in (f"phases/{phase.name}/README", f"notebooks/{phase.name}", f"reference/{phase.package}"):
            assert (site / f"{page}.html").is_file(), f"the site has no {page}"
    reference = (site / "reference" / "paged_cache.html").read_text(encoding="utf-8")
    assert "paged_cache.allocator.BlockAllocator" in reference, "docstrings are shown"


def test_diagrams_are_no_programs(site: Path) -> None:
    page = (site / "phases" / "05_paged_cache" / "README.html").read_text(encoding="utf-8")
    assert "highlight-text" in page and "highlight-python" in page
    assert "highlight-default" not in page, "a fence without a language is read as Python"


def test_links_between_pages_resolve(site: Path) -> None:
    broken = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", link) and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == [], f"{len(broken)} links point at nothing"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_reads_and_searches_it_from_disk(site: Path) -> None:
    sync = pytest.importorskip("playwright.sync_api")
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "phases" / "05_paged_cache" / "README.html").as_uri())
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        parts = [int(part) for part in re.findall(r"\d+", colour)[:3]]
        assert max(parts) < 80, f"in dark mode the page is {colour}"
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 360, f"at 360 pixels the page is {wide} wide"
        page.goto((site / "search.html").as_uri() + "?q=watermark")
        page.wait_for_selector("#search-results li a", timeout=60_000)
        elsewhere = [url for url in asked if not url.startswith(("file:", "data:"))]
        assert elsewhere == [], "the site asks somebody for something"
        browser.close()
