"""Training of a head: it learns to say what the model says, in the time that it is given."""

from __future__ import annotations

import random
import time

import pytest
import torch

pytest.importorskip("triton")

import continuous
from common.sampling.params import SamplingParams
from forward.attention import LayerSpec, RecomputeAttention
from forward.model import Model
from forward.models.llama import Llama
from phases.appendix.drafter_training import train
from phases.appendix.drafter_training.train import Talk
from tests.heads import head_of


def test_training_attends_as_the_model_does() -> None:
    layer = LayerSpec(0, 6, 2, 8, 0.35, None, None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8, generator=generator) for heads in (6, 2, 2))
    off = (train.WholeAttention()(layer, q, k, v) - RecomputeAttention()(layer, q, k, v)).abs().max()
    assert off < 1e-5


@torch.inference_mode()
def test_training_unrolls_the_head_as_drafting_does(model: Model) -> None:
    """Each place of step j is what the head makes when its chain began j places before."""
    assert isinstance(model, Llama)
    made = head_of(model)
    ids = torch.tensor([[(7 * n) % 250 + 1 for n in range(14)], [(5 * n) % 250 + 1 for n in range(14)]])
    hidden = train.hidden_states(model, ids, made.taps)
    steps = train.outputs(made, ids, hidden, 4)
    for line, start in ((0, 0), (0, 5), (1, 8)):
        features = made.mix(hidden[line, : start + 1])
        for step, out in enumerate(steps):
            place = start + step
            tokens = ids[line, 1 : place + 2]
            right = made.step(tokens, features, torch.arange(place + 1), RecomputeAttention())[-1]
            difference = float((out[line, place] - right).abs().max())
            assert difference < 1e-4, f"step {step} of the chain that began at {start} is off by {difference}"
            features = torch.cat((features, right[None]))


@pytest.mark.slow
def test_training_makes_a_drafter_in_its_time(model: Model) -> None:
    assert isinstance(model, Llama)
    engine = continuous.load(model, max_rows=16, max_len=64)
    prompts = [[(7 * n + k) % 250 + 1 for k in range(4)] for n in range(80)]
    said = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    talks = [Talk(one.prompt_ids + one.token_ids, 4) for one in said]
    before = {name: value.clone() for name, value in model.named_parameters()}
    started = time.monotonic()
    made = train.train(model, talks[4:], skip=2, seconds=4.0, vocab=128)
    assert time.monotonic() - started < 25, "asked for 4 seconds"
    assert len(made.lm_head.ids) == 128 and all(not weight.requires_grad for weight in made.own().values())
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    ids, real = train.padded(talks[:4], model.device)
    untrained = train.begun(model, made.lm_head.ids)
    losses = [train.loss(model, head, ids, real, 2).item() for head in (made, untrained)]
    assert losses[0] < losses[1] - 0.005, losses


class Written:
    """A tokenizer whose chat form is a frame around the content."""

    def chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        return [250, 251, *({"A": [65], "Why": [87]}[messages[0]["content"]]), 2, 252]


@pytest.mark.slow
def test_the_model_asks_and_answers(model: Model) -> None:
    before, between = train.template(Written())  # type: ignore[arg-type]
    assert (before, between) == ([250, 251], [2, 252])
    engine = continuous.load(model, max_rows=4, max_len=300)
    eos = model.config.eos_token_ids[0]
    talks = train.write(
        engine, before, [eos, 252], seconds=5.0, most=3, answer_tokens=8, begin=lambda rng: [40, 41]
    )
    assert engine.idle
    for talk in talks:
        assert talk.tokens[:4] == [*before, 40, 41], "a question does not begin as it was begun"
        assert talk.tokens[talk.answer - 2 : talk.answer] == [eos, 252]
        assert eos not in talk.tokens[2 : talk.answer - 2], "a question has an end inside"
    groups = list(train.batches(talks, 64, random.Random(0))) if talks else []
    assert sum(map(len, groups)) == len(talks)
