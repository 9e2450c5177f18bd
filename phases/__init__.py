"""The phases of the ladder, in order, as data: the command line, the tests and the tables read this list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import UserError, near

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or the package `inference_ladder` of a wheel, without benchmarks, exercises and figures."""


def in_checkout() -> bool:
    """Return True in a checkout, whose files measure and teach, and False in an installed wheel."""
    return (ROOT / "benchmarks").is_dir()


def need_checkout(command: str) -> None:
    """Raise `UserError` if a command needs files of the checkout, and this is an installed wheel."""
    if not in_checkout():
        raise UserError(
            f"`ladder {command}` works in a checkout only, because it needs lessons, benchmarks or evidence: "
            "clone the repository and run `make setup` there, or `pip install -e .`"
        )


@dataclass(frozen=True)
class Phase:
    """One rung: a folder with a lesson, and the package inside it."""

    number: int
    package: str
    """The importable package; the folder is `NN_package`."""
    title: str
    summary: str
    """What this phase adds, in one line."""
    needs: str = ""
    """What it must have to run natively ('cuda'), or nothing when it runs on every device."""
    headline: str = "output_tokens_per_s"
    """The metric that this phase is about: its gain in tables is read from the evidence's runs."""
    headline_runs: Mapping[str, Any] = field(default_factory=dict)
    """The runs that it is read from, where there are such: one model for all, options one would choose."""
    headline_variants: tuple[str, ...] = ()
    """And of which variants, the first that was measured, where none has just the phase's name."""
    headline_before: tuple[str, ...] = ()
    """What it is compared with, the first that was measured, where that is not just the phase before."""

    @property
    def name(self) -> str:
        """Folder name and the name used in evidence files, such as `05_paged_cache`."""
        return f"{self.number:02d}_{self.package}"

    @property
    def folder(self) -> Path:
        """The phase's folder in this checkout."""
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
        "tokens that leave the grammar are masked: it always parses",
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
)
"""Package, title and summary of each phase, in order."""
_MORE: dict[int, dict[str, Any]] = {
    2: {"headline_runs": {"model": "qwen3-0.6b"}},
    3: {"headline_runs": {"model": "qwen3-0.6b"}},
    5: {"headline": "requests_in_flight"},
    6: {"needs": "cuda"},
    7: {"headline": "itl_ms_p99", "headline_runs": {"model": "qwen3-0.6b", "budget": 512}},
    8: {"headline": "ttft_ms_p50"},
    9: {"headline_before": ("08_prefix_cache, kernels of 06", "08_prefix_cache")},
    10: {"headline_variants": ("10_quant fp8", "10_quant int8")},
    13: {
        "headline_before": ("13_serving, phase 02 one at a time", "09_cuda_graphs, no server")
    },
    14: {"headline_runs": {"dtype": "bfloat16", "ranks": 2, "part": "offline"}},
    15: {
        "headline": "cache_hit_fraction",
        "headline_runs": {"route": "prefix"},
        "headline_before": ("13_serving, copies",),
    },
    16: {
        "headline_runs": {"active_experts": 4},
        "headline_before": ("13_serving", "dense of equal activity"),
    },
    17: {"headline": "requests_in_flight", "headline_runs": {"context": 8192}},
}
"""What else is to be said of some, by number: the fields of `Phase`."""
PHASES = tuple(
    Phase(n, *names, **_MORE.get(n, {})) for n, names in enumerate(_CONTENTS, start=1)
)
"""The phases, in order."""


def find_phase(text: str) -> Phase | None:
    """The phase meant by `1`, `01`, `forward` or `01_forward`, or None."""
    wanted = text.strip().lower().replace("-", "_").removeprefix("phase_")
    for phase in PHASES:
        # Compared as text: a number of thousands of digits is none that int() takes.
        if wanted.lstrip("0") == str(phase.number) or wanted in (phase.package, phase.name):
            return phase
    return None


def phase_named(text: str, *others: str) -> Phase:
    """Find the phase meant by `1`, `01`, `forward` or `01_forward`.

    Raises:
        UserError: there is none. It names the phases and the `others` that the caller takes as well.
    """
    phase = find_phase(text)
    if phase is None:
        known = [*(phase.name for phase in PHASES), *others]
        hint = near(text.strip().lower(), [*(phase.package for phase in PHASES), *known])
        raise UserError(f"phase is {text!r}, but it must be one of {', '.join(known)}{hint}")
    return phase


def own_options(
    phase: Phase, options: Mapping[str, Any], first: Mapping[str, int]
) -> dict[str, Any]:
    """Return options without switches of later phases that are off, for comparisons of several phases.

    Raises:
        UserError: another option is of a later phase; see `check_phase`.
    """
    own = {
        name: value
        for name, value in options.items()
        if value is not False or first.get(name, 0) <= phase.number
    }
    check_phase(phase, own, first)
    return own


def check_phase(phase: Phase, options: Mapping[str, Any], first: Mapping[str, int]) -> None:
    """Raise `UserError` for an option of a later phase, a switch that is off included.

    first: the first phase that has an option.
    """
    for name, value in options.items():
        if first.get(name, 0) > phase.number:
            flag = ("--no-" if value is False else "--") + name.replace("_", "-")
            raise UserError(
                f"{flag} is for phases from {first[name]:02d} on, but the phase is {phase.name}"
            )
