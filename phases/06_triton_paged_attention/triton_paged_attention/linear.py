"""A linear layer fused with the norm before it and the gated activation and residual addition after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from triton_paged_attention.kernels.norms import NormWeights, add_rms_norm

KINDS = {"silu": 0, "gelu_new": 1, "gelu_pytorch_tanh": 1, "gelu": 2}
"""Names in a model's configuration -> the kernel's constant."""


@triton.jit
def activate(gate, KIND: tl.constexpr):
    """Return the activation of `gate`, a float32 tile: KIND 0 is SiLU, 1 GELU (tanh form), 2 GELU (erf)."""
    if KIND == 0:
        result = gate * tl.sigmoid(gate)
    elif KIND == 1:
        inner = 1.5957691216057308 * (
            gate + 0.044715 * gate * gate * gate
        )  # 2 sqrt(2 / pi) (...)
        result = gate * tl.sigmoid(inner)  # (1 + tanh(y)) / 2 = sigmoid(2 y)
    else:
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    return result


@triton.jit
def gated_kernel(out, gate_up, SIZE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write `act(gate) * up` for BLOCK numbers of a row. One program per row and part of BLOCK numbers.

    gate_up: `[rows, 2 SIZE]`, each row's gates and then its ups. out: `[rows, SIZE]`.
    KIND: the activation: 0 SiLU, 1 GELU (tanh form), 2 GELU (erf).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(
        out + row * SIZE + i, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=mask
    )


def gated(gate_up: Tensor, kind: str) -> Tensor:
    """Return `act(gates) * ups` as `[..., I]`, from `gate_up [..., 2 I]`: gates, then ups.

    kind: the activation, a key of `KINDS` such as "silu".
    """
    size = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(size))
    gated_kernel[(out.numel() // size, triton.cdiv(size, block))](
        out, gate_up, SIZE=size, KIND=KINDS[kind], BLOCK=block, num_warps=max(1, block // 256)
    )
    return out


class LinearKernel(Protocol):
    """Interface of a function that computes a linear layer faster, for the numbers of tokens it supports."""

    def supports(self, tokens: int, gate: str | None) -> bool:
        """Return True if this kernel can compute `tokens` tokens with this activation after the product.

        gate: a key of `KINDS`, such as "silu"; None: no activation.
        """

    def __call__(
        self, x: Tensor, *, norm: NormWeights | None, gate: str | None, residual: Tensor | None
    ) -> Tensor:
        """Return `residual + act(linear(norm(x)))`: `[..., in]` -> `[..., out]`.

        norm, residual: None leaves this step out.
        gate: the activation, a key of `KINDS`: the linear outputs are then gates and as many ups, and
            `act(gates) * ups [..., out / 2]` takes the place of `act(...)`. None: no activation.
        """


class FusedLinear(nn.Module):
    """A linear layer that computes each call by the first of its kernels that supports it, or by torch.

    linear: the layer itself, `[..., in] -> [..., out]`, in any format of weights.
    kernels: faster functions, asked in this order; empty in this phase.
    total: function that sums a product over ranks (devices that have a part of the layer each), and adds
        the residual; None: there is one rank.
    """

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.kernels: list[LinearKernel] = []
        self.total: Callable[[Tensor, Tensor | None], Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        *,
        norm: NormWeights | None = None,
        gate: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return `residual + act(linear(norm(x)))`: `[..., in]` -> `[..., out]`.

        norm: RMSNorm of the input; None: not normalized. residual: `[..., out]`; None: nothing is added.
        gate: the activation, a key of `KINDS`: the linear outputs are then gates and as many ups, and
            `act(gates) * ups [..., out / 2]` takes the place of `act(...)`. None: no activation.
        """
        kernel = self.kernel(x, gate) or self._library
        if self.total is None:
            return kernel(x, norm=norm, gate=gate, residual=residual)
        return self.total(kernel(x, norm=norm, gate=gate, residual=None), residual)

    def kernel(self, x: Tensor, gate: str | None = None) -> LinearKernel | None:
        """Return the first kernel that supports the tokens of `x [..., in]` and the activation `gate`.

        Returns None if no kernel does.
        """
        tokens = x.numel() // x.shape[-1]
        for kernel in self.kernels:
            if kernel.supports(tokens, gate):
                return kernel
        return None

    def _library(
        self, x: Tensor, *, norm: NormWeights | None, gate: str | None, residual: Tensor | None
    ) -> Tensor:
        """Return `residual + act(linear(norm(x)))` by separate operators: `[..., in]` -> `[..., out]`.

        norm, residual: None leaves this step out.
        gate: the activation, a key of `KINDS`: the linear outputs are then gates and as many ups, and
            `act(gates) * ups [..., out / 2]` takes the place of `act(...)`. None: no activation.
        """
        out: Tensor = self.linear(x if norm is None else add_rms_norm(x, None, norm)[1])
        out = out if gate is None else gated(out, gate)
        return out if residual is None else out + residual


@runtime_checkable
class Concatenable(Protocol):
    """Interface of a quantized linear layer that can be concatenated with layers that read the same input."""

    def joined(self, *parts: nn.Module) -> nn.Module | None:
        """Return `parts`, linear layers of the same input, as one layer; None if they cannot be one."""


def join(*parts: nn.Module) -> FusedLinear:
    """Return linear layers that read the same input as one layer, whose output is theirs end to end.

    Layers whose formats of weights differ stay separate inside it, and are computed one by one.
    """
    for part in parts:
        if isinstance(part, Concatenable):
            found = part.joined(*parts) or FusedProjection(*parts)
            return found if isinstance(found, FusedLinear) else FusedLinear(found)
    whole = parts[0] if len(parts) == 1 else concatenated(parts)  # type: ignore[arg-type]  # all are plain
    return FusedLinear(whole)


def concatenated(parts: Sequence[nn.Linear]) -> nn.Linear:
    """Return `nn.Linear` layers that read the same input as one `nn.Linear`, with copied weights."""
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    assert len(biases) in (0, len(parts)), "some parts have a bias, and some have none"
    weight = torch.cat([part.weight for part in parts])
    return linear_of(weight, torch.cat(biases) if biases else None)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return an `nn.Linear` with this weight `[out, in]` and bias `[out]` (None: no bias), not copied."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


class FusedProjection(nn.Module):
    """Linear layers that read the same input, computed one by one since their weights' formats differ."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., in]` to the outputs of all joined layers, concatenated: `[..., out]`."""
        return torch.cat([part(x) for part in self.parts], dim=-1)
