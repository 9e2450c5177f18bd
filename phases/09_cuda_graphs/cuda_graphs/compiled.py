"""The other way to fewer and larger kernels: let `torch.compile` fuse phase 01's layers.

The compiler turns each layer into two pieces, up to attention and after it, and writes Triton kernels for the
small operators of each; matrix products stay with the library. Attention is left to phase 06's kernels, which
it cannot look into. The result is captured in graphs like any other model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from forward.attention import Attention, LayerSpec
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.runner import PagedRunner
from triton_paged_attention import CUDA_BLOCK_SIZE, TritonPagedAttention, TritonSampler
from triton_paged_attention.surgery import clone


class Opaque:
    """An attention object that the compiler calls and does not trace."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `forward.attention.Attention`."""
        return self.attention(layer, q, k, v)


class CompiledBlock(nn.Module):
    """A block that runs as compiled pieces."""

    def __init__(self, block: nn.Module, backend: str) -> None:
        super().__init__()
        self.block = block
        # One compilation for all sizes but 1, which the compiler always treats by itself.
        self.run = torch.compile(block, dynamic=True, backend=backend)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention) -> Tensor:
        """See `LlamaBlock.forward`."""
        return self.run(x, cos_sin, Opaque(attention))


def compile_layers(model: Model, backend: str = "inductor") -> Model:
    """The same model with every block compiled; it shares the given one's weights."""
    model = clone(model)
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    for index, block in enumerate(layers):
        layers[index] = CompiledBlock(block, backend)
    return model


def load_compiled(
    model: Model,
    *,
    below: Callable[..., PagedEngine],
    block_size: int = CUDA_BLOCK_SIZE,
    make_runner: Callable[..., PagedRunner] = PagedRunner,
    **options: Any,
) -> PagedEngine:
    """`below`'s engine with compiled layers around phase 06's attention and sampling."""
    heads = model.config.num_heads
    return below(
        compile_layers(model),
        block_size=block_size,
        make_attention=lambda pool: TritonPagedAttention(pool, heads),
        make_runner=partial(make_runner, make_sampler=TritonSampler),
        **options,
    )
