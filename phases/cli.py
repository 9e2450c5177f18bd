"""The `ladder` command and its arguments.

Each command's work is in `phases.commands`, and imported when it is called: `ladder --help` must not wait for
PyTorch. What happens when something is wrong is in `phases.process`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from common.errors import UserError
from common.errors import choice as choose
from phases.commands.arguments import (
    MODEL_HELP,
    AccessLog,
    ApiKeys,
    AsChat,
    AsJson,
    Choices,
    GrammarFile,
    Host,
    Hosts,
    MaxTokens,
    Origins,
    OwnSampling,
    Port,
    PromptsFile,
    PromptTexts,
    Regex,
    SchemaFile,
    Seed,
    ServedModel,
    ServedName,
    ServedSampling,
    ShowStats,
    Strict,
    Temperature,
    TopK,
    TopP,
    TraceMasks,
    TracesTo,
    Verbose,
)
from phases.commands.course_cli import course_app
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

app.add_typer(course_app, name="course")


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


PHASE_HELP = "1, 01, forward or 01_forward"
PhaseName = Annotated[str, typer.Argument(metavar="PHASE", help=PHASE_HELP)]
# What `phases.commands.benches.extras` finds, written down because the help must not wait for it.
EXTRAS_HELP = (
    "decode_step, gpu_tests, json_schema_suite, ladder, neighbours, paged_attention, quality, replicas or "
    "sampling"
)
DeviceName = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:INDEX or mps")]
DtypeName = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(help="YAML file with options of the engine, from phase 05 on; see `ladder config`"),
]
# And what `quant.formats` and `quant.methods` have.
SCHEMES = ("fp8", "fp8-block", "fp8-weights", "int8", "w8a8", "int4")
METHODS = ("rtn", "gptq", "awq")
SOURCES = ("model", "neutral")
"""Of sampling that nobody asks for; see `common.sampling.defaults`."""


def _joined(values: list[str] | None) -> str | None:
    """One text of a flag that was given several times, with the commas that it may have had at once."""
    return None if values is None else ",".join(values)


@app.command("list")
def list_phases(
    names: Annotated[bool, typer.Option("--names", help="only the names, one a line")] = False,
) -> int:
    """List the phases, with measured gains where there is evidence."""
    from phases.commands import listing

    return listing.run(names)


@app.command()
def doctor(
    verify: Annotated[
        bool, typer.Option("--verify", help="instead compare stored models with their SHA-256")
    ] = False,
) -> int:
    """Say what this machine has, how fast it is, which phases run natively here, and how to get the rest."""
    from phases.commands import doctor

    return doctor.verify() if verify else doctor.run()


@app.command()
def fetch(
    model: Annotated[
        str, typer.Argument(metavar="[smollm2|gemma3-270m|HUB_ID]", help=MODEL_HELP)
    ] = "smollm2",
) -> int:
    """Download a model (and convert it, if it is one of the bundled two)."""
    from phases.commands import fetch

    return fetch.run(model)


@app.command()
@without_engine_flags
def run(
    phase: PhaseName,
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    prompt: PromptTexts = None,
    prompts_file: PromptsFile = None,
    chat: AsChat = False,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    generation_config: OwnSampling = "neutral",
    seed: Seed = None,
    json_schema: SchemaFile = None,
    regex: Regex = None,
    choice: Choices = None,
    grammar: GrammarFile = None,
    trace: TraceMasks = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    as_json: AsJson = False,
    config: ConfigFile = None,
    stats: ShowStats = False,
    verbose: Verbose = False,
    **options: Any,
) -> int:
    """Generate text with one phase."""
    from phases.commands import early

    given = {name: value for name, value in options.items() if value is not None}
    early.check(phase, device=device, dtype=dtype, model=model, options=given)
    choose("generation_config", generation_config, SOURCES)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    from common.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
    from phases.commands.engines import read_prompts

    prompts = read_prompts(prompt, prompts_file, chat=chat)
    from phases.commands.grammars import chosen_grammar

    params = replace(params, grammar=chosen_grammar(json_schema, regex, _joined(choice), grammar))
    from phases.commands import run

    return run.run(
        phase,
        model=model,
        prompts=prompts,
        chat=chat,
        params=params,
        generation_config=generation_config,
        said=frozenset(sampling),
        device=device,
        dtype=dtype,
        as_json=as_json,
        trace=trace,
        config=config,
        stats=stats,
        verbose=verbose,
        options=given,
    )


@app.command("config")
@without_engine_flags
def write_config(
    phase: PhaseName,
    device: DeviceName = "auto",
    config: ConfigFile = None,
    **options: Any,
) -> int:
    """Print an engine's options as a file for `ladder run --config`."""
    from phases.commands import early

    given = {name: value for name, value in options.items() if value is not None}
    early.check(phase, device=device, options=given)
    from phases.commands import config as command

    return command.run(phase, device=device, config=config, options=given)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write, which is not there yet")],
    scheme: Annotated[str, typer.Option(help=", ".join(SCHEMES))] = "int4",
    method: Annotated[str, typer.Option(help="rtn (nearest), gptq, or for int4 awq")] = "rtn",
    calibration: Annotated[
        Path | None, typer.Option(help="text that gptq and awq see; by default one that is here")
    ] = None,
    group_size: Annotated[int, typer.Option(help="inputs that share a scale in int4")] = 128,
    pieces: Annotated[int, typer.Option(help="pieces of the text that are read, from its end")] = 32,
    length: Annotated[int, typer.Option(help="tokens in a piece")] = 512,
    kv_cache: Annotated[
        str, typer.Option(help="scales for keys and values too: none, fp8 or int8, from the same text")
    ] = "none",
    device: DeviceName = "auto",
) -> int:
    """Write a model's checkpoint anew in 8 or 4 bits, as compressed-tensors."""
    from phases.commands import early

    early.check(device=device, model=model)
    choose("scheme", scheme, SCHEMES)
    choose("method", method, METHODS)
    from phases.commands import quantize

    return quantize.run(
        model,
        folder,
        scheme=scheme,
        method=method,
        calibration=calibration,
        group_size=group_size,
        pieces=pieces,
        length=length,
        kv_cache=kv_cache,
        device=device,
    )


@app.command()
@without_engine_flags
def serve(
    model: ServedModel = "smollm2",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKeys = None,
    name: ServedName = None,
    strict: Strict = False,
    allowed_origins: Origins = None,
    allowed_hosts: Hosts = None,
    access_log: AccessLog = "-",
    traces: TracesTo = None,
    generation_config: ServedSampling = "model",
    phase: Annotated[str, typer.Option(help=f"whose engine: {PHASE_HELP}")] = "13",
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    config: ConfigFile = None,
    **options: Any,
) -> int:
    """Serve a model to OpenAI's clients, with a page to look at."""
    from common.errors import integer
    from phases.commands import early
    from phases.commands.flags import LIMITS, REPLICAS, all_flags

    given = {name: value for name, value in options.items() if value is not None}
    early.check(phase, device=device, dtype=dtype, model=model, options=given)
    integer("port", port, low=0, high=65_535)
    choose("generation_config", generation_config, SOURCES)
    owners = {flag.name: flag.of for flag in all_flags()}
    from phases.commands import serve

    return serve.run(
        model,
        phase_name=phase,
        host=host,
        port=port,
        api_key=_joined(api_key),
        name=name,
        strict=strict,
        allowed_origins=_joined(allowed_origins),
        allowed_hosts=_joined(allowed_hosts),
        access_log=access_log,
        traces=traces,
        device=device,
        dtype=dtype,
        generation_config=generation_config,
        config=config,
        limits={name: value for name, value in given.items() if owners[name] == LIMITS},
        replicas={name: value for name, value in given.items() if owners[name] == REPLICAS},
        options={name: value for name, value in given.items() if not owners[name]},
    )


@app.command()
def load(
    url: Annotated[str, typer.Argument(metavar="URL", help="such as http://127.0.0.1:8000")],
    users: Annotated[
        list[str] | None,
        typer.Option(help="so many at a time, each waits for its answer; several with commas"),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="requests a second, whether answered or not")] = None,
    workload: Annotated[str, typer.Option(help="what to ask; see benchmarks/workloads.py")] = (
        "continuous_batching-small"
    ),
    requests: Annotated[
        int | None, typer.Option(help="how many; or all of the workload, or twice the users")
    ] = None,
    vocab: Annotated[int, typer.Option(help="token ids of the prompts are below this")] = 10_000,
    processes: Annotated[int, typer.Option(help="client processes")] = 4,
    api_key: Annotated[str, typer.Option(help="the server's key")] = "",
    first_ms: Annotated[float, typer.Option(help="a good request's first token comes within")] = 2000.0,
    gap_ms: Annotated[float, typer.Option(help="and 99 % of its gaps are below")] = 100.0,
    json: Annotated[Path | None, typer.Option("--json", help="file for the numbers")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="file for a figure, .svg or .png")] = None,
) -> int:
    """Ask a server from many users, and say what they had to wait for."""
    from phases.commands import reach

    reach.check(url, api_key)
    from phases.commands import load

    return load.run(
        url,
        users=_joined(users),
        rate=rate,
        name=workload,
        requests=requests,
        vocab=vocab,
        processes=processes,
        key=api_key,
        first_ms=first_ms,
        gap_ms=gap_ms,
        json_path=json,
        plot_path=plot,
    )


@app.command()
def demo(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "smollm2",
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
) -> int:
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
    quick: Annotated[
        bool, typer.Option("--quick", help="a short look: one sample on smaller workloads")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="replace the repository's evidence and figure; else: the cache")
    ] = False,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    model: Annotated[str | None, typer.Option(help=f"{MODEL_HELP}, or random:SHAPE")] = None,
    repeats: Annotated[int | None, typer.Option(help="timed samples of each variant")] = None,
) -> int:
    """Measure a phase against the one before it, beside the recorded evidence; write evidence and figure."""
    from phases.commands import benches, early

    early.check(device=device, dtype=dtype)
    return benches.bench(
        phase, quick=quick, record=record, device=device, dtype=dtype, model=model, repeats=repeats
    )


@app.command()
def profile(
    phase: PhaseName,
    model: Annotated[str | None, typer.Option(help=f"{MODEL_HELP}, or random:SHAPE")] = None,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    batch: Annotated[int | None, typer.Option(help="prompts at a time")] = None,
    context: Annotated[int | None, typer.Option(help="tokens of each prompt")] = None,
    steps: Annotated[int | None, typer.Option(help="decode steps after the prefill")] = None,
    output: Annotated[Path | None, typer.Option(help="folder for the trace, or build/profile")] = None,
) -> int:
    """Show the kernels of a phase's steps, and write a trace for chrome://tracing or Perfetto."""
    from phases.commands import early

    early.check(phase, device=device, dtype=dtype, model=model)
    from phases.commands import profile

    return profile.run(
        phase,
        model=model,
        device=device,
        dtype=dtype,
        batch=batch,
        context=context,
        steps=steps,
        output=output,
    )


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


WITH_ENGINE_FLAGS = {"run": run, "config": write_config, "serve": serve}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (by default `sys.argv`) and exit with its code, as `phases.process` says."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(exit_code(lambda: _call(given)))


def _call(given: Sequence[str]) -> int:
    named = next((word for word in given if not word.startswith("-")), "")
    if named in WITH_ENGINE_FLAGS:
        from phases.commands.flags import add_engine_flags

        add_engine_flags(WITH_ENGINE_FLAGS[named], limits=named == "serve")
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
