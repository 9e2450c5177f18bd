"""`make docs`: the lessons, notebooks and docstrings as a site in build/site/html, without network.

There is no second text. What the repository has is copied in its own order of folders; links to code become
links to pages that show it, and a page for each package shows its docstrings. Any warning is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "build" / "site"
SOURCE, HTML = SITE / "source", SITE / "html"
PAGES = (
    "*.md", "docs/*.md", "docs/log/*.md", "phases/*/*.md", "phases/appendix/*/*.md",
    "notebooks/*.md", "notebooks/*.ipynb", "benchmarks/*.md", "tests/*.md",
)  # fmt: skip
PICTURES = (".png", ".svg", ".gif")
LANGUAGES = {
    ".py": "python",
    ".json": "json",
    ".yaml": "yaml",
    ".toml": "toml",
    ".html": "html",
    ".css": "css",
    ".js": "javascript",
    ".sh": "bash",
}
# Code comes first, so that brackets in it are not taken for links.
LINK = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)|`[^`\n]*`(?!\]))"
    r"|(?P<image>!?)\[(?P<label>(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*)\]\(\s*(?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\s*\)",
    re.M | re.S,
)


class Stage:
    """The folder that Sphinx reads, filled."""

    def __init__(self) -> None:
        shutil.rmtree(SITE, ignore_errors=True)
        self.pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
        self.code: set[Path] = set()

    def fill(self) -> None:
        """Every page, the pictures and files that they link to, and the packages' docstrings."""
        for path in self.pages:
            text = path.read_text(encoding="utf-8")
            self.write(
                path,
                self.notebook(text, path)
                if path.suffix == ".ipynb"
                else self.linked(text, path),
            )
        for path in sorted(self.code):
            self.write(path.with_name(path.name + ".md"), shown(path))
        reference = list(self.reference())
        front = SOURCE / "README.md"
        front.write_text(
            front.read_text(encoding="utf-8") + self.contents(reference), encoding="utf-8"
        )

    def write(self, path: Path, text: str) -> None:
        """Put a page where `path` would be."""
        target = SOURCE / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def notebook(self, text: str, path: Path) -> str:
        """A notebook with its links made for the site."""
        book = json.loads(text)
        for cell in book["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = self.linked("".join(cell["source"]), path)
        return json.dumps(book)

    def linked(self, text: str, page: Path) -> str:
        """A page's text with its links made for the site."""

        def made(match: re.Match[str]) -> str:
            target = match["target"]
            if match["code"] is not None or not target or re.match(r"[a-z][a-z+.-]*:", target):
                return match[0]
            label = LINK.sub(made, match["label"])
            file = (page.parent / target).resolve()
            if file.is_dir():
                file, target = file / "README.md", f"{target.rstrip('/')}/README.md"
            if file in self.pages:
                return f"{match['image']}[{label}]({target}{match['anchor'] or ''})"
            if not file.is_file():
                return label  # a folder without a page
            if file.suffix in PICTURES:
                place = SOURCE / file.relative_to(ROOT)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
                return f"{match['image']}[{label}]({target})"
            self.code.add(file)
            return f"[{label}]({target}.md)"

        return LINK.sub(made, text)

    def reference(self) -> Iterator[str]:
        """A page for each package, with the docstrings of its modules; yields their names."""
        folders = [
            ROOT / "common",
            *sorted(path.parent for path in ROOT.glob("phases/[0-9]*/*/__init__.py")),
        ]
        for folder in folders:
            if folder.name == "tests":
                continue
            modules = [
                ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(
                    ".__init__"
                )
                for path in sorted(folder.rglob("*.py"))
            ]
            parts = [f"# `{folder.name}`: what its docstrings say\n"]
            for module in modules:
                parts.append(
                    f"## `{module}`\n\n```{{eval-rst}}\n.. automodule:: {module}\n```\n"
                )
            self.write(ROOT / "reference" / f"{folder.name}.md", "\n".join(parts))
            yield f"reference/{folder.name}"

    def contents(self, reference: list[str]) -> str:
        """The site's table of contents, for its side bar."""

        def names(*folders: str) -> list[str]:
            here = [path.relative_to(ROOT).with_suffix("") for path in self.pages]
            return [
                path.as_posix()
                for path in here
                if path.parts[0] in folders and path.name != "README"
            ]

        lessons = [
            path.relative_to(ROOT).with_suffix("").as_posix()
            for path in self.pages
            if "phases" in path.parts
        ]
        others = ["docs/README", "benchmarks/README", "tests/README"]
        top = [
            path.stem for path in self.pages if path.parent == ROOT and path.stem != "README"
        ]
        chapters = {
            "Lessons": lessons,
            "Notebooks": ["notebooks/README", *names("notebooks")],
            "More": [*names("docs"), *others, *top],
            "Reference": reference,
        }
        text = ""
        for caption, entries in chapters.items():
            listed = "\n".join(entries)
            text += f"\n\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {caption}\n\n{listed}\n```\n"
        return text


def shown(path: Path) -> str:
    """A page that shows a file."""
    language = LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT)
    return (
        f"---\norphan: true\n---\n# `{name}`\n\n"
        f"```{{literalinclude}} {os.path.relpath(path, SOURCE / name.parent)}\n"
        f":language: {language}\n:linenos:\n```\n"
    )


def main() -> int:
    """Build the site; the exit status of Sphinx."""
    Stage().fill()
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-j",
        "2",
        "-b",
        "html",
    ]
    code = subprocess.run(
        [*command, "-c", Path(__file__).parent, SOURCE, HTML], cwd=ROOT
    ).returncode
    if code == 0:
        (HTML / "index.html").write_text(
            '<meta http-equiv="refresh" content="0; url=README.html">\n'
        )
        print(HTML / "index.html")
    return code


if __name__ == "__main__":
    sys.exit(main())
