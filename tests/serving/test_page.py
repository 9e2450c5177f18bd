"""The page at `/`: one file that asks nobody else, and in a real browser a chat beside the live engine."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from phases.appendix.observability.live import PAGE, whole_page
from tests.servers import Running

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# It must not ask anybody anything by itself: tests run where there is no network.
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
QUIET += ["--disable-sync", "--no-first-run"]


def test_it_asks_nobody_else():
    text = whole_page().decode()
    assert text.endswith("</html>\n") and not re.search(r"/\* \w+\.(css|js) \*/", text), (
        "a part is missing"
    )
    assert not re.findall(
        r"""(?:src|href|url|import|fetch)\s*[=(]?\s*["'(]\s*(?:https?:)?//""", text
    )
    assert set(re.findall(r'ask\("([^"]+)"', text)) == {
        "v1/chat/completions",
        "events",
        "v1/models",
    }
    assert len(re.findall(r"fetch\(", text)) == 1, (
        "all goes through `ask`, which sends the key along"
    )
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), (
        "what a model says would be read as HTML"
    )


NODE = """
const nodes = [];
const make = (tag, name = "", text = "") => {
  const made = { tag, parts: [], append(...more) { this.parts.push(...more); }, addEventListener() {} };
  if (text) made.parts.push(text);
  return made;
};
const document = { createDocumentFragment: () => make("") };
const button = () => make("button"), copy = () => {};
const inner = (node) => node.parts.map(written).join("");
const written = (node) => typeof node === "string" ? node : `<${node.tag}>${inner(node)}</>`;
const lines = (text) => { let at = 0; return text.split("\\n").map((text) => ({ text, at: at++ })); };
const leaf = (text) => text ? [text] : [];
for (const text of JSON.parse(require("fs").readFileSync(0))) {
  const started = process.cpuUsage(), made = written(markdown(lines(text), leaf));
  const { user, system } = process.cpuUsage(started);
  console.log(JSON.stringify([(user + system) / 1e3, made]));
}
"""


def drawn(texts: list[str]) -> list[tuple[float, str]]:
    """Milliseconds of work, and nodes, of texts as Markdown, without a browser."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    source = (PAGE / "markdown.js").read_text(encoding="utf-8") + NODE
    found = subprocess.run(
        [node, "-e", source],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not found.stderr, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_markdown_takes_time_in_proportion_to_its_text():
    """A model in a loop writes such lines, and an answer is drawn ten times a second."""
    kinds = [
        "[",
        "*",
        "_",
        "`",
        "- ",
        "> ",
        "|",
        "[a](",
        "**a ",
        "_a ",
        "`a ",
        " ",
        "- a\n\n",
        "\\",
    ]
    texts = [kind * 16_000 for kind in kinds] + [
        "a | b\n" + "-" * 16_000,
        "- a" + "\n" * 16_000 + "  b",
    ]
    texts.append("|" + " " * 16_000 + "|\n|-|\n|" + "x " * 8_000 + "|")
    for text, (took, _) in zip(texts, drawn(texts), strict=True):
        assert took < 400, f"{text[:12]!r}... of {len(text)} characters takes {took:.0f} ms"


def test_markdown_is_read():
    bold, code, link, table, items = (nodes for _, nodes in drawn([
        "a **b *c*** d", "`` x`y `` and `z`", "[x](https://example.org/y) [z", "a|b\n-|:-:\n1|**2**",
        "- a\n\n- b\n  - c"]))  # fmt: skip
    assert bold == "<><p>a <strong>b <em>c</></> d</></>" or "<strong>b " in bold
    assert code == "<><p><code> x`y </> and <code>z</></></>"
    assert link == "<><p><a>x</> [z</></>"
    assert table.startswith(
        "<><table><tr><th>a</><th>b</></><tr><td>1</><td><strong>2</></></>"
    )
    assert items.count("<li>") == 3 and items.count("<ul>") == 2


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with Running("--max-rows", "8", "--drafter", "ngram", "--access-log", "none") as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    playwright.expect.set_options(timeout=30_000)  # a browser on a busy machine
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"there is no browser: none of {', '.join(BROWSERS)} is on PATH")
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(executable_path=path, args=QUIET)
        except Exception as error:  # some systems put a note how to get one under the name
            pytest.skip(f"{path} does not start: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def visit(server, browser):
    """Opens the page; at the end it must have had no errors, and asked only its server."""
    from playwright.sync_api import expect

    problems: list[str] = []
    opened = []

    def asked(url: str) -> None:
        if not url.startswith((server.url, "data:")):
            problems.append(f"the page has asked {url}")

    def visit(width: int = 1280, scheme: str = "light"):
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        opened.append(page)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: asked(request.url))
        page.goto(server.url)
        expect(page.locator("#state")).to_have_text("ready")
        return page

    yield visit
    for page in opened:
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (
            "the page is wider than the screen"
        )
        page.close()
    server.settle()
    assert problems == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_chat_in_a_browser(visit, width, scheme):
    from playwright.sync_api import expect

    page = visit(width, scheme)
    page.evaluate(
        "document.getElementById('seed').value = 1"
    )  # some first tokens end the answer
    page.keyboard.type("hello")  # the field has the focus
    page.keyboard.press("Enter")
    expect(page.locator("#speed")).to_contain_text("tokens")
    expect(page.locator(".turn.assistant")).to_have_count(1)
    page.evaluate("document.getElementById('max_tokens').value = 800")
    page.fill("#say", "again")
    page.press("#say", "Enter")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_disabled(timeout=20_000)
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#running")).to_have_text("0")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(247, 246, 243)" if scheme == "light" else "rgb(20, 20, 18)"
    )


def answers(page, *texts: str, marks: str = "") -> list[dict]:
    """Have a page's requests answered with these texts in turn; returns the list of their bodies."""
    asked: list[dict] = []

    def reply(route) -> None:
        asked.append(json.loads(route.request.post_data))
        text = texts[min(len(asked), len(texts)) - 1]
        pieces = [text[i : i + 5] for i in range(0, len(text), 5)]
        choices = [
            {
                "index": 0,
                "delta": {"content": it},
                "token_marks": [[it, marks if i % 2 else ""]],
            }
            for i, it in enumerate(pieces)
        ]
        chunks = [{"choices": [choice]} for choice in choices]
        chunks.append({"choices": [], "usage": {"completion_tokens": len(pieces)}})
        events = [*map(json.dumps, chunks), "[DONE]"]
        route.fulfill(
            content_type="text/event-stream", body="".join(f"data: {it}\n\n" for it in events)
        )

    page.route("**/v1/chat/completions", reply)
    return asked


def say(page, text: str, turns: int) -> None:
    """Send a message, and wait for so many messages of both in the conversation."""
    from playwright.sync_api import expect

    page.fill("#say", text)
    page.press("#say", "Enter")
    expect(page.locator("#speed")).to_contain_text("token")
    expect(page.locator(".turn")).to_have_count(turns)


MARKDOWN = """## A *title*

Some **bold**, `a < b`, [a link](https://a.example/x), [no link](javascript:alert) and snake_case_names.
The second line, with 2 * 3 * 4 and <b onclick="alert(1)">HTML</b>.

1. One:
   ```python
   if a:

       b = "<script>alert(1)</script>"
   ```
2. Two
   - inner **one**
   - inner two

> quoted

| name | value |
| --- | ---: |
| x | `1` |
"""


@pytest.mark.slow
def test_markdown_becomes_elements_and_never_html(visit):
    page = visit()
    answers(page, MARKDOWN, marks="draft")
    say(page, "all of it", 2)
    body = page.locator(".turn.assistant .body")
    for kind, texts in {
        "h3": ["A title"],
        "strong": ["bold", "one"],
        "p code": ["a < b"],
        "pre code": ['if a:\n\n    b = "<script>alert(1)</script>"\n'],
        "a": ["a link"],
        "ol > li > ul > li": ["inner one", "inner two"],
        "blockquote p": ["quoted"],
        "th": ["name", "value"],
        "td": ["x", "1"],
        "b, script, td script": [],
    }.items():
        assert (
            body.locator(kind).evaluate_all("all => all.map((it) => it.textContent)") == texts
        ), kind
    text = body.evaluate("it => it.textContent")
    assert (
        '<b onclick="alert(1)">HTML</b>' in text
        and "snake_case_names" in text
        and "2 * 3 * 4" in text
    )
    assert body.locator("a").get_attribute("href") == "https://a.example/x"
    tinted = body.locator("pre .draft").evaluate_all("all => all.map((it) => it.textContent)")
    pieces = [MARKDOWN[i : i + 5] for i in range(5, len(MARKDOWN), 10)]
    assert tinted and all(any(part in piece for piece in pieces) for part in tinted), (
        "tints have shifted"
    )


@pytest.mark.slow
def test_conversations_are_kept_in_the_browser(visit):
    from playwright.sync_api import expect

    page = visit()
    asked = answers(page, "first", "second", "third", "fourth")
    page.locator("summary").click()
    page.fill("#system", "Be short.")
    say(page, "one", 2)
    say(page, "two", 4)
    assert [it["content"] for it in asked[1]["messages"]] == [
        "Be short.",
        "one",
        "first",
        "two",
    ]
    page.locator(".assistant .tools button", has_text="Regenerate").last.click()
    expect(page.locator(".assistant .body").last).to_have_text("third")
    expect(page.locator("#stop")).to_be_disabled()  # before, nothing can be edited
    assert asked[2]["messages"] == asked[1]["messages"], (
        "the answer is no part of the question"
    )
    page.locator(".user .tools button", has_text="Edit").first.click()
    assert page.locator("#say").input_value() == "one"
    say(page, "other", 2)
    assert [it["content"] for it in asked[3]["messages"]] == ["Be short.", "other"]
    page.locator(".user .tools button", has_text="Edit").first.click()
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)  # the conversation that was open
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    page.select_option("#kept", label="other")
    assert page.locator(".turn .body").all_inner_texts() == ["other", "fourth"]
    assert page.locator("#system").input_value() == "Be short."
    page.click("#forget")
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.locator("#kept option")).to_have_count(1)


HALF_AN_ANSWER = """() => {
  const real = window.fetch;
  const event = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}';
  const start = (signal) => (stream) => {
    stream.enqueue(new TextEncoder().encode(event + String.fromCharCode(10, 10)));
    signal.addEventListener("abort", () => stream.error(signal.reason));
  };
  const half = (signal) => new Response(new ReadableStream({ start: start(signal) }));
  window.fetch = (path, options) => path.includes("chat")
    ? Promise.resolve(half(options.signal)) : real(path, options);
}"""


@pytest.mark.slow
def test_a_stopped_answer_says_so_also_after_a_reload(visit):
    from playwright.sync_api import expect

    page = visit()
    page.evaluate(HALF_AN_ANSWER)
    page.fill("#say", "hello")
    page.press("#say", "Enter")
    expect(page.locator(".turn.assistant .body")).to_have_text("half")
    page.keyboard.press("Escape")
    expect(page.locator(".turn.assistant .note")).to_have_text("Stopped before its end.")
    page.reload()
    expect(page.locator(".turn.assistant .note")).to_have_text("Stopped before its end.")


@pytest.mark.slow
def test_an_answer_that_max_tokens_cut_says_so(visit):
    from playwright.sync_api import expect

    page = visit()
    page.evaluate("document.getElementById('max_tokens').value = 3")
    page.evaluate("document.getElementById('seed').value = 1")
    say(page, "hello", 2)
    expect(page.locator(".turn.assistant .note")).to_have_text("Cut off at max_tokens.")


@pytest.mark.slow
def test_options_leave_room_and_a_wrong_schema_is_told_beside_its_field(visit):
    page = visit()
    page.locator("summary").click()
    page.fill("#schema", "{")
    page.fill("#say", "hello")
    page.press("#say", "Enter")
    assert "no JSON" in page.locator("#schema + *, label:has(#schema) + div").inner_text()
    box = page.locator("#talk").bounding_box()
    assert box["height"] > 200, f"the conversation has {box['height']} pixels"
    assert page.locator("#temperature").get_attribute("placeholder")
    assert page.locator("#temperature").input_value() == "", "the server's sampling is its own"


@pytest.mark.slow
def test_a_server_that_is_away_is_told_in_words_and_the_question_can_be_sent_again(visit):
    from playwright.sync_api import expect

    page = visit()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#say", "hello")
    page.press("#say", "Enter")
    expect(page.locator(".turn.error")).to_contain_text("The server cannot be reached")
    assert page.locator("#say").input_value() == "hello"
    page.unroute("**/v1/chat/completions")
    answers(page, "an answer")
    page.locator(".turn.error button", has_text="Try again").click()
    expect(page.locator(".turn.assistant .body")).to_have_text("an answer")
    expect(page.locator(".turn.error")).to_have_count(0)


@pytest.mark.slow
def test_a_narrow_screen_reaches_the_engine(visit):
    page = visit(390)
    assert page.locator("#running").bounding_box()["y"] < 800, "its first numbers are in view"
    page.locator("nav a", has_text="Engine").click()
    page.wait_for_function("document.getElementById('steps').getBoundingClientRect().y < 400")


@pytest.mark.slow
def test_a_page_without_its_server_is_grey(browser):
    from playwright.sync_api import expect

    with Running("--max-rows", "8", "--access-log", "none") as running:
        page = browser.new_page()
        page.goto(running.url)
        expect(page.locator("#state")).to_have_text("ready")
    expect(page.locator("#state")).to_have_text("not reached; trying again")
    expect(page.locator("#engine")).to_have_class("stale")
    page.close()


@pytest.mark.slow
def test_the_key_has_a_field(browser):
    from playwright.sync_api import expect

    with Running("--api-key", "secret", "--max-rows", "8", "--access-log", "none") as closed:
        page = browser.new_page()
        try:
            page.goto(closed.url)
            expect(page.locator("#state")).to_have_text("needs a key")
            assert (
                page.locator("#model").inner_text() == ""
                and page.locator("#total").inner_text() == ""
            )
            page.fill("#key", "wrong")
            page.press("#key", "Enter")
            expect(page.locator("#door_says")).to_contain_text("wrong")
            page.fill("#key", "secret")
            page.press("#key", "Enter")
            expect(page.locator("#state")).to_have_text("ready")
            expect(page.locator("#model")).not_to_be_empty()
            expect(page.locator("#door")).to_be_hidden()
            page.reload()
            expect(page.locator("#state")).to_have_text("ready")
            page.evaluate("document.getElementById('seed').value = 1")
            say(page, "hello", 2)
            assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
            page.goto(f"{closed.url}/docs")
            expect(page.locator("#routes")).to_contain_text("the key is missing")
            page.fill("#key", "secret")
            page.press("#key", "Enter")
            expect(page.locator("#routes")).to_contain_text("/v1/chat/completions")
        finally:
            page.close()
