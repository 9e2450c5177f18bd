"""The `ladder` command and its arguments.

Each command's work is in `phases.commands`, and imported when it is called: `ladder --help` must not wait for
PyTorch. What happens when something is wrong is in `phases.process`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import typer

from common.console import err
from common.environment import limit_threads_and_noise
from common.errors import UserError
from common.interrupts import INTERRUPTED
from common.neighbours import usage
from phases import EXTRAS, find_phase, flags, need_checkout
from phases.commands import arguments as a
from phases.commands.arguments import PHASE_HELP, asking, drawing, flag, masking, printing
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
    version: bool = typer.Option(
        False,
        "--version",
        help="print versions and exit",
        is_eager=True,
        callback=_print_version,
    ),
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
        which `main` adds to some commands, are in the namespace's `options`.
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
                loading = LOADING[function.__name__].format(**vars(asked))
                err.print(f"{loading} ...", style="dim", markup=False)
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
    names: bool = flag(False, "only the names, one a line", "--names"),
) -> None:
    """List the phases, with measured gains where there is evidence."""


@command("phases.commands.doctor:run")
def doctor() -> None:
    """Print what this machine has, how fast it is, which phases run natively here, and how to get the
    rest.
    """


@command("phases.commands.plain:fetch")
def fetch(
    model: str = typer.Argument(
        "smollm2", metavar="[smollm2|gemma3-270m|HUB_ID]", help=a.MODEL_HELP
    ),
) -> None:
    """Download a model (and convert it, if it is one of the bundled two)."""


@command("phases.commands.run:run")
def run(
    phase: a.PhaseName,
    model: a.Model = "smollm2",
    prompt: list[str] | None = asking(
        None, "question or text; repeat the option for several requests", metavar="TEXT"
    ),
    prompts_file: Path | None = asking(None, "file with one prompt a line"),
    chat: bool | None = asking(
        None,
        "prompts are questions of a chat, or text to continue; by default a chat if the model has a "
        "chat template",
        "--chat/--no-chat",
        show_default=False,
    ),
    max_tokens: int = drawing(128, "most tokens to generate"),
    temperature: float | None = drawing(
        None, "randomness of the choice; 0: always the most likely token", show_default="0"
    ),
    top_k: int | None = drawing(
        None, "sample among the k most likely tokens; 0: all", show_default="0"
    ),
    top_p: float | None = drawing(
        None,
        "sample among the most likely tokens whose probabilities reach this sum",
        show_default="1",
    ),
    generation_config: str = drawing("neutral", a.DEFAULTS_HELP),
    seed: int | None = drawing(
        None, "seed of the random numbers, which makes sampling repeatable; -1: none"
    ),
    json_schema: Path | None = masking(
        None, "file with a JSON schema that the output must obey"
    ),
    regex: str | None = masking(None, "regular expression that the whole output must match"),
    choice: list[str] | None = masking(
        None,
        "texts with commas between them, of which the output is one; may be repeated",
        metavar="TEXTS",
    ),
    grammar: Path | None = masking(None, "file with a Lark or GBNF grammar of the output"),
    trace: bool = masking(
        False, "show each step's mask, and the model's most likely tokens", "--trace"
    ),
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    as_json: bool = printing(False, "one JSON object instead of text", "--json"),
    stats: bool = printing(
        False, "also how many drafts were accepted, from phase 11 on", "--stats"
    ),
    verbose: bool = printing(False, "also how the memory is divided", "--verbose", "-v"),
    **options: Any,
) -> None:
    """Generate text with one phase."""


@command("phases.commands.serve:run")
def serve(
    model: str = typer.Argument(
        "smollm2", metavar="MODEL", help=f"{a.MODEL_HELP}, or random:SHAPE"
    ),
    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0: all"),
    port: int = flag(8000, "port to listen on; 0: any that is free"),
    api_key: list[str] | None = flag(
        None,
        "key that clients must send; several with commas; LADDER_API_KEY is not shown by ps",
        metavar="KEY",
    ),
    name: str | None = flag(None, "name by which clients call the model"),
    allowed_origins: list[str] | None = flag(
        None,
        "origin whose web pages may send requests, such as https://example.org; several with commas; "
        "*: any",
        metavar="ORIGIN",
    ),
    allowed_hosts: list[str] | None = flag(
        None,
        "names of this server beside localhost, --host and addresses, which alone are answered "
        "without a key; several with commas; *: any",
        metavar="HOST",
    ),
    access_log: str = flag(
        "-", "file that gets a line of JSON for each request; -: standard error; or none"
    ),
    generation_config: str = flag("model", a.DEFAULTS_HELP),
    phase: str = flag("13", f"phase of the engine, from 04 on: {PHASE_HELP}"),
    device: a.DeviceName = "auto",
    prefill_device: str | None = flag(
        None,
        "device of a second engine that computes prompts, from phase 19 on; their blocks go through "
        "--disk-folder",
    ),
    dtype: a.DtypeName = "auto",
    **options: Any,
) -> None:
    """Serve a model to OpenAI's clients, with a page to look at."""


@command("benchmarks.loadtest.command:run", checkout=True)
def load(
    url: str = typer.Argument(metavar="URL", help="such as http://127.0.0.1:8000"),
    users: list[str] | None = flag(
        None, "number of users, each with one request at a time; several numbers with commas"
    ),
    rate: float | None = flag(None, "requests a second, sent without waiting for responses"),
    workload: str = flag(
        "continuous_batching-small", "name of the workload; see benchmarks/workloads.py"
    ),
    requests: int | None = flag(
        None, "number of requests; by default all of the workload, or twice the users"
    ),
    vocab: int = flag(10_000, "token ids of the prompts are below this"),
    processes: int = flag(4, "client processes"),
    api_key: str = flag("", "the server's key"),
    first_ms: float = flag(
        2000.0, "milliseconds within which a good request's first token comes"
    ),
    gap_ms: float = flag(
        100.0, "milliseconds that 99 % of a good request's token gaps do not exceed"
    ),
    json: Path | None = flag(None, "file for the results, as JSON", "--json"),
) -> None:
    """Send a server the requests of many users, and print how long they had to wait."""


@command("phases.commands.demo:run")
def demo(
    model: a.Model = "smollm2", device: a.DeviceName = "auto", dtype: a.DtypeName = "auto"
) -> None:
    """Answer the same questions with every phase that can, and compare their speeds."""


@command("benchmarks.bench_command:bench", checkout=True)
def bench(
    what: str = typer.Argument(
        metavar="PHASE", help=f"{PHASE_HELP}; beside the phases {EXTRAS_HELP}"
    ),
    quick: bool = flag(False, "a short look: one sample on smaller workloads", "--quick"),
    record: bool = flag(
        False, "replace the repository's evidence and figure; else: the cache", "--record"
    ),
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    model: a.AnyModel = None,
    repeats: int | None = flag(None, "timed samples of each variant"),
) -> None:
    """Measure a phase against the one before it, beside the recorded evidence; write evidence and figure."""


@command("benchmarks.profile_command:run", checkout=True)
def profile(
    phase: a.PhaseName,
    model: a.AnyModel = None,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    batch: int | None = flag(None, "prompts at a time"),
    context: int | None = flag(None, "tokens of each prompt"),
    steps: int | None = flag(None, "decode steps after the prefill"),
    output: Path | None = flag(None, "folder for the trace; by default build/profile"),
) -> None:
    """Show the kernels of a phase's steps, and write a trace for chrome://tracing or Perfetto."""


@command("benchmarks.bench_command:plot", checkout=True)
def plot(
    what: str | None = typer.Argument(
        None, metavar="[PHASE]", help=f"only the figures of this phase, or of {EXTRAS_HELP}"
    ),
) -> None:
    """Draw all figures and fill in all tables again, from the evidence alone."""


WITH_ENGINE_FLAGS = {"run": run, "serve": serve}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process with its exit code; this does not return.

    arguments: the words after `ladder`; None: those of `sys.argv`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(exit_code(lambda: _call(given)))


def _hidden(command: str, given: Sequence[str], options: Sequence[str]) -> set[str]:
    """Return the names of options that a command's help does not show.

    These are all but the short list in `SHORT_HELP`. With `--help-all` they are only the options of phases
    later than the phase that is given, if one is.
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
        wants_prompt = named == "run" and "extra argument" in describe()
        hint = ": a prompt is given with --prompt" if wants_prompt else ""
        raise UserError(f"{describe()}{hint}") from None
    return code if isinstance(code, int) else 0
