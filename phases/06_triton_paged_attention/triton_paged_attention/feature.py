"""The Triton kernels as a feature of an engine. Triton is imported when the feature is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from common.errors import UserError
from common.names import choice
from paged_cache import EngineBuilder, Feature

Backend = Literal["torch", "triton"]
"""What computes an engine's operators: torch as in phase 05, or the kernels of this phase."""
CUDA_BLOCK_SIZE = 64
"""One tile of keys then lies in one block, and a step of the kernel looks up one block id instead of 64."""


@dataclass(frozen=True)
class Kernels(Feature):
    """Compute attention, norms, RoPE and gates by "triton" or by "torch"; the tokens are the same."""

    name = "kernels"
    phase = 6
    for_draft_models = True

    @classmethod
    def switched_on(cls, value: Any) -> bool:
        """Return True if a value of the option `kernels` asks for Triton ("triton", True), False for "torch".

        Raises:
            UserError: the value is none of these.
        """
        if not isinstance(value, bool):
            choice(cls.name, value, get_args(Backend))
        return value in (True, "triton")

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True on a CUDA GPU, else False: a CPU would run the kernels in a slow interpreter."""
        return device.type == "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Replace the model's layers by fused ones, and attention in torch by Triton kernels.

        On a GPU, KV cache blocks have 64 tokens by default.

        Raises:
            UserError: Triton cannot run on the model's device.
        """
        device = builder.model.device.type
        check_triton(device)
        from triton_paged_attention.attention import TritonPagedAttention
        from triton_paged_attention.layers import optimize

        model = optimize(builder.own_model())
        builder.attention.replace(
            self, partial(TritonPagedAttention, num_heads=model.config.num_heads)
        )
        if device == "cuda":
            builder.default_block_size = CUDA_BLOCK_SIZE


def check_triton(device: str) -> None:
    """Raise `UserError` unless Triton kernels can run. device: "cuda", or "cpu" for Triton's interpreter."""
    if device not in ("cuda", "cpu"):
        raise UserError(
            f"device is {device!r}, but Triton kernels need 'cuda', or 'cpu' for the interpreter"
        )
    try:
        import triton.language as tl
    except ModuleNotFoundError:
        raise UserError(
            "kernels need triton, which is not installed: see `ladder doctor`"
        ) from None
    from triton.runtime.interpreter import InterpretedFunction

    if device == "cpu" and not isinstance(
        tl.sum, InterpretedFunction
    ):  # Triton's own come first
        raise UserError(
            "device is 'cpu', but Triton was imported without TRITON_INTERPRET=1 in the environment: "
            "import phase 06 before a model is made, or set it"
        )
