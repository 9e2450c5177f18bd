"""The documentation site builds without a warning, asks nobody for anything, and can be searched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phases import PHASES, ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
HTML = ROOT / "build" / "site" / "html"


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
        for page in (
            f"phases/{phase.name}/README",
            f"notebooks/{phase.name}",
            f"reference/{phase.package}",
        ):
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
