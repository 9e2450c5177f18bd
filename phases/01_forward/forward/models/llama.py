"""Llama 3 (arXiv 2407.21783), the family that SmolLM2 belongs to; most later families change details of it.

Pre-norm blocks, RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from common.models.config import ModelConfig
from forward.attention import Attention, LayerSpec
from forward.layers import Embedding, GatedMLP, RMSNorm
from forward.model import Model
from forward.rope import Rope, apply_rope


class LlamaAttention(nn.Module):
    """Llama's attention layer: the projections before and after attention, and RoPE."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``q [..., H, D]``, ``k`` and ``v [..., KH, D]`` of ``x [..., hidden]``, not yet rotated."""
        q = self.q_proj(x).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        k = self.k_proj(x).unflatten(-1, (self.spec.num_kv_heads, self.spec.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.spec.num_kv_heads, self.spec.head_dim))
        return q, k, v

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Return attention's output ``[..., hidden]`` for ``x [..., hidden]``.

        cos_sin: RoPE's cosines and sines. attention: the only part that mixes tokens. Queries and keys are
            rotated after `project`, which families override; values are not.
        """
        q, k, v = self.project(x)
        out = attention(self.spec, apply_rope(q, cos_sin), apply_rope(k, cos_sin), v)
        return self.o_proj(out.flatten(-2))


class LlamaBlock(nn.Module):
    """A block of Llama: attention, then the MLP, each on a normalized copy and added back."""

    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = self.attention_class(config, spec)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias
        )

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Return ``x [..., hidden]`` plus attention's output, and plus the MLP's output.

        cos_sin: RoPE's cosines and sines. attention: mixes the tokens. The residual is `x` as it came, not
            its normalized copy.
        """
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(Model):
    """Llama: embedding, blocks, norm, head."""

    block_class: ClassVar[type[LlamaBlock]] = LlamaBlock

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config.rope, config.head_dim)
        self.layers = nn.ModuleList(
            self.block_class(config, spec) for spec in self.layer_specs
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the final hidden states ``[..., hidden]`` of token ids ``[...]`` and their positions.

        Cosines and sines are computed once a step, the last norm after all layers.
        """
        x = self.embed_tokens(input_ids)  # [..., hidden]
        cos_sin = self.rope(positions)  # once a step, not once a layer
        for layer in self.layers:
            x = layer(x, cos_sin, attention)
        return self.norm(x)

    @staticmethod
    def rename(name: str) -> str | None:
        """Return a checkpoint's name without the prefix ``model.``; None for RoPE frequencies."""
        if name.endswith("rotary_emb.inv_freq"):
            return None  # old checkpoints stored the frequencies that `Rope` computes
        return name.removeprefix("model.")
