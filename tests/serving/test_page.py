"""The page at `/`: one file that asks nobody else, and in a real browser a chat beside the live engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from phases import ROOT
from tests.servers import Running

PAGE = ROOT / "phases" / "13_serving" / "serving" / "page" / "index.html"


def test_it_asks_nobody_else():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|url|import|fetch)\s*[=(]?\s*["'(]\s*(?:https?:)?//""", text)
    assert set(re.findall(r'fetch\("([^"]+)"', text)) == {"v1/chat/completions", "events", "v1/models"}
    assert "innerHTML" not in text, "what a model says would be read as HTML"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running("--max-rows", "8", "--access-log", "none") as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch()
        except Exception:
            try:
                found = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            except Exception as error:
                pytest.skip(f"there is no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_chat_in_a_browser(server, browser, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    problems: list[str] = []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda asked: (
            elsewhere.append(asked.url) if not asked.url.startswith((server.url, "data:")) else None
        ),
    )
    page.goto(server.url)
    page.wait_for_function("document.getElementById('state').textContent === 'ready'")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.wait_for_function("document.getElementById('speed').textContent.includes('tokens')", timeout=20_000)
    page.fill("#say", "again")
    page.evaluate("document.getElementById('max_tokens').value = 800")
    page.press("#say", "Enter")
    page.wait_for_function("Number(document.getElementById('running').textContent) > 0")
    page.keyboard.press("Escape")
    page.wait_for_function("document.getElementById('stop').disabled")
    server.settle()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
        "it is wider than the screen"
    )
    assert problems == [] and elsewhere == []
    page.close()
