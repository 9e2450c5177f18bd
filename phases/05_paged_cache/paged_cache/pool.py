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
    """A layer's keys and values, `[N, P, KH, D]` each, and what they have to be multiplied by.

    k_scale, v_scale: `[KH]` float32, or None where the stored numbers are the keys and values themselves.
    layout: see `KVFormat`.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    layout: Any = None

    @property
    def scaled(self) -> bool:
        """True if there are scales."""
        return self.k_scale is not None


@dataclass(frozen=True)
class KVFormat:
    """The format of stored keys and values.

    dtype: of the stored numbers; None: the model's.
    scales: `[L, 2, KH]` float32 on any device, for the keys and the values of each layer's heads; a key is
        the number that is stored for it times its scale. None: there are none.
    layout: a seam: another layout of values in a block, which a later phase's kernels know; None: as said.
    """

    dtype: torch.dtype | None = None
    scales: Tensor | None = None
    layout: Any = None

    def dtype_for(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the stored numbers."""
        return model_dtype if self.dtype is None else self.dtype

    def exact(self, model_dtype: torch.dtype) -> bool:
        """True if the stored numbers are those that the model computed."""
        return self.scales is None and self.dtype_for(model_dtype) == model_dtype

    def bytes_per_block(
        self, config: ModelConfig, block_size: int, model_dtype: torch.dtype
    ) -> int:
        """Bytes that one block takes, over all layers."""
        return block_size * config.kv_bytes_per_token(self.dtype_for(model_dtype))


def encode(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Keys or values `x [..., KH, D]` as they are stored: over `scale [KH]`, within what `dtype` can hold.

    Without a scale only the dtype changes.
    """
    if scale is None:
        return x.to(dtype)
    x = x.float() / scale[:, None]
    if not dtype.is_floating_point:
        x = (x + 0.5).floor()
    return x.clamp(-largest(dtype), largest(dtype)).to(dtype)


def largest(dtype: torch.dtype) -> float:
    """The largest number that scaled keys and values may be stored as; the smallest is minus that."""
    return float((torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max)


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros; on a CPU a page of it takes memory once something is written there."""
    size = prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.frombuffer(mmap(-1, size), dtype=dtype).view(shape)


class BlockPool:
    """One allocation `[L, 2, N, P, KH, D]`, and of it each layer's `LayerBlocks`.

    stained: some block may hold NaN.
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
        """Make room for `blocks` blocks of `block_size` tokens; `dtype` is the model's."""
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
        """Bytes that one block takes in the model's own dtype; see `KVFormat.bytes_per_block`."""
        return KVFormat().bytes_per_block(config, block_size, dtype)

    def regroup(self, moves: Any) -> None:
        """A seam: groups of layers may keep different blocks. Here there is one group, and nothing moves."""

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, `(source, target)`, in every layer."""
        sources, targets = (
            torch.tensor(side, device=self.data.device) for side in zip(*pairs, strict=True)
        )
        self.data[:, :, targets] = self.data[:, :, sources]

    def wipe(self, blocks: list[int]) -> None:
        """Make whole blocks zeros, in every layer."""
        self.data[:, :, torch.tensor(blocks, device=self.data.device)] = 0
