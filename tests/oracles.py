"""Small random models of `transformers`, also in files, and their logits beside ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from forward.attention import RecomputeAttention
from forward.model import Model

VOCAB = 97
"""Of all these models."""


def written(config: Any, folder: Path, change: Callable[[Any], None] | None = None) -> Any:
    """A model of random weights, changed and written to `folder`."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases and norms start at 0 and 1: make them matter
            parameter.add_(torch.randn_like(parameter) * 0.1)
        if change is not None:
            change(model)
    model.save_pretrained(folder)
    return model


def logits_of(model: Model, ids: Tensor) -> Tensor:
    """Logits of all tokens, computed from nothing."""
    with torch.inference_mode():
        return model.logits(
            model(ids, torch.arange(ids.shape[-1]).expand(ids.shape), RecomputeAttention())
        )


def assert_same_logits(model: Model, reference: Any, what: str = "", length: int = 40) -> None:
    """Fail unless a model's logits are the reference's, within 1e-4."""
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids).logits
    off = (logits_of(model, ids) - expected).abs().amax(-1)  # [B, S]
    wrong = (~(off <= 1e-4)).nonzero().tolist()  # NaN is wrong as well
    assert not wrong, (
        f"{what}: {len(wrong)} of {ids.numel()} tokens have other logits than in transformers, first row "
        f"{wrong[0][0]}, token {wrong[0][1]}: off by {off[tuple(wrong[0])]:.1e}"
    )
