"""Facts about a phase for the command line and the benchmarks: name, requirements, options, engine."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from common.console import err
from common.device import pick_device
from common.errors import UserError
from common.events import Streams
from common.names import unknown
from common.options import route
from common.text.tokenizer import Tokenizer
from forward.loading import facts_of
from forward.model import Model
from phases import PHASES, Phase, appendix, check_phase, first_phases
from phases import phase_named as phase_named

if TYPE_CHECKING:
    from paged_cache.preset import Chosen, Preset
    from paged_cache.recipe import Feature

LOADS = {"model", "device", "dtype", "tokenizer"}
"""Parameters of every phase's `load` that are not options."""
ROWS = 4
BLOCKS = 5
KERNELS = 6
QUANT = 10
STATES = 17
"""First phases with rows of requests, with blocks and features, with quantized weights, and with states; and
the phase that only CUDA runs natively.
"""
BLOCKS_FOLDER = "blocks"
"""Beside a model's floats: its weights as a GGUF file has them; see `common.models.gguf_import`."""
NEEDS_FLOATS = {
    "quantization",
    "head",
    "group_size",
    "tensor_parallel",
    "draft_model",
    "batch_invariant",
}
"""Options that say how weights are kept, and features that read weights or an embedding of floats."""


def import_phase(phase: Phase) -> ModuleType:
    """Import and return a phase's package.

    No phase needs Triton for that: kernels are imported when a feature is installed.
    """
    return importlib.import_module(phase.package)


def missing_for(phase: Phase, device: torch.device) -> str:
    """Return what `phase` needs and this machine lacks, such as "a CUDA device"; "" if it lacks nothing."""
    if phase.number == KERNELS and device.type != "cuda":
        return "a CUDA device" if not torch.cuda.is_available() else "--device cuda"
    return ""


# Features and options.


def preset(phase: Phase) -> Preset:
    """Return a phase's default sizes and features, with those of the appendix that extend it or an earlier
    phase.
    """
    own: Preset = import_phase(phase).PRESET
    return own.plus(fitting=appendix.features(phase.number))


def features(phase: Phase) -> list[type[Feature]]:
    """Return every `Feature` class (an optional part of engines) that a phase or one below it has.

    Those of lower phases come first.
    """
    found: dict[type[Feature], None] = {}
    for each in PHASES[BLOCKS - 1 : phase.number]:
        own = preset(each)
        found |= dict.fromkeys((*own.on, *own.fitting))
    return sorted(found, key=lambda kind: kind.phase)


@dataclass(frozen=True)
class Checked:
    """Checked options of a phase's engine.

    own: name -> value, as given. chosen: the sizes and features made of the options; None before phase 05.
    """

    phase: Phase
    own: dict[str, Any]
    chosen: Chosen | None = None


def check_options(phase: Phase, options: Mapping[str, Any], device: torch.device) -> Checked:
    """Return the options of a phase's engine, checked, for `load_checked` (what makes the engine).

    options: name -> value, as given.

    Raises:
        UserError: an option is unknown, out of its limits, or of a later phase.
    """
    check_phase(phase, options)
    own = dict(options)
    if phase.number >= BLOCKS:
        chosen = preset(phase).choose(own, device, features(phase))
        return Checked(phase, own, chosen)
    if phase.number >= ROWS:
        from continuous.sizes import Sizes

        Sizes(**route(own, [Sizes])[0])
    else:
        known = sorted(set(inspect.signature(import_phase(phase).load).parameters) - LOADS)
        for name in options:
            if name not in known:
                raise UserError(unknown(name, known))
    return Checked(phase, own)


def check_model(phase: Phase, model: Any) -> None:
    """Raise `UserError` if a model has layers that the phase cannot compute (Gated DeltaNet before phase
    17).

    model: a loaded model, or its name.
    """
    if facts_of(model).delta is not None and 1 < phase.number < STATES:
        raise UserError(
            f"the model has layers of Gated DeltaNet, which keep a state: phases from {STATES} on have room "
            f"for it, and phase 01 computes it without a cache, but the phase is {phase.name}"
        )


def load_checked(
    options: Checked,
    model: Any,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
) -> Streams:
    """Return a phase's engine for a model, with options that are checked already.

    options: the phase, and its options. model: a loaded model, or its name.
    tokenizer: used for grammars; may be None.

    Raises:
        UserError: the phase cannot compute the model's layers.
    """
    phase, chosen = options.phase, options.chosen
    check_model(phase, model)
    if chosen is None:
        package = import_phase(phase)
        early: Streams = package.load(
            model, device=device, dtype=dtype, tokenizer=tokenizer, **options.own
        )
        return early
    from paged_cache import Recipe, build

    return build(Recipe(model, chosen.sizes, chosen.features, device, dtype, tokenizer))


def default_weights(options: Checked, model: str, device: torch.device, dtype: str) -> str:
    """Return the folder of the weights to load: on a CPU a GGUF file's quantized blocks, if the model has
    them.

    Other devices and dtypes, phases before 10, options that say how weights are kept, and machines that
    cannot compile the appendix's C++ decode step get the float weights, which are in `model` itself.

    Args:
        model: its folder, or another name, which is returned unchanged.
        dtype: as on the command line, such as "auto".
    """
    blocks = Path(model) / BLOCKS_FOLDER
    if options.chosen is None or options.phase.number < QUANT or not blocks.is_dir():
        return model
    names = [*options.own, *(feature.name for feature in options.chosen.features)]
    floats = dtype not in ("auto", "float32") or not NEEDS_FLOATS.isdisjoint(names)
    floats |= options.own.get("drafter") == "head"  # which reads the model's embedding
    if floats or device.type != "cpu":
        return model
    from phases.appendix.cpu_step.blocks import CpuBlocks
    from phases.appendix.cpu_step.feature import library
    from quant import Quant

    kinds = {type(feature) for feature in options.chosen.features}
    compiled = {CpuBlocks, Quant} <= kinds and library() is not None
    return str(blocks) if compiled else model


def load_folder(
    options: Checked, folder: str, device: torch.device, dtype: str, tokenizer: Tokenizer
) -> Streams:
    """Return a phase's engine for a command, with options that are checked already.

    A line on standard error says what the phase lacks on this machine.

    Args:
        folder: of the model, or a model's name. dtype: as on the command line, such as "auto".
        tokenizer: used for grammars.
    """
    if missing := missing_for(options.phase, device):
        err.print(
            f"[dim]{options.phase.name} needs {missing} to be fast; here it may take minutes.[/dim]",
            soft_wrap=True,
        )
    weights = default_weights(options, folder, device, dtype)
    return load_checked(options, weights, device=str(device), dtype=dtype, tokenizer=tokenizer)


def load_engine(
    phase: Phase,
    model: Any,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Streams:
    """Check options, and return a phase's engine with them; commands and benchmarks make engines here.

    model: a loaded model, or its name. options: of the engine; a switch of a later phase that is False is
    ignored, so that several phases can be compared.

    Raises:
        UserError: an option is wrong, or the phase cannot compute the model's layers.
    """
    where = model.device if isinstance(model, Model) else pick_device(device)
    first = first_phases()
    own = {
        name: value
        for name, value in options.items()
        if value is not False or first.get(name, 0) <= phase.number
    }
    checked = check_options(phase, own, where)
    return load_checked(checked, model, device=device, dtype=dtype, tokenizer=tokenizer)
