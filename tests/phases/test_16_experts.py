"""Phase 16: routing, the layer of experts and its families against definitions and Hugging Face's."""

from __future__ import annotations

import copy
import json
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import experts
import forward
from common.errors import UserError
from common.events import generate
from common.models.config import ExpertConfig, ModelConfig
from common.sampling.params import SamplingParams
from experts import grouped_experts
from experts.grouped_experts import GroupedExperts, combine, group_experts
from experts.layer import ExpertModules, Experts
from experts.routing import route, sort_by_expert
from forward.loading import load_model, random_model
from forward.model import Model
from forward.shapes import SHAPES
from quant.linear import QuantLinear
from tests.equivalence.compare import assert_all_same
from tests.oracles import assert_same_logits, written
from tests.schedules import check

AWKWARD = {
    "vocab_size": 97,
    "hidden_size": 60,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 20,
}
QWEN3, QWEN2 = transformers.Qwen3MoeConfig, transformers.Qwen2MoeConfig
ORACLES: dict[str, tuple[type, dict[str, Any]]] = {
    "normalized": (QWEN3, {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "head_dim": 12}),
    "not-normalized": (QWEN3, {"num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    "top-1": (QWEN3, {"num_experts": 9, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    "all-of-them": (QWEN3, {"num_experts": 5, "num_experts_per_tok": 5, "norm_topk_prob": True}),
    "one-expert": (QWEN3, {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": True}),
    "biases-tied": (QWEN3, {"num_experts": 3, "num_experts_per_tok": 2, "attention_bias": True,
        "tie_word_embeddings": True}),
    "shared": (QWEN2, {"num_experts": 7, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 44}),
    "shared-top-1": (QWEN2, {"num_experts": 6, "num_experts_per_tok": 1, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 8}),
}  # fmt: skip
SMALL: dict[str, Any] = {"max_rows": 6, "max_len": 160, "step_tokens": 40, "block_size": 4}


def oracle(name: str, folder: Path) -> Any:
    """A transformers model of random weights, also written to `folder`. Two of its experts are alike."""
    kind, options = ORACLES[name]
    return written(kind(**{**AWKWARD, **options}), folder, with_ties)


def with_ties(model: Any) -> None:
    """Let two experts compute the same: either may be chosen."""
    for layer in model.model.layers:
        stacks = [
            p for n, p in layer.mlp.named_parameters() if n.startswith(("experts", "gate.w"))
        ]
        for stack in stacks if len(stacks) == 3 else ():
            stack[-1] = stack[0]


def layer_of(
    count: int = 7, top_k: int = 3, inside: int = 20, seed: int = 0, **facts: Any
) -> Experts:
    """One layer of random weights."""
    config = replace(
        SHAPES["tiny-moe"],
        num_layers=1,
        sliding_windows=(),
        experts=ExpertConfig(count=count, top_k=top_k, intermediate_size=inside, **facts),
    )
    model = random_model(config, device="cpu", dtype=torch.float32, seed=seed)
    layer = model.get_submodule("layers.0.mlp")
    assert isinstance(layer, Experts)
    return layer


def grouped(layer: Experts) -> Experts:
    """The same layer, its experts in two tensors."""
    made = copy.deepcopy(layer)
    made.experts = group_experts(layer.experts, "silu")
    return made


def list_of(layer: Experts) -> ExpertModules:
    assert isinstance(layer.experts, ExpertModules)
    return layer.experts


def written_out(layer: Experts, x: Tensor) -> Tensor:
    """The definition, one token and one expert at a time, in float64."""
    facts, out = layer.facts, torch.zeros(x.shape, dtype=torch.float64)
    for token, vector in enumerate(x.double()):
        scores = (layer.gate.weight.double() @ vector).softmax(0).tolist()
        ranked = sorted(range(facts.count), key=lambda e: (-scores[e], e))[: facts.top_k]
        total = sum(scores[e] for e in ranked) if facts.normalize else 1.0
        for e in ranked:
            gate, up, down = (part.weight.double() for part in list_of(layer)[e].children())
            out[token] += (
                scores[e]
                / total
                * (down @ (nn.functional.silu(gate @ vector) * (up @ vector)))
            )
    return out


# Routing.


def test_ties_go_to_the_lowest_number() -> None:
    logits = torch.zeros(5, 40)
    logits[1:, [33, 7, 21]] = 2.0
    for repeat in (1, 200):  # other numbers of rows are sorted by other algorithms
        weights, chosen = route(logits.repeat(repeat, 1), 2, normalize=True)
        wanted = [[0, 1], *[[7, 21]] * 4] * repeat
        assert chosen.tolist() == wanted, (
            f"{5 * repeat} tokens: of equal experts the lowest number is first"
        )
        assert torch.equal(weights, torch.full_like(weights, 0.5))


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_probabilities_in_float32(normalize: bool) -> None:
    logits = torch.randn(50, 7, dtype=torch.bfloat16)
    weights, chosen = route(logits, 3, normalize)
    exact = logits.double().softmax(-1).gather(1, chosen)
    expected = exact / exact.sum(-1, keepdim=True) if normalize else exact
    assert weights.dtype == torch.float32 and (chosen.sort(-1).values.diff() > 0).all()
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=0)
    assert (exact[:, :-1] >= exact[:, 1:]).all(), "the first choice is the likeliest"


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_choices_lie_expert_by_expert_in_the_order_of_tokens(tokens: int) -> None:
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(tokens)])
    chosen[chosen == 4] = 9  # of ten experts, 4, 7 and 8 are chosen by none
    order, offsets = sort_by_expert(chosen, 10)
    flat = chosen.flatten().tolist()
    expected = [[at for at, e in enumerate(flat) if e == expert] for expert in range(10)]
    bounds = offsets.tolist()
    assert [order[a:b].tolist() for a, b in pairwise(bounds)] == expected
    assert bounds[0] == 0 and bounds[-1] == 3 * tokens and expected[4] == []


def test_products_return_to_their_tokens() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [0, 1]])
    weights = torch.tensor([[0.5, 2.0], [1.0, 3.0], [4.0, 0.0]])
    order, _ = sort_by_expert(chosen, 3)
    # A product says which choice it is of: the token, and the expert.
    products = torch.stack(
        [torch.tensor([i // 2, chosen.flatten()[i]]) for i in order.tolist()]
    ).float()
    expected = [[0 * 2.5, 0.5 * 2 + 2 * 0], [1 * 4.0, 1 * 1 + 3 * 2], [2 * 4.0, 4 * 0 + 0 * 1]]
    assert combine(products, order, weights).tolist() == expected


def test_a_token_s_sum_is_its_own() -> None:
    """Bit for bit, whoever else is there: large numbers make the order of a sum seen."""
    products, weights = torch.randn(60, 3, 8) * 1e4, torch.rand(60, 3)
    chosen = torch.stack([torch.randperm(7)[:3] for _ in range(60)])

    def sums(tokens: list[int]) -> Tensor:
        order, _ = sort_by_expert(chosen[tokens], 7)
        return combine(products[tokens].flatten(0, 1)[order], order, weights[tokens])

    everyone = sums(list(range(60)))
    for tokens in ([5], [59, 5], [*range(5, 20)]):
        assert torch.equal(sums(tokens)[tokens.index(5)], everyone[5])


# The layer.

LAYERS: list[dict[str, Any]] = [
    {},
    {"count": 9, "top_k": 1, "normalize": False},
    {"count": 4, "top_k": 4},
    {"normalize": False},
]


@pytest.mark.parametrize("facts", LAYERS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_both_forms_are_the_definition(facts: dict[str, Any], tokens: int) -> None:
    layer, x = layer_of(**facts), torch.randn(tokens, 48)
    expected = written_out(layer, x)
    for form in (layer, grouped(layer)):
        found = form(x)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            form(x.view(1, tokens, 1, 48)), found.view(1, tokens, 1, 48)
        )


def test_ties_and_an_expert_that_no_token_chose() -> None:
    layer, x = layer_of(), torch.randint(-3, 4, (20, 48)).float()
    # Five experts tie with expert 0, to the last bit: sums of small integers are exact in any order.
    layer.gate.weight.data[:] = torch.randint(-3, 4, (48,)).float()
    layer.gate.weight.data[1] *= -1
    for number in (4, 5, 6):
        list_of(layer)[number].requires_grad_(False).apply(
            lambda part: (
                part.weight.fill_(float("nan")) if isinstance(part, nn.Linear) else None
            )
        )
    # Experts 4 to 6 never come before 0, 2 and 3, so nothing of them may be read.
    for form in (layer, grouped(layer)):
        assert form(x).isfinite().all()


def test_an_expert_computes_the_tokens_that_chose_it() -> None:
    layer, x = layer_of(), torch.randn(50, 48)
    rows: dict[int, int] = {}
    for number, expert in enumerate(list_of(layer)):
        expert.register_forward_hook(
            lambda _, given, out, number=number: rows.update(
                {number: rows.get(number, 0) + len(given[0])}
            )
        )
    layer(x)
    _, chosen = route(layer.gate(x), 3, normalize=True)
    counts = {expert: int((chosen == expert).sum()) for expert in range(7)}
    assert rows == {expert: count for expert, count in counts.items() if count}
    assert sum(rows.values()) == 3 * 50


def test_half_precision_sums_in_float32() -> None:
    parts = torch.tensor(
        [[256.0], [1.0], [1.0]], dtype=torch.bfloat16
    )  # 256 + 1 is 256 in bfloat16
    assert combine(parts, torch.arange(3), torch.ones(1, 3)).tolist() == [[258.0]]
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer = layer_of()
    exact = written_out(layer.bfloat16(), x)
    scores = (x.double() @ layer.gate.weight.double().t()).sort(1, descending=True).values
    top_k = layer.facts.top_k
    # In bfloat16 near scores may choose another expert.
    clear = scores[:, top_k - 1] - scores[:, top_k] > 0.05
    assert clear.sum() > 20
    for form in (layer, grouped(layer)):
        found = form(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found[clear].double(), exact[clear], atol=0.03, rtol=0.03)


# Families.


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    reference = oracle(name, tmp_path)
    plain = load_model(tmp_path, device="cpu", dtype="float32")
    fast = experts.load(tmp_path, device="cpu", dtype="float32", **SMALL).runner.model
    assert any(isinstance(part, ExpertModules) for part in plain.modules())
    assert not any(isinstance(part, ExpertModules) for part in fast.modules())
    for form in (plain, fast):
        assert_same_logits(form, reference, name)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "too-many": (
        "normalized",
        {"num_experts_per_tok": 8},
        "num_experts_per_tok is 8, but there are 7",
    ),
    "none": (
        "normalized",
        {"num_experts": None, "num_local_experts": None},
        "no field 'num_experts'",
    ),
    "windows": ("normalized", {"use_sliding_window": True}, "use_sliding_window is True"),
    "no-biases": ("shared", {"qkv_bias": False}, "qkv_bias is False"),
    "dense-layers": ("normalized", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
    "every-second": ("normalized", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    "two-counts": (
        "normalized",
        {"num_experts": 7, "num_local_experts": 8},
        "means the same field",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_configurations_that_are_refused(case: str) -> None:
    name, change, says = WRONG[case]
    kind, options = ORACLES[name]
    raw = json.loads(kind(**{**AWKWARD, **options}).to_json_string())
    assert ModelConfig.from_hf(raw).experts is not None
    with pytest.raises(UserError, match=says):
        ModelConfig.from_hf(raw | change)


# Engines.


@pytest.fixture(scope="module")
def moe() -> Model:
    return load_model("random:tiny-moe", device="cpu", dtype="float32")


def work() -> tuple[list[list[int]], list[SamplingParams]]:
    """Shared prefixes, repeated words that drafts find, greedy and sampled."""
    prompts = [
        [5, 6, 7, 8] * 6,
        [5, 6, 7, 8] * 6 + [9],
        [3],
        list(range(1, 70)),
        [11, 12] * 20,
        [200] * 9,
    ]
    params = [SamplingParams(max_tokens=24, ignore_eos=True) for _ in prompts]
    params[1] = replace(params[1], temperature=0.8, seed=3)
    params[3] = replace(params[3], temperature=1.0, seed=4, n=2)
    return prompts, params


ENGINES: dict[str, dict[str, Any]] = {
    "usual": {},
    "in turn": {"overlap": False, "chunked_prefill": False, "step_tokens": 160},
    "tiny chunks": {"step_tokens": 9, "chunk_tokens": 5},
    "always drafting": {"draft_adaptive": False, "draft_length": 4},
    "preempting": {"cache_bytes": 40 * 4608, "max_rows": 5},
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_tokens_are_phase_01_s(name: str, moe: Model) -> None:
    prompts, params = work()
    expected = generate(forward.load(moe), prompts, params)
    engine = experts.load(moe, **{**SMALL, **ENGINES[name]})
    for _ in range(2):  # the second time with a warm cache
        assert_all_same(moe, expected, generate(engine, prompts, params), params)
    check(engine)
    if name == "preempting":
        assert engine.scheduler.preemptions > 0


def test_the_caller_s_model_stays_as_it_is(moe: Model) -> None:
    engine = experts.load(moe, **SMALL)
    own = engine.runner.model
    for index in range(3):
        before, after = (
            model.get_submodule(f"layers.{index}.mlp.experts") for model in (moe, own)
        )
        assert isinstance(before, ExpertModules) and isinstance(after, GroupedExperts)
    assert own.get_parameter("embed_tokens.weight") is moe.get_parameter("embed_tokens.weight")
    assert experts.load(moe, experts=False, **SMALL).runner.model is moe


def test_one_layer_at_a_time_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    def noted(old: nn.Module, activation: str) -> Any:
        alive.append(sum(layer() is not None for layer in seen))
        seen.append(weakref.ref(old))
        return group_experts(old, activation)

    monkeypatch.setattr("experts.feature.group_experts", noted)
    experts.load("random:tiny-moe", device="cpu", dtype="float32", **SMALL)
    assert alive == [0, 0, 0], "a layer that is grouped is still there when the next one is"
    assert all(layer() is None for layer in seen)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_quantized_experts(scheme: str, moe: Model) -> None:
    """On a CPU they stay phase 10's layers, one by one; the router is never rounded."""
    prompts, params = work()
    alone: dict[str, Any] = {**SMALL, "max_rows": 2, "drafter": "none", "quantization": scheme}
    plain, engine = experts.load(moe, experts=False, **alone), experts.load(moe, **alone)
    layer = engine.runner.model.get_submodule("layers.0.mlp")
    assert sum(isinstance(part, QuantLinear) for part in layer.modules()) >= 2 * 7
    assert layer.gate.weight is moe.get_submodule("layers.0.mlp").gate.weight  # type: ignore[union-attr]
    found, expected = (generate(each, prompts, params) for each in (engine, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_rows_that_a_step_multiplies(moe: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts a token: three sevenths of what all of them would compute."""
    seen: list[tuple[int, int]] = []
    plain = grouped_experts.sorted_loop

    def counted(layer: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        seen.append((len(x), chosen.numel()))
        return plain(layer, x, weights, chosen)

    monkeypatch.setattr(grouped_experts, "sorted_loop", counted)
    generate(experts.load(moe, **SMALL), *work())
    assert seen and all(tokens > 1 for tokens, _ in seen), "a token alone needs no sorting"
    assert all(rows == 3 * tokens for tokens, rows in seen)
