"""The kit of all pictures: cells, words, and tables of them that find their own places, drawn as SVG.

A module says what stands in which line and column; sizes and places follow. Every item is a `Box`, a table
included, so tables stand in tables. Words alone are labels in the first column, and soft and centred
elsewhere. The panel is light on a dark page too, so there is one set of colours, and a request has the same
one in every picture.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat, zip_longest
from xml.sax.saxutils import escape

WIDTH = 760
"""The widest that a lesson shows."""
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
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
}
PALE = {
    "a": "#cfdff0",
    "b": "#f3dfbd",
    "c": "#cfe6d4",
    "d": "#e3d7ef",
    "e": "#f4d5cf",
}
"""Of a request, by its letter: what is computed now, and what was computed before."""

MARGIN = 16
LETTER, BOLD = 6.7, 7.4
"""Width of a letter in the mean."""
KINDS = ("now", "kept", "known", "coming", "free", "idle")
"""How a cell looks: computed in this step, computed before, known and not computed, its value still on its
way, empty, or work for no request."""
STYLES: Mapping[str, Mapping[str, str]] = {
    "bold": {"font_weight": "bold"},
    "soft": {"fill": SOFT},
    "mid": {"text_anchor": "middle"},
    "end": {"text_anchor": "end"},
    **{who: {"fill": colour} for who, colour in STRONG.items()},
}


class Picture:
    """What has been drawn so far. `str` makes a file of it, and a notebook shows it.

    Args:
        title: what it is, in a few words.
        says: what is to be seen, for readers who cannot see it.
    """

    def __init__(self, title: str, says: str, height: float, width: float) -> None:
        self.title = title
        self.words = f"<title>{escape(title)}</title>\n<desc>{escape(says)}</desc>"
        wide, high = _number(width), _number(height)
        self.size = f'width="{wide}" height="{high}" viewBox="0 0 {wide} {high}"'
        self._parts: list[str] = []
        self.add("rect", width=width, height=height, rx=10, fill=PAPER)

    def add(self, tag: str, words: str = "", /, **attributes: object) -> None:
        """An element of SVG with these attributes (`_` stands for `-`), and with words in it."""
        given = " ".join(
            f'{name.replace("_", "-")}="{_number(value)}"'
            for name, value in attributes.items()
        )
        self._parts.append(f"<{tag} {given}>{escape(words)}</{tag}>")

    def text(self, x: float, y: float, words: str, fill: str = INK) -> None:
        """Words whose baseline is at `y`, and whose middle at `x`."""
        self.add("text", words, x=x, y=y, text_anchor="middle", fill=fill)

    def arrow(self, points: Sequence[complex], colour: str) -> None:
        """An arrow from the first point to the last; two others between them pull at it."""
        places = [f"{_number(point.real)} {_number(point.imag)}" for point in points]
        through = f"{places[0]} {'C' if len(points) > 2 else 'L'}{' '.join(places[1:])}"
        self.add("path", d=f"M{through}", fill="none", stroke=colour)
        before, end = points[-2:]
        back = 7 * (before - end) / abs(before - end)
        corners = (end, end + back * (1 + 0.5j), end + back * (1 - 0.5j))
        head = " ".join(f"{_number(one.real)},{_number(one.imag)}" for one in corners)
        self.add("polygon", points=head, fill=colour)

    def __str__(self) -> str:
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {self.size} role="img" {FONT}>'
        return "\n".join([start, self.words, *self._parts, "</svg>\n"])

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return str(self)


def _number(value: object) -> str:
    return (
        f"{value + 0.0:.1f}".removesuffix(".0")
        if isinstance(value, int | float)
        else str(value)
    )


@dataclass(eq=False)
class Box:
    """A rectangle that knows its size, and where it stands once it is drawn.

    says: its words in the order of reading. parts: boxes in it, and where: right of and below its corner.
    align: where it stands in a wider column, from 0 (left) to 1 (right).
    """

    width: float = 0.0
    height: float = 0.0
    says: str = ""
    parts: Sequence[tuple[float, float, Box]] = ()
    align: float = 0.0
    x: float = 0.0
    y: float = 0.0

    def point(self, right: float, below: float) -> complex:
        """A point of the drawn box, by the share of its width and height."""
        return complex(self.x + right * self.width, self.y + below * self.height)

    def draw(self, on: Picture, x: float, y: float) -> None:
        """Draw it with its upper left corner at `x`, `y`."""
        self.x, self.y = x, y
        for right, below, part in self.parts:
            part.draw(on, x + right, y + below)


class Text(Box):
    """Words. style: `bold`, `soft` or a request's letter for a colour; `mid` or `end` of a column.

    width: that of its column, if the words may reach beyond it.
    """

    def __init__(self, words: str, style: str = "", width: float | None = None) -> None:
        self.styles = style.split()
        if width is None:
            width = len(words) * (BOLD if "bold" in self.styles else LETTER)
        align = 0.5 if "mid" in self.styles else float("end" in self.styles)
        super().__init__(width, 16, words, (), align)

    def draw(self, on: Picture, x: float, y: float) -> None:
        """Draw the words in their column."""
        more = {"fill": INK}
        for style in self.styles:
            more.update(STYLES[style])
        on.add("text", self.says, x=x + self.align * self.width, y=y + 12, **more)


class Cell(Box):
    """A cell with a few letters. look: one of `KINDS`, and whose it is (a letter)."""

    def __init__(
        self, words: str = "", look: str = "free", width: float = 38, height: float = 27
    ) -> None:
        super().__init__(width, height, words or look.partition(" ")[0])
        self.words, self.look = words, look

    def draw(self, on: Picture, x: float, y: float) -> None:
        """Draw the cell, a little smaller than its place."""
        super().draw(on, x, y)
        kind, _, who = self.look.partition(" ")
        strong, pale = STRONG.get(who, NEUTRAL), PALE.get(who, GREY)
        fill = {"now": strong, "kept": pale, "idle": GREY}.get(kind, PAPER)
        ink = {"now": PAPER, "coming": strong, "free": SOFT, "idle": SOFT}.get(kind, INK)
        stroke = LINE if kind in ("free", "idle") else strong
        size = {"width": self.width - 2, "height": self.height - 2}
        dash = {"stroke_dasharray": "3 2"} if kind == "coming" else {}
        on.add("rect", x=x + 1, y=y + 1, **size, rx=3, fill=fill, stroke=stroke, **dash)
        if self.words:
            on.text(x + self.width / 2, y + self.height / 2 + 4, self.words, ink)


class Dial(Box):
    """A circle with an arrow and a number for each angle, in radians."""

    def __init__(self, angles: Sequence[float]) -> None:
        super().__init__(170, 150)
        self.angles = angles

    def draw(self, on: Picture, x: float, y: float) -> None:
        """Draw the circle and its arrows."""
        centre = complex(x + 85, y + 75)
        on.add("circle", cx=x + 85, cy=y + 75, r=58, fill=PAPER, stroke=NEUTRAL)
        for at, angle in enumerate(self.angles):
            turn = cmath.rect(1, -angle)
            on.arrow([centre, centre + 56 * turn], STRONG["a"])
            words = centre + 70 * turn
            on.text(words.real, words.imag + 4, str(at))


class Graph(Box):
    """States as circles in a line, the first where one begins, and arrows with a letter between them.

    ends: of each state, whether one may end there: it has two circles. edges: from, to, letter.
    """

    def __init__(self, ends: Sequence[bool], edges: Iterable[tuple[int, int, str]]) -> None:
        self.ends, self.edges = ends, list(edges)
        says = "; ".join(f"from {a} {letter} leads to {b}" for a, b, letter in self.edges)
        super().__init__(110 * len(ends) - 20, 150, says)

    def draw(self, on: Picture, x: float, y: float) -> None:
        """Draw arrows to the next state straight, to other later ones above, to earlier ones below."""
        centres = [complex(x + 50 + 110 * state, y + 85) for state in range(len(self.ends))]
        on.arrow([complex(x + 5, y + 85), complex(x + 32, y + 85)], INK)
        for a, b, letter in self.edges:
            begin, end = centres[a], centres[b]
            third = (end - begin) / 3 or -25
            lift = 80j if b < a else -80j * abs(b - a - 1)
            first, last = begin + third + lift, end - third + lift
            end += 18 * (last - end) / abs(last - end)
            on.arrow([begin, first, last, end], INK)
            middle = (begin + 3 * first + 3 * last + end) / 8
            on.text(middle.real, middle.imag - 6, letter)
        for state, centre in enumerate(centres):
            for radius in (18, 14) if self.ends[state] else (18,):
                on.add(
                    "circle",
                    cx=centre.real,
                    cy=centre.imag,
                    r=radius,
                    fill=PAPER,
                    stroke=NEUTRAL,
                )
            on.text(centre.real, centre.imag + 4, str(state))


Item = Box | str | int
Lines = list[list[Item]]
Arrow = tuple[Box, Box, str]
"""From a box to another, in the colour of a request."""


def table(
    lines: Iterable[Iterable[Item]], gap: float = 0, down: float = 0, label: float = 12
) -> Box:
    """Lines of items; what stands in one column is as wide as the widest of it.

    gap: between two columns, but `label` behind the first. down: between two lines.
    """
    boxes = [[_box(at, item) for at, item in enumerate(line)] for line in lines]
    columns = zip_longest(*boxes, fillvalue=Box())
    widths = [max(box.width for box in column) for column in columns]
    parts: list[tuple[float, float, Box]] = []
    y = right = 0.0
    for line in boxes:
        x = 0.0
        high = max(box.height for box in line)
        for at, box in enumerate(line):
            parts.append(
                (x + box.align * (widths[at] - box.width), y + (high - box.height) / 2, box)
            )
            right = max(right, x + widths[at])
            x += widths[at] + (gap if at else label)
        y += high + down
    says = [" ".join(box.says for box in line if box.says) for line in boxes]
    return Box(right, y - down, "; ".join(filter(None, says)), parts)


def _box(column: int, item: Item) -> Box:
    return item if isinstance(item, Box) else Text(str(item), "mid soft" if column else "end")


def row(*items: Item, gap: float = 0) -> Box:
    """Items beside each other."""
    return table([items or (Box(),)], gap, label=gap)


def cells(
    words: Iterable[object], looks: Sequence[str], width: float = 38, height: float = 27
) -> Box:
    """Cells beside each other; a last look goes for all that are left."""
    pairs = zip(words, chain(looks, repeat(looks[-1] if looks else "")), strict=False)
    return row(*(Cell(str(word), look, width, height) for word, look in pairs))


def strip(name: str, who: str, **counts: int) -> Box:
    """Tokens of a request, numbered from 0: so many that look like this, then so many like that."""
    looks = [f"{how} {who}" for how, count in counts.items() for _ in range(count)]
    return cells([f"{name}{token}" for token in range(len(looks))], looks)


def column(*items: Item, gap: float = 6) -> Box:
    """Items below each other."""
    return table([[item] for item in items], down=gap)


def titled(title: str, *items: Item) -> Box:
    """Items below a bold title."""
    return column(Text(title, "bold"), *items)


def track(places: Iterable[tuple[float, Box]]) -> Box:
    """Boxes at these distances from the left."""
    parts = [(right, 0.0, box) for right, box in places]
    width = max(right + box.width for right, _, box in parts)
    high = max(box.height for _, _, box in parts)
    return Box(width, high, " ".join(box.says for _, _, box in parts), parts)


def _legend(entry: str) -> Box:
    look, _, words = entry.partition(": ")
    if look.split()[0] in KINDS:
        return row(Cell("", look, 18, 15), Text(words, "soft"), gap=6)
    return Text(entry, "soft")


def picture(
    title: str, *items: Box | str, arrows: Iterable[Arrow] = (), across: bool = False
) -> Picture:
    """Draw boxes below each other, a legend, and arrows between some of the boxes.

    items: boxes, then strings for the legend: a look and what it means, `now a: computed in this step`, or
        only words. arrows: from a box to one below it, or to one right of it if they go `across`.
    """
    boxes = [item for item in items if isinstance(item, Box)]
    entries = [_legend(item) for item in items if isinstance(item, str)]
    if entries:
        boxes.append(row(*entries, gap=20))
    body = column(*boxes, gap=16)
    sheet = Picture(title, body.says, body.height + 2 * MARGIN, body.width + 2 * MARGIN)
    body.draw(sheet, MARGIN, MARGIN)
    for a, b, who in arrows:
        if across:
            begin, end = a.point(1, 0.5), b.point(0, 0.5)
            bend = complex((end - begin).real / 2)
        else:
            begin, end = a.point(0.5, 1), b.point(0.5, 0)
            bend = complex(0, (end - begin).imag / 2)
        sheet.arrow([begin, begin + bend, end - bend, end], STRONG.get(who, SOFT))
    return sheet
