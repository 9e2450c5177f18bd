"""Whole models quantized by GPTQ and AWQ, which are calibrated on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.calibration import quantize_model, samples
from benchmarks.fidelity import compare
from common.errors import UserError
from forward.attention import RecomputeAttention
from forward.loading import load_model
from forward.surgery import clone
from quant import rtn
from quant.formats import INT4, SCHEMES, Scheme
from quant.weights import QuantizedWeight
from tests.quant_kit import folders as folders
from tests.quant_kit import logits


def test_awq_divides_inputs_by_what_it_multiplies_weights_by(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that are hardly rounded, the model stays what it was."""
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    multiplied: list[Tensor] = []

    def kept(
        weight: Tensor, importance: Tensor, scheme: Scheme, dtype: Any
    ) -> QuantizedWeight:
        multiplied.append(weight)
        return rtn.quantize(weight, SCHEMES["int8"])

    monkeypatch.setattr("benchmarks.calibration.awq.quantize", kept)
    want, changed = logits(model), clone(model)
    quantize_model(changed, INT4, "awq", [list(range(1, 60))])
    assert not torch.equal(
        multiplied[0], model.get_parameter("layers.0.self_attn.q_proj.weight")
    )
    off = float((logits(changed) - want).abs().max() / want.abs().max())
    assert off < 0.05, f"weights were multiplied, but their inputs not divided: {off:.1e}"


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "gptq"), ("llama", "awq"), ("gemma3", "gptq")]
)
def test_methods_are_better_than_nearest(
    folders: dict[str, Path], family: str, method: Any
) -> None:
    model = load_model(str(folders[family]), device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(97, (1200,), generator=generator).tolist()
    texts = samples(tokens, 16, 64)
    nearest, better = clone(model), clone(model)
    quantize_model(nearest, INT4.with_group(64))
    quantize_model(better, INT4.with_group(64), method, texts)
    ways = [("rtn", nearest, RecomputeAttention()), (method, better, RecomputeAttention())]
    found = compare(model, ways, tokens[:512], window=64)
    assert found[method].kl < found["rtn"].kl, f"{method} on {family}: {found}"


def test_a_text_that_is_too_short() -> None:
    assert samples(list(range(10)), 2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    last = samples(list(range(10)), 1, 4)
    assert last == [[4, 5, 6, 7]], f"calibration takes the end of the text, not {last}"
    with pytest.raises(
        UserError, match="the calibration text has 3 tokens, but must have 4 at least"
    ):
        samples([1, 2, 3], 2, 4)
