"""The arguments of `ladder run` and `ladder serve` that are no option of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = "smollm2, gemma3-270m, a folder or a Hugging Face hub id"

# Groups of the help of `ladder run`.
PROMPT, SAMPLING, GRAMMAR, OUTPUT = (
    "What to complete",
    "How tokens are chosen",
    "What the output may be, from phase 12 on",
    "What is printed",
)

PromptTexts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="text to continue; several times: several requests", rich_help_panel=PROMPT
    ),
]
PromptsFile = Annotated[Path | None, typer.Option(help="file with one prompt a line", rich_help_panel=PROMPT)]
AsChat = Annotated[
    bool, typer.Option("--chat", help="put prompts into the model's chat form", rich_help_panel=PROMPT)
]
MaxTokens = Annotated[int, typer.Option(help="most tokens to generate", rich_help_panel=SAMPLING)]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the most likely token each time", show_default="0", rich_help_panel=SAMPLING),
]
TopK = Annotated[
    int | None,
    typer.Option(
        help="sample among the k most likely tokens; 0: all", show_default="0", rich_help_panel=SAMPLING
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="sample among the most likely tokens up to this share",
        show_default="1",
        rich_help_panel=SAMPLING,
    ),
]
OwnSampling = Annotated[
    str,
    typer.Option(
        help="what holds where these say nothing: neutral (the most likely token), or model (its "
        "generation_config.json)",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[int | None, typer.Option(help="makes sampling repeatable", rich_help_panel=SAMPLING)]
SchemaFile = Annotated[
    Path | None, typer.Option(help="file with a JSON schema that it obeys", rich_help_panel=GRAMMAR)
]
Regex = Annotated[
    str | None, typer.Option(help="regular expression that it matches", rich_help_panel=GRAMMAR)
]
Choices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXTS",
        help="texts between commas, one of which it is; may be given several times",
        rich_help_panel=GRAMMAR,
    ),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(help="file with a Lark or GBNF grammar that derives it", rich_help_panel=GRAMMAR),
]
TraceMasks = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="show each step's mask, and what the model would have said",
        rich_help_panel=GRAMMAR,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="one JSON object instead of text", rich_help_panel=OUTPUT)
]
ShowStats = Annotated[
    bool,
    typer.Option(
        "--stats", help="also how many guesses were right, from phase 11 on", rich_help_panel=OUTPUT
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="also where the memory goes", rich_help_panel=OUTPUT)
]

ServedModel = Annotated[str, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}, or random:SHAPE")]
Host = Annotated[str, typer.Option(help="address to listen on; 0.0.0.0: all")]
Port = Annotated[int, typer.Option(help="port to listen on; 0: any that is free")]
ApiKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help="key that clients must send; several with commas; or LADDER_API_KEY, unseen by ps",
    ),
]
ServedName = Annotated[str | None, typer.Option(help="what clients call the model")]
Strict = Annotated[bool, typer.Option("--strict", help="refuse unknown fields of requests")]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="whose web pages may ask from a browser, such as https://example.org; several with commas; "
        "*: anybody's",
    ),
]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="HOST",
        help="names of this server beside localhost, --host and addresses, which alone are answered "
        "without a key; several with commas; *: any",
    ),
]
AccessLog = Annotated[str, typer.Option(help="a file for a line of JSON a request, - or none")]
TracesTo = Annotated[str | None, typer.Option(help="a collector's address for OpenTelemetry's spans")]
ServedSampling = Annotated[
    str,
    typer.Option(
        help="sampling where a request says nothing: model (its generation_config.json) or neutral "
        "(temperature 1, all tokens)"
    ),
]
