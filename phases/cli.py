"""The `ladder` command and its arguments.

Each command's work is in `phases.commands`, and imported when it is called: `ladder --help` must not wait for
PyTorch. What happens when something is wrong is in `phases.process`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from common.console import err
from common.environment import limit_threads_and_noise
from common.errors import UserError
from common.interrupts import INTERRUPTED
from common.neighbours import usage
from phases import EXTRAS, find_phase, flags, need_checkout
from phases.commands import arguments as a
from phases.commands.arguments import PHASE_HELP, flag
from phases.process import exit_code

BEGUN = usage()
"""Counters of the processors before arguments are read, which takes long enough to see if others use them."""
app = typer.Typer(
    name="ladder",
    help="A language model inference engine in runnable phases.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(a.course_app, name="course")


def _print_version(wanted: bool) -> None:
    if wanted:
        from phases.commands.plain import line

        print(line())
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="print versions and exit", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """A language model inference engine in runnable phases."""


MEASURING = ("bench", "profile")
"""Commands that are to have the machine for themselves: their threads spin."""
EXTRAS_HELP = ", ".join(EXTRAS)
LOADING = {
    "run": "Loading {model} for phase {phase}",
    "demo": "Loading {model}",
    "profile": "Loading phase {phase}",
    "bench": "Loading the benchmark {what}",
}
"""Command -> the line that a terminal shows at once, since importing PyTorch takes seconds."""
HELP_ALL = "--help-all"
EPILOG = f"{HELP_ALL} shows all options; behind a phase, those of that phase."
SHORT_HELP = {
    "run": "model prompt prompts_file chat max_tokens temperature seed device as_json verbose help",
    "serve": "host port api_key name phase max_len cache_bytes access_log device dtype help",
}
"""Command -> its options that `--help` shows."""


def command(
    target: str, *, checkout: bool = False
) -> Callable[[Callable[..., None]], Callable[..., int]]:
    """Return a decorator that makes a CLI command of a function whose signature and docstring are its help.

    target: the function that does the work, such as `phases.commands.run:run`. It gets the arguments as one
        namespace, after `early.check` has refused what can be refused without PyTorch. Flags of an engine,
        which `main` adds to some commands, are in its `options`.
    checkout: whether the command needs lessons, benchmarks or evidence, which are files of a checkout.
    """

    def made(function: Callable[..., None]) -> Callable[..., int]:
        signature = inspect.signature(function, eval_str=True)
        name = function.__name__.rstrip("_")
        own = [
            p
            for p in signature.parameters.values()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]

        @wraps(function)
        def call(**given: Any) -> int:
            from phases.commands import early

            if checkout:
                need_checkout(name)
            asked = SimpleNamespace(**{each.name: given.pop(each.name) for each in own})
            asked.options = {name: value for name, value in given.items() if value is not None}
            early.check(asked)
            if function.__name__ in LOADING and err.is_terminal:
                err.print(f"[dim]{LOADING[function.__name__].format(**vars(asked))} ...[/dim]")
            measuring = function.__name__ in MEASURING
            # Before PyTorch is imported.
            limit_threads_and_noise(measuring=measuring, begun=BEGUN)
            code: int = resolve_name(target)(asked)
            return code

        call.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return app.command(name, epilog=EPILOG if name in SHORT_HELP else None)(call)

    return made


@command("phases.commands.plain:list_phases")
def list_(
    names: Annotated[bool, flag("only the names, one a line", "--names")] = False,
) -> None:
    """List the phases, with measured gains where there is evidence."""


@command("phases.commands.doctor:run")
def doctor() -> None:
    """Print what this machine has, how fast it is, which phases run natively here, and how to get the
    rest.
    """


@command("phases.commands.plain:fetch")
def fetch(
    model: Annotated[
        str, typer.Argument(metavar="[smollm2|gemma3-270m|HUB_ID]", help=a.MODEL_HELP)
    ] = "smollm2",
) -> None:
    """Download a model (and convert it, if it is one of the bundled two)."""


asking = partial(flag, panel="What to complete")
drawing = partial(flag, panel="How tokens are chosen")
masking = partial(flag, panel="What the output may be, from phase 12 on")
printing = partial(flag, panel="What is printed")


@command("phases.commands.run:run")
def run(
    phase: a.PhaseName,
    model: a.Model = "smollm2",
    prompt: Annotated[
        list[str] | None,
        asking("question or text; repeat the option for several requests", metavar="TEXT"),
    ] = None,
    prompts_file: Annotated[Path | None, asking("file with one prompt a line")] = None,
    chat: Annotated[
        bool | None,
        asking(
            "prompts are questions of a chat, or text to continue; by default a chat if the model has a "
            "chat template",
            "--chat/--no-chat",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[int, drawing("most tokens to generate")] = 128,
    temperature: Annotated[
        float | None,
        drawing("randomness of the choice; 0: always the most likely token", show_default="0"),
    ] = None,
    top_k: Annotated[
        int | None, drawing("sample among the k most likely tokens; 0: all", show_default="0")
    ] = None,
    top_p: Annotated[
        float | None,
        drawing(
            "sample among the most likely tokens whose probabilities reach this sum",
            show_default="1",
        ),
    ] = None,
    generation_config: Annotated[str, drawing(a.DEFAULTS_HELP)] = "neutral",
    seed: Annotated[
        int | None,
        drawing("seed of the random numbers, which makes sampling repeatable; -1: none"),
    ] = None,
    json_schema: Annotated[
        Path | None, masking("file with a JSON schema that the output must obey")
    ] = None,
    regex: Annotated[
        str | None, masking("regular expression that the whole output must match")
    ] = None,
    choice: Annotated[
        list[str] | None,
        masking(
            "texts with commas between them, of which the output is one; may be repeated",
            metavar="TEXTS",
        ),
    ] = None,
    grammar: Annotated[
        Path | None, masking("file with a Lark or GBNF grammar of the output")
    ] = None,
    trace: Annotated[
        bool, masking("show each step's mask, and the model's most likely tokens", "--trace")
    ] = False,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    as_json: Annotated[bool, printing("one JSON object instead of text", "--json")] = False,
    stats: Annotated[
        bool, printing("also how many drafts were accepted, from phase 11 on", "--stats")
    ] = False,
    verbose: Annotated[
        bool, printing("also how the memory is divided", "--verbose", "-v")
    ] = False,
    **options: Any,
) -> None:
    """Generate text with one phase."""


@command("phases.commands.serve:run")
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help=f"{a.MODEL_HELP}, or random:SHAPE")
    ] = "smollm2",
    host: Annotated[str, flag("address to listen on; 0.0.0.0: all")] = "127.0.0.1",
    port: Annotated[int, flag("port to listen on; 0: any that is free")] = 8000,
    api_key: Annotated[
        list[str] | None,
        flag(
            "key that clients must send; several with commas; LADDER_API_KEY is not shown by ps",
            metavar="KEY",
        ),
    ] = None,
    name: Annotated[str | None, flag("name by which clients call the model")] = None,
    allowed_origins: Annotated[
        list[str] | None,
        flag(
            "origin whose web pages may send requests, such as https://example.org; several with commas; "
            "*: any",
            metavar="ORIGIN",
        ),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        flag(
            "names of this server beside localhost, --host and addresses, which alone are answered "
            "without a key; several with commas; *: any",
            metavar="HOST",
        ),
    ] = None,
    access_log: Annotated[
        str,
        flag("file that gets a line of JSON for each request; -: standard output; or none"),
    ] = "-",
    generation_config: Annotated[str, flag(a.DEFAULTS_HELP)] = "model",
    phase: Annotated[str, flag(f"phase of the engine, from 04 on: {PHASE_HELP}")] = "13",
    device: a.DeviceName = "auto",
    prefill_device: Annotated[
        str | None,
        flag(
            "device of a second engine that computes prompts, from phase 19 on; their blocks go through "
            "--disk-folder"
        ),
    ] = None,
    dtype: a.DtypeName = "auto",
    **options: Any,
) -> None:
    """Serve a model to OpenAI's clients, with a page to look at."""


@command("benchmarks.loadtest.command:run", checkout=True)
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="such as http://127.0.0.1:8000")],
    users: Annotated[
        list[str] | None,
        flag("number of users, each with one request at a time; several numbers with commas"),
    ] = None,
    rate: Annotated[
        float | None, flag("requests a second, sent without waiting for responses")
    ] = None,
    workload: Annotated[
        str, flag("name of the workload; see benchmarks/workloads.py")
    ] = "continuous_batching-small",
    requests: Annotated[
        int | None,
        flag("number of requests; by default all of the workload, or twice the users"),
    ] = None,
    vocab: Annotated[int, flag("token ids of the prompts are below this")] = 10_000,
    processes: Annotated[int, flag("client processes")] = 4,
    api_key: Annotated[str, flag("the server's key")] = "",
    first_ms: Annotated[
        float, flag("milliseconds within which a good request's first token comes")
    ] = 2000.0,
    gap_ms: Annotated[
        float, flag("milliseconds that 99 % of a good request's token gaps do not exceed")
    ] = 100.0,
    json: Annotated[Path | None, flag("file for the results, as JSON", "--json")] = None,
) -> None:
    """Send a server the requests of many users, and print how long they had to wait."""


@command("phases.commands.demo:run")
def demo(
    model: a.Model = "smollm2", device: a.DeviceName = "auto", dtype: a.DtypeName = "auto"
) -> None:
    """Answer the same questions with every phase that can, and compare their speeds."""


@command("benchmarks.bench_command:bench", checkout=True)
def bench(
    what: Annotated[
        str,
        typer.Argument(metavar="PHASE", help=f"{PHASE_HELP}; beside the phases {EXTRAS_HELP}"),
    ],
    quick: Annotated[
        bool, flag("a short look: one sample on smaller workloads", "--quick")
    ] = False,
    record: Annotated[
        bool, flag("replace the repository's evidence and figure; else: the cache", "--record")
    ] = False,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    model: a.AnyModel = None,
    repeats: Annotated[int | None, flag("timed samples of each variant")] = None,
) -> None:
    """Measure a phase against the one before it, beside the recorded evidence; write evidence and figure."""


@command("benchmarks.profile_command:run", checkout=True)
def profile(
    phase: a.PhaseName,
    model: a.AnyModel = None,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    batch: Annotated[int | None, flag("prompts at a time")] = None,
    context: Annotated[int | None, flag("tokens of each prompt")] = None,
    steps: Annotated[int | None, flag("decode steps after the prefill")] = None,
    output: Annotated[
        Path | None, flag("folder for the trace; by default build/profile")
    ] = None,
) -> None:
    """Show the kernels of a phase's steps, and write a trace for chrome://tracing or Perfetto."""


@command("benchmarks.bench_command:plot", checkout=True)
def plot(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[PHASE]", help=f"only the figures of this phase, or of {EXTRAS_HELP}"
        ),
    ] = None,
) -> None:
    """Draw all figures and fill in all tables again, from the evidence alone."""


WITH_ENGINE_FLAGS = {"run": run, "serve": serve}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its code. arguments: None: those of `sys.argv`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(exit_code(lambda: _call(given)))


def _hidden(command: str, given: Sequence[str], options: Sequence[str]) -> set[str]:
    """Return the names of options that a command's help does not show.

    These are all but the short list in `SHORT_HELP`; with `--help-all` those of phases later than the given
    one.
    given: the words of the command line. options: names of all options of the command.
    """
    if HELP_ALL not in given:
        return set(options) - set(SHORT_HELP[command].split())
    phase = next(filter(None, map(find_phase, given)), None)
    return {flag.name for flag in flags() if phase is not None and flag.first > phase.number}


def _call(given: Sequence[str]) -> int:
    named = next((word for word in given if not word.startswith("-")), "")
    if named in WITH_ENGINE_FLAGS:
        from phases.commands.flags import add_engine_flags

        add_engine_flags(WITH_ENGINE_FLAGS[named], server=named == "serve")
    if named == "course":
        need_checkout(named)
        from phases.commands import course  # noqa: F401  (adds its commands)
    group: Any = typer.main.get_command(app)
    if named in SHORT_HELP:
        hidden = _hidden(named, given, [param.name for param in group.commands[named].params])
        for param in group.commands[named].params:
            # An argument has no such field, and shows itself.
            param.hidden = param.name in hidden
    given = ["--help" if word == HELP_ALL else word for word in given]
    try:
        code = group(given, prog_name="ladder", standalone_mode=False)
    except Exception as error:
        # Typer's own complaints about arguments; the library that raises them differs between its versions.
        describe = getattr(error, "format_message", None)
        if type(error).__name__ == "Abort" and isinstance(error.__cause__, KeyboardInterrupt):
            return INTERRUPTED
        if describe is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(describe())
            return 2 if given else 0
        raise UserError(describe()) from None
    return code if isinstance(code, int) else 0
