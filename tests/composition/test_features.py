"""One engine from any set of features: the same tokens, and a reason for every set that makes no sense."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, ClassVar

import pytest
import torch

import continuous
import paged_cache
import prefix_cache
from common.errors import UserError
from common.sampling.params import SamplingParams
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedSizes, Recipe, build
from paged_cache.scheduler import PagedScheduler
from phases import first_phases, phase_named, registry
from phases.cli import main

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42], [3]]
PARAMS = [
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=3, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=1, ignore_eos=True),
]
NAMES = ("kernels", "chunked_prefill", "prefix_cache", "overlap", "graphs")
SUBSETS = list(
    chain.from_iterable(combinations(NAMES, count) for count in range(len(NAMES) + 1))
)
# Kernels for one token replace layers of the others: alone, with kernels, in graphs, with everything.
SUBSETS += [(*on, "latency") for on in ((), ("kernels",), ("kernels", "graphs"), NAMES)]
# The interpreter takes its time: with kernels, `make test` tries what needs them, and all features.
QUICK = [
    on
    for on in SUBSETS
    if "kernels" not in on or on[1:] in (("graphs",), ("latency",)) or set(NAMES) <= {*on}
]
SETS = [on if on in QUICK else pytest.param(on, marks=pytest.mark.long) for on in SUBSETS]
SMALL = {
    "max_rows": 4,
    "max_len": 48,
    "step_tokens": 48,
    "block_size": 4,
    "cache_bytes": 1 << 20,
}


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    engine = continuous.load(model, max_rows=4, max_len=48)
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.slow
@pytest.mark.parametrize("on", SETS, ids=lambda names: "+".join(names) or "none")
def test_every_set_of_features_gives_the_same_tokens(
    on: tuple[str, ...], model: Model, expected: list[list[int]]
) -> None:
    options: dict[str, Any] = {name: name in on for name in (*NAMES, "latency")} | SMALL
    if "graphs" in on:
        options |= {"graph_rows": 2, "graph_tokens": 0}
        if "kernels" not in on:
            with pytest.raises(UserError, match="is on, but needs kernels, which is off"):
                registry.load_engine(phase_named("09"), model, **options)
            return
    if on == ("latency",):
        with pytest.raises(UserError, match="latency is on, but needs kernels, which is off"):
            registry.load_engine(phase_named("09"), model, **options)
        return
    engine = registry.load_engine(phase_named("09"), model, **options)
    found = [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]
    assert found == expected, f"with {on or 'no features'}"
    engine.check_integrity()
    assert engine.cache.free == engine.cache.allocator.count, (
        f"blocks leak with {on or 'no features'}"
    )


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a typo": ("05", {"max_row": 3}, "'max_row' is no option here: did you mean max_rows"),
    "a typo in 01": ("01", {"max_rowz": 3}, "'max_rowz' is no option here"),
    "a typo in 04": ("04", {"max_rowz": 3}, "'max_rowz' is no option here"),
    "a later phase": ("07", {"prefix_cache": True}, "--prefix-cache is for phases from 08 on"),
    "an option of a later phase": ("05", {"index": "hash"}, "--index is for phases from 08 on"),
    "no switch": ("09", {"overlap": "yes"}, "overlap is 'yes', but must be True or False"),
    "an option of what is off": ("09", {"prefix_cache": False, "index": "hash"},
        "index is 'hash', but prefix_cache is off on cpu: switch it on with prefix_cache=True"),
    "kernels of another library": ("09", {"kernels": "cuda"}, "kernels is 'cuda'"),
    "a policy": ("05", {"policy": "fcsf"}, r"policy is 'fcsf', but must be one of .*did you mean 'fcfs'"),
}  # fmt: skip


@pytest.mark.parametrize(("number", "options", "says"), WRONG.values(), ids=WRONG.keys())
def test_wrong_options(model: Model, number: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        registry.load_engine(phase_named(number), model, **options)


def test_a_phase_by_itself_takes_its_own_options_only(model: Model) -> None:
    with pytest.raises(UserError, match="'index' is no option here"):
        paged_cache.load(model, index="hash")
    assert isinstance(
        prefix_cache.load(model, index="hash", **SMALL).cache.index, prefix_cache.HashIndex
    )
    plain = prefix_cache.load(model, prefix_cache=False, chunked_prefill=False, **SMALL)
    assert (
        type(plain.cache) is paged_cache.PagedCache and type(plain.scheduler) is PagedScheduler
    )


@dataclass(frozen=True)
class Grab(Feature):
    """Brings a scheduler, as chunked prefill does."""

    name: ClassVar[str] = "grab"
    phase: ClassVar[int] = 7

    def install(self, builder: EngineBuilder) -> None:
        builder.scheduler.replace(self, PagedScheduler)


def test_two_features_that_bring_the_same_part(model: Model) -> None:
    from chunked_prefill import Chunked

    says = "grab and chunked_prefill cannot both be on: each brings its own scheduler"
    with pytest.raises(UserError, match=says):
        build(Recipe(model, PagedSizes(**SMALL), (Chunked(), Grab())))
    with pytest.raises(UserError, match="grab is given twice"):
        build(Recipe(model, PagedSizes(**SMALL), (Grab(), Grab())))


# The owner of the model.


def test_a_named_model_belongs_to_its_engine_and_a_loaded_one_to_its_caller(
    model: Model,
) -> None:
    before = dict(model.named_modules())
    engine = registry.load_engine(phase_named("06"), model, **SMALL)
    assert dict(model.named_modules()) == before, "the caller's layers were replaced"
    assert engine.runner.model is not model  # type: ignore[attr-defined]
    assert registry.load_engine(phase_named("08"), model, **SMALL).runner.model is model  # type: ignore[attr-defined]


# As flags.


def test_flags_come_from_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["run", "--help-all"])
    shown = capsys.readouterr().out
    for name in first_phases():
        assert "--" + name.replace("_", "-") in shown, name
