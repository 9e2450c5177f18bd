"""Replace a loaded model's layers by fused ones. The model's own code stays as phase 01 wrote it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from forward.layers import GatedMLP, RMSNorm
from forward.model import Model
from forward.models.gemma3 import Gemma3RMSNorm
from forward.models.llama import LlamaAttention, LlamaBlock
from forward.rope import Rope
from triton_paged_attention.activation import KINDS
from triton_paged_attention.backends import Backends
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm, HeadForOne
from triton_paged_attention.rope import FusedRope


def optimize(model: Model, backends: Backends | None = None) -> Model:
    """Put this phase's layers in the places of phase 01's, in the model that is given; returns it.

    GPT-2 has LayerNorm, no RoPE and no gate: it keeps its layers, and gains by attention alone.
    """
    chosen = backends or Backends()
    kind = model.config.activation
    if "triton" in (chosen.rope, chosen.projections):
        _replace(model, LlamaAttention, lambda old: FusedAttention(old, chosen))
    if chosen.rope == "triton":
        _replace(model, Rope, FusedRope)
    if "triton" in (chosen.activation, chosen.projections) and kind in KINDS:
        _replace(model, GatedMLP, lambda old: FusedMLP(old, kind, chosen))
    if chosen.norms == "triton":
        if chosen.rope == "torch":  # or the kernel above takes care of the heads' norms
            _replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm)
        else:
            _replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm, skip=FusedAttention)
        _replace(model, LlamaBlock, FusedBlock)
    if chosen.projections == "triton":
        model.lm_head = HeadForOne(model.lm_head)
    return model


def _replace(
    model: Model,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[Any], nn.Module],
    skip: type[nn.Module] | None = None,
) -> None:
    """Put `make(module)` in the place of every module of a kind, except those whose owner is a `skip`."""
    for name, module in list(model.named_modules()):
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        if isinstance(module, kind) and not (skip is not None and isinstance(holder, skip)):
            setattr(holder, last, make(module))
