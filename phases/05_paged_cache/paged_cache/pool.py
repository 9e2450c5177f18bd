"""The tensors that hold the KV cache's blocks, and the format in which keys and values are stored."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.models.config import ModelConfig


class LayerBlocks(NamedTuple):
    """A layer's KV cache: `N` blocks of `P` tokens, keys and values `[N, P, KH, D]` each, and their scales.

    k_scale, v_scale: `[KH]` float32, by which stored numbers are multiplied, or None if the stored numbers
        are the keys and values themselves.
    layout: another order of the values (not the keys) in a block, which only certain kernels know; None: as
        above.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    layout: Any = None

    @property
    def scaled(self) -> bool:
        """Return True if stored keys and values must be multiplied by scales."""
        return self.k_scale is not None


@dataclass(frozen=True)
class KVFormat:
    """The format in which keys and values are stored.

    dtype: of the stored numbers; None: the model's.
    scales: `[L, 2, KH]` float32 on any device, for the keys and the values of each layer's heads; a key is
        its stored number times the scale. None: stored numbers are the keys and values.
    layout: another order of the values (not the keys) in a block, which a later phase's kernels know; None:
        `[N, P, KH, D]`.
    """

    dtype: torch.dtype | None = None
    scales: Tensor | None = None
    layout: Any = None

    def dtype_for(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the stored numbers; `model_dtype`, if the format has none of its own."""
        return model_dtype if self.dtype is None else self.dtype

    def exact(self, model_dtype: torch.dtype) -> bool:
        """Return True if the stored numbers are those that a model of `model_dtype` computed, not rounded."""
        return self.scales is None and self.dtype_for(model_dtype) == model_dtype

    def bytes_per_block(
        self, config: ModelConfig, block_size: int, model_dtype: torch.dtype
    ) -> int:
        """Return the bytes that one block of `block_size` tokens takes, over all layers.

        config: the model's sizes. model_dtype: the model's dtype.
        """
        return block_size * config.kv_bytes_per_token(self.dtype_for(model_dtype))


def largest(dtype: torch.dtype) -> float:
    """Return the largest number to which keys and values are scaled for storage in `dtype`: its maximum.

    The smallest is its negative.
    """
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x [G, H, queries, D]` with each head multiplied by the scale of its key/value head.

    `G` requests, `H` query heads of size `D`. scale: `[KH]`. The result has the dtype of `x`.
    """
    per_head = scale.repeat_interleave(x.shape[1] // len(scale))
    return (x * per_head[:, None, None]).to(x.dtype)


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros; on a CPU the system gives memory only to the parts that are written."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.frombuffer(mmap(-1, size), dtype=dtype).view(shape)


class BlockPool:
    """The device's KV cache: one tensor `data [L, 2, N, P, KH, D]`, and each layer's part of it.

    `L` layers, keys and values, `N` blocks of `P` tokens, `KH` heads of size `D`.
    layers: a `LayerBlocks` for each layer.
    exact: True if keys and values are stored as the model computes them, not rounded.
    stained: True if some block may hold NaN, so that blocks are set to zero when a request takes them.
    """

    stained = False

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv: KVFormat | None = None,
    ) -> None:
        """Allocate `blocks` blocks of `block_size` tokens for every layer.

        config: the model's sizes. dtype: the model's. kv: the format of keys and values; None: in `dtype`.
        """
        config.check_keys_only()
        kv = kv or KVFormat()
        shape = (
            config.num_layers,
            2,
            blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        # Zeros, not garbage: a masked key's weight is exactly 0, and 0 times a stray NaN is NaN.
        self.data = zeros(shape, device, kv.dtype_for(dtype))
        self.exact = kv.exact(dtype)
        if kv.scales is None:
            self.layers = [LayerBlocks(k, v, layout=kv.layout) for k, v in self.data]
        else:
            wanted = (config.num_layers, 2, config.num_kv_heads)
            assert kv.scales.shape == wanted, (
                f"scales are {tuple(kv.scales.shape)}, but must be {wanted}"
            )
            scales = kv.scales.to(device, torch.float32)
            layers = zip(self.data, scales, strict=True)
            self.layers = [LayerBlocks(k, v, s[0], s[1], kv.layout) for (k, v), s in layers]

    @staticmethod
    def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes that one block of `block_size` tokens takes over all layers, stored as `dtype`."""
        return KVFormat().bytes_per_block(config, block_size, dtype)

    def regroup(self, moves: Any) -> None:
        """Update which blocks each group of layers uses.

        moves: what `PagedCache.take_moves` returned, if that is not None. Does nothing here, where all
        layers share one block table; phase 17 overrides it.
        """

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks in every layer. pairs: block numbers, (source, target) for each copy."""
        sources, targets = (
            torch.tensor(side, device=self.data.device) for side in zip(*pairs, strict=True)
        )
        self.data[:, :, targets] = self.data[:, :, sources]

    def wipe(self, blocks: list[int]) -> None:
        """Set whole blocks to zero in every layer. blocks: their numbers."""
        self.data[:, :, torch.tensor(blocks, device=self.data.device)] = 0
