"""Each rung of `ladder demo` shows what it is for, by a count that no neighbour changes."""

from __future__ import annotations

from types import SimpleNamespace

from common.sampling.params import SamplingParams
from forward.model import Model
from paged_cache.memory import weight_bytes
from phases import PHASES, find_phase
from phases.commands.demo import CHUNK, ELSEWHERE, MEMORY_ROWS, SHOWS, load
from phases.commands.work import counted, model_of

BEGIN = list(range(1, 61))
PROMPTS = [BEGIN + [100 + number] * (3 + number) for number in range(8)]
"""Eight questions that begin alike, as the demo's do."""
LENGTHS = [4, 20, 5, 18, 6, 16, 7, 14]


def work(model: Model, number: str) -> SimpleNamespace:
    phase = find_phase(number)
    engine = load(phase, model)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in LENGTHS]
    with counted(phase, engine) as found:
        for event in engine.stream(PROMPTS, params):
            assert event.finish_reason != "error"
    return SimpleNamespace(**found, weights=weight_bytes(model_of(phase, engine)))


def test_every_phase_is_shown_or_named_elsewhere():
    assert {phase.number for phase in PHASES} - {13} == {*SHOWS, *ELSEWHERE}


def test_each_rung_changes_its_number(model):
    found = {
        number: work(model, number) for number in ("1", "2", "3", "4", "5", "7", "8", "10")
    }
    one, two, three, four, five, seven, eight, ten = found.values()
    outputs, prompts = sum(LENGTHS), sum(map(len, PROMPTS))
    assert two.computed == prompts + outputs - len(PROMPTS), "each token is computed once"
    assert one.computed > 8 * two.computed
    assert (one.steps, two.steps) == (outputs, outputs)
    assert three.steps == sum(map(max, zip(LENGTHS[::2], LENGTHS[1::2], strict=True))), (
        "a batch of two waits"
    )
    assert four.steps < three.steps and four.at_once == three.at_once == MEMORY_ROWS
    assert five.at_once > four.at_once
    assert five.largest > seven.largest == CHUNK
    assert eight.computed < seven.computed - 3 * len(BEGIN)
    assert ten.weights < eight.weights / 2
