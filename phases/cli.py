"""The `ladder` command and its arguments.

Each command's work is in `phases.commands`, and imported when it is called: `ladder --help` must not wait for
PyTorch. What happens when something is wrong is in `phases.process`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from common.errors import UserError
from common.errors import choice as choose
from phases.commands import arguments as a
from phases.commands.arguments import PHASE_HELP, flag, joined
from phases.process import INTERRUPTED, exit_code


def without_engine_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Leave a command's `**options` out of what is shown. `main` puts an engine's flags there when it runs.

    The flags are made from the options of all phases, whose packages need PyTorch.
    """
    signature = inspect.signature(command, eval_str=True)
    kept = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return command


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
        from phases.commands.version import line

        print(line())
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool,
        typer.Option("--version", help="print versions and exit", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """A language model inference engine in runnable phases."""


# What `phases.commands.benches.extras` finds, written down because the help must not wait for it.
EXTRAS_HELP = (
    "attacks, decode_step, gpu_tests, json_schema_suite, ladder, neighbours, paged_attention, quality, "
    "replicas, sampling or step_times"
)
# And what `quant.formats` and `quant.methods` have.
SCHEMES = ("fp8", "fp8-block", "fp8-weights", "int8", "w8a8", "int4")
METHODS = ("rtn", "gptq", "awq")
FIRST_STEPS = 4
"""The phase whose engine marks its steps in a trace."""
SOURCES = ("model", "neutral")
"""Of sampling that nobody asks for; see `common.sampling.defaults`."""


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a person has said something of."""
    return {name: value for name, value in options.items() if value is not None}


# A command passes all its arguments on by name, as `locals()` has them at its beginning.


@app.command("list")
def list_phases(
    names: Annotated[bool, flag("only the names, one a line", "--names")] = False,
) -> int:
    """List the phases, with measured gains where there is evidence."""
    from phases.commands import listing

    return listing.run(names)


@app.command()
def doctor() -> int:
    """Say what this machine has, how fast it is, which phases run natively here, and how to get the rest."""
    from phases.commands import doctor

    return doctor.run()


@app.command()
def fetch(
    model: Annotated[
        str, typer.Argument(metavar="[smollm2|gemma3-270m|HUB_ID]", help=a.MODEL_HELP)
    ] = "smollm2",
) -> int:
    """Download a model (and convert it, if it is one of the bundled two)."""
    from phases.commands import fetch

    return fetch.run(model)


@app.command()
@without_engine_flags
def run(
    phase: a.PhaseName,
    model: a.Model = "smollm2",
    prompt: a.PromptTexts = None,
    prompts_file: a.PromptsFile = None,
    chat: a.AsChat = False,
    max_tokens: a.MaxTokens = 128,
    temperature: a.Temperature = None,
    top_k: a.TopK = None,
    top_p: a.TopP = None,
    generation_config: a.OwnSampling = "neutral",
    seed: a.Seed = None,
    json_schema: a.SchemaFile = None,
    regex: a.Regex = None,
    choice: a.Choices = None,
    grammar: a.GrammarFile = None,
    trace: a.TraceMasks = False,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    as_json: a.AsJson = False,
    stats: a.ShowStats = False,
    verbose: a.Verbose = False,
    **options: Any,
) -> int:
    """Generate text with one phase."""
    given = SimpleNamespace(**locals() | {"options": _given(options)})
    from phases.commands import early

    early.check(phase, device=device, dtype=dtype, model=model, options=given.options)
    choose("generation_config", generation_config, SOURCES)
    given.said = _given({"temperature": temperature, "top_k": top_k, "top_p": top_p})
    from common.sampling.params import SamplingParams
    from phases.commands.engines import read_prompts

    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **given.said)
    prompts = read_prompts(prompt, prompts_file, chat=chat)
    from phases.commands.grammars import chosen_grammar

    grammar_of_all = chosen_grammar(json_schema, regex, joined(choice), grammar)
    from phases.commands import run

    return run.run(given, prompts, sampling, grammar_of_all)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help=a.MODEL_HELP)],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write, which is not there yet")],
    scheme: Annotated[str, flag(", ".join(SCHEMES))] = "int4",
    method: Annotated[str, flag("rtn (nearest), gptq, or for int4 awq")] = "rtn",
    calibration: Annotated[
        Path | None, flag("text that gptq and awq see; by default one that is here")
    ] = None,
    group_size: Annotated[int, flag("inputs that share a scale in int4")] = 128,
    pieces: Annotated[int, flag("pieces of the text that are read, from its end")] = 32,
    length: Annotated[int, flag("tokens in a piece")] = 512,
    kv_cache: Annotated[
        str, flag("scales for keys and values too: none, fp8 or int8, from the same text")
    ] = "none",
    device: a.DeviceName = "auto",
) -> int:
    """Write a model's checkpoint anew in 8 or 4 bits, as compressed-tensors."""
    given = SimpleNamespace(**locals())
    from phases.commands import early

    early.check(device=device, model=model)
    choose("scheme", scheme, SCHEMES)
    choose("method", method, METHODS)
    from phases.commands import quantize

    return quantize.run(given)


@app.command()
@without_engine_flags
def serve(
    model: a.ServedModel = "smollm2",
    host: a.Host = "127.0.0.1",
    port: a.Port = 8000,
    api_key: a.ApiKeys = None,
    name: a.ServedName = None,
    allowed_origins: a.Origins = None,
    allowed_hosts: a.Hosts = None,
    access_log: a.AccessLog = "-",
    generation_config: a.ServedSampling = "model",
    phase: a.ServingPhase = "13",
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    **options: Any,
) -> int:
    """Serve a model to OpenAI's clients, with a page to look at."""
    given = SimpleNamespace(**locals() | {"options": _given(options)})
    from common.errors import integer
    from phases.commands import early

    early.check(phase, device=device, dtype=dtype, model=model, options=given.options)
    integer("port", port, low=0, high=65_535)
    choose("generation_config", generation_config, SOURCES)
    from phases.commands import serve

    return serve.run(given)


@app.command()
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="such as http://127.0.0.1:8000")],
    users: Annotated[
        list[str] | None, flag("so many at a time, each waits for its answer; several with commas")
    ] = None,
    rate: Annotated[float | None, flag("requests a second, whether answered or not")] = None,
    workload: Annotated[str, flag("what to ask; see benchmarks/workloads.py")] = "continuous_batching-small",
    requests: Annotated[int | None, flag("how many; or all of the workload, or twice the users")] = None,
    vocab: Annotated[int, flag("token ids of the prompts are below this")] = 10_000,
    processes: Annotated[int, flag("client processes")] = 4,
    api_key: Annotated[str, flag("the server's key")] = "",
    first_ms: Annotated[float, flag("a good request's first token comes within")] = 2000.0,
    gap_ms: Annotated[float, flag("and 99 % of its gaps are below")] = 100.0,
    json: Annotated[Path | None, flag("file for the numbers", "--json")] = None,
) -> int:
    """Ask a server from many users, and say what they had to wait for."""
    given = SimpleNamespace(**locals() | {"users": joined(users)})
    from phases.commands import reach

    reach.check(url, api_key)
    from phases.commands import load

    return load.run(given)


@app.command()
def demo(model: a.Model = "smollm2", device: a.DeviceName = "auto", dtype: a.DtypeName = "auto") -> int:
    """Answer the same questions with every phase, and compare their speeds."""
    from phases.commands import early

    early.check(device=device, dtype=dtype, model=model)
    from phases.commands import demo

    return demo.run(model, device, dtype)


@app.command()
def bench(
    phase: Annotated[
        str, typer.Argument(metavar="PHASE", help=f"{PHASE_HELP}; beside the phases {EXTRAS_HELP}")
    ],
    quick: Annotated[bool, flag("a short look: one sample on smaller workloads", "--quick")] = False,
    record: Annotated[
        bool, flag("replace the repository's evidence and figure; else: the cache", "--record")
    ] = False,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    model: a.AnyModel = None,
    repeats: Annotated[int | None, flag("timed samples of each variant")] = None,
) -> int:
    """Measure a phase against the one before it, beside the recorded evidence; write evidence and figure."""
    given = SimpleNamespace(**locals())
    from phases.commands import benches, early

    early.check(device=device, dtype=dtype)
    return benches.bench(given)


@app.command()
def profile(
    phase: a.PhaseName,
    model: a.AnyModel = None,
    device: a.DeviceName = "auto",
    dtype: a.DtypeName = "auto",
    batch: Annotated[int | None, flag("prompts at a time")] = None,
    context: Annotated[int | None, flag("tokens of each prompt")] = None,
    steps: Annotated[int | None, flag("decode steps after the prefill")] = None,
    output: Annotated[Path | None, flag("folder for the trace, or build/profile")] = None,
) -> int:
    """Show the kernels of a phase's steps, and write a trace for chrome://tracing or Perfetto."""
    given = SimpleNamespace(**locals())
    from phases.commands import early

    named = early.check(phase, device=device, dtype=dtype, model=model)
    if named is not None and named.number < FIRST_STEPS:
        raise UserError(f"steps are profiled from phase {FIRST_STEPS:02d} on, but the phase is {named.name}")
    from phases.commands import profile

    return profile.run(given)


@app.command()
def plot(
    phase: Annotated[
        str | None,
        typer.Argument(metavar="[PHASE]", help=f"only the figures of this phase, or of {EXTRAS_HELP}"),
    ] = None,
) -> int:
    """Draw all figures and fill in all tables again, from the evidence alone."""
    from phases.commands import benches

    return benches.plot(phase)


WITH_ENGINE_FLAGS = {"run": run, "serve": serve}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (by default `sys.argv`) and exit with its code, as `phases.process` says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(exit_code(lambda: _call(given)))


def _call(given: Sequence[str]) -> int:
    named = next((word for word in given if not word.startswith("-")), "")
    if named in WITH_ENGINE_FLAGS:
        from phases.commands.flags import add_engine_flags

        add_engine_flags(WITH_ENGINE_FLAGS[named], server=named == "serve")
    if named == "course":
        from phases.commands import course  # noqa: F401  (adds its commands)
    try:
        code = app(given, prog_name="ladder", standalone_mode=False)
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
