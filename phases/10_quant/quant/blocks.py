"""A GGUF file's own weights of four and eight bits: 32 neighbouring inputs share a scale.

In q4_1 they share a minimum too: a number stands for `number * scale + minimum`. Rounding such a weight to
another format would round it a second time. So numbers, scales and minimums are kept as they are, and read
where the file is mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.names import choice
from forward.model import Model

METHOD = "gguf"
"""The `quant_method` of a checkpoint that `common.models.gguf_import` has written."""
KINDS = ("q4_1", "q8_0")
GROUP = 32
"""Inputs that share a scale."""


class BlockWeight(nn.Module):
    """A weight `[N, K]` in a format of GGUF files, with a scale for each group of 32 inputs.

    kind: the format, "q8_0" or "q4_1".
    data: q8_0 int8 `[N, K]`; q4_1 uint8 `[N, K / 2]`, where byte i of a group's 16 holds input i in its low
        and input i + 16 in its high half.
    scale: float16 `[N, K / 32]`.
    minimum: float16 `[N, K / 32]` of q4_1, added to each weight of its group; otherwise None.

    Raises:
        UserError: the kind is none of `KINDS`.
    """

    data: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, kind: str, outputs: int, inputs: int) -> None:
        super().__init__()
        choice("the type of a weight", kind, KINDS)
        self.kind, self.shape = kind, (outputs, inputs)
        groups = outputs, inputs // GROUP
        eight = kind == "q8_0"
        minimum = None if eight else torch.empty(groups, dtype=torch.float16)
        width = inputs if eight else inputs // 2
        self.register_buffer(
            "data", torch.empty(outputs, width, dtype=torch.int8 if eight else torch.uint8)
        )
        self.register_buffer("scale", torch.empty(groups, dtype=torch.float16))
        self.register_buffer("minimum", minimum)

    def dequantize(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """Return the weight in float32: `[N, K]`, or `[..., K]` for the row indices `rows [...]`."""
        data, scale = self.data[rows], self.scale[rows].float()
        if self.kind == "q8_0":
            numbers = data.view(*scale.shape, GROUP).float()  # [..., K / 32, 32]
        else:
            pairs = data.view(*scale.shape, GROUP // 2)
            numbers = torch.cat([pairs & 15, pairs >> 4], dim=-1).float()
        weight = numbers.mul_(scale[..., None])
        if self.minimum is not None:
            weight += self.minimum[rows].float()[..., None]
        return weight.flatten(-2)


class BlockEmbedding(BlockWeight):
    """An embedding table in a GGUF file's groups of 32 numbers; it replaces an `nn.Embedding`."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embeddings of token ids `ids [...]`: `[..., K]` float32."""
        return self.dequantize(ids)


Product = Callable[["BlockLinear", Tensor], Tensor]
"""A layer and `x [..., K]` float32 -> `[..., N]` without the bias."""


class BlockLinear(BlockWeight):
    """A linear layer with a weight in groups of 32 inputs as in GGUF files; it replaces an `nn.Linear`.

    Inputs are not rounded.

    product: computes `x [..., K]` times the weight; None: the weight is dequantized at each call.
    """

    product: Product | None = None
    bias: nn.Parameter | None

    def __init__(
        self, kind: str, outputs: int, inputs: int, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(kind, outputs, inputs)
        self.register_parameter("bias", bias)

    @classmethod
    def tied(cls, embedding: BlockEmbedding) -> BlockLinear:
        """Return an output head that shares the tensors of `embedding`."""
        with torch.device("meta"):
            head = cls(embedding.kind, *embedding.shape)
        head.data = embedding.data
        head.scale = embedding.scale
        head.minimum = embedding.minimum
        return head

    def forward(self, x: Tensor) -> Tensor:
        """Map `x [..., K]` to `[..., N]` in `x`'s dtype."""
        if self.product is None or not x.numel():
            return F.linear(x, self.dequantize().to(x.dtype), self.bias)
        out = self.product(self, x.float()).to(x.dtype)
        return out if self.bias is None else out + self.bias


def expect_blocks(model: Model, kinds: Mapping[str, Any]) -> None:
    """Replace modules of a model on `meta` by `BlockEmbedding`s and `BlockLinear`s for GGUF weights.

    An output head that is tied to such an embedding has no tensors in the checkpoint; it becomes an
    `nn.Identity` here, and `Quantize.finish` replaces it.

    Args:
        kinds: the format ("q8_0" or "q4_1") of each matrix by the name of its module in the checkpoint.
    """
    with torch.device("meta"):
        for stored, kind in kinds.items():
            name = str(model.rename(f"{stored}.weight")).removesuffix(".weight")
            layer = model.get_submodule(name)
            if isinstance(layer, nn.Embedding):
                model.set_submodule(name, BlockEmbedding(kind, *layer.weight.shape))
            elif isinstance(layer, nn.Linear):
                made = BlockLinear(kind, layer.out_features, layer.in_features, layer.bias)
                model.set_submodule(name, made)
    for head, _ in tied_blocks(model):
        model.set_submodule(head, nn.Identity())


def tied_blocks(model: Model) -> list[tuple[str, BlockEmbedding]]:
    """Return (module name, embedding) of each output head that is tied to a `BlockEmbedding`."""
    if not model.config.tie_word_embeddings:
        return []
    owners = [
        (head.rpartition(".")[0], source.rpartition(".")[0])
        for head, source in model.TIED.items()
    ]
    found = [(head, model.get_submodule(source)) for head, source in owners]
    return [(head, layer) for head, layer in found if isinstance(layer, BlockEmbedding)]
