"""Whole models quantized by GPTQ and AWQ, which are calibrated on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.fidelity import compare
from common.errors import UserError
from forward.attention import RecomputeAttention
from forward.loading import load_model
from forward.model import Model
from forward.surgery import clone
from phases.appendix.checkpoint_formats.calibrate import samples
from phases.appendix.checkpoint_formats.quantize import quantize_model
from quant.formats import INT4, SCHEMES
from tests.quant_kit import folders as folders
from tests.quant_kit import logits


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model("random:tiny", device="cpu", dtype="float32")


@pytest.mark.parametrize("family", ["llama", "llama with biases", "qwen2", "qwen3", "gemma3"])
def test_awq_moves_scales_without_changing_the_model(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that are not rounded, only the scales move: from a layer into what is before it."""
    model = load_model(str(folders[family.split()[0]]), device="cpu", dtype="float32")
    for block in model.layers if "biases" in family else ():
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer: Any = block.get_submodule(f"mlp.{name}")
            layer.bias = nn.Parameter(torch.randn(layer.out_features), requires_grad=False)
    want, changed = logits(model), clone(model)
    monkeypatch.setattr(
        "phases.appendix.checkpoint_formats.quantize.quantize_block", lambda *given: None
    )
    quantize_model(changed, INT4, "awq", [list(range(1, 60))])
    moved, before = (
        one.get_parameter("layers.0.mlp.up_proj.weight") for one in (changed, model)
    )
    assert not torch.equal(moved, before)
    off = float((logits(changed) - want).abs().max() / want.abs().max())
    assert off < 1e-4, (
        f"{family}: scales moved into a layer, but not out of what is before it: {off:.1e}"
    )


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
    seen: list[str] = []
    quantize_model(better, INT4.with_group(64), method, texts, seen.append)
    assert seen == ["layers.0", "layers.1"]
    ways = [("rtn", nearest, RecomputeAttention()), (method, better, RecomputeAttention())]
    found = compare(model, ways, tokens[:512], window=64)
    assert found[method].kl < found["rtn"].kl, f"{method} on {family}: {found}"


WRONG: dict[str, tuple[str, str, list[list[int]], str]] = {
    "nothing to choose": (
        "fp8-block",
        "gptq",
        [[1]],
        "method is 'gptq', which does not go with fp8-block",
    ),
    "eight bits": ("fp8", "awq", [[1]], "method is 'awq', which does not go with fp8"),
    "no text": ("int4", "awq", [], "method is 'awq', which needs a calibration text"),
}


@pytest.mark.parametrize(("scheme", "method", "texts", "says"), WRONG.values(), ids=WRONG)
def test_methods_that_make_no_sense(
    tiny: Model, scheme: str, method: Any, texts: Any, says: str
) -> None:
    with pytest.raises(UserError, match=says):
        quantize_model(clone(tiny), SCHEMES[scheme], method, texts)


def test_a_text_that_is_too_short() -> None:
    assert samples(list(range(10)), 2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    last = samples(list(range(10)), 1, 4)
    assert last == [[4, 5, 6, 7]], f"calibration takes the end of the text, not {last}"
    with pytest.raises(
        UserError, match="the calibration text has 3 tokens, but must have 4 at least"
    ):
        samples([1, 2, 3], 2, 4)
