"""Error messages of libraries in one line."""

from __future__ import annotations

import re

from common.errors import brief

_DRAWN_REGEX = re.compile(
    r"""(?:invalid\ regex\ .*\ \(in\ regex\):\ )?
    regex\ parse\ error:\n
    \ {4}(?P<pattern>.*)\n
    \ {4}(?P<before>\ *)\^[\ ^]*\n
    (?:.*\n)*?error:\ (?P<why>.*)""",
    re.VERBOSE,
)
_LISTED_SOURCE = re.compile(r"(\n +\d+ \| .*)+(\n *\^+ *(?=\n|$))?")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")


def one_line(message: str) -> str:
    """Return a library's error message of several lines as one line that says where the error is.

    Libraries in Rust repeat the source and put `^` under the character. In its place comes a number, such
    as `unclosed group at character 3 of 'ab('`, or `line 2, character 4:` in a grammar; both count from 1.
    """

    def place(found: re.Match[str]) -> str:
        return f"{found['why']} at character {len(found['before']) + 1} of {brief(found['pattern'])}"

    message = _DRAWN_REGEX.sub(place, _LISTED_SOURCE.sub("", message))
    return " ".join(_PLACE.sub(r"line \1, character \2: ", message).split())
