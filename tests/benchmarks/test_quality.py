"""What `ladder bench quality` measures, and the figure that it draws."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import quality
from benchmarks.evidence import Metric, Run, collect
from forward.loading import load_model
from quant.linear import QuantLinear


def test_a_way_is_what_its_name_says() -> None:
    tiny = load_model("random:tiny", device="cpu", dtype="float32")
    made = quality.Way("fp8", head="int8").make(tiny, ())
    schemes = {
        name: layer.scheme.name for name, layer in made.named_modules() if isinstance(layer, QuantLinear)
    }
    assert schemes.pop("lm_head") == "int8" and set(schemes.values()) == {"fp8"}, schemes
    assert not any(isinstance(layer, QuantLinear) for layer in tiny.modules()), "the reference was changed"


def test_the_figure(tmp_path: Path) -> None:
    """With ways that are as good as the reference, and with models of which only some have a speed."""
    runs = [
        Run(name, "w", "hash", model, "real", "float32", numbers(kl), {"tokens": 20_440})
        for model in quality.MODELS
        for name, kl in (("reference", 0.0), ("int8", 0.003), ("int4 gptq", 0.13), ("keys fp8", 0.008))
    ]
    quality.draw(collect("quality", runs, torch.device("cpu")), tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 10_000


def numbers(kl: float) -> dict[str, Metric]:
    return {"kl": Metric((kl,)), "perplexity": Metric((40.0,)), "agreement": Metric((0.9,))}
