"""Six families of models. Read `llama` first; `qwen2`, `qwen3` and `gemma3` are what they change in it."""

import importlib

from forward.model import Model
from forward.models.gemma3 import Gemma3
from forward.models.gpt2 import GPT2
from forward.models.llama import Llama
from forward.models.qwen2 import Qwen2
from forward.models.qwen3 import Qwen3

FAMILIES: dict[str, type[Model]] = {
    "gpt2": GPT2,
    "llama": Llama,
    "mistral": Llama,  # with a sliding window, which every layer's `LayerSpec` has room for
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "gemma3": Gemma3,
}

LATER: dict[str, str] = {
    "qwen2_moe": "experts.qwen3_moe.Qwen2Moe",
    "qwen3_moe": "experts.qwen3_moe.Qwen3Moe",
    "gpt_oss": "experts.gpt_oss.GptOss",
    "qwen3_5": "hybrid_cache.states.qwen3_5.Qwen35",
}
"""A seam: families of later phases, each as `module.Class`, imported when a model of it is made."""


def family_of(name: str) -> type[Model]:
    """Return the `Model` class of a family such as "llama", of this phase or (if in `LATER`) a later one."""
    if name in FAMILIES:
        return FAMILIES[name]
    module, _, kind = LATER[name].rpartition(".")
    return getattr(importlib.import_module(module), kind)
