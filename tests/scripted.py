"""A model whose next token depends on the position alone, so that it says a given text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from forward.loading import random_model
from forward.model import Model
from forward.shapes import SHAPES

POSITIONS = 512


def scripted_model(vocab_size: int, eos: int) -> Model:
    """A GPT-2 of one layer that knows its position and nothing else."""
    config = replace(
        SHAPES["gpt2"],
        vocab_size=vocab_size,
        hidden_size=POSITIONS,
        intermediate_size=8,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=POSITIONS // 4,
        max_position_embeddings=POSITIONS,
        sliding_windows=(),
        tie_word_embeddings=False,
        eos_token_ids=(eos,),
    )
    made = random_model(config, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.fill_(float("ln_" in name and name.endswith("weight")))
        made.get_parameter("wpe.weight").copy_(torch.eye(POSITIONS))
    return made


def write_script(model: Model, prompt: int, tokens: Sequence[int]) -> None:
    """Let a `scripted_model` say these tokens behind a prompt of so many."""
    head = model.get_parameter("lm_head.weight")  # [V, hidden]
    with torch.no_grad():
        head.zero_()
        for place, token in enumerate(tokens, start=prompt - 1):
            head[token, place] = 1.0
