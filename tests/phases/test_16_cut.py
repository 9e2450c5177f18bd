"""Phase 16: a dense model cut into experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import experts
import forward
from common.errors import UserError
from common.events import generate
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from experts import cut
from experts.layer import Experts
from experts.stacked import StackedExperts
from forward.loading import load_model
from forward.model import Model
from phases import phase_named
from phases.registry import load_engine
from quant.calibrate import TEXT
from tests.equivalence.compare import assert_all_same
from tests.oracles import logits_of
from tests.schedules import check

SMALL: dict[str, Any] = {"max_rows": 4, "max_len": 96, "step_tokens": 40, "block_size": 4}
PROMPTS = [[5, 6, 7, 8] * 5, [5, 6, 7, 8] * 5 + [9], [3], list(range(1, 40))]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=1)
    for t in (0, 0.8, 0, 0)
]


@pytest.fixture(autouse=True)
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """An empty cache folder, but for tests with real weights."""
    if "smollm2_folder" not in request.fixturenames:
        monkeypatch.setenv("LADDER_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model("random:tiny", device="cpu", dtype="float32")


@pytest.mark.parametrize("name", ["random:tiny", "random:tiny-window"])
def test_all_experts_are_the_dense_model(name: str) -> None:
    dense = load_model(name, device="cpu", dtype="float32")
    expected = generate(forward.load(dense), PROMPTS, PARAMS)
    engine = experts.load(dense, active_experts=8, **SMALL)
    layers = [
        layer for layer in engine.runner.model.modules() if isinstance(layer, StackedExperts)
    ]
    assert len(layers) == dense.config.num_layers
    assert_all_same(dense, expected, generate(engine, PROMPTS, PARAMS), PARAMS)
    check(engine)


def test_what_the_appendix_adds_leaves_experts_alone(tiny: Model) -> None:
    """A step of one call knows MLPs, and must not take a layer of experts for one."""
    expected = generate(forward.load(tiny), PROMPTS, PARAMS)
    engine: Any = load_engine(phase_named("16"), tiny, active_experts=8, **SMALL)
    assert_all_same(tiny, expected, generate(engine, PROMPTS, PARAMS), PARAMS)


def test_fewer_experts_are_nearer_the_more_there_are(tiny: Model) -> None:
    ids = torch.randint(0, 257, (80,))
    exact = logits_of(tiny, ids)
    off = []
    for count in (1, 4, 7, 8):
        model = experts.load(tiny, active_experts=count, **SMALL).runner.model
        off.append(float((logits_of(model, ids) - exact).square().mean()))
    assert off[0] > off[1] > off[2] > 1e-6 > off[3]


def test_neurons_that_fire_together_go_together() -> None:
    """Eight kinds of tokens, eight groups of neurons, each large for one kind, dealt out at random."""
    kind = torch.arange(64) % cut.COUNT
    group = torch.randperm(48) % cut.COUNT
    neurons = (kind[:, None] == group).float() * 5 + torch.rand(64, 48)
    x = F.one_hot(kind, cut.COUNT).float()
    found, router = cut.divide(x, neurons, torch.randn(20, 48))
    assert sorted(found.flatten().tolist()) == list(range(48))
    for own in found:
        assert len(own) == 6 and len(set(group[own].tolist())) == 1
    # And the router sends a kind of token to its own group.
    best = (x @ router.t()).argmax(dim=1)
    assert [group[found[e][0]].item() for e in best.tolist()] == kind.tolist()


def test_a_router_learns_which_part_is_large() -> None:
    x, plan = torch.randn(2000, 12), torch.randn(5, 12)
    sizes = (x @ plan.t() + torch.randn(2000, 1)).exp()  # what all have in common says nothing
    router = cut.fit(x, sizes)
    agree = (x @ router.t()).argmax(1) == sizes.argmax(1)
    assert agree.float().mean() > 0.95


def test_what_parts_have_in_common_decides_nothing() -> None:
    x, plan = torch.randn(3000, 12), torch.randn(5, 12)
    router = cut.fit(x, (x @ plan.t() + 3 * torch.randn(3000, 1)).exp())
    torch.testing.assert_close(
        router, (plan - plan.mean(0)) / (1 + cut.RIDGE), atol=0.02, rtol=0
    )


def test_few_tokens_and_empty_parts_leave_a_router_small() -> None:
    x, sizes = torch.randn(6, 20), torch.rand(6, 5)
    assert cut.fit(x, sizes).abs().max() < 10, "more inputs than tokens: any number would do"
    sizes[:, 2] = 0.0
    assert cut.fit(x, sizes).isfinite().all()


def test_what_was_found_is_kept(
    tiny: Model, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = experts.load(tiny, active_experts=4, **SMALL).runner.model
    assert len([*home.rglob("*.safetensors")]) == 1
    monkeypatch.setattr(cut, "look", None)  # a second look would fail
    second = experts.load(tiny, active_experts=3, **SMALL).runner.model
    for one, again in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, again)
    other = load_model("random:tiny", device="cpu", dtype="float32", seed=1)
    with pytest.raises(TypeError):  # another model is looked at anew
        experts.load(other, active_experts=4, **SMALL)


def test_a_mixture_has_its_own_experts() -> None:
    model = load_model("random:tiny-moe", device="cpu", dtype="float32")
    engine = experts.load(model, active_experts=2, **SMALL)
    layer = engine.runner.model.get_submodule("layers.0.mlp")
    assert isinstance(layer, Experts) and layer.facts.top_k == 2 and layer.facts.count == 7


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "nine": ("random:tiny", {"active_experts": 9}, "active_experts is 9, but a layer has 8"),
    "none": ("random:tiny", {"active_experts": 0}, "active_experts is 0"),
    "all of seven": (
        "random:tiny-moe",
        {"active_experts": 8},
        "active_experts is 8, but a layer has 7",
    ),
    "few bits": ("random:tiny", {"active_experts": 4, "quantization": "int8"}, "or few bits"),
    "off": ("random:tiny", {"active_experts": 4, "experts": False}, "experts is off"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_cut(case: str) -> None:
    name, options, says = WRONG[case]
    with pytest.raises(UserError, match=says):
        experts.load(name, device="cpu", dtype="float32", **options, **SMALL)


@pytest.mark.slow
def test_smollm2_in_experts(smollm2_folder: Path) -> None:
    """All eight: the dense model's tokens. Six: a text is less likely, but far from random."""
    model, tokenizer = (
        load_model(smollm2_folder, device="cpu", dtype="float32"),
        Tokenizer(smollm2_folder),
    )
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8")[:2000])
    ids = torch.tensor(text)
    params = [SamplingParams(max_tokens=12, ignore_eos=True)]
    expected = generate(forward.load(model), [text[:40]], params)
    sizes: dict[str, Any] = {"max_rows": 2, "max_len": 128, "tokenizer": tokenizer}
    engine = experts.load(model, active_experts=8, **sizes)
    assert_all_same(model, expected, generate(engine, [text[:40]], params), params)

    def surprise(of: Model) -> float:
        return float(F.cross_entropy(logits_of(of, ids)[:-1], ids[1:]))

    whole, six = (
        surprise(model),
        surprise(experts.load(model, active_experts=6, **sizes).runner.model),
    )
    assert whole < six < whole + 1.5 < math.log(49_152)
