"""An untrained head for a model, and an oracle for what it reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forward.attention import RecomputeAttention
from forward.model import Model
from forward.models.llama import Llama
from speculative.draft_model import DraftModel
from speculative.head import KIND, Head


def save_head(model: Head, path: Path) -> None:
    """Write a drafter's own weights in half precision, with what is needed to load them."""
    own = {
        name: value.detach().to(torch.float16).cpu().contiguous()
        for name, value in model.own().items()
    }
    own["ids"] = model.lm_head.ids.to(torch.int32).cpu()
    shape = {
        "kind": KIND,
        "layers": model.config.num_layers,
        "width": model.config.intermediate_size,
        "hidden": model.config.hidden_size,
        "vocab": model.config.vocab_size,
    }
    save_file(own, path, metadata={"drafter": json.dumps(shape)})


def head_of(model: Model) -> Head:
    assert isinstance(model, Llama)
    torch.manual_seed(1)
    made = Head(model, 1, 32, torch.arange(0, 257, 2, device=model.device)).to(model.device)
    with (
        torch.no_grad()
    ):  # as if trained: norms that do something, and attention that looks somewhere
        for name, weight in made.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
            elif "q_proj" in name or "k_proj" in name or "qkv" in name:
                weight.mul_(8.0)
    return made.to(model.dtype).requires_grad_(False).eval()


@torch.no_grad()
def hidden_states(model: Model, ids: Tensor, taps: Sequence[int]) -> Tensor:
    """Of `ids [S]`: outputs of the layers `taps`, and the last hidden states: `[S, (taps + 1) * hidden]`."""
    seen: list[Tensor] = []
    hooks = [
        model.get_submodule(f"layers.{at}").register_forward_hook(
            lambda *call: seen.append(call[2])
        )
        for at in taps
    ]
    last = model(ids, torch.arange(len(ids)), RecomputeAttention())
    for hook in hooks:
        hook.remove()
    return torch.cat((*seen, last), dim=-1)


def clean_drafts(source: DraftModel | None) -> None:
    if source is None:
        return
    assert not source.shadows, "a request that has ended is still in the draft model"
    assert source.cache.free == source.cache.allocator.count, "blocks of the draft model leak"
    assert source.rows.free == source.rows.count, "rows of the draft model leak"
    source.cache.check()
