"""Experts over ranks: the tokens of one rank, from a part of the weights each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import experts
import parallel
from common.errors import UserError
from common.sampling.params import SamplingParams
from experts.expert_parallel import own_experts
from experts.weights import ExpertWeights, stack_layers
from paged_cache import EngineBuilder, Feature, Recipe
from quant import Quant
from quant.formats import FP8
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight
from tests.ranks_kit import (
    KERNELS,
    LLAMA,
    SMALL,
    end_worker_groups,
    same,
    tokens_of,
    write_checkpoint,
)


@pytest.fixture(scope="module", autouse=True)
def _end_worker_groups() -> Iterator[None]:
    yield
    end_worker_groups()


def test_every_expert_is_on_one_rank() -> None:
    for count, size in ((7, 2), (128, 8), (5, 4)):
        ranks: list[Any] = [_Rank(rank, size) for rank in range(size)]
        found = [own_experts(count, rank) for rank in ranks]
        assert [expert for own in found for expert in own] == list(range(count))
        assert max(map(len, found)) - min(map(len, found)) <= 1


class _Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def dequantized(stack: ExpertWeights) -> Tensor:
    """The last expert's weight."""
    if stack.scheme is None or stack.scale is None:
        return stack.data[-1]
    return QuantizedWeight(stack.scheme, stack.data[-1], stack.scale[-1]).dequantize()


def _stacks(scheme: Any, hidden: int, inside: int) -> tuple[ExpertWeights, ExpertWeights]:
    sizes = ((hidden, inside), (hidden, inside), (inside, hidden))
    layers: list[list[Any]] = [[torch.nn.Linear(*size) for size in sizes] for _ in range(2)]
    if scheme is not None:
        layers = [[QuantLinear.of(layer, scheme, "x") for layer in each] for each in layers]
    return stack_layers([each[:2] for each in layers]), stack_layers(
        [each[2:] for each in layers]
    )


def test_some_experts_are_a_copy() -> None:
    up, _ = _stacks(FP8, 6, 8)
    found = up.only(range(1, 2))
    assert torch.equal(dequantized(found), dequantized(up)) and len(found.data) == 1
    assert (
        found.bias is not None
        and up.bias is not None
        and torch.equal(found.bias[0], up.bias[1])
    )
    assert found.data.untyped_storage().nbytes() < up.data.untyped_storage().nbytes(), (
        "the rest can go"
    )


def test_more_ranks_than_experts_are_refused() -> None:
    with pytest.raises(UserError, match="tensor_parallel is 9, but a layer has 7 experts"):
        experts.load("random:tiny-moe", tensor_parallel=9, **SMALL)


# The same tokens.


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in files: 7 experts, 2 key/value heads."""
    folder = tmp_path_factory.mktemp("mixture")
    raw = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_attention_heads": 4,
        "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 3, "num_experts": 7,
        "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        "tie_word_embeddings": False, "attention_bias": False,
    }  # fmt: skip
    write_checkpoint(folder, LLAMA | raw)
    return folder


@pytest.fixture(scope="module")
def expected(mixture: Path) -> list[list[int]]:
    return tokens_of(experts.load(str(mixture), **SMALL))


def _in_ranks(model: Path, *given: Any, **options: Any) -> list[list[int]]:
    """Tokens of two ranks."""
    engine: Any = experts.load(str(model), tensor_parallel=2, **SMALL | options)
    try:
        found = tokens_of(engine, *given)
        engine.check_integrity()
        assert engine.cache.free == engine.cache.allocator.count, "blocks are lost in ranks"
        return found
    finally:
        engine.loop.close()


@pytest.mark.slow
def test_ranks_give_the_tokens_of_one(mixture: Path, expected: list[list[int]]) -> None:
    same(_in_ranks(mixture), expected, "two ranks")


@pytest.mark.slow
def test_experts_of_few_bits_are_those_of_one_rank(mixture: Path) -> None:
    """Without kernels they are not stacked, and every rank computes all of them."""
    options = {"quantization": "int4", "group_size": 16}
    wanted = tokens_of(experts.load(str(mixture), **SMALL | options))
    same(_in_ranks(mixture, **options), wanted, "two ranks, int4")


@pytest.mark.slow
def test_kernels_in_ranks_give_the_tokens_of_one(mixture: Path) -> None:
    short = [  # one token of a prefill, one of a decode: each has an expert kernel of its own
        SamplingParams(max_tokens=2, ignore_eos=True, temperature=t, seed=5)
        for t in (0.0, 0.8)
    ]
    given = ([[3], [5, 6, 7, 8, 9, 10]], short)
    options = SMALL | KERNELS | {"quantization": "fp8-weights"}
    wanted = tokens_of(experts.load(str(mixture), **options), *given)
    same(_in_ranks(mixture, *given, **options), wanted, "two ranks, kernels, fp8")


def _loaded(ranks: Any, model: str, *more: Feature) -> EngineBuilder:
    """A builder with the model of one rank (None: of all), before features are installed."""
    from parallel.feature import Split

    split = (Split(ranks),) if ranks else ()
    features = (*split, experts.MixtureOfExperts(), experts.ExpertParallel(), *more)
    builder = EngineBuilder(Recipe(model, features=features, device="cpu", dtype="float32"))
    for feature in builder.recipe.features:
        feature.configure_load(builder)
    builder.model = builder.load.part(builder)
    for surgery in builder.surgeries:
        surgery(builder)
    return builder


def _own_experts(ranks: Any, model: str) -> dict[int, tuple[int, ...]]:
    """Shapes of what a rank keeps of each layer's second product."""
    from experts.grouped_experts import GroupedExperts
    from experts.layer import Experts

    builder = _loaded(ranks, model)
    layers = (layer.mlp for layer in builder.model.layers)  # type: ignore[union-attr]
    return {
        index: tuple(layer.experts.down.data.shape)
        for index, layer in enumerate(layers)
        if isinstance(layer, Experts) and isinstance(layer.experts, GroupedExperts)
    }


def _key_scales(ranks: Any, model: str) -> list[Any]:
    """What a rank measures of its own heads, by a pass through the model: layers, keys and values, heads."""
    scales = _loaded(ranks, model, Quant(kv_cache="int8")).kv.part.scales
    assert scales is not None
    return scales.tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_scales_of_keys_are_measured_with_the_sums_of_all_ranks(mixture: Path) -> None:
    wanted = torch.tensor(_key_scales(None, str(mixture)))
    found = torch.tensor(parallel.together(2, _key_scales, str(mixture)))
    found = torch.cat(tuple(found), dim=-1)
    assert torch.allclose(found, wanted, rtol=1e-3), f"{found} in two ranks, {wanted} in one"


@pytest.mark.slow
def test_no_rank_holds_the_whole(mixture: Path) -> None:
    first, second = parallel.together(2, _own_experts, str(mixture))
    assert first == dict.fromkeys(range(3), (3, 64, 48))
    assert second == dict.fromkeys(range(3), (4, 64, 48))
