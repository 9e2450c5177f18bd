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
from triton_paged_attention.backends import Backends
from triton_paged_attention.kernels.activation import KINDS
from triton_paged_attention.kernels.rope import FusedRope
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP, FusedRMSNorm
from triton_paged_attention.linear import Joins, join


def optimize(model: Model, backends: Backends | None = None) -> Model:
    """Put this phase's layers in the places of phase 01's, and return the model, which is the same object.

    Projections are joined layer by layer, and the old ones of a layer are let go of before the next is
    joined. Who still needs the model as it was gives a `clone`, and so keeps both alive.

    GPT-2 has LayerNorm, no RoPE and no gate: it keeps its layers, and gains by attention alone.
    """
    chosen = backends or Backends()
    kind = model.config.activation
    if "triton" in (chosen.rope, chosen.projections):
        replace(model, LlamaAttention, lambda old: FusedAttention(old, chosen))
    if chosen.rope == "triton":
        replace(model, Rope, FusedRope)
    if "triton" in (chosen.activation, chosen.projections) and kind in KINDS:
        replace(model, GatedMLP, lambda old: FusedMLP(old, kind, chosen))
    if chosen.norms == "triton":
        if chosen.rope == "torch":  # or the kernel above takes care of the heads' norms
            replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm)
        else:
            replace(model, (RMSNorm, Gemma3RMSNorm), FusedRMSNorm, skip=FusedAttention)
        replace(model, LlamaBlock, FusedBlock)
    if chosen.projections == "triton" and isinstance(model.lm_head, (nn.Linear, Joins)):
        model.lm_head = join(model.lm_head)
    return model


def replace(
    model: nn.Module,
    kind: type[nn.Module] | tuple[type[nn.Module], ...],
    make: Callable[[Any], nn.Module],
    skip: type[nn.Module] | None = None,
) -> None:
    """Put `make(module)` in the place of every module of a kind, except those whose owner is a `skip`."""
    # Names, not modules: a list of these would keep all the old weights alive until the last is replaced.
    found = [name for name, module in model.named_modules() if isinstance(module, kind)]
    for name in found:
        owner, _, last = name.rpartition(".")
        holder = model.get_submodule(owner)
        if skip is None or not isinstance(holder, skip):
            setattr(holder, last, make(getattr(holder, last)))
