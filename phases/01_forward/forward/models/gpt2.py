"""GPT-2 (Radford et al., 2019): the ancestor. Learned positions, LayerNorm, biases, GELU, no RoPE."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from common.models.config import ModelConfig
from forward.attention import Attention, LayerSpec
from forward.layers import Embedding, LayerNorm, activation
from forward.model import Model


class GPT2Attention(nn.Module):
    """GPT-2's attention: one projection makes queries, keys and values, of as many heads each."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.c_attn = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.c_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Return attention's output: ``[..., hidden]`` -> ``[..., hidden]``."""
        heads = (self.spec.num_heads, self.spec.head_dim)
        parts = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, heads) for part in parts)  # [..., H, D]
        return self.c_proj(attention(self.spec, q, k, v).flatten(-2))


class GPT2MLP(nn.Module):
    """GPT-2's MLP: two matrices with a GELU between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = activation(config.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output: ``[..., hidden]`` -> ``[..., hidden]``."""
        return self.c_proj(self.act(self.c_fc(x)))


class GPT2Block(nn.Module):
    """A block of GPT-2: attention, then the MLP, each on a normalized copy and added back."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.attn = GPT2Attention(config, spec)
        self.ln_2 = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """Return ``x [..., hidden]`` plus attention's and the MLP's outputs."""
        x = x + self.attn(self.ln_1(x), attention)
        return x + self.mlp(self.ln_2(x))


class GPT2(Model):
    """GPT-2: token and position embeddings, blocks, norm, tied head."""

    TIED: ClassVar[dict[str, str]] = {"lm_head.weight": "wte.weight"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.wpe = Embedding(config.max_position_embeddings, config.hidden_size)
        self.h = nn.ModuleList(GPT2Block(config, spec) for spec in self.layer_specs)
        self.ln_f = LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the final hidden states ``[..., hidden]`` of token ids ``[...]`` and their positions."""
        x = self.wte(input_ids) + self.wpe(positions)  # [..., hidden]
        for block in self.h:
            x = block(x, attention)
        return self.ln_f(x)

    @staticmethod
    def rename(name: str) -> str | None:
        """Return a checkpoint's name without the prefix ``transformer.``; None for stored causal masks."""
        name = name.removeprefix("transformer.")
        return None if name.endswith((".attn.bias", ".attn.masked_bias")) else name

    @staticmethod
    def transform(name: str, tensor: Tensor) -> Tensor:
        """Return a checkpoint's tensor in this model's layout: matrices of linears are transposed.

        GPT-2's own code computes ``x W``, `nn.Linear` computes ``x W^T``.
        """
        matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        return tensor.t() if name.endswith(matrices) and tensor.dim() == 2 else tensor
