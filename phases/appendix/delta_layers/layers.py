"""Qwen3.5's layers over kernels: built from those they replace, with whose weights they work.

`fuse` puts them into a model that has just been loaded. Phase 06 then fuses the rest. What adds ways to its
`FusedLinear` finds these layers' as well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from forward.attention import Attention
from hybrid_cache.kernels import FusedDelta, GroupedTriton
from hybrid_cache.mixer import Mixer
from hybrid_cache.qwen3_5 import GatedAttention, Qwen35, Qwen35Block
from phases.appendix.delta_layers.prompts import scan
from phases.appendix.latency.lone import attend_lone
from phases.appendix.latency.tables import LONE, LoneKey
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.kernels.rope import HeadNorms
from triton_paged_attention.layers import FusedAttention, FusedMLP, FusedRMSNorm, Stream, replace
from triton_paged_attention.linear import join


class FusedGatedAttention(FusedAttention):
    """`GatedAttention` as phase 06's attention, with the gate as further outputs of the projection.

    Phase 06 turns pairs of numbers half a head apart. Numbers of a head may stand in any order, if queries
    and keys have the same: here those of a pair stand so, and pairs that do not turn have an angle of 0.

    turned: numbers of a head that turn. sharpness: their factor, which the norms' weights take in.
    """

    def __init__(self, old: GatedAttention, turned: int, sharpness: float) -> None:
        nn.Module.__init__(self)
        spec = self.spec = old.spec
        heads, keys, size = spec.num_heads, spec.num_kv_heads, spec.head_dim
        device = old.q_proj.weight.device
        order = torch.arange(size, device=device)
        turning, still = order[:turned].chunk(2), order[turned:].chunk(2)
        order = torch.cat((turning[0], still[0], turning[1], still[1]))
        q, k = (torch.arange(n, device=device)[:, None] * size for n in (2 * heads, keys))
        parts = picked(old.q_proj, q[::2] + order), picked(old.k_proj, k + order)
        gate = picked(old.q_proj, q[1::2] + torch.arange(size, device=device))
        self.qkv_proj, self.o_proj = join(*parts, old.v_proj, gate), join(old.o_proj)
        self.fused = True
        factor = torch.where(order < turned, sharpness, 1.0)
        weights = (factor * (1.0 + part.weight[order].float()) for part in (old.q_norm, old.k_norm))
        self.head_norms = HeadNorms(*weights, old.q_norm.eps, one_plus=False)
        width = max(16, triton.next_power_of_2(size))
        self.lone_config = LONE.lookup(LoneKey(keys, width, old.v_proj.weight.element_size()), device)
        self.workspace = Workspace(heads * self.lone_config.splits, width, device)

    @property
    def norms(self) -> HeadNorms:
        """See `FusedAttention.norms`."""
        return self.head_norms

    def forward(
        self,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: Attention,
        *,
        norm: NormWeights | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See `GatedAttention.forward` and `FusedLinear.forward`."""
        made = self.qkv_proj(x, norm=norm)
        out = self.spec.num_heads * self.spec.head_dim
        qkv, gate = made[..., :-out].contiguous(), made[..., -out:]
        alone = isinstance(attention, GroupedTriton) and attention.decodes and attention.stores_early
        if alone and len(x) == 1 and not attention.pool.layers[self.spec.index].scaled:
            mixed = self.lone(qkv, cos_sin, attention)
        else:
            mixed = self.attend(qkv, cos_sin, attention)
        return self.o_proj(under_gate(mixed, gate), residual=residual)

    def lone(self, qkv: Tensor, cos_sin: tuple[Tensor, Tensor], attention: GroupedTriton) -> Tensor:
        """One request's token, from the projection to attention's output in one kernel: `[1, H D]`."""
        cache, slots = attention.place(self.spec)
        batch, room, config = attention.batch, self.workspace, self.lone_config
        given = qkv, self._flat(cos_sin), self.norms, self.spec, cache, batch.block_tables, batch.context_lens
        return attend_lone(*given, slots, workspace=room, config=config, meet=True).out


class FusedHybridBlock(nn.Module):
    """A `Qwen35Block` that leaves its last addition to the next norm; one token's go with the products."""

    input_layernorm: FusedRMSNorm
    post_attention_layernorm: FusedRMSNorm
    mlp: FusedMLP

    def __init__(self, block: Qwen35Block) -> None:
        super().__init__()
        self.keeps_state = block.keeps_state
        for name, part in block.named_children():
            setattr(self, name, part)

    def forward(
        self, x: Tensor | Stream, cos_sin: tuple[Tensor, Tensor], attention: Attention, mixer: Mixer
    ) -> Tensor | Stream:
        """See `Qwen35Block.forward`."""
        layer = self.linear_attn if self.keeps_state else self.self_attn
        given = (mixer,) if self.keeps_state else (cos_sin, attention)
        behind, mlp = self.post_attention_layernorm, self.mlp
        if isinstance(x, Tensor) and len(x) == 1:
            x = layer(x, *given, norm=self.input_layernorm.weights, residual=x)
            return mlp.down_proj(mlp.gate_up_proj(x, norm=behind.weights, gate=mlp.kind), residual=x)
        if isinstance(x, Stream):
            total, normed = self.input_layernorm.add(x.total, x.delta)
        else:
            total, normed = x, self.input_layernorm(x)
        total, normed = behind.add(total, layer(normed, *given))
        return Stream(total, mlp(normed))


def fuse(model: Qwen35) -> None:
    """Put these layers in the places of Qwen3.5's, but those whose weights are not plain."""
    for module in model.modules():
        if isinstance(module, FusedDelta):
            module.scan = scan
    if all(isinstance(part, nn.Linear) for name, part in model.named_modules() if name.endswith(".q_proj")):
        turned, sharp = 2 * len(model.rope.inverse_frequencies), model.sharpness
        replace(model, GatedAttention, lambda old: FusedGatedAttention(old, turned, sharp))
        still = model.config.head_dim // 2 - turned // 2
        model.rope.inverse_frequencies = F.pad(model.rope.inverse_frequencies, (0, still))
        model.sharpness = 1.0
        replace(model, Qwen35Block, FusedHybridBlock)


def picked(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    """Return a plain layer with some outputs of another one: `rows` of any shape."""
    made = nn.Linear(linear.in_features, rows.numel(), bias=False, device="meta")
    made.weight = nn.Parameter(linear.weight[rows.flatten()], requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias[rows.flatten()], requires_grad=False)
    return made


@triton.jit
def under_gate_kernel(out, x, gate, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and part of it."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * SIZE + i, mask=i < SIZE, other=0.0)
    share = tl.sigmoid(tl.load(gate + row * stride + i, mask=i < SIZE, other=0.0).to(tl.float32))
    share = share.to(value.dtype).to(tl.float32)  # as torch rounds it
    tl.store(out + row * SIZE + i, (value.to(tl.float32) * share).to(value.dtype), mask=i < SIZE)


def under_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, both `[T, N]`; the rows of `gate` may lie apart."""
    out, size = torch.empty_like(x), x.shape[-1]
    under_gate_kernel[len(x), triton.cdiv(size, 1024)](out, x, gate, gate.stride(0), SIZE=size, BLOCK=1024)
    return out
