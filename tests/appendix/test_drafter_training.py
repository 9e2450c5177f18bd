"""Training of a head: it learns to say what the model says, in the time that it is given."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import continuous
import forward
from common.sampling.params import SamplingParams
from forward.attention import LayerSpec, RecomputeAttention
from forward.model import Model
from phases.appendix.drafter_training import run, text, unroll
from phases.appendix.drafter_training.text import Talk
from speculative import head
from speculative.head import Head, ReducedHead
from tests.heads import head_of


@pytest.mark.parametrize(("window", "cap"), [(None, None), (3, None), (None, 5.0)])
def test_training_attends_as_the_model_does(window: int | None, cap: float | None) -> None:
    layer = LayerSpec(0, 6, 2, 8, 0.35, window, cap)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8, generator=generator) for heads in (6, 2, 2))
    off = (unroll.WholeAttention()(layer, q, k, v) - RecomputeAttention()(layer, q, k, v)).abs().max()
    assert off < 1e-5, f"window {window}, soft cap {cap}: off by {off:.1e}"


@torch.inference_mode()
def test_training_unrolls_the_head_as_drafting_does(model: Model) -> None:
    """Each place of step j is what the head makes when its chain began j places before."""
    made = head_of(model)
    assert isinstance(made, Head)
    ids = torch.tensor([[(7 * n) % 250 + 1 for n in range(14)], [(5 * n) % 250 + 1 for n in range(14)]])
    hidden = unroll.hidden_states(model, ids, made.taps)
    steps = unroll.outputs(made, ids, hidden, 4)
    for line, start in ((0, 0), (0, 5), (1, 8)):
        features = made.mix(hidden[line, : start + 1])
        for step, out in enumerate(steps):
            place = start + step
            tokens = ids[line, 1 : place + 2]
            attention = forward.attention.RecomputeAttention()
            right = made.step(tokens, features, torch.arange(place + 1), attention)[-1]
            difference = float((out[line, place] - right).abs().max())
            assert difference < 1e-4, f"step {step} of the chain that began at {start} is off by {difference}"
            features = torch.cat((features, right[None]))


def test_the_loss_falls_and_nothing_but_the_drafter_changes(model: Model) -> None:
    made = head_of(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    for value in made.own().values():
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(made.own().values(), lr=3e-3)
    ids, real = unroll.padded(
        [Talk([(3 * n * n + k) % 250 + 1 for n in range(20 + k)], 2, True) for k in range(4)], model.device
    )
    losses = []
    for _ in range(25):
        value = unroll.loss(model, made, ids, real, 2, 3)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0] - 0.005, losses
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


class AlwaysRight:
    """A head whose hidden states are those that the model will have."""

    taps = ()

    def __init__(self, model: Model) -> None:
        self.model, self.ids = model, torch.empty(0)
        self.lm_head = ReducedHead(model.lm_head.weight, torch.arange(257), 257)

    def mix(self, states: Tensor) -> Tensor:
        return states

    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, attention: object) -> Tensor:
        return unroll.hidden_states(self.model, self.ids)[:, 1:]


def test_acceptance_counts_chains_of_right_drafts(model: Model) -> None:
    right = AlwaysRight(model)
    talks = []
    for one in continuous.load(model, max_rows=3, max_len=64).generate(
        [[1, 2, 3], [9] * 8], SamplingParams(max_tokens=20, ignore_eos=True)
    ):
        talks.append(Talk(one.prompt_ids + one.token_ids, len(one.prompt_ids), True))
    right.ids = unroll.padded(talks, model.device)[0]
    assert unroll.accepted(model, right, talks) == [1.0] * 4  # type: ignore[arg-type]


class Written:
    """A tokenizer whose chat form is a frame around the content."""

    def chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        return [250, 251, *({"A": [65], "Why": [87]}[messages[0]["content"]]), 2, 252]


@pytest.mark.slow
def test_the_model_asks_and_answers(model: Model) -> None:
    before, between = text.template(Written())  # type: ignore[arg-type]
    assert (before, between) == ([250, 251], [2, 252])
    engine = continuous.load(model, max_rows=4, max_len=300)
    eos = model.config.eos_token_ids[0]
    talks = text.write(
        engine,
        before,
        [eos, 252],
        seconds=5.0,
        most=3,
        answer_tokens=8,
        begun=lambda rng: [40, 41],
    )
    assert engine.idle
    for talk in talks:
        assert talk.tokens[:4] == [*before, 40, 41], "a question does not begin as it was begun"
        assert talk.tokens[talk.answer - 2 : talk.answer] == [eos, 252]
        assert eos not in talk.tokens[2 : talk.answer - 2], "a question has an end inside"
    groups = list(text.batches(talks, 64, random.Random(0))) if talks else []
    assert sum(map(len, groups)) == len(talks)


@pytest.mark.slow
def test_training_makes_a_drafter_in_its_time(model: Model, tmp_path: Any) -> None:
    engine = continuous.load(model, max_rows=16, max_len=64)
    prompts = [[(7 * n + k) % 250 + 1 for k in range(4)] for n in range(80)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    talks = [Talk(one.prompt_ids + one.token_ids, 4, True) for one in engine.generate(prompts, params)]
    path, started = tmp_path / "tiny-head.safetensors", time.monotonic()
    about = {"model": "tiny", "device": "cpu", "minutes": 0.1}
    facts = run.train_head(model, talks, path, about, skip=2, seconds=4.0, vocab=128)  # type: ignore[arg-type]
    assert time.monotonic() - started < 25, "asked for 4 seconds"
    assert len(head.load(path, model).lm_head.ids) == 128
    assert facts["tokens_per_step"] == 1 + sum(facts["accepted"]) and facts["conversations"] == 76
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "`tiny-head.safetensors`" in card and "--minutes 0.1" in card


def test_questions_begin_in_many_ways() -> None:
    rng = random.Random(0)
    words = [f"qx{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(300)]
    begun = [text.beginning(rng, words) for _ in range(3_000)]
    assert 0.12 < begun.count("") / len(begun) < 0.18, "the model begins about one of seven"
    assert len(set(begun)) > 900 and not any("{" in one or "|" in one for one in begun)
    found = {word for word in words if any(word in one for one in begun)}
    assert len(found) > 270, f"of 300 words of the vocabulary {len(found)} are topics"


def test_words_of_a_vocabulary_stand_alone_and_are_whole() -> None:
    texts = [
        " harbour",
        "harbour",
        " Harbour",
        " bee",
        " piano",
        " piano",
        " can't",
        " naïve",
        " under score",
    ]
    assert text.words_of(texts) == ["harbour", "piano"]


@pytest.mark.slow
def test_answers_cut_off_by_the_time_are_kept(model: Model) -> None:
    engine = continuous.load(model, max_rows=4, max_len=300)
    eos = model.config.eos_token_ids[0]
    talks = text.write(engine, [250, 251], [eos, 252], seconds=1.5, most=50, answer_tokens=250)
    assert engine.idle and engine.scheduler.rows.free == 4, "what was cut off still holds its row"
    assert all(
        len(talk.tokens) - talk.answer >= text.LEAST_ANSWER for talk in talks if talk.tokens[-1] != eos
    )


def test_frequent_tokens() -> None:
    talks = [Talk([5, 5, 5, 2, 2, 9], 1, True)]
    assert text.frequent(talks, 2, 12) == [2, 5] and text.frequent(talks, 4, 12) == [0, 2, 5, 9]
