"""Triton kernels as a feature of an engine. Triton itself is imported when it is installed in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch

from common.errors import UserError, choice
from common.options import option
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedAttention

if TYPE_CHECKING:
    from triton_paged_attention.attention import TritonPagedAttention

Backend = Literal["torch", "triton"]
"""The backend of a kind of operator: plain torch as in phase 01, or the kernels of this phase."""
LAYERS = ("norms", "rope", "activation", "projections")
"""Kinds of operators in a model's layers."""
CUDA_BLOCK_SIZE = 64
"""One tile of keys then lies in one block, and a step of the kernel looks up one block id instead of 64."""


@dataclass(frozen=True)
class Kernels(Feature):
    """Each kind of operator by "triton" or by "torch"; the tokens are the same."""

    name: ClassVar[str] = "kernels"
    phase: ClassVar[int] = 6
    for_draft_models: ClassVar[bool] = True

    attention_prefill: Backend = option("triton", "attention of requests with many new tokens")
    attention_decode: Backend = option(
        "triton", "attention of requests with at most 16 rows of queries"
    )
    norms: Backend = option("triton", "RMSNorm, and the addition before it")
    rope: Backend = option("triton", "query and key norm, RoPE and KV store in one kernel")
    activation: Backend = option("triton", "SwiGLU and GeGLU")
    projections: Backend = option(
        "triton", "one matrix product for q, k and v, and one for gate and up"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        for name in KINDS:
            choice(name, getattr(self, name), get_args(Backend))

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """On a GPU; elsewhere kernels run in the interpreter."""
        return device.type == "cuda"

    def install(self, builder: EngineBuilder) -> None:
        """Fused layers, and kernels for attention."""
        device = builder.model.device.type
        check_triton(device)
        from triton_paged_attention.attention import TritonPagedAttention
        from triton_paged_attention.layers import optimize

        optimize(
            builder.own_model(), [name for name in LAYERS if getattr(self, name) == "torch"]
        )
        builder.attention.replace(self, self.attention_of(TritonPagedAttention, builder.model))
        if device == "cuda":
            builder.default_block_size = CUDA_BLOCK_SIZE

    @property
    def attends(self) -> bool:
        """True if all attention is in kernels, as graphs need it."""
        return self.attention_prefill == self.attention_decode == "triton"

    def attention_of(
        self, kind: type[TritonPagedAttention], model: Model
    ) -> Callable[..., PagedAttention]:
        """Makes attention of a kind, with these backends, over a pool."""
        return partial(
            kind,
            num_heads=model.config.num_heads,
            prefill=self.attention_prefill,
            decode=self.attention_decode,
        )


KINDS = tuple(field.name for field in fields(Kernels))
"""Kinds of operators."""
Kernels.without = dict.fromkeys(KINDS, "torch")


def check_triton(device: str) -> None:
    """Raise `UserError` unless kernels can run on a kind of device."""
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
