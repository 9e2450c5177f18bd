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

from common.device import pick_device
from common.errors import UserError
from common.events import Streams
from common.options import route, unknown
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
QUANT = 10
STATES = 17
"""First phases with rows of requests, with blocks and features, with quantized weights, and with states."""
BLOCKS_FOLDER = "blocks"
"""Beside a model's floats: its weights as a GGUF file has them; see `common.models.gguf_import`."""
NEEDS_FLOATS = {
    "quantization",
    "head",
    "group_size",
    "tensor_parallel",
    "draft_model",
    "active_experts",
    "batch_invariant",
}
"""Options that say how weights are kept, and features that read weights or an embedding of floats."""


def import_phase(phase: Phase) -> ModuleType:
    """Import a phase's package. None needs Triton: kernels are imported when a feature is installed."""
    return importlib.import_module(phase.package)


def missing_for(phase: Phase, device: torch.device) -> str:
    """Return what `phase` needs and this machine lacks, such as a CUDA device; empty if it runs natively on
    `device`.
    """
    if phase.needs == "cuda" and device.type != "cuda":
        return "a CUDA device" if not torch.cuda.is_available() else "--device cuda"
    return ""


# Features and options.


def preset(phase: Phase) -> Preset:
    """Return a phase's preset with the appendix's features for it and the phases below."""
    own: Preset = import_phase(phase).PRESET
    return own.plus(fitting=appendix.features(phase.number))


def features(phase: Phase) -> list[type[Feature]]:
    """Return every feature that a phase or one below it has, in the order of their phases."""
    found: dict[type[Feature], None] = {}
    for each in PHASES[BLOCKS - 1 : phase.number]:
        own = preset(each)
        found |= dict.fromkeys((*own.on, *own.fitting))
    return sorted(found, key=lambda kind: kind.phase)


@dataclass(frozen=True)
class Checked:
    """Checked options of a phase's engine.

    own: by name. chosen: from phase 05 on, the sizes and features that they ask for.
    """

    phase: Phase
    own: dict[str, Any]
    chosen: Chosen | None = None


def check_options(phase: Phase, options: Mapping[str, Any], device: torch.device) -> Checked:
    """Return a phase's options as `load_checked` takes them.

    Raises:
        UserError: an option is unknown, out of its limits, or of a later phase.
    """
    check_phase(phase, options, first_phases())
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
    """Raise `UserError` if a model, loaded or given by its name, has layers that the phase cannot compute."""
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
    """Make a phase's engine for a model's name or a loaded model. Raises `UserError`: see `check_model`."""
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
    """Return the checkpoint of a model that commands read: on a CPU the blocks of its GGUF file, if any.

    Phases before 10, options that say how weights are kept, and machines that cannot compile `cpu_step` get
    the floats.

    Args:
        model: its folder, or another name, which is returned as it is.
        dtype: as it was asked for.
    """
    blocks = Path(model) / BLOCKS_FOLDER
    floats = (
        options.phase.number < QUANT
        or dtype not in ("auto", "float32")
        or not NEEDS_FLOATS.isdisjoint([*options.own, *_switched_on(options)])
    )
    if options.chosen is None or floats or device.type != "cpu" or not blocks.is_dir():
        return model
    from phases.appendix.cpu_step.blocks import CpuBlocks
    from phases.appendix.cpu_step.feature import library
    from quant import Quant

    kinds = {type(feature) for feature in options.chosen.features}
    compiled = {CpuBlocks, Quant} <= kinds and library() is not None
    return str(blocks) if compiled else model


def _switched_on(options: Checked) -> list[str]:
    return [] if options.chosen is None else [one.name for one in options.chosen.features]


def load_engine(
    phase: Phase,
    model: Any,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Streams:
    """Check options, and make a phase's engine with them: everything that runs one comes here.

    Switches of later phases that are off are left out, for comparisons of several phases.

    Raises:
        UserError: see `check_options` and `check_model`.
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
