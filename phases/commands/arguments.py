"""The arguments of several commands, and those of `run` and `serve` that are no option of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

# Groups of the help of `ladder run`.
PROMPT, SAMPLING, GRAMMAR, OUTPUT = (
    "What to complete",
    "How tokens are chosen",
    "What the output may be, from phase 12 on",
    "What is printed",
)


course_app = typer.Typer(
    help="Exercises: make a working copy, check it, ask for hints, grade it.", no_args_is_help=True
)
"""Its commands are added by `phases.commands.course`, which is imported when one is called."""


def flag(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option in a group of the help; without `names` it is spelled as its parameter."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def joined(values: Iterable[str] | None) -> str | None:
    """One text of a flag that was given several times, with the commas that it may have had at once."""
    return None if values is None else ",".join(values)


MODEL_HELP = "smollm2, gemma3-270m, a folder or a Hugging Face hub id"
PHASE_HELP = "1, 01, forward or 01_forward"
PhaseName = Annotated[str, typer.Argument(metavar="PHASE", help=PHASE_HELP)]
Model = Annotated[str, flag(MODEL_HELP)]
AnyModel = Annotated[str | None, flag(f"{MODEL_HELP}, or random:SHAPE")]
DeviceName = Annotated[str, flag("auto, cpu, cuda, cuda:INDEX or mps")]
DtypeName = Annotated[str, flag("auto, float32, bfloat16 or float16")]

PromptTexts = Annotated[
    list[str] | None, flag("text to continue; several times: several requests", panel=PROMPT, metavar="TEXT")
]
PromptsFile = Annotated[Path | None, flag("file with one prompt a line", panel=PROMPT)]
AsChat = Annotated[bool, flag("put prompts into the model's chat form", "--chat", panel=PROMPT)]
MaxTokens = Annotated[int, flag("most tokens to generate", panel=SAMPLING)]
Temperature = Annotated[
    float | None, flag("0 takes the most likely token each time", panel=SAMPLING, show_default="0")
]
TopK = Annotated[
    int | None, flag("sample among the k most likely tokens; 0: all", panel=SAMPLING, show_default="0")
]
TopP = Annotated[
    float | None,
    flag("sample among the most likely tokens up to this share", panel=SAMPLING, show_default="1"),
]
OwnSampling = Annotated[
    str,
    flag(
        "what holds where these say nothing: neutral (the most likely token), or model (its "
        "generation_config.json)",
        panel=SAMPLING,
    ),
]
Seed = Annotated[int | None, flag("makes sampling repeatable", panel=SAMPLING)]
SchemaFile = Annotated[Path | None, flag("file with a JSON schema that it obeys", panel=GRAMMAR)]
Regex = Annotated[str | None, flag("regular expression that it matches", panel=GRAMMAR)]
Choices = Annotated[
    list[str] | None,
    flag(
        "texts between commas, one of which it is; may be given several times", panel=GRAMMAR, metavar="TEXTS"
    ),
]
GrammarFile = Annotated[Path | None, flag("file with a Lark or GBNF grammar that derives it", panel=GRAMMAR)]
TraceMasks = Annotated[
    bool, flag("show each step's mask, and what the model would have said", "--trace", panel=GRAMMAR)
]
AsJson = Annotated[bool, flag("one JSON object instead of text", "--json", panel=OUTPUT)]
ShowStats = Annotated[
    bool, flag("also how many guesses were right, from phase 11 on", "--stats", panel=OUTPUT)
]
Verbose = Annotated[bool, flag("also where the memory goes", "--verbose", "-v", panel=OUTPUT)]

ServedModel = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}, or random:SHAPE")]
ServingPhase = Annotated[str, flag(f"whose engine: {PHASE_HELP}")]
Host = Annotated[str, flag("address to listen on; 0.0.0.0: all")]
Port = Annotated[int, flag("port to listen on; 0: any that is free")]
ApiKeys = Annotated[
    list[str] | None,
    flag("key that clients must send; several with commas; or LADDER_API_KEY, unseen by ps", metavar="KEY"),
]
ServedName = Annotated[str | None, flag("what clients call the model")]
Origins = Annotated[
    list[str] | None,
    flag(
        "whose web pages may ask from a browser, such as https://example.org; several with commas; "
        "*: anybody's",
        metavar="ORIGIN",
    ),
]
Hosts = Annotated[
    list[str] | None,
    flag(
        "names of this server beside localhost, --host and addresses, which alone are answered "
        "without a key; several with commas; *: any",
        metavar="HOST",
    ),
]
AccessLog = Annotated[str, flag("a file for a line of JSON a request, - or none")]
ServedSampling = Annotated[
    str,
    flag(
        "sampling where a request says nothing: model (its generation_config.json) or neutral "
        "(temperature 1, all tokens)"
    ),
]
