"""Quantize a whole model by any method: what `ladder quantize` and the measurements of quality call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from common.errors import UserError
from forward.layers import GatedMLP, RMSNorm
from forward.model import Model
from forward.models.gemma3 import Gemma3Block, Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from quant import awq, gptq, rtn
from quant.calibrate import Hessians, blocks_of, sweep
from quant.formats import Scheme
from quant.linear import QuantLinear
from quant.loading import plain_layers, replace_layer

Method = Literal["rtn", "gptq", "awq"]
Progress = Callable[[str], None]
HALF = torch.bfloat16
"""What scales of groups are kept in."""


def quantize_model(
    model: Model,
    scheme: Scheme,
    method: Method = "rtn",
    texts: Sequence[Sequence[int]] = (),
    progress: Progress = lambda name: None,
) -> None:
    """Put `QuantLinear`s in the places of the linear layers of a model's blocks; the head stays as it is.

    Args:
        model: phase 01's. The old layers go one by one.
        scheme: of all layers, with smaller groups where they do not divide a layer's inputs.
        method: gptq and awq choose four-bit numbers; the others leave nothing to choose.
        texts: pieces of text as tokens, which gptq and awq need.
        progress: called with each block's name before its turn.

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
            _move_scales(name, block, scheme, hessians)
        _each(name, block, scheme, method, hessians)

    if method != "rtn":
        sweep(model, texts, change)
        return
    for name, block in blocks_of(model):
        change(name, block, {})


def _each(
    name: str, block: nn.Module, scheme: Scheme, method: Method, hessians: Hessians
) -> None:
    """Replace the linear layers of a block, one after the other."""
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
        replace_layer(block, inner, QuantLinear(weight, layer.bias))


def _move_scales(name: str, block: nn.Module, scheme: Scheme, hessians: Hessians) -> None:
    """Multiply weights by AWQ's `s`, and divide what makes their input, and its matrices, by it."""
    names = {layer: inner for inner, layer in block.named_modules()}
    for maker, layers in _inputs(name, block):
        first = names[layers[0]]
        own = scheme.fitted(layers[0].in_features, f"{name}.{first}")
        scales = awq.input_scales([layer.weight for layer in layers], hessians[first], own)
        _divide(maker, scales)
        for layer in layers:
            layer.weight = nn.Parameter(
                (layer.weight * scales).to(layer.weight.dtype), requires_grad=False
            )
            hessians[names[layer]] = hessians[names[layer]] / (scales * scales[:, None])


def _inputs(name: str, block: nn.Module) -> list[tuple[nn.Module, list[nn.Linear]]]:
    """Yield each layer whose output can be divided by `s` at no cost, and the layers that take it.

    What attention returns can be only where every query head has values of its own, so the projection behind
    it is left out.
    """
    if not isinstance(block, LlamaBlock | Gemma3Block):
        raise UserError(
            f"method is 'awq', but {name} is of a family that it is not supported for"
        )
    attention, mlp = block.self_attn, block.mlp
    assert isinstance(attention, LlamaAttention) and isinstance(mlp, GatedMLP)
    before = (
        block.pre_feedforward_layernorm
        if isinstance(block, Gemma3Block)
        else block.post_attention_layernorm
    )
    return [
        (block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (before, [mlp.gate_proj, mlp.up_proj]),
        (mlp.up_proj, [mlp.down_proj]),
    ]


def _divide(maker: nn.Module, scales: Tensor) -> None:
    """Make `maker`'s outputs smaller by `scales`."""
    weight = maker.weight
    assert isinstance(weight, Tensor)
    if isinstance(maker, Gemma3RMSNorm):
        divided = (1 + weight.float()) / scales - 1  # what is stored is the distance from 1
    elif isinstance(maker, RMSNorm):
        divided = weight.float() / scales
    else:
        assert isinstance(maker, nn.Linear)
        divided = weight.float() / scales[:, None]
        if maker.bias is not None:
            bias = maker.bias.float() / scales
            maker.bias = nn.Parameter(bias.to(maker.bias.dtype), requires_grad=False)
    maker.weight = nn.Parameter(divided.to(weight.dtype), requires_grad=False)
