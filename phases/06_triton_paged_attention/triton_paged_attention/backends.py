"""The choice of each kind of operator: plain torch as in phase 01, or the kernels of this phase."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from common.errors import UserError

Backend = Literal["torch", "triton"]


def check_backend(name: str, value: str) -> None:
    """Raise `UserError` unless `value` is a backend."""
    if value not in ("torch", "triton"):
        raise UserError(f"{name} is {value!r}, but must be 'torch' or 'triton'")


@dataclass(frozen=True)
class Backends:
    """The choice for each kind of layer, so that a benchmark can switch one at a time.

    norms: RMSNorm, and the residual addition before it where the block allows.
    rope: query and key norm, RoPE and KV store in one kernel.
    activation: SwiGLU and GeGLU.
    projections: one matrix product for queries, keys and values, one for gate and up; where a step has one
        token, or a few in a small model, and all of these are "triton", kernels with norms, gate and
        residuals inside.
    """

    norms: Backend = "triton"
    rope: Backend = "triton"
    activation: Backend = "triton"
    projections: Backend = "triton"

    def __post_init__(self) -> None:
        """Refuse what is no backend."""
        for field in fields(self):
            check_backend(field.name, getattr(self, field.name))
