"""Shapes of published models, for measuring speed where their weights are not at hand.

Sources: the `config.json` of each model on the Hugging Face hub (`llama-160m`: JackFram's).
Speed depends on the shape alone; what a model of random weights says is noise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.models.config import DeltaConfig, ExpertConfig, ModelConfig, RopeConfig


def _shape(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: tuple[int, int, int],
    max_position_embeddings: int,
    **more: Any,
) -> ModelConfig:
    """Return a `ModelConfig` of these sizes. more: other fields, where they differ from common defaults.

    heads: `(H, KH, D)`: query heads, key/value heads, numbers in a head.
    """
    defaults = {
        "norm_eps": 1e-6,
        "activation": "silu",
        "tie_word_embeddings": False,
        "attention_scale": heads[2] ** -0.5,
        "rope": RopeConfig(),
    }
    sizes = (vocab_size, hidden_size, intermediate_size, layers, *heads)
    return ModelConfig(family, *sizes, max_position_embeddings, **{**defaults, **more})


def _yarn(theta: float, trained: int) -> RopeConfig:
    """Return gpt-oss's RoPE configuration: YaRN for a context 32 times as long as in training.

    theta: base of the frequencies. trained: context in training, in tokens.
    """
    return RopeConfig(
        theta, kind="yarn", factor=32.0, original_max_position=trained, truncate=False
    )


QWEN3 = _shape(
    "qwen3", 151_936, 1024, 3072, 28, (16, 8, 128), 40_960,
    tie_word_embeddings=True, rope=RopeConfig(1_000_000.0), eos_token_ids=(151_645,),
)  # fmt: skip
# Small enough for exhaustive tests, and awkward on purpose: grouped heads whose number is no power
# of two, a head size that is not hidden / heads, an odd vocabulary.
TINY = _shape("llama", 257, 48, 80, 2, (6, 3, 16), 1024, norm_eps=1e-5, eos_token_ids=(0,))

# Where a shape has another number of layers than the one it is made of, `sliding_windows=()` is anew: none.
SHAPES: dict[str, ModelConfig] = {
    "qwen3-0.6b": QWEN3,
    "qwen3-8b": replace(
        QWEN3, hidden_size=4096, intermediate_size=12_288, num_layers=36, num_heads=32,
        tie_word_embeddings=False, sliding_windows=(),
    ),
    "qwen3-30b-a3b": replace(
        QWEN3, family="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_layers=48,
        num_heads=32,
        num_kv_heads=4, tie_word_embeddings=False, sliding_windows=(),
        experts=ExpertConfig(count=128, top_k=8, intermediate_size=768),
    ),
    "gpt-oss-20b": _shape(
        "gpt_oss", 201_088, 2880, 2880, 24, (64, 8, 64), 131_072,
        norm_eps=1e-5, attention_bias=True, rope=_yarn(150_000.0, 4096),
        sliding_windows=(128, None) * 12,
        eos_token_ids=(200_002, 199_999, 200_012),
        experts=ExpertConfig(count=32, top_k=4, intermediate_size=2880),
    ),
    "qwen3.5-0.8b": _shape(
        "qwen3_5", 248_320, 1024, 3584, 24, (8, 2, 256), 262_144,
        tie_word_embeddings=True, rope=RopeConfig(10_000_000.0, share=0.25),
        eos_token_ids=(248_044,),
        delta=DeltaConfig(
            key_heads=16, value_heads=16, key_dim=128, value_dim=128, conv_width=4,
            layers=(True, True, True, False) * 6,
        ),
    ),
    "llama-160m": _shape("llama", 32_000, 768, 3072, 12, (12, 12, 64), 2048, eos_token_ids=(2,)),
    "gpt2": _shape(
        "gpt2", 50_257, 768, 3072, 12, (12, 12, 64), 1024,
        norm_eps=1e-5, activation="gelu_new", tie_word_embeddings=True, attention_bias=True,
        mlp_bias=True,
        rope=None, eos_token_ids=(50_256,),
    ),
    "tiny": TINY,
    # The same with every feature that a cache or a mask can get wrong: windows, and a soft cap of the logits.
    "tiny-window": replace(
        TINY, family="gemma3", num_layers=3, num_heads=4, num_kv_heads=2,
        activation="gelu_pytorch_tanh",
        attention_scale=24**-0.5, rope=RopeConfig(100_000.0), rope_local=RopeConfig(),
        sliding_windows=(24, 24, None), final_soft_cap=30.0,
    ),
    # Experts whose number and size are no powers of two.
    "tiny-moe": replace(
        TINY, family="qwen3_moe", num_layers=3, norm_eps=1e-6, sliding_windows=(),
        experts=ExpertConfig(count=7, top_k=3, intermediate_size=112),
    ),
    # The same with sinks, a window in every other layer and a longer context than it was trained for.
    "tiny-gpt-oss": replace(
        TINY, family="gpt_oss", intermediate_size=40, num_layers=3, attention_bias=True,
        rope=_yarn(150.0, 32), sliding_windows=(24, None, 24),
        experts=ExpertConfig(count=5, top_k=2, intermediate_size=40),
    ),
    # The same with layers that keep a state: groups of value heads, and sizes that no tile divides.
    "tiny-delta": replace(
        TINY, family="qwen3_5", num_layers=5, num_heads=4, num_kv_heads=2,
        rope=RopeConfig(share=0.5),
        sliding_windows=(),
        delta=DeltaConfig(
            key_heads=3, value_heads=6, key_dim=12, value_dim=20, conv_width=4,
            layers=(True, True, False, True, False),
        ),
    ),
}  # fmt: skip
