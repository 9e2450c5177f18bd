"""Quantize all blocks of a model, by rounding to nearest, GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from common.errors import UserError
from forward.layers import GatedMLP
from forward.model import Model
from forward.models.gemma3 import Gemma3Block, Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from phases.appendix.checkpoint_formats.calibrate import Hessians, blocks_of, sweep
from quant import awq, gptq, rtn
from quant.formats import Scheme
from quant.linear import QuantLinear
from quant.loading import plain_layers

Method = Literal["rtn", "gptq", "awq"]
Progress = Callable[[str], None]
HALF = torch.bfloat16
"""The dtype of the scales of groups."""


def quantize_model(
    model: Model,
    scheme: Scheme,
    method: Method = "rtn",
    texts: Sequence[Sequence[int]] = (),
    progress: Progress = lambda name: None,
) -> None:
    """Replace the linear layers of a model's blocks by `QuantLinear`s, in place; the head stays as it is.

    model: phase 01's. Its plain layers are freed one by one. progress: called with a block's name before it.
    scheme: the format of all layers, with smaller groups where they do not divide a layer's inputs.
    method: rtn (round to nearest), gptq or awq. These two need int4; gptq also takes eight bits with scales
        by channel.
    texts: pieces of a calibration text as token ids, for gptq and awq.

    Raises:
        UserError: the method does not go with the scheme, or has no text.
    """
    if method != "rtn":
        if scheme.weights != "int4" and (method == "awq" or scheme.scales != "channel"):
            raise UserError(
                f"method is {method!r}, which does not go with {scheme.name}: use rtn"
            )
        if not texts:
            raise UserError(f"method is {method!r}, which needs a calibration text")

    def change(name: str, block: nn.Module, hessians: Hessians) -> None:
        progress(name)
        if method == "awq":
            move_scales(name, block, scheme, hessians)
        quantize_block(name, block, scheme, method, hessians)

    if method == "rtn":
        for name, block in blocks_of(model):
            change(name, block, {})
    else:
        sweep(model, texts, change)


def quantize_block(
    name: str, block: nn.Module, scheme: Scheme, method: Method, hessians: Hessians
) -> None:
    """Replace the linear layers of `block` by layers quantized to `scheme`, one after the other, in place.

    name: of the block. method: rtn, gptq or awq. hessians: `X^T X` of each layer's inputs, by the layer's
    name; used by gptq and awq.
    """
    for inner in plain_layers(block):
        layer = block.get_submodule(inner)
        assert isinstance(layer, nn.Linear)
        own = scheme.fitted(layer.in_features, f"{name}.{inner}")
        if method == "gptq":
            weight = gptq.quantize(layer.weight, hessians[inner], own, HALF)
        elif method == "awq":
            weight = awq.quantize(layer.weight, hessians[inner].diagonal(), own, HALF)
        else:
            weight = rtn.quantize(layer.weight, own, HALF)
        block.set_submodule(inner, QuantLinear(weight, layer.bias))


def move_scales(name: str, block: nn.Module, scheme: Scheme, hessians: Hessians) -> None:
    """Multiply weights of a block, in place, by AWQ's scale of each input, before they are rounded to
    `scheme`.

    The layer that computes these inputs is divided by the scales, and so are the Hessians.
    name: of the block. hessians: `X^T X` of each linear layer's inputs, by name.
    """
    names = {layer: inner for inner, layer in block.named_modules()}
    for source, layers in sources(name, block):
        first = names[layers[0]]
        own = scheme.fitted(layers[0].in_features, f"{name}.{first}")
        scales = awq.input_scales([layer.weight for layer in layers], hessians[first], own)
        divide_outputs(source, scales)
        for layer in layers:
            layer.weight = _parameter(layer.weight * scales, layer.weight)
            hessians[names[layer]] = hessians[names[layer]] / (scales * scales[:, None])


def sources(name: str, block: nn.Module) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Return pairs (layer, its readers): the layer's outputs can be divided at no cost, the readers
    multiplied.

    The attention's output projection is no reader: its inputs could be divided only if every query head had
    values of its own. name: of the block, for errors.

    Raises:
        UserError: the block is of a family that AWQ does not support here.
    """
    if not isinstance(block, LlamaBlock | Gemma3Block):
        raise UserError(
            f"method is 'awq', but {name} is of a family that it is not supported for"
        )
    attention, mlp = block.self_attn, block.mlp
    assert isinstance(attention, LlamaAttention) and isinstance(mlp, GatedMLP)
    norm = block.post_attention_layernorm
    if isinstance(block, Gemma3Block):
        norm = block.pre_feedforward_layernorm
    return [
        (block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (norm, [mlp.gate_proj, mlp.up_proj]),
        (mlp.up_proj, [mlp.down_proj]),
    ]


def divide_outputs(layer: nn.Module, scales: Tensor) -> None:
    """Divide the weight and bias of a norm or linear layer in place by `scales [outputs]`: so are its
    outputs.
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)
    added = 1 if isinstance(layer, Gemma3RMSNorm) else 0  # it stores the distance from 1
    divisor = scales[:, None] if isinstance(layer, nn.Linear) else scales
    layer.weight = _parameter((weight.float() + added) / divisor - added, weight)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        layer.bias = _parameter(layer.bias.float() / scales, layer.bias)


def _parameter(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(like.dtype), requires_grad=False)
