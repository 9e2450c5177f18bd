"""Phase 06: attention over the paged pool in one kernel, and the small operators around it, in Triton.

Without a CUDA GPU the kernels run in Triton's interpreter: the same programs, one after the other, in
numpy. It is slow and good for lessons and tests. The choice is made when Triton is first imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import paged_cache
from common.errors import UserError
from forward.loading import load_model
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.llm import LLM as PagedLLM
from paged_cache.runner import PagedRunner
from triton_paged_attention.attention import TritonPagedAttention
from triton_paged_attention.backends import Backend, Backends, check_backend
from triton_paged_attention.sampler import TritonSampler
from triton_paged_attention.surgery import clone, optimize

__all__ = ["LLM", "Backend", "Backends", "TritonPagedAttention", "TritonSampler", "load", "optimize"]

CUDA_BLOCK_SIZE = 64
"""One tile of keys then lies in one block, and a step of the kernel looks up one block id instead of 64."""


def load(
    model: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    attention_prefill: Backend = "triton",
    attention_decode: Backend = "triton",
    norms: Backend = "triton",
    rope: Backend = "triton",
    activation: Backend = "triton",
    projections: Backend = "triton",
    sampling: Backend = "triton",
    block_size: int | None = None,
    attention_class: type[TritonPagedAttention] = TritonPagedAttention,
    below: Callable[..., PagedEngine] = paged_cache.load,
    **options: Any,
) -> PagedEngine:
    """Phase 05's engine, or a later one, with this phase's kernels.

    Args:
        model, device, dtype: see `paged_cache.load`. A loaded model keeps its layers; the engine's copy
            shares its weights except those of fused projections.
        attention_prefill, attention_decode, norms, rope, activation, projections, sampling: "torch" or
            "triton", each on its own (see `Backends`); sampled tokens are the same with both.
        block_size: tokens in a block, by default 64 on a GPU and 16 elsewhere.
        attention_class: what attends; a later phase gives its own.
        below: the `load` whose engine gets the kernels; a later phase gives its own.
        options: the others of `below`.

    Raises:
        UserError: an option is out of its limits, or the device has no Triton.
    """
    loaded = load_model(model, device=device, dtype=dtype)
    kind = loaded.device.type
    if kind not in ("cuda", "cpu"):
        raise UserError(f"device is {kind!r}, but Triton kernels need 'cuda', or 'cpu' for the interpreter")
    if kind == "cpu" and not _interpreted():
        raise UserError(
            "device is 'cpu', but Triton was imported without TRITON_INTERPRET=1 in the environment"
        )
    heads = loaded.config.num_heads
    check_backend("sampling", sampling)
    if sampling == "triton":
        make_runner: Callable[..., PagedRunner] = options.pop("make_runner", PagedRunner)
        options["make_runner"] = partial(make_runner, make_sampler=TritonSampler)
    return below(
        optimize(clone(loaded), Backends(norms, rope, activation, projections)),
        block_size=block_size or (CUDA_BLOCK_SIZE if kind == "cuda" else 16),
        make_attention=lambda pool: attention_class(
            pool, heads, prefill=attention_prefill, decode=attention_decode
        ),
        **options,
    )


def _interpreted() -> bool:
    """Whether kernels of this package run in the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    from triton_paged_attention.kernels.kv_store import kv_store_kernel

    return isinstance(kv_store_kernel, InterpretedFunction)


class LLM(PagedLLM):
    """See `paged_cache.LLM`; options are those of this phase's `load`."""

    load = staticmethod(load)
