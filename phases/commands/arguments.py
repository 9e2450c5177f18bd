"""Arguments that several commands have, and the functions that define arguments."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import typer

course_app = typer.Typer(
    help="Exercises: make a working copy, check it, ask for hints, grade it.",
    no_args_is_help=True,
)
"""Its commands are added by `phases.commands.course`, which is imported when one of them is called."""


def flag(default: Any, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Return a Typer option with a default and a help text, for a parameter's default value.

    names: spellings such as `--names`; none: spelled as its parameter. panel: the heading in the help under
    which it stands. more: further arguments of `typer.Option`.
    """
    return typer.Option(default, *names, help=help, rich_help_panel=panel, **more)


asking = partial(flag, panel="What to complete")
drawing = partial(flag, panel="How tokens are chosen")
masking = partial(flag, panel="What the output may be, from phase 12 on")
printing = partial(flag, panel="What is printed")


def joined(values: Iterable[str] | None) -> str | None:
    """Return the values of a repeated flag as one text, joined by commas; None if the flag was not given."""
    return None if values is None else ",".join(values)


MODEL_HELP = "smollm2, gemma3-270m, a folder or a Hugging Face hub id"
DEFAULTS_HELP = (
    "sampling where nothing is said: neutral, or model (its generation_config.json)"
)
PHASE_HELP = "1, 01, forward or 01_forward"
PhaseName = Annotated[str, typer.Argument(metavar="PHASE", help=PHASE_HELP)]
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
AnyModel = Annotated[str | None, typer.Option(help=f"{MODEL_HELP}, or random:SHAPE")]
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:INDEX or mps")]
DtypeName = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
