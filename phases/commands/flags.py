"""Flags of an engine, made from the dataclasses that hold its options: none is written down twice.

The classes are in packages that import PyTorch: two seconds, for a list of names. So the list is
kept in the cache folder, and made again when a file of a phase has changed.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import typer

from common.errors import UserError
from common.files import whole
from common.options import described, names
from common.paths import cache_home
from phases import PHASES, ROOT

Command = Callable[..., int]
KINDS: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str)}


class Flag(NamedTuple):
    """One flag.

    kind: the name of its type.
    first: the first phase whose engine has it; 0 for one of a server.
    """

    name: str
    kind: str
    help: str
    panel: str
    first: int = 0


def add_engine_flags(command: Command, *, server: bool = False) -> None:
    """Give a command a flag for each option of an engine. What is given arrives in its `**options`.

    server: and one for each limit of a server, and for its replicas.
    """
    signature = inspect.signature(command)
    flags = [
        inspect.Parameter(
            flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_typer(flag)
        )
        for flag in all_flags()
        if flag.name not in signature.parameters and (server or flag.first)
    ]
    parameters = [*signature.parameters.values(), *flags]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}


def all_flags() -> list[Flag]:
    """Return every flag: those of a server first, then the phases' in order.

    They are read from the cache, unless a phase has changed since, or the registry is imported anyway and may
    know of features that no file has.
    """
    if "phases.registry" in sys.modules:
        return _made()
    key, path = _key(), cache_home() / "flags.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["key"] == key:
            return [Flag(*flag) for flag in kept["flags"]]
    made = _made()
    with suppress(UserError), whole(path) as scratch:
        scratch.write_text(json.dumps({"key": key, "flags": made}))
    return made


def _key() -> list[str | int]:
    """The checkout, and the number and the times of the files that a flag may come from."""
    changes = [path.stat().st_mtime_ns for path in (ROOT / "phases").rglob("*.py")]
    return [str(ROOT), len(changes), sum(changes)]


def _made() -> list[Flag]:
    from continuous.sizes import Sizes
    from paged_cache.builder import PagedSizes
    from phases import registry
    from replicas.options import ReplicaOptions
    from serving.http.limits import Limits

    made = [*_of(Limits, "Limits of the server"), *_of(ReplicaOptions, "Replicas")]
    made += _of(Sizes, _panel(registry.ROWS), registry.ROWS)
    paged = _of(PagedSizes, _panel(registry.BLOCKS), registry.BLOCKS)
    made += [flag for flag in paged if flag.name not in names(Sizes)]
    for kind in registry.features().values():
        appendix = "Appendix to " if kind.__module__.startswith("phases.appendix.") else ""
        panel = appendix + _panel(kind.phase)
        what = (inspect.getdoc(kind) or "").split("\n")[0]
        made.append(Flag(kind.name, "bool", what, panel, first=kind.phase))
        made += _of(kind, panel, kind.phase)
    return made


def _panel(number: int) -> str:
    return f"{PHASES[number - 1].title}, from phase {number:02d} on"


def _of(kind: type, panel: str, first: int = 0) -> list[Flag]:
    return [Flag(*option, panel, first) for option in described(kind)]


def _typer(flag: Flag) -> Any:
    spelled = "--" + flag.name.replace("_", "-")
    if flag.kind == "bool":
        spelled += "/--no-" + spelled[2:]
    kind: Any = KINDS[flag.kind]
    return Annotated[
        kind | None, typer.Option(spelled, help=flag.help, rich_help_panel=flag.panel)
    ]
