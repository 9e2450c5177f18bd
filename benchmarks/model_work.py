"""The work of a step of a model, and the least time that a machine can take for it.

Any step of a model must read its weights and the keys and values it attends to, and must do its
multiplications. The machine has a ceiling for each: bytes a second from memory, and floating-point operations
a second in matrix products. A step takes at least the longer of the two times (Williams, Waterman, Patterson
2009, "Roofline: an insightful visual performance model"). `common.roofline` measures the ceilings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

import torch

from common.models.config import ModelConfig


@dataclass(frozen=True)
class Ceilings:
    """The ceilings of a machine's roofline: bytes read from memory per second, FLOPs of matrix products
    per second.
    """

    read_bytes_per_s: float
    matmul_flop_per_s: float

    def to_json(self) -> dict[str, float]:
        """Return the two ceilings by name, for the evidence file."""
        return asdict(self)


@dataclass(frozen=True)
class ComputeCost:
    """The work of one stretch of computation, on any machine.

    weight_bytes, kv_bytes: bytes read; a state, which is written as well, counts twice as keys and values.
    flops: multiplications and additions, counted separately.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """Return the seconds of this work at these ceilings: of reading or of computing, whichever takes
        longer.
        """
        read = (self.weight_bytes + self.kv_bytes) / ceilings.read_bytes_per_s
        return max(read, self.flops / ceilings.matmul_flop_per_s)


def layer_parameters(config: ModelConfig, experts: float | None = None) -> float:
    """Return the number of weights in all layers' matrix products: no embedding, norms or biases.

    experts: how many of a mixture's experts to count in each layer; None: all.
    """
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (query + 2 * kv) + query * config.hidden_size
    # GPT-2's MLP has two matrices, the others a gate as well.
    gated = 2 if config.family == "gpt2" else 3
    mixers = _mixer_parameters(config, attention)
    facts = config.experts
    if facts is None:
        dense = gated * config.hidden_size * config.intermediate_size
        return mixers + config.num_layers * dense
    chosen = facts.count if experts is None else experts
    inside = facts.intermediate_size * chosen + facts.shared_size
    sparse = config.hidden_size * (3 * inside + facts.count)
    return mixers + config.num_layers * sparse


def _mixer_parameters(config: ModelConfig, attention: int) -> int:
    """Return the number of weights of attention or Gated DeltaNet, in all layers.

    attention: number of weights in one layer of plain attention.
    """
    delta, states = config.delta, _state_layers(config)
    if delta is None:
        return config.num_layers * attention
    # Into the gate, out of it, and two numbers a head.
    values = delta.value_heads * delta.value_dim
    mixer = config.hidden_size * (delta.channels + 2 * values + 2 * delta.value_heads)
    # Here attention has a gate as well.
    attention += config.hidden_size * config.num_heads * config.head_dim
    return (config.num_layers - states) * attention + states * mixer


def state_bytes(config: ModelConfig) -> float:
    """Return the bytes of all layers' states of one request, in float32; each token reads and writes them."""
    return 4 * _state_layers(config) * prod(config.delta.state_shape) if config.delta else 0


def _state_layers(config: ModelConfig) -> int:
    return config.num_layers - len(config.attention_layers)


def experts_read(config: ModelConfig, tokens: float) -> float | None:
    """Return how many of a layer's experts `tokens` tokens choose on average, if all are equally likely."""
    facts = config.experts
    return facts.count * (1 - (1 - facts.top_k / facts.count) ** tokens) if facts else None


def parameters_of_a_token(config: ModelConfig) -> float:
    """Return the number of the layers' weights that one token is multiplied with."""
    return layer_parameters(config, config.experts.top_k if config.experts else None)


def decode_work(
    config: ModelConfig, dtype: torch.dtype, batch: int, context: float
) -> ComputeCost:
    """Return the work of one decode step: one new token for each of `batch` sequences of `context` keys.

    The embedding is read once as the output head (a tied one is the same matrix); of the input embedding
    only `batch` rows are read, which is nothing.
    """
    head = config.vocab_size * config.hidden_size
    read = layer_parameters(config, experts_read(config, batch)) + head
    keys = _keys(config, context)
    held = keys * _kv_bytes_per_key(config, dtype) + 2 * state_bytes(config)
    flops = 2.0 * (parameters_of_a_token(config) + head) + keys * _flops_per_key(config)
    return ComputeCost(read * dtype.itemsize, batch * held, batch * flops)


def prefill_work(
    config: ModelConfig, dtype: torch.dtype, prompt_lens: Sequence[int]
) -> ComputeCost:
    """Return the work of prompts of `prompt_lens` tokens computed in one pass: all tokens through the layers,
    the head for the last ones.
    """
    head = config.vocab_size * config.hidden_size
    tokens = sum(prompt_lens)
    read = layer_parameters(config, experts_read(config, tokens))
    pairs = sum(_pairs(config, length) for length in prompt_lens)
    flops = 2.0 * (tokens * parameters_of_a_token(config) + len(prompt_lens) * head)
    flops += pairs * _flops_per_key(config)
    # Keys and values of a prompt are used where they are made.
    return ComputeCost((read + head) * dtype.itemsize, 0.0, flops)


def generation_work(
    config: ModelConfig,
    dtype: torch.dtype,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    batch: int,
    cached: bool = True,
) -> list[ComputeCost]:
    """Return the work of all prefills, and of all decodes, of requests that run at most `batch` at a time.

    prompt_lens, output_lens: tokens of each request.
    cached: False: no KV cache, so that every output token is a prefill of all that stands before it (phase
        01).

    The number of decode steps is the least that any schedule needs: no request goes faster than one token a
    step, and no step yields more than `batch` tokens. The first output token comes from the prefill.
    """
    if not cached:
        works = []
        for prompt, output in zip(prompt_lens, output_lens, strict=True):
            works += [prefill_work(config, dtype, [prompt + done]) for done in range(output)]
        return works
    decodes = [max(output - 1, 0) for output in output_lens]
    steps = max(max(decodes, default=0), -(-sum(decodes) // batch))
    waves = -(-len(prompt_lens) // batch)
    prefill = prefill_work(config, dtype, prompt_lens)
    keys = sum(
        _keys(config, prompt + done)
        for prompt, output in zip(prompt_lens, decodes, strict=True)
        for done in range(1, output + 1)
    )
    one = decode_work(config, dtype, 1, 0)
    return [
        replace(prefill, weight_bytes=prefill.weight_bytes * waves),
        ComputeCost(
            weight_bytes=decode_work(config, dtype, batch, 0).weight_bytes * steps,
            kv_bytes=keys * _kv_bytes_per_key(config, dtype) + sum(decodes) * one.kv_bytes,
            flops=one.flops * sum(decodes) + keys * _flops_per_key(config),
        ),
    ]


def ideal_seconds(works: Sequence[ComputeCost], ceilings: Ceilings) -> float:
    """Return the least seconds that a machine with these ceilings takes for `works`, one after the other."""
    return sum(work.seconds(ceilings) for work in works)


def _keys(config: ModelConfig, context: float) -> float:
    """Return the keys that one query reads, summed over the layers: `context`, or less with a sliding
    window.
    """
    return sum(_seen(config, context))


def _seen(config: ModelConfig, context: float) -> list[float]:
    """Return the keys that one query reads in each layer of attention; a window of None sees all."""
    windows = [config.sliding_windows[layer] for layer in config.attention_layers]
    return [min(context, window or context) for window in windows]


def _pairs(config: ModelConfig, length: int) -> float:
    """Return the query-key pairs of one causal prompt of `length` tokens, summed over the layers."""
    return sum(
        seen * (seen + 1) / 2 + (length - seen) * seen for seen in _seen(config, length)
    )


def _kv_bytes_per_key(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's key and value in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def _flops_per_key(config: ModelConfig) -> float:
    """Return the FLOPs that one query spends on one key in one layer: a score and a weighted value in
    each head.
    """
    return 4.0 * config.num_heads * config.head_dim
