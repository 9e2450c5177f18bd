"""What `ladder bench quality` measures, and the figure that it draws."""

from __future__ import annotations

from benchmarks import quality
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
