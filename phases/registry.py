"""A phase as the command line and the benchmarks see it: name, requirements, options, engine."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from common.device import pick_device
from common.errors import UserError
from common.events import Streams
from common.options import names, route, unknown
from common.text.tokenizer import Tokenizer
from continuous.sizes import Sizes
from forward.loading import facts_of
from forward.model import Model
from paged_cache.build import build
from paged_cache.builder import Feature, PagedSizes, Recipe
from paged_cache.preset import Chosen, Preset
from phases import PHASES, Phase, appendix, check_phase, own_options
from phases import phase_named as phase_named

LOADS = {"model", "device", "dtype", "tokenizer"}
"""What every phase's `load` takes beside options."""
ROWS = 4
BLOCKS = 5
QUANT = 10
STATES = 17
"""The phases that bring rows of requests, blocks with all that is a feature, few bits, and layers' states."""
BLOCKS_FOLDER = "blocks"
"""Beside a model's floats: its weights as a GGUF file has them; see `common.models.gguf_import`."""
NEEDS_FLOATS = {
    "quantization",
    "head",
    "group_size",
    "tensor_parallel",
    "draft_model",
    "active_experts",
}
"""Options that say how weights are kept, or whose features read an embedding of floats."""


def import_phase(phase: Phase) -> ModuleType:
    """Import the phase's package, none of which needs Triton: its kernels are imported when installed."""
    return importlib.import_module(phase.package)


def missing_for(phase: Phase, device: torch.device) -> str:
    """Return the name of what `phase` needs and lacks here; empty if it runs natively on `device`."""
    if phase.needs == "cuda" and device.type != "cuda":
        return "a CUDA device" if not torch.cuda.is_available() else "--device cuda"
    return ""


# Features and options.


def features() -> dict[str, type[Feature]]:
    """Every feature there is, by name, in the order of their phases."""
    found: dict[str, type[Feature]] = {}
    for phase in PHASES:
        if phase.number > BLOCKS:
            own = preset(phase)
            found |= {kind.name: kind for kind in (*own.on, *own.fitting)}
    return dict(sorted(found.items(), key=lambda item: item[1].phase))


def preset(phase: Phase) -> Preset:
    """Return a phase's preset with the appendix's features for it and the phases below."""
    own: Preset = import_phase(phase).PRESET
    return own.plus(
        fitting=[kind for kind in appendix.features() if kind.phase <= phase.number]
    )


def first_phases() -> dict[str, int]:
    """Every option of an engine and every feature's switch, with the first phase that has it."""
    found = {name: BLOCKS for name in names(PagedSizes)} | {
        name: ROWS for name in names(Sizes)
    }
    for kind in features().values():
        found |= dict.fromkeys((kind.name, *names(kind)), kind.phase)
    return found


def choose(phase: Phase, options: Mapping[str, Any], device: torch.device) -> Chosen:
    """Return the sizes and features that options mean for a phase from 05 on.

    Raises:
        UserError: an option is unknown, out of its limits, or of a later phase.
    """
    more = [kind for kind in features().values() if kind.phase <= phase.number]
    return preset(phase).choose(own_options(phase, options, first_phases()), device, more)


def check_options(phase: Phase, options: Mapping[str, Any], device: torch.device) -> None:
    """Raise `UserError` for options that a phase does not have, or that are out of their limits.

    A switch of a later phase is none of this one's, even where it is off.
    """
    check_phase(phase, options, first_phases())
    if phase.number >= BLOCKS:
        choose(phase, options, device)
    elif phase.number >= ROWS:
        Sizes(**route(options, [Sizes])[0])
    else:
        known = sorted(set(inspect.signature(import_phase(phase).load).parameters) - LOADS)
        for name in options:
            if name not in known:
                raise UserError(unknown(name, known))


def check_model(phase: Phase, model: Any) -> None:
    """Raise `UserError` for a model, or the name of one, with layers that a phase cannot compute."""
    if facts_of(model).delta is not None and 1 < phase.number < STATES:
        raise UserError(
            f"the model has layers of Gated DeltaNet, which keep a state: phases from {STATES} on have room "
            f"for it, and phase 01 computes it without a cache, but the phase is {phase.name}"
        )


def default_weights(
    phase: Phase, model: str, device: torch.device, dtype: str, options: Mapping[str, Any]
) -> str:
    """Return the checkpoint of a model that commands read: on a CPU the blocks of its GGUF file, if any.

    Phases before 10, options that say how weights are kept, and machines that cannot compile `cpu_step` get
    the floats.

    Args:
        model: its folder, or another name, which is returned as it is.
        dtype: as it was asked for.
    """
    blocks = Path(model) / BLOCKS_FOLDER
    floats = (
        phase.number < QUANT
        or dtype not in ("auto", "float32")
        or not NEEDS_FLOATS.isdisjoint(options)
    )
    if floats or device.type != "cpu" or not blocks.is_dir():
        return model
    installed = {feature.name for feature in choose(phase, options, device).installed}
    if not {"quant", "cpu_step"} <= installed:
        return model
    from phases.appendix.cpu_step.feature import library

    return model if library() is None else str(blocks)


def load_engine(
    phase: Phase,
    model: Any,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> Streams:
    """A phase's engine for a model's name or a loaded model: everything that runs one comes here.

    Raises:
        UserError: an option is unknown, out of its limits, or of a later phase; or see `check_model`.
    """
    where = model.device if isinstance(model, Model) else pick_device(device)
    if phase.number < BLOCKS:
        options = own_options(phase, options, first_phases())
        check_options(phase, options, where)
        check_model(phase, model)
        package = import_phase(phase)
        early: Streams = package.load(
            model, device=device, dtype=dtype, tokenizer=tokenizer, **options
        )
        return early
    chosen = choose(phase, options, where)
    check_model(phase, model)
    return build(Recipe(model, chosen.sizes, chosen.installed, device, dtype, tokenizer))
