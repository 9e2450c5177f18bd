"""Write `phases/flags.json`, the flags of engines and servers, from the dataclasses that have the options."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args, get_type_hints

from common.files import whole
from common.http.limits import Limits
from common.options import names
from continuous.sizes import Sizes
from paged_cache import PagedSizes
from phases import PHASES, ROOT, Flag, phase_named, registry
from replicas.options import ReplicaOptions

TABLE = ROOT / "phases" / "flags.json"


def all_flags() -> list[Flag]:
    """Make every flag: those of a server first, then those of engines, in the order of their phases."""
    made = [*_of(Limits, "Limits of the server"), *_of(ReplicaOptions, "Replicas")]
    made += _of(Sizes, _panel(registry.ROWS), registry.ROWS)
    paged = _of(PagedSizes, _panel(registry.BLOCKS), registry.BLOCKS)
    made += [flag for flag in paged if flag.name not in names(Sizes)]
    for kind in registry.features(PHASES[-1]):
        appendix = "Appendix to " if kind.__module__.startswith("phases.appendix.") else ""
        panel = appendix + _panel(kind.phase)
        what = (inspect.getdoc(kind) or "").split("\n")[0]
        made.append(Flag(kind.name, "bool", what, panel, first=kind.phase))
        made += _of(kind, panel, kind.phase)
    return made


def _panel(number: int) -> str:
    return f"{phase_named(str(number)).title}, from phase {number:02d} on"


def _of(kind: type, panel: str, first: int = 0) -> list[Flag]:
    return [Flag(*option, panel, first) for option in described(kind)]


def described(kind: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and line of help of each option that the dataclass `kind` has.

    The type is int, float, bool or str: of `int | None` int, and of a `Literal` of strings str.
    """
    hints = get_type_hints(kind)
    for item in fields(kind):
        parts = [part for part in get_args(hints[item.name]) if part is not type(None)] or [
            hints[item.name]
        ]
        found = parts[0] if isinstance(parts[0], type) else type(parts[0])
        yield item.name, found.__name__, item.metadata.get("help", "")


def text() -> str:
    """Return what the table must be: one flag a line."""
    return "[\n" + ",\n".join(json.dumps(flag) for flag in all_flags()) + "\n]\n"


if __name__ == "__main__":
    with whole(TABLE) as scratch:
        scratch.write_text(text(), encoding="utf-8")
