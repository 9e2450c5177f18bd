"""Command line flags of an engine, made from its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from phases import Flag, flags

Command = Callable[..., int]
KINDS: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str)}


def add_engine_flags(command: Command, *, server: bool = False) -> None:
    """Add a flag to a command, in place, for each option of an engine.

    The values arrive in the command's `**options`. server: also add a flag for each limit of a server, and
    for its replicas.
    """
    signature = inspect.signature(command)
    made = [
        inspect.Parameter(
            flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_typer(flag)
        )
        for flag in flags()
        if flag.name not in signature.parameters and (server or flag.first)
    ]
    parameters = [*signature.parameters.values(), *made]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in made}


def _typer(flag: Flag) -> Any:
    spelled = "--" + flag.name.replace("_", "-")
    if flag.kind == "bool":
        spelled += "/--no-" + spelled[2:]
    kind: Any = KINDS[flag.kind]
    return Annotated[
        kind | None, typer.Option(spelled, help=flag.help, rich_help_panel=flag.panel)
    ]
