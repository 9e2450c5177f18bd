"""Sphinx's configuration: lessons, notebooks and docstrings as they are. `build.py` calls it."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The docstrings are those of this checkout, whichever one the environment was installed for.
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), *map(str, sorted((ROOT / "phases").glob("[0-9]*")))]

project = "Inference Ladder"
author = "the founders of Inference Ladder"
root_doc = "README"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
html_css_files = ["site.css"]
html_static_path = ["static"]
highlight_language = "text"  # of fences that name none: diagrams, and what a command prints
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Notebooks are shown as they were run and tested; building the site runs nothing and needs no network.
nb_execution_mode = "off"
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = [
    "myst.header",  # a lesson may go from a title to a third level
    "misc.highlighting_failure",  # an excerpt need not be a whole program
    "mystnb.unknown_mime_type",
    "ref.python",  # several classes have a field of one name
]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_use_type_comments = (
    False  # there are none, and looking for them parses a file for each function
)
# Every page copies the table of contents of all: with each function in it, that takes minutes.
toc_object_entries = False
autodoc_typehints_description_target = "documented"
autodoc_default_options = {
    "members": True,
    "undoc-members": False,
    "show-inheritance": True,
    "ignore-module-all": True,
}
# Words of the source would be set on `load`, one method of all phases, for each, without its first argument.
autodoc_preserve_defaults = False
# Extras that this environment may lack: their users' docstrings are shown all the same.
autodoc_mock_imports = [name for name in ("xgrammar", "ray") if find_spec(name) is None]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # an attribute is an object of its own where its class names it

SPAN = re.compile(r"(``.+?``|`[^`]+`)", re.S)
FIELD = re.compile(r"^(\w+(?:, \w+)*): (?=\S)")


def as_rst(text: str) -> str:
    """A docstring's plain text and `code` in the markup that autodoc reads."""
    parts = SPAN.split(listed(text))
    for i, part in enumerate(parts):
        if i % 2:
            span = part if part.startswith("``") else f"`{part}`"
            parts[i] = " ".join(span.split()) + (
                "\\ " if re.match(r"\w", parts[i + 1]) else ""
            )
        else:
            parts[i] = re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", part).replace(BULLET, "*")
    return "".join(parts)


BULLET = "\0"


def listed(text: str) -> str:
    """`name: what it is`, with its further lines indented, as a list."""
    lines, inside = [], False
    for line in text.split("\n"):
        field, before = FIELD.match(line), lines[-1].strip() if lines else ""
        if field and (inside or not before or before.endswith((".", ":"))):
            if before and not inside:
                lines.append("")
            lines.append(f"{BULLET} `{field[1]}`: {line[field.end() :]}")
            inside = True
        elif inside and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            if inside and line.strip():
                lines.append("")
            inside = False
            lines.append(line)
    return "\n".join(lines)


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's hook for a docstring: `lines` is changed in place."""
    lines[:] = as_rst("\n".join(lines)).split("\n")


def setup(app: Any) -> None:
    """Sphinx's hook for the start."""
    app.connect("autodoc-process-docstring", process, priority=0)
