"""Batch invariance as an engine feature: sums in an order that no batch changes, or an error at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from batch_invariance.activations import fix_activations
from batch_invariance.attention import ChunkedTorch
from batch_invariance.quantized import FixedQuantLinear, fix_linears
from common.errors import UserError
from continuous.attention import avoid_plans_per_shape
from cuda_graphs import Graphs
from cuda_graphs.buckets import chunk_sizes, decode_sizes
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedAttention
from parallel.feature import Parallel
from quant.blocks import BlockWeight
from triton_paged_attention import Kernels


@dataclass(frozen=True)
class BatchInvariance(Feature):
    """A request's tokens and log-probabilities have the same bits, whatever shares its batch."""

    name = "batch_invariant"
    phase = 18

    def configure_load(self, builder: EngineBuilder) -> None:
        """Raise `UserError` if tensor parallelism splits the model: ranks would add parts of sums."""
        parallel = builder.feature(Parallel)
        refuse("tensor_parallel is not 1", parallel and parallel.tensor_parallel > 1)

    def install(self, builder: EngineBuilder) -> None:
        """Fix the order of the sums in products and in attention; drop kernels that only small batches use.

        Raises:
            UserError: the model has sums whose order depends on the batch.
        """
        refuse_unknown_sums(builder)
        model = builder.own_model()
        if builder.feature(Kernels) is not None:
            from triton_paged_attention.layers import FusedBlock
            from triton_paged_attention.linear import FusedLinear

            for part in model.modules():
                if isinstance(part, FusedLinear | FusedBlock):
                    part.kernels.clear()
        fix_activations(model)
        fix_linears(model, likely_rows(builder))
        builder.reservations.append(lambda builder: unpacked_bytes(builder.model))
        builder.attention.decorate(self, lambda plain: attention_of(builder))
        if builder.feature(Graphs) is not None:
            from batch_invariance.sampling import FixedSamplerBackend
            from cuda_graphs.sampling import TritonSamplerBackend

            if isinstance(builder.sampler_backend.part, TritonSamplerBackend):
                builder.sampler_backend.decorate(self, lambda plain: FixedSamplerBackend())


def refuse_unknown_sums(builder: EngineBuilder) -> None:
    """Raise `UserError` if the builder's model or KV format has sums whose order nothing fixes yet.

    These are mixtures of experts, Gated DeltaNet, weights in GGUF blocks, and KV blocks whose values are in
    another order than `[N, P, KH, D]`.
    """
    model = builder.model
    blocks = any(isinstance(part, BlockWeight) for part in model.modules())
    # Of a mixture attention's sinks would be missing, too: only gpt-oss has them.
    refuse("the model is a mixture of experts", model.config.experts is not None)
    refuse("the model has layers of Gated DeltaNet", model.config.delta is not None)
    refuse("weights are blocks of a GGUF file", blocks)
    refuse("keys and values have a layout of few bits", builder.kv.part.layout is not None)


def refuse(reason: str, holds: object) -> None:
    """Raise `UserError` that `batch_invariant` cannot be on, if `holds` is true.

    reason: why, for the message: a clause such as "the model is a mixture of experts".
    """
    if holds:
        raise UserError(
            f"batch_invariant is True, but {reason}, whose sums have no fixed order yet: "
            "switch it off with batch_invariant=False"
        )


def likely_rows(builder: EngineBuilder) -> list[int]:
    """Return numbers of rows (tokens) that steps of this engine have.

    They are sizes of decode steps and of chunked ones up to the most tokens of a step, and of CUDA graphs.
    """
    graphs = builder.feature(Graphs)
    rows = decode_sizes(max(builder.max_rows, 16)) + chunk_sizes(max(builder.step_tokens, 32))
    if graphs is not None and graphs.graph_tokens:
        rows += chunk_sizes(graphs.graph_tokens)
    return rows


def unpacked_bytes(model: Model) -> int:
    """Return the bytes of a model's largest unpacked weight, of those that are unpacked for each product.

    Returns:
        0 if no quantized weight is unpacked.
    """
    parts = (part for part in model.modules() if isinstance(part, FixedQuantLinear))
    return max((prod(part.layer.shape) for part in parts), default=0) * model.dtype.itemsize


def attention_of(builder: EngineBuilder) -> Callable[[Any], PagedAttention]:
    """Return a function: pool of KV blocks -> attention object whose bits no batch changes."""
    if builder.feature(Kernels) is None:
        avoid_plans_per_shape()
        return ChunkedTorch
    from batch_invariance.kernels.paged import ChunkedTriton

    return partial(ChunkedTriton, num_heads=builder.model.config.num_heads)
