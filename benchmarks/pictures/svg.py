"""A picture: cells, words and arrows on a white panel, as SVG.

Everything is placed by its caller, in units of which 760 are the widest a lesson shows. The panel is light on
a dark page too, so there is one set of colours, and a request has the same one in every picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal
from xml.sax.saxutils import escape

WIDTH = 760
INK = "#23211e"
SOFT = "#6d6962"
LINE = "#ddd7cc"
PAPER = "#fffefc"
GREY = "#ebe7df"
NEUTRAL = "#5b564e"
STRONG = {
    "a": "#2a65a0",
    "b": "#a8650f",
    "c": "#37794a",
    "d": "#7a4f9e",
    "e": "#ad4536",
    "f": "#22757d",
}
PALE = {
    "a": "#cfdff0",
    "b": "#f3dfbd",
    "c": "#cfe6d4",
    "d": "#e3d7ef",
    "e": "#f4d5cf",
    "f": "#cbe6e8",
}
"""Of a request, by its letter: what is computed now, and what was computed before."""

Kind = Literal["now", "kept", "known", "coming", "free", "idle"]
"""How a cell looks: computed in this step, computed before, known and not computed, its value still on its
way, empty, or work for no request."""
Anchor = Literal["start", "middle", "end"]


class Picture:
    """What has been drawn so far. `str` makes a file of it, and a notebook shows it.

    Args:
        title: what it is, in a few words.
        says: what is to be seen, for readers who cannot see it.
    """

    def __init__(self, title: str, says: str, height: float, width: float = WIDTH) -> None:
        self.title = title
        self.says = says
        self.width = width
        self.height = height
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, wide: float, high: float, fill: str, stroke: str = ""
    ) -> None:
        """A plain rectangle with round corners."""
        more: dict[str, object] = {"stroke": stroke} if stroke else {}
        self._add("rect", x=x, y=y, width=wide, height=high, rx=3, fill=fill, **more)

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str) -> None:
        """A circle around a point."""
        self._add("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke)

    def cell(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        kind: Kind,
        who: str = "a",
        words: str = "",
    ) -> None:
        """A cell of request `who` (a letter), with a few letters in it."""
        strong, pale = STRONG.get(who, NEUTRAL), PALE.get(who, GREY)
        fill, stroke, ink = {
            "now": (strong, strong, "#ffffff"),
            "kept": (pale, strong, INK),
            "known": (PAPER, strong, INK),
            "coming": (PAPER, strong, strong),
            "free": (PAPER, LINE, SOFT),
            "idle": (GREY, LINE, SOFT),
        }[kind]
        dash = {"stroke_dasharray": "3 2"} if kind == "coming" else {}
        self._add(
            "rect",
            x=x + 1,
            y=y + 1,
            width=wide - 2,
            height=high - 2,
            rx=3,
            fill=fill,
            stroke=stroke,
            **dash,
        )
        if words:
            self.text(x + wide / 2, y + high / 2 + 4, words, "middle", ink)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: Anchor = "start",
        fill: str = INK,
        size: float = 12,
        *,
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Words whose baseline is at `y`."""
        more: dict[str, object] = {"font_size": size} if size != 12 else {}
        if bold:
            more["font_weight"] = "bold"
        if mono:
            more["font_family"] = "monospace"
        self._add("text", words, x=x, y=y, text_anchor=anchor, fill=fill, **more)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str = SOFT,
        *,
        tip: bool = False,
        dash: str = "",
    ) -> None:
        """A line through these points; with `tip` an arrow."""
        path = " L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        more: dict[str, object] = {"stroke_dasharray": dash} if dash else {}
        self._add("path", d="M" + path, fill="none", stroke=colour, **more)
        if tip:
            self._tip(points[-2], points[-1], colour)

    def curve(
        self, begin: tuple[float, float], end: tuple[float, float], colour: str = SOFT
    ) -> None:
        """An arrow that leaves downwards and arrives from above."""
        (x0, y0), (x1, y1) = begin, end
        middle = (y0 + y1) / 2
        path = " ".join(map(_number, (x0, middle, x1, middle, x1, y1 - 6)))
        self._add(
            "path", d=f"M{_number(x0)} {_number(y0)} C{path}", fill="none", stroke=colour
        )
        self._tip((x1, y1 - 1), (x1, y1), colour)

    def loop(self, x: float, y: float, colour: str = SOFT) -> None:
        """An arrow out of the lower side of a circle of radius 18 around a point, and back into it."""
        path = " ".join(map(_number, (x - 40, y + 54, x + 40, y + 54, x + 14, y + 22)))
        self._add(
            "path",
            d=f"M{_number(x - 9)} {_number(y + 16)} C{path}",
            fill="none",
            stroke=colour,
        )
        self._tip((x + 19, y + 30), (x + 9, y + 16), colour)

    def _tip(self, before: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        """The head of an arrow that comes from `before`; arrows may be level, upright or oblique."""
        (x0, y0), (x1, y1) = before, end
        far = math.hypot(x1 - x0, y1 - y0)
        dx, dy = 7 * (x1 - x0) / far, 7 * (y1 - y0) / far
        corners = (
            (x1, y1),
            (x1 - dx - dy / 2, y1 - dy + dx / 2),
            (x1 - dx + dy / 2, y1 - dy - dx / 2),
        )
        self._add(
            "path",
            d="M" + " L".join(f"{_number(x)} {_number(y)}" for x, y in corners) + " z",
            fill=colour,
        )

    def legend(
        self, x: float, y: float, entries: Sequence[tuple[Kind, str, str]], gap: float = 18
    ) -> None:
        """Each a small cell (kind, request) and what it means, in one line that begins at `x`."""
        for kind, who, words in entries:
            self.cell(x, y - 11, 18, 15, kind, who)
            self.text(x + 24, y + 1, words, fill=SOFT)
            x += 24 + 6.8 * len(words) + gap

    def _add(self, tag: str, words: str = "", /, **attributes: object) -> None:
        given = "".join(
            f' {name.replace("_", "-")}="{_number(value) if isinstance(value, int | float) else value}"'
            for name, value in attributes.items()
        )
        self._parts.append(
            f"<{tag}{given}>{escape(words)}</{tag}>" if words else f"<{tag}{given}/>"
        )

    def __str__(self) -> str:
        size = f'width="{_number(self.width)}" height="{_number(self.height)}"'
        view = f'viewBox="0 0 {_number(self.width)} {_number(self.height)}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img" '
                'font-family="system-ui, sans-serif" font-size="12">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.says)}</desc>",
                f'<rect width="{_number(self.width)}" height="{_number(self.height)}" rx="10" '
                f'fill="{PAPER}"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return str(self)


def _number(value: float) -> str:
    return f"{value + 0.0:.1f}".removesuffix(".0")
