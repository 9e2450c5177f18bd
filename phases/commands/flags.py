"""Flags of an engine, made from the dataclasses that hold its options: none is written down twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from common.options import helps, names, types
from continuous.sizes import Sizes
from paged_cache.parts import PagedSizes
from phases import registry

Command = Callable[..., int]


def add_engine_flags(command: Command, *, limits: bool = False) -> None:
    """Give a command a flag for each option of an engine. What is given arrives in its `**options`.

    limits: and one for each limit of a server, and for its replicas.
    """
    signature = inspect.signature(command)
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ((_limits() if limits else {}) | _flags()).items()
        if name not in signature.parameters
    ]
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *flags])  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}


def _flags() -> dict[str, Any]:
    first = f"Engine, from phase {registry.ROWS:02d} on"
    flags = _of(Sizes, first)
    flags |= {
        name: flag
        for name, flag in _of(PagedSizes, f"Paged cache, from phase {registry.BLOCKS:02d} on").items()
        if name not in flags
    }
    for kind in registry.features().values():
        panel = f"{kind.name}, from phase {kind.phase:02d} on"
        what = inspect.getdoc(kind) or ""
        flags[kind.name] = _flag(kind.name, bool, what.split("\n")[0], panel)
        flags |= _of(kind, panel)
    return flags


def _limits() -> dict[str, Any]:
    from replicas.options import ReplicaOptions
    from serving.http.limits import Limits

    return _of(Limits, "Limits of the server") | _of(ReplicaOptions, "Replicas of the server")


def _of(kind: type, panel: str) -> dict[str, Any]:
    found, help = types(kind), helps(kind)
    return {name: _flag(name, found[name], help[name], panel) for name in names(kind)}


def _flag(name: str, kind: type, help: str, panel: str) -> Any:
    flag = name.replace("_", "-")
    spelled = f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}"
    return Annotated[kind | None, typer.Option(spelled, help=help, rich_help_panel=panel)]
