"""The pictures in the lessons are what the engines do now, and nothing in them is cut or too small."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import pytest

from benchmarks.pictures import DRAWN, draw
from benchmarks.pictures.svg import WIDTH, Picture
from phases import ROOT, Phase
from prefix_cache.radix import Node, RadixIndex

SVG = "{http://www.w3.org/2000/svg}"
LETTER = 0.56
"""Of the size of a font, the width of a letter in the mean, in a wide font."""
BY_OTHERS = {"life"}
"""Pictures with a program of their own."""


def lesson(name: str) -> str:
    return (ROOT / "phases" / name / "README.md").read_text(encoding="utf-8")


def flaws(picture: Picture) -> Iterator[str]:
    """What is wrong with a picture for whoever looks at it."""
    root = ElementTree.fromstring(str(picture))
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    if width > WIDTH:
        yield f"it is {width} wide, and a lesson shows {WIDTH}"
    for name in ("title", "desc"):
        if not root.findtext(SVG + name):
            yield f"it has no {name}"
    for text in root.iter(SVG + "text"):
        size = float(text.get("font-size", "12"))
        long = LETTER * size * len(text.text or "")
        x, y = float(text.get("x", "0")), float(text.get("y", "0"))
        begin = (
            x
            - {"start": 0.0, "middle": long / 2, "end": long}[text.get("text-anchor", "start")]
        )
        if size < 11:
            yield f"{text.text!r} is written in size {size}"
        if begin < 0 or begin + long > width or not size <= y <= height:
            yield f"{text.text!r} leaves the panel: from {begin:.0f} to {begin + long:.0f}, at {y:.0f}"
    for rect in root.iter(SVG + "rect"):
        x, y, wide, high = (
            float(rect.get(name, "0")) for name in ("x", "y", "width", "height")
        )
        if x < 0 or y < 0 or x + wide > width or y + high > height:
            yield f"a rectangle at {x:.0f}, {y:.0f} leaves the panel"


@pytest.mark.parametrize("phase", DRAWN, ids=lambda phase: phase.name)
def test_pictures_are_what_the_engine_does(phase: Phase) -> None:
    drawn = draw(phase.package)
    text = lesson(phase.name)
    for name, picture in drawn.items():
        file = phase.folder / f"{name}.svg"
        kept = file.read_text(encoding="utf-8") if file.exists() else ""
        assert kept == str(picture), (
            f"{phase.name}: the engine does not do what {name}.svg shows; "
            f"python -m benchmarks.pictures {phase.number:02} draws it again"
        )
        assert f"]({name}.svg)" in text, f"the lesson of {phase.name} does not show {name}.svg"
        assert list(flaws(picture)) == [], f"{phase.name}: {name}.svg"
    left = {file.stem for file in phase.folder.glob("*.svg")} - set(drawn) - BY_OTHERS
    assert not left, f"{phase.name}: nobody draws {sorted(left)}"


def test_the_text_of_five_calls_is_what_the_tree_does() -> None:
    index = RadixIndex()

    def nodes() -> str:
        def says(node: Node) -> str:
            words = f"{b''.join(node.keys).decode()} {node.pins} pin{'s' * (node.pins != 1)}"
            below = " and ".join(says(child) for child in node.children.values())
            return f"{words}, below it {below}" if below else words

        (root,) = index.roots
        return " and ".join(says(child) for child in root.children.values())

    def keys(letters: str) -> list[bytes]:
        return [letter.encode() for letter in letters]

    first, _, _ = index.extend(index.attach([], ""), keys("abcd"), [0, 1, 2, 3])
    lines = ['extend(root, "abcd", [0, 1, 2, 3])'.ljust(38) + nodes()]
    second = index.attach(keys("ab"), "")
    lines.append('attach("ab")'.ljust(38) + nodes())
    second, _, _ = index.extend(second, keys("xy"), [4, 5])
    lines.append('extend(cursor 2, "xy", [4, 5])'.ljust(38) + nodes())
    index.detach(first)
    lines.append("detach(cursor 1)".ljust(38) + nodes())
    index.detach(second)
    freed = " ".join(map(str, index.evict(3)))
    lines.append("detach(cursor 2), evict(3)".ljust(38) + nodes() + f"; evicted: {freed}")
    assert "\n".join(lines) in lesson("08_prefix_cache")
