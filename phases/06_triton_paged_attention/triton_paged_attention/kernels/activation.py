"""SwiGLU and GeGLU: `act(gate) * up` over the output of one fused gate/up projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KINDS = {"silu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "gelu": 2}
"""Names in a model's configuration -> the kernel's constant."""


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """The activation of a float32 tile: 0 SiLU, 1 GELU (tanh form), 2 GELU (erf)."""
    if KIND == 0:
        result = gate * tl.sigmoid(gate)
    elif KIND == 1:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi) (...)
        result = gate * tl.sigmoid(inner)  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    else:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return result


@triton.jit
def gated_kernel(out, gate_up, SIZE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and part of it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=mask)


def gated(gate_up: Tensor, kind: str) -> Tensor:
    """`[..., 2 * I]` (gates, then ups) -> `[..., I]`; `kind` is a key of `KINDS`."""
    size = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    gated_kernel[(out.numel() // size, triton.cdiv(size, block))](
        out, gate_up, SIZE=size, KIND=KINDS[kind], BLOCK=block, num_warps=max(1, block // 256)
    )
    return out
