"""The tensors that keys and values lie in, and the format that they are stored in."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.models.config import ModelConfig


class LayerBlocks(NamedTuple):
    """A layer's blocks of keys and values, `[N, P, KH, D]` each, and their scales.

    k_scale, v_scale: `[KH]` float32, by which stored numbers are multiplied, or None if the stored numbers
        are the keys and values themselves.
    layout: another order of values in a block, which only some kernels know; None: as above.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    layout: Any = None

    @property
    def scaled(self) -> bool:
        """Return True if keys and values have scales."""
        return self.k_scale is not None


@dataclass(frozen=True)
class KVFormat:
    """The format in which keys and values are stored.

    dtype: of the stored numbers; None: the model's.
    scales: `[L, 2, KH]` float32 on any device, for the keys and the values of each layer's heads; a key is
        the number that is stored for it times its scale. None: there are none.
    layout: another order of values in a block, which a later phase's kernels know; None: `[N, P, KH, D]`.
    """

    dtype: torch.dtype | None = None
    scales: Tensor | None = None
    layout: Any = None

    def dtype_for(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the stored numbers, for a model of `model_dtype`."""
        return model_dtype if self.dtype is None else self.dtype

    def exact(self, model_dtype: torch.dtype) -> bool:
        """Return True if the stored numbers are those that a model of `model_dtype` computed, not rounded."""
        return self.scales is None and self.dtype_for(model_dtype) == model_dtype

    def bytes_per_block(
        self, config: ModelConfig, block_size: int, model_dtype: torch.dtype
    ) -> int:
        """Return the bytes that one block of `block_size` tokens takes, over all layers of a model of
        `model_dtype`.
        """
        return block_size * config.kv_bytes_per_token(self.dtype_for(model_dtype))


def largest(dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` that a scaled key or value is stored as; the smallest is its
    negative.
    """
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x [G, H, queries, D]` times its key/value head's `scale [KH]`."""
    per_head = scale.repeat_interleave(x.shape[1] // len(scale))
    return (x * per_head[:, None, None]).to(x.dtype)


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros; on a CPU its memory is taken page by page, as it is written."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.frombuffer(mmap(-1, size), dtype=dtype).view(shape)


class BlockPool:
    """The device's KV cache: one tensor `[L, 2, N, P, KH, D]`, and each layer's part of it.

    stained: True if some block may hold NaN, so blocks are wiped when they get a new owner.
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
        """Allocate `blocks` blocks of `block_size` tokens for every layer; `dtype` is the model's.

        kv: the format of keys and values; None: the model's dtype.
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
        """Update which blocks each group of layers uses: nothing here, where all layers share one block
        table.

        Phase 17 overrides it. moves: what `PagedCache.take_moves` returned, if that is not None.
        """

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, from source to target of each of the `pairs` of block numbers, in every
        layer.
        """
        sources, targets = (
            torch.tensor(side, device=self.data.device) for side in zip(*pairs, strict=True)
        )
        self.data[:, :, targets] = self.data[:, :, sources]

    def wipe(self, blocks: list[int]) -> None:
        """Set whole blocks to zero, in every layer."""
        self.data[:, :, torch.tensor(blocks, device=self.data.device)] = 0
