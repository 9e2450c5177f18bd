"""Whole models quantized by rounding to nearest, GPTQ or AWQ, calibrated on a text.

Of a layer's inputs `X [tokens, K]` a method needs `H = X^T X [K, K]`: the squared error that a change
`D [N, K]` of the weight causes is the trace of `D H D^T`. The matrices of one block are in memory at a time;
its inputs come from the blocks below, which are quantized already.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.errors import UserError
from forward.attention import RecomputeAttention
from forward.model import Model
from quant import awq, gptq, rtn
from quant.formats import Scheme
from quant.linear import QuantLinear
from quant.loading import plain_layers

TEXT = Path(__file__).with_name("news_from_nowhere.txt")
"""A calibration text: 185,000 characters of a novel by William Morris, published in 1890.

It is in the public domain: the author died in 1896. The transcription is Project Gutenberg's eBook 3261, of
the edition of 1908, with each paragraph on one line and without Project Gutenberg's own words.
"""
Hessians = dict[str, Tensor]
"""`H [K, K]` float32 of each linear layer of a block, by the layer's name within the block."""
Method = Literal["rtn", "gptq", "awq"]
HALF = torch.bfloat16
"""The dtype of the scales of groups."""
ONE_INPUT = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Layers of a block that read one input, which a norm or layer before it can divide at no cost."""


def samples(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return the last `count` pieces of a text, each of `length` token ids; `tokens`: the whole text.

    Raises:
        UserError: the text is shorter than one piece.
    """
    pieces = [
        list(tokens[at : at + length]) for at in range(0, len(tokens) - length + 1, length)
    ]
    if not pieces:
        raise UserError(
            f"the calibration text has {len(tokens)} tokens, but must have {length} at least"
        )
    return pieces[-count:]


@torch.no_grad()
def quantize_model(
    model: Model, scheme: Scheme, method: Method = "rtn", texts: Sequence[Sequence[int]] = ()
) -> None:
    """Replace the linear layers of a model's blocks by `QuantLinear`s, in place; the head stays as it is.

    model: phase 01's.
    scheme: the format of all layers, with smaller groups where they do not divide a layer's inputs.
    method: rtn (round to nearest), gptq or awq. These two need int4; gptq also takes eight bits with scales
        by channel.
    texts: pieces of a calibration text as token ids, for gptq and awq.
    """
    blocks = list(model.get_submodule("layers").children())
    calls = [arguments(model, text, blocks) for text in texts if method != "rtn"]
    inputs = [call[0][0] for call in calls]
    for number, block in enumerate(blocks):
        hessians: Hessians = {}
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(partial(add, hessians, name))
            for name in plain_layers(block)
        ]
        for x, call in zip(inputs, calls, strict=True):
            block(x, *call[number][1:])
        for hook in hooks:
            hook.remove()
        quantize_block(block, scheme, method, hessians)
        inputs = [block(x, *call[number][1:]) for x, call in zip(inputs, calls, strict=True)]


def arguments(
    model: Model, text: Sequence[int], blocks: Sequence[nn.Module]
) -> list[tuple[Any, ...]]:
    """Return each block's arguments for a text, given as token ids: its input, and such as cos and sin."""
    seen: list[tuple[Any, ...]] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: seen.append(given))
        for block in blocks
    ]
    ids = torch.tensor(list(text), device=model.device)
    model(ids, torch.arange(len(ids), device=model.device), RecomputeAttention())
    for hook in hooks:
        hook.remove()
    return seen


def add(hessians: Hessians, name: str, layer: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Add `X^T X` of the inputs that a layer is given to its Hessian, in place."""
    x = given[0].reshape(-1, given[0].shape[-1]).float()
    hessians[name] = hessians[name].addmm_(x.t(), x) if name in hessians else x.t() @ x


def quantize_block(
    block: nn.Module, scheme: Scheme, method: Method, hessians: Hessians
) -> None:
    """Replace the linear layers of `block` by layers quantized to `scheme`, in place.

    hessians: of gptq and awq. AWQ's factors are divided out of the inputs in front of the layer, where
    a checkpoint would have them in the weights of the norm or layer that computes these.
    """
    factors: dict[str, Tensor] = {}
    for names in ONE_INPUT if method == "awq" else ():
        weights = [block.get_parameter(f"{name}.weight") for name in names]
        own = scheme.fitted(weights[0].shape[1], names[0])
        factors |= dict.fromkeys(names, awq.input_scales(weights, hessians[names[0]], own))
    for name in plain_layers(block):
        layer = block.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        own = scheme.fitted(layer.in_features, name)
        if method == "gptq":
            weight = gptq.quantize(layer.weight, hessians[name], own, HALF)
        elif method == "awq":
            factor = factors.get(name, torch.ones_like(layer.weight[0]))
            importance = hessians[name].diagonal() / factor.square()
            weight = awq.quantize(layer.weight * factor, importance, own, HALF)
        else:
            weight = rtn.quantize(layer.weight, own, HALF)
        made: nn.Module = QuantLinear(weight, layer.bias)
        if name in factors:
            made = nn.Sequential(Divide(factors[name]), made)
        block.set_submodule(name, made)


class Divide(nn.Module):
    """Divide inputs `[..., K]` by factors `[K]`."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.register_buffer("factors", factors)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., K]` -> `[..., K]`."""
        return x / self.get_buffer("factors")
