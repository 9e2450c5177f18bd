"""What calls `columns.cu`: when it fits, and with what; and the layers that do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cuda_graphs.latency.few import FEW_TOKENS
from cuda_graphs.latency.linear import LatencyLinear, OutputLinear
from cuda_graphs.latency.lone_few import FewParts
from forward.model import Model
from phases.appendix.drafting_in_graphs.launch import CudaKernel, available
from triton_paged_attention.hardware import multiprocessors
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.surgery import replace

PARTS = (64, 96, 128, 192, 256)
"""Inputs that a warp may have."""
MOST_WARPS = 12
TILE = 16
"""Rows of a tensor core's tile."""
MOST_WEIGHTS = 6144
"""Of a warp: 96 registers in each lane."""
MOST_SPLITS = 8
"""Of attention: four lanes have a token, and each weighs two."""


class Shape(NamedTuple):
    """How a matrix is shared out: inputs of a warp, and tiles of rows in a program."""

    part: int
    tiles: int


@cache
def shape_of(rows: int, size: int, gated: bool, device: torch.device) -> Shape | None:
    """For a matrix `[rows, size]`, if gated of two, one below the other; None: it has no such kernel.

    All programs are to run side by side where their registers allow it, and as many as may.
    """
    part = next((part for part in PARTS if size % part == 0 and size // part <= MOST_WARPS), None)
    tiles = 2 if gated else 1
    if part is None or rows % tiles or tiles * TILE * part > MOST_WEIGHTS:
        return None
    while -(-rows // (TILE * tiles)) > multiprocessors(device) and 2 * tiles * TILE * part <= MOST_WEIGHTS:
        tiles *= 2
    return Shape(part, tiles)


class Splits(NamedTuple):
    """How attention has left its splits: see `cuda_graphs.latency.lone_few.lone_few_kernel`."""

    most: int
    head_dim: int
    heads: int
    capacity: int
    block: int
    min_tiles: int
    window: int


@cache
def kernel(
    size: int, outputs: int, shape: Shape, norms: tuple[bool, bool], gated: bool, adds: bool, ahead: bool,
    splits: Splits | None, device: torch.device,
) -> CudaKernel:  # fmt: skip
    """The kernel for a shape, compiled once. norms: whether there is one, and it has distances from 1."""
    names = ["K", "N", "EACH", "TILES", "NORM", "ONE_PLUS", "GATED", "ADD", "AHEAD"]
    constants = dict(zip(names, (size, outputs, *shape, *norms, gated, adds, ahead), strict=True))
    more = ["SPLITS", "D", "H", "CAPACITY", "BLOCK", "MIN_TILES", "WINDOW"]
    constants |= dict(zip(more, splits or (0,) * len(more), strict=True))
    return CudaKernel(Path(__file__).with_name("columns.cu"), constants, device)


def columns(
    x: Tensor,  # [T, K] bfloat16
    weight: Tensor,  # [N, K]; with a gate [2 N, K]
    shape: Shape,
    *,
    norm: NormWeights | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,  # [T, N]
    run_ahead: bool = True,
) -> Tensor:
    """`cuda_graphs.latency.few.few` of a matrix that has a shape: `[T, N]`."""
    tokens, size = x.shape
    assert tokens <= FEW_TOKENS, f"x has {tokens} tokens, but may have {FEW_TOKENS}"
    outputs = weight.shape[0] // (1 if gate is None else 2)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    call = kernel(
        size, outputs, shape, (norm is not None, one_plus), gate is not None, residual is not None, run_ahead,
        None, x.device,
    )  # fmt: skip
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    call(*_grid(weight, shape), out, x, weight, norm_weight, added, x, x, x, eps, tokens)
    return out


def project_few_heads(
    residual: Tensor,  # [T, N] bfloat16
    weight: Tensor,  # [N, H D]
    parts: FewParts,
    shape: Shape,
) -> Tensor:
    """`cuda_graphs.latency.heads.project_few_heads`: `[T, N]`; padding gets its residual."""
    layer, space, config = parts.layer, parts.workspace, parts.config
    tokens, (outputs, size) = len(residual), weight.shape
    splits = Splits(
        config.splits, layer.head_dim, layer.num_heads, 1 << (tokens - 1).bit_length(),
        config.block_n, config.min_tiles, layer.sliding_window or 0,
    )  # fmt: skip
    call = kernel(size, outputs, shape, (False, False), False, True, True, splits, residual.device)
    out = torch.empty_like(residual)
    call(
        *_grid(weight, shape), out, space.partial, weight, residual, residual,
        space.lse, parts.context_lens, parts.query_starts, 0.0, tokens,
    )  # fmt: skip
    return out


def _grid(weight: Tensor, shape: Shape) -> tuple[int, int]:
    """Programs, and their threads."""
    rows, size = weight.shape
    return -(-rows // (TILE * shape.tiles)), size // shape.part * 32


class ColumnLinear(LatencyLinear):
    """A `LatencyLinear` whose few tokens are columns of a tensor core, where its matrix has a shape.

    fewest: tokens that are; if that is one, a lone token is a column, too.
    """

    fewest = 2

    def shape(self, gate: str | None) -> Shape | None:
        """How its matrix is shared out, if it can be with such a gate."""
        fits = self.bias is None and gate in (None, "silu")
        return shape_of(*self.weight.shape, gate is not None, self.weight.device) if fits else None

    def project_one(self, x: Tensor, **around: Any) -> Tensor:
        """See `LatencyLinear.project_one`."""
        shape = self.shape(around["gate"]) if self.fewest == 1 else None
        return super().project_one(x, **around) if shape is None else self._columns(x, shape, **around)

    def project_few(self, x: Tensor, **around: Any) -> Tensor:
        """See `LatencyLinear.project_few`."""
        shape = self.shape(around["gate"])
        return super().project_few(x, **around) if shape is None else self._columns(x, shape, **around)

    def _columns(self, x: Tensor, shape: Shape, *, bias: None, **around: Any) -> Tensor:
        return columns(x, self.weight, shape, **around)


class ColumnOutput(OutputLinear, ColumnLinear):
    """The same behind attention, whose splits it may combine."""

    def combine_few(self, parts: FewParts, residual: Tensor) -> Tensor:
        """See `OutputLinear.combine_few`."""
        shape = self.shape(None)
        if shape is None or parts.layer.head_dim % shape.part or parts.config.splits > MOST_SPLITS:
            return super().combine_few(parts, residual)
        return project_few_heads(residual, self.weight, parts, shape)


def by_columns(linear: LatencyLinear, *, fewest: int = 2) -> LatencyLinear:
    """The same layer, its weight shared, with this kernel for so many tokens or more, if there is one for it.

    Others stay as they are: of other dtypes, on other devices, and where a few tokens have no kernel at all.
    """
    if not (linear.few and linear.weight.dtype == torch.bfloat16 and available(linear.weight.device)):
        return linear
    made = (ColumnOutput if isinstance(linear, OutputLinear) else ColumnLinear)(linear.weight, linear.bias)
    made.few, made.run_ahead, made.out_dtype = linear.few, linear.run_ahead, linear.out_dtype
    made.fewest = fewest
    return made


def install(model: Model, *, fewest: int = 2) -> None:
    """`by_columns` for all layers of a model."""
    replace(model, LatencyLinear, lambda linear: by_columns(linear, fewest=fewest))
