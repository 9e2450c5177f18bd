"""The interface of every model family: hidden states from tokens, logits from hidden states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.models.config import ModelConfig
from forward.attention import Attention, LayerSpec
from forward.rope_scaling import attention_scaling


class Model(nn.Module, ABC):
    """A decoder-only transformer; its attention is an argument of `forward`.

    The leading shape of ``input_ids`` is free: ``[S]`` for one sequence, ``[B, S]`` for a padded batch,
    ``[T]`` for a ragged one. Only the attention object has to know which it is.

    config: the model's shape. layer_specs: for each layer the facts that attention needs.
    """

    TIED: ClassVar[dict[str, str]] = {"lm_head.weight": "embed_tokens.weight"}
    """``{head: embedding}``, the parameter that a checkpoint with tied embeddings leaves out."""

    lm_head: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layer_specs = tuple(
            LayerSpec(
                index=i,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.attention_scale
                * attention_scaling(config, i)
                / (i + 1 if config.scale_by_layer else 1),
                sliding_window=config.sliding_windows[i],
            )
            for i in range(config.num_layers)
        )

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states ``[..., hidden]`` of tokens ``input_ids [...]``.

        positions: ``[...]``, 0 for a sequence's first token. attention: mixes the tokens of every layer.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., V]`` float32 of hidden states ``[..., hidden]``: those to sample from.

        ``final_soft_cap = c`` replaces each logit ``l`` by ``c * tanh(l / c)``, in float32 too.
        """
        logits: Tensor = self.lm_head(hidden).float()
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of hidden states: the first parameter's (a quantized linear may have another)."""
        return next(self.parameters()).dtype

    @property
    def max_len(self) -> int:
        """Return the context length in tokens, prompt and output together."""
        return self.config.max_position_embeddings

    def tie_weights(self) -> None:
        """Make the output head the same parameter as the input embedding, if the configuration ties them.

        `TIED` names both by their paths. In ``lm_head.weight``, ``lm_head`` is the module
        (`get_submodule`), and ``weight`` its attribute. `setattr` replaces this attribute by the embedding's
        parameter (`get_parameter`).
        """
        if self.config.tie_word_embeddings:
            for head, embedding in self.TIED.items():
                owner, _, name = head.rpartition(".")
                setattr(self.get_submodule(owner), name, self.get_parameter(embedding))

    @staticmethod
    def rename(name: str) -> str | None:
        """Return this model's name of a checkpoint's tensor; ``None``: it does not use the tensor."""
        return name

    @staticmethod
    def transform(name: str, tensor: Tensor) -> Tensor:
        """Return a checkpoint's tensor in this model's layout; ``name`` is its name in this model."""
        return tensor
