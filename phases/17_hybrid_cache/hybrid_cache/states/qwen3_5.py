"""Qwen3.5's text model: of every four layers three keep a state, and one keeps keys and values.

Three layers of Gated DeltaNet (`delta_rule`) and one of attention that a gate of its own scales, with RoPE on
the first quarter of each head. All norms but the one inside Gated DeltaNet multiply by ``1 + weight``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.models.config import DeltaConfig, ModelConfig
from forward.attention import Attention, LayerSpec
from forward.layers import Embedding, GatedMLP, RMSNorm
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.rope import Rope, apply_rope
from forward.rope_scaling import attention_scaling
from hybrid_cache.states.mixer import DeltaInputs, Mixer, mixer_of


class GatedAttention(nn.Module):
    """Qwen3.5's attention, whose output is multiplied by a gate that the query's projection computes as
    well.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, 2 * queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = Gemma3RMSNorm(spec.head_dim, config.norm_eps)
        self.k_norm = Gemma3RMSNorm(spec.head_dim, config.norm_eps)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """Map hidden states `[..., hidden]` to the layer's output, same shape.

        cos_sin: RoPE's cosines and sines. attention: the engine's attention over its KV cache.
        """
        heads = self.spec.num_heads
        keys = self.spec.num_kv_heads
        size = self.spec.head_dim
        q, gate = (
            self.q_proj(x).unflatten(-1, (heads, 2 * size)).chunk(2, -1)
        )  # [..., H, D] each
        k = self.k_proj(x).unflatten(-1, (keys, size))
        v = self.v_proj(x).unflatten(-1, (keys, size))
        q, k = (
            rotate_first_dimensions(self.q_norm(q), cos_sin),
            rotate_first_dimensions(self.k_norm(k), cos_sin),
        )
        out = attention(self.spec, q, k, v) * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2))


def rotate_first_dimensions(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to the first dimensions of every head of `x [..., H, D]`; the others stay as they are.

    cos_sin: RoPE's cosines and sines of each token; their last dimension says how many are rotated.
    """
    turned = cos_sin[0].shape[-1]
    return torch.cat((apply_rope(x[..., :turned], cos_sin), x[..., turned:]), -1)


class GatedDeltaNet(nn.Module):
    """A Gated DeltaNet layer: projections, decay and output gate around a `Mixer`, which keeps the state."""

    def __init__(self, config: ModelConfig, delta: DeltaConfig, layer: int) -> None:
        super().__init__()
        self.delta, self.layer = delta, layer
        hidden = config.hidden_size
        channels = delta.channels
        values = delta.value_heads * delta.value_dim
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, values, bias=False)
        self.in_proj_b = nn.Linear(hidden, delta.value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, delta.value_heads, bias=False)
        # Holds the weights as checkpoints do, `[C, 1, W]`; the mixer applies them.
        self.conv1d = nn.Conv1d(
            channels, channels, delta.conv_width, groups=channels, bias=False
        )
        self.dt_bias = nn.Parameter(torch.zeros(delta.value_heads))
        self.A_log = nn.Parameter(torch.zeros(delta.value_heads))
        self.norm = RMSNorm(delta.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(values, hidden, bias=False)

    def forward(self, x: Tensor, mixer: Mixer) -> Tensor:
        """Map hidden states `[..., hidden]` to the layer's output, same shape.

        mixer: computes the convolution and the delta rule over each request's tokens, and keeps the states.
        """
        decay = -self.A_log.float().exp() * F.softplus(
            self.in_proj_a(x).float() + self.dt_bias.float()
        )
        beta, conv = torch.sigmoid(self.in_proj_b(x)), self.conv1d.weight.squeeze(1)
        mixed = mixer.mix(
            DeltaInputs(self.layer, self.delta, conv, self.in_proj_qkv(x), decay, beta)
        )
        out = self.norm(mixed)  # [..., H, Dv]
        gate = self.in_proj_z(x).view_as(out)
        return self.out_proj((out * F.silu(gate.float())).to(x.dtype).flatten(-2))


class Qwen35Block(nn.Module):
    """A block of Qwen3.5: attention or Gated DeltaNet, then the MLP; each reads a normed input and adds
    its output.
    """

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        assert config.delta is not None
        self.input_layernorm = Gemma3RMSNorm(config.hidden_size, config.norm_eps)
        if config.delta.layers[spec.index]:
            self.linear_attn = GatedDeltaNet(config, config.delta, spec.index)
        else:
            self.self_attn = GatedAttention(config, spec)
        self.keeps_state = config.delta.layers[spec.index]
        self.post_attention_layernorm = Gemma3RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.activation)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention, mixer: Mixer
    ) -> Tensor:
        """Map hidden states `[..., hidden]` to the block's output, same shape.

        cos_sin: RoPE's cosines and sines. attention: the engine's attention over its KV cache. mixer:
            computes its Gated DeltaNet layers, with their states.
        """
        normed = self.input_layernorm(x)
        if self.keeps_state:
            x = x + self.linear_attn(normed, mixer)
        else:
            x = x + self.self_attn(normed, cos_sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen35(Model):
    """Qwen3.5's text model. Weights of its image encoder and of its multi-token prediction are ignored."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rope = Rope(config.rope, int(config.rope.share * config.head_dim))
        # A longer context sharpens what turns; the scale of `Model` would sharpen what does not as well.
        self.attention_scaling = attention_scaling(config, 0) ** 0.5
        self.layer_specs = tuple(
            replace(spec, scale=config.attention_scale) for spec in self.layer_specs
        )
        self.layers = nn.ModuleList(Qwen35Block(config, spec) for spec in self.layer_specs)
        self.norm = Gemma3RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the final hidden states `[..., hidden]` of token ids and their positions.

        attention: the engine's attention over its KV cache; it is the `Mixer` of the layers with states, too.
        """
        mixer = mixer_of(attention)
        x = self.embed_tokens(input_ids)  # [..., hidden]
        cos, sin = self.rope(positions)
        cos_sin = cos * self.attention_scaling, sin * self.attention_scaling
        for layer in self.layers:
            x = layer(x, cos_sin, attention, mixer)
        return self.norm(x)

    @staticmethod
    def rename(name: str) -> str | None:
        """Return a checkpoint's tensor name without its prefix; None for weights of images and multi-token
        prediction, which are not loaded.
        """
        if name.startswith(("mtp.", "model.visual.", "visual.")):
            return None
        for prefix in ("model.language_model.", "language_model.", "model."):
            name = name.removeprefix(prefix)
        return name
