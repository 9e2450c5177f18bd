"""Engines have what their variants' names say: built engines are looked at, not their presets."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

from benchmarks import ladder
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX
from forward.loading import load_model, random_model
from forward.model import Model
from forward.shapes import SHAPES
from phases import PHASES, Phase, phase_named
from phases.appendix.cpu_step.feature import CAPABLE, library
from phases.registry import import_phase

SIZES: dict[str, Any] = {"max_rows": 2, "max_len": 64, "cache_bytes": 1 << 20}
HIDDEN = [
    ("15_replicas", f"15{APPENDIX}", "phases.appendix.guidance"),
    ("11_speculative", "12", "structured"),
    ("19_moving_blocks", "18", "batch_invariance"),
]
"""A variant, the variant whose engine it has in truth, and the package that gives it away."""


def origins(root: object) -> dict[str, str]:
    """Return {module: a class or function of it} for all that an object reaches, but not by globals."""
    found: dict[str, str] = {}
    reached: dict[int, object] = {}
    waiting = [root]
    while waiting:
        item = waiting.pop()
        of_module = isinstance(item, dict) and "__spec__" in item
        if id(item) in reached or of_module or isinstance(item, ModuleType | FrameType):
            continue
        reached[id(item)] = item  # kept, or another object could get its id
        kind = item if isinstance(item, type | FunctionType) else type(item)
        found[str(kind.__module__)] = kind.__qualname__
        if not isinstance(item, type):
            waiting += gc.get_referents(item)
    return found


def below(phase: Phase) -> set[str]:
    """Return the packages of a phase and those that it builds on: 19 builds on 17, but not on 18."""

    def on(lower: Phase) -> set[object]:
        return set() if lower.number < ladder.GRAPHS else set(import_phase(lower).PRESET.on)

    return {lower.package for lower in PHASES[: phase.number] if on(lower) <= on(phase)}


def check(variant: str, engine: object, model: Model) -> None:
    """Fail if an engine has a feature that its name does not say; a model's own layers are none."""
    own = below(phase_named(variant.removesuffix(APPENDIX)))
    refused = {phase.package for phase in PHASES} - own
    refused |= set() if variant.endswith(APPENDIX) else {"phases"}  # where the appendix is
    known = origins(model)
    for module, name in origins(engine).items():
        hidden = module.partition(".")[0] in refused and module not in known
        assert not hidden, f"{variant} has {name} of {module}, but is not named so"


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
@pytest.mark.parametrize("name", ["tiny", "tiny-window", "tiny-moe"])
def test_an_engine_has_only_what_its_name_says(name: str, phase: Phase) -> None:
    model = load_model(f"random:{name}", device="cpu", dtype="float32")
    if phase.number >= ladder.BLOCKS and (name, phase.number) != ("tiny-moe", 18):  # refused
        check(phase.name, engine_of(phase.name, model, **SIZES), model)
    if phase.number <= ladder.LAST:
        for variant, engine in ladder.engines(phase, model, rows=2):
            assert variant.removesuffix(APPENDIX) == phase.name
            check(variant, engine, model)


@pytest.mark.parametrize("phase", PHASES[ladder.GRAPHS - 1 :], ids=lambda phase: phase.name)
def test_the_appendix_is_seen_where_it_is_named(phase: Phase) -> None:
    entry = "cpu_step" if phase.number < 12 else "guidance"
    if entry == "cpu_step" and not (CAPABLE and library()):
        pytest.skip("needs a C++ compiler and AVX2")
    config = replace(SHAPES["tiny"], vocab_size=256)  # which the compiled step can compute
    model = random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    engine = engine_of(phase.name + APPENDIX, model, **SIZES)
    assert any(module.startswith(f"phases.appendix.{entry}.") for module in origins(engine))
    check(phase.name, engine_of(phase.name, model, **SIZES), model)


@pytest.mark.parametrize(("variant", "has", "module"), HIDDEN)
def test_a_hidden_feature_is_named(
    variant: str, has: str, module: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(has, model, **SIZES)
    monkeypatch.setattr(import_phase(phase_named(variant)), "load", lambda _: engine)
    with pytest.raises(AssertionError, match=rf"^{variant} has [\w.]+ of {module}\.\w+"):
        check(variant, engine_of(variant, model), model)
