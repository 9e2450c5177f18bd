"""Every link in every Markdown file and notebook that points into this repository points at something."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.tables import markdown_files
from phases import ROOT

LINK = re.compile(
    r"(?<!\\)!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|<img[^>]+src=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)",
    re.M,
)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
CODE = re.compile(r"`[^`\n]*`")


def sources() -> list[Path]:
    return [*markdown_files(ROOT), *sorted((ROOT / "notebooks").glob("*.ipynb"))]


def text_of(path: Path) -> str:
    """Markdown of a file, without its code, in which brackets mean other things."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return CODE.sub("", FENCE.sub("", text))


def anchors(path: Path) -> set[str]:
    """Names that a link can end in after `#`: headings as GitHub spells them, and lines of code."""
    if path.suffix != ".md":
        return {
            f"L{line}"
            for line in range(1, len(path.read_text(encoding="utf-8").splitlines()) + 1)
        }
    found: set[str] = set()
    for heading in re.findall(
        r"^#+\s+(.+?)\s*$", FENCE.sub("", path.read_text(encoding="utf-8")), re.M
    ):
        plain = re.sub(
            r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "").replace("*", "")
        )
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        number = sum(
            name == slug or re.fullmatch(re.escape(slug) + r"-\d+", name) is not None
            for name in found
        )
        found.add(f"{slug}-{number}" if number else slug)
    return found


def broken(path: Path) -> list[str]:
    """The links in a file that point at nothing."""
    wrong = []
    for groups in LINK.findall(text_of(path)):
        link = next(group for group in groups if group)
        if re.match(r"[a-z][a-z+.-]*:", link):
            continue  # the web is not this test's business
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.exists():
            wrong.append(f"{link}: there is no {target}")
        elif anchor and file.is_file() and not known(anchor, anchors(file)):
            wrong.append(f"{link}: {file.name} has no {anchor}")
    return wrong


def known(anchor: str, there: set[str]) -> bool:
    return all(part in there for part in re.split(r"-(?=L\d)", anchor))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_point_at_something(path):
    assert broken(path) == []


def test_the_index_lists_every_document():
    index = ROOT / "docs" / "README.md"
    links = re.findall(r"\]\(([^)#]+\.md)\)", index.read_text(encoding="utf-8"))
    listed = {(index.parent / link).resolve() for link in links}
    there = {path for path in index.parent.rglob("*.md") if path != index}
    assert there <= listed, f"the index omits {sorted(path.name for path in there - listed)}"
