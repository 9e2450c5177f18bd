"""The list of phases, in order: the command line, the tests and the tables read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.names import near

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or the package `inference_ladder` of a wheel, without benchmarks, exercises and figures."""


_EXTRAS = "attacks kernels.paged_attention ladder quality replicas step_times"
EXTRAS = {path.rpartition(".")[2]: f"benchmarks.{path}" for path in _EXTRAS.split()}
"""Name of a benchmark that belongs to no phase -> the module that measures and draws."""


def in_checkout() -> bool:
    """Return True if this package lies in a checkout (with lessons, benchmarks, tests), False in a wheel."""
    return (ROOT / "benchmarks").is_dir()


def need_checkout(command: str) -> None:
    """Raise `UserError` if this is an installed wheel, which lacks lessons, benchmarks and evidence.

    command: name of the `ladder` command that needs these files, for the error's text.
    """
    if not in_checkout():
        raise UserError(
            f"`ladder {command}` works in a checkout only, because it needs lessons, benchmarks or evidence: "
            "clone the repository and run `make setup` there, or `pip install -e .`"
        )


@dataclass(frozen=True)
class Phase:
    """One phase: a folder with a lesson, and the package inside it.

    number: from 1. title: its name in tables.
    """

    number: int
    package: str
    """The importable package; the folder is `NN_package`."""
    title: str
    summary: str
    """What this phase adds, in one line."""

    @property
    def name(self) -> str:
        """Return the folder's name, also used in evidence files, such as `05_paged_cache`."""
        return f"{self.number:02d}_{self.package}"

    @property
    def folder(self) -> Path:
        """Return the phase's folder in this checkout."""
        return ROOT / "phases" / self.name


_CONTENTS = (
    (
        "forward",
        "Forward pass",
        "the transformer from scratch; every token recomputes everything",
    ),
    ("kv_cache", "KV cache", "keys and values are kept, so a step computes one token"),
    ("batching", "Static batching", "several prompts share one pass over the weights"),
    ("continuous", "Continuous batching", "requests join and leave the batch at every step"),
    (
        "paged_cache",
        "Paged cache",
        "the cache is blocks handed out on demand, not one row a request",
    ),
    (
        "triton_paged_attention",
        "Triton kernels",
        "attention reads the blocks where they lie; small operators are fused",
    ),
    (
        "chunked_prefill",
        "Chunked prefill",
        "long prompts are cut so that decodes never wait for one",
    ),
    (
        "prefix_cache",
        "Prefix cache",
        "requests that begin alike share the blocks of what they share",
    ),
    (
        "cuda_graphs",
        "CUDA graphs and overlap",
        "a step is one launch, and the next is scheduled meanwhile",
    ),
    ("quant", "Quantization", "weights and keys of 8 and 4 bits: fewer bytes a token"),
    (
        "speculative",
        "Speculative decoding",
        "tokens are guessed ahead and checked in one step; the text stays the same",
    ),
    (
        "structured",
        "Structured output",
        "tokens that leave the grammar are masked: a finished answer parses",
    ),
    ("serving", "Serving", "the engine behind the API that every client speaks"),
    (
        "parallel",
        "More than one GPU",
        "a model split over GPUs: each reads a part of the weights",
    ),
    (
        "replicas",
        "Replicas",
        "servers copied over GPUs and machines; a request goes where its prefix is cached",
    ),
    (
        "experts",
        "Mixture of experts",
        "a token goes through a few of many MLPs: a model of more weights reads fewer of them",
    ),
    (
        "hybrid_cache",
        "Hybrid cache",
        "layers that remember less keep less: windows give blocks back, states are one block",
    ),
    (
        "batch_invariance",
        "Batch invariance",
        "every sum has one order, so a request gets the same bits whatever shares its batch",
    ),
    (
        "moving_blocks",
        "Moving blocks",
        "blocks go to host memory and to files, and come back: a restarted server is warm",
    ),
)
"""Package, title and summary of each phase, in order."""
PHASES = tuple(Phase(n, *names) for n, names in enumerate(_CONTENTS, start=1))
"""The phases, in order."""


def find_phase(text: str) -> Phase | None:
    """Return the phase meant by a text such as `1`, `01`, `forward` or `01_forward`; None if it means no
    phase.
    """
    wanted = text.strip().lower().replace("-", "_").removeprefix("phase_")
    for phase in PHASES:
        # Compared as text: a number of thousands of digits is none that int() takes.
        if wanted.lstrip("0") == str(phase.number) or wanted in (phase.package, phase.name):
            return phase
    return None


def phase_named(text: str, *others: str) -> Phase:
    """Return the phase meant by a text such as `1`, `01`, `forward` or `01_forward`.

    Raises:
        UserError: the text means no phase. The message lists the phases and `others`: further words that
            the calling command accepts.
    """
    phase = find_phase(text)
    if phase is None:
        known = [*(phase.name for phase in PHASES), *others]
        hint = near(text.strip().lower(), [*(phase.package for phase in PHASES), *known])
        raise UserError(f"phase is {text!r}, but it must be one of {', '.join(known)}{hint}")
    return phase


class Flag(NamedTuple):
    """A command line option of an engine or of a server.

    name: as the parameter is called in Python. kind: the name of its type. help: its help text.
    panel: the heading under which the help shows it.
    first: number of the first phase whose engine has it; 0 for an option of a server.
    """

    name: str
    kind: str
    help: str
    panel: str
    first: int


@cache
def flags() -> list[Flag]:
    """Return every command line option as a `Flag`: first those of a server, then those of engines by phase.

    They are read from `flags.json`, which `python -m tests.flags` makes of the dataclasses that declare
    the options: to import all of these takes seconds, and a phase must not need later phases.
    """
    table = Path(__file__).with_name("flags.json").read_text(encoding="utf-8")
    return [Flag(*flag) for flag in json.loads(table)]


def first_phases() -> dict[str, int]:
    """Return {name of an engine's option or feature switch: number of the first phase that has it}."""
    return {flag.name: flag.first for flag in flags() if flag.first}


def check_phase(phase: Phase, options: Mapping[str, Any]) -> None:
    """Raise `UserError` if an option of a phase's engine is of a later phase, also a switch set to False.

    options: name -> value, as given.
    """
    first = first_phases()
    for name, value in options.items():
        if first.get(name, 0) > phase.number:
            flag = ("--no-" if value is False else "--") + name.replace("_", "-")
            raise UserError(
                f"{flag} is for phases from {first[name]:02d} on, but the phase is {phase.name}"
            )
