"""The layout of values in a block: a seam, for a later phase may have another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from paged_cache.pool import LayerBlocks
from triton_paged_attention.tiles import attend


@triton.jit
def value_place(slot, block_stride, slot_stride, P: tl.constexpr):
    """Return the place of a token's first value, and how far apart its values are."""
    return (slot // P) * block_stride + (slot % P) * slot_stride, 1


class Layout(NamedTuple):
    """Functions of kernels, `attend` and `place`, and what a launch does for them.

    fit: return a configuration (of `tables`) in which they can run, for a block size.
    words: return values in the type that `attend` loads.
    """

    attend: Any = attend
    place: Any = value_place
    fit: Callable[[Any, int], Any] = lambda config, block_size: config
    words: Callable[[Tensor], Tensor] = lambda values: values


PLAIN = Layout()


def layout_of(cache: LayerBlocks | None) -> Layout:
    """Return the layout of a layer's values."""
    return PLAIN if cache is None or cache.layout is None else cache.layout
