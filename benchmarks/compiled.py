"""The other way to fewer and larger kernels: let `torch.compile` fuse phase 01's layers.

The compiler turns each layer into two pieces, up to attention and after it, and writes Triton kernels for the
small operators of each; matrix products stay with the library. Attention is left to phase 06's kernels, which
it cannot look into. The result is captured in graphs like any other model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from forward.attention import Attention, LayerSpec
from forward.model import Model
from paged_cache import EngineBuilder, Feature
from triton_paged_attention.feature import CUDA_BLOCK_SIZE, check_triton


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

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], attention: Attention
    ) -> Tensor:
        """See `LlamaBlock.forward`."""
        return self.run(x, cos_sin, Opaque(attention))


def compile_layers(model: Model, backend: str = "inductor") -> Model:
    """Put every block of the model that is given behind the compiler; returns it."""
    layers = model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    for index, block in enumerate(layers):
        layers[index] = CompiledBlock(block, backend)
    return model


@dataclass(frozen=True)
class Compiled(Feature):
    """For comparison: `torch.compile` fuses the layers, around the kernels' attention and sampling."""

    name: ClassVar[str] = "compiled"
    phase: ClassVar[int] = 8  # before graphs, which capture what it makes

    attends: ClassVar[bool] = True

    def install(self, builder: EngineBuilder) -> None:
        """Compiled layers."""
        from triton_paged_attention.attention import TritonPagedAttention

        check_triton(builder.model.device.type)
        model = compile_layers(builder.own_model())
        attention = partial(TritonPagedAttention, num_heads=model.config.num_heads)
        builder.replace(self, attention=attention)  # graphs bring the chooser
        if model.device.type == "cuda":
            builder.defaults["block_size"] = CUDA_BLOCK_SIZE
