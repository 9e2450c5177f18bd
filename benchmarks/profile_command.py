"""`ladder profile`: some steps of a phase's engine under PyTorch's profiler, as a trace and as a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.evidence import check_folder
from benchmarks.profiler import record
from benchmarks.trace import StepTable, read_trace, step_tables
from benchmarks.workloads import uniform
from common.console import err, out, table
from common.device import pick_device, pick_dtype
from common.errors import UserError, integer
from common.models.hub import model_folder
from common.words import count
from continuous.engine import Engine
from forward.loading import load_model
from forward.model import Model
from phases import ROOT, Phase, phase_named
from phases.registry import import_phase, load_engine, missing_for

FOLDER = ROOT / "build" / "profile"
"""Default folder of traces; not part of the checkout's files."""
MOST_TOKENS = 1 << 20
"""Most tokens of the whole workload."""
ROWS = 16
"""Rows of a table, of the kernels that took most; the trace has all of them."""


class Size(NamedTuple):
    """The workload: `batch` prompts of `context` tokens at once, and `steps` decode steps after each."""

    batch: int
    context: int
    steps: int


DEFAULT, TINY = Size(4, 128, 8), Size(2, 12, 2)
"""The default, and that of a phase that is not native on this device, such as Triton's kernels on a CPU."""


def run(given: SimpleNamespace) -> int:
    """Run `ladder profile`: profile a phase's steps, write the trace, and print a table for each kind of
    step.

    given: the arguments of the command line: phase, model, batch, context, steps, output and more.
    Returns the exit code.
    """
    rung, model = phase_named(given.phase), given.model
    where = pick_device(given.device)
    kind = pick_dtype(given.dtype, where)
    missing = missing_for(rung, where)
    asked = {
        name: value for name in Size._fields if (value := getattr(given, name)) is not None
    }
    size = (TINY if missing else DEFAULT)._replace(**asked)
    # A prefill has more than one token.
    for name, least in (("batch", 1), ("context", 2), ("steps", 1)):
        integer(f"--{name}", getattr(size, name), low=least, high=MOST_TOKENS)
    whole = size.batch * (size.context + size.steps)
    if whole > MOST_TOKENS:
        raise UserError(
            f"--batch, --context and --steps make {whole:,} tokens, but may make {MOST_TOKENS:,}"
        )
    folder = given.output or FOLDER
    check_folder(folder, "--output" if given.output else "")
    if missing and model is None:
        err.print(
            f"[dim]{rung.name} needs {missing} to be fast; here it runs a tiny model.[/dim]"
        )
    name = model or ("random:tiny" if missing else "smollm2")
    source = name if name.startswith("random:") else str(model_folder(name))
    # Before a model makes PyTorch import Triton: phase 06 decides who runs its kernels.
    import_phase(rung)
    loaded = load_model(source, device=str(where), dtype=str(kind).removeprefix("torch."))
    tokens = size.context + size.steps + 1
    if tokens > loaded.max_len:
        raise UserError(
            f"--context and --steps need {tokens} tokens, but {name} has at most {loaded.max_len}"
        )
    path = folder / f"{rung.name}.json.gz"
    engine = load_engine(rung, loaded, **engine_options(rung, loaded, size.batch, tokens))
    assert isinstance(engine, Engine)
    vocab = min(10_000, loaded.config.vocab_size)
    work = uniform("profile", size.batch, size.context, size.steps + 1, vocab)
    record(engine, work, loaded, path, size.steps)
    on_device = where.type == "cuda"
    out.print(
        f"{rung.name}, {name}, {where}, {str(kind).removeprefix('torch.')}: "
        f"{count(size.batch, 'prompt')} of {count(size.context, 'token')}, "
        f"{count(size.steps, 'decode step')}",
        markup=False,
        soft_wrap=True,
    )
    for found in step_tables(read_trace(path), on_device=on_device):
        out.print()
        out.print(kernel_table(found, on_device))
        out.print(summary(found, on_device), soft_wrap=True)
    out.print()
    out.out(str(path), highlight=False)
    err.print("[dim]Open the trace in https://ui.perfetto.dev or chrome://tracing.[/dim]")
    return 0


def engine_options(phase: Phase, model: Model, batch: int, tokens: int) -> dict[str, Any]:
    """Return options of an engine (name -> value) that give it just as much memory as the workload needs.

    batch: requests. tokens: of each, prompt and output.
    """
    at_once = max(2048, batch * tokens)  # all prompts in one step
    options: dict[str, Any] = {"max_rows": batch, "max_len": tokens, "step_tokens": at_once}
    if phase.number > 4:
        blocks = batch * (tokens // 64 + 2) * 64
        options["cache_bytes"] = 2 * blocks * model.config.kv_bytes_per_token(model.dtype)
    return options


def kernel_table(steps: StepTable, on_device: bool) -> Table:
    """Return a table of the kernels of one kind of step, longest time first.

    on_device: the rows are a GPU's kernels; otherwise PyTorch's operators on the CPU.
    """
    title = f"{steps.kind}: {'kernel' if on_device else 'operator'}"
    shown = table(title, right=("calls", "a step", "total ms", "share", "mean µs"))
    total = sum(row.seconds for row in steps.rows) or 1.0
    for row in steps.rows[:ROWS]:
        calls = (
            (f"{row.calls:,}", f"{row.calls / steps.steps:,.1f}") if row.calls else ("", "")
        )
        mean = f"{row.seconds / row.calls * 1e6:,.1f}" if row.calls else ""
        shown.add_row(
            row.name, *calls, f"{row.seconds * 1e3:,.3f}", f"{row.seconds / total:.1%}", mean
        )
    return shown


def summary(table: StepTable, on_device: bool) -> str:
    """Return one line about a kind of step: steps, kernels and milliseconds a step, and the busy share of
    the time.

    on_device: the table counts a GPU's kernels and copies; otherwise PyTorch's operators on the CPU.
    """
    launches = table.launches / table.steps
    wall = table.wall / table.steps * 1e3
    share = table.busy / table.wall if table.wall else 0.0
    if on_device:
        what = f"{launches:,.1f} kernels and {table.copies / table.steps:,.1f} copies a step"
        busy = f"GPU busy {share:.1%}"
    else:
        what, busy = f"{launches:,.1f} operators a step", f"inside operators {share:.1%}"
    return f"{table.kind}: {count(table.steps, 'step')}, {what}, {wall:,.3f} ms a step (profiled), {busy}"
