"""Decode steps of few requests as one call of `step.cpp`, which reads weights and cache where they lie."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL, Structure, c_double, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from common.console import err
from continuous.runner import Forwarded
from continuous.work import Work
from paged_cache import EngineBuilder, Feature, PagedRunner
from paged_cache.attention import PagedBatch, TorchPagedAttention
from phases.appendix.cpu_step.build import load_library
from quant.blocks import BlockLinear
from quant.linear import QuantLinear

# Registers of 16 numbers, for which PyTorch orders weights of four bits.
WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"
CAPABLE = torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2")
SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-x",
    "c++",
)

# Requests in such a step; PyTorch's products of matrices are the faster ones for more.
MOST = 16
# Inputs of a product and a head's numbers are multiples of WIDTH, outputs of SIDE; of BLOCK with four bits in
# PyTorch's order. A product has TASKS at most: each fetches ahead what is another's, so few are faster.
WIDTH = 16
SIDE = 4
BLOCK = 64
TASKS = 32
INT4, Q8_0, Q4_0, Q4_1, ADD, NORM, SILU, GELU, TURN, ATTEND = range(3, 13)
PRODUCTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
BLOCKS = {"q8_0": Q8_0, "q4_0": Q4_0, "q4_1": Q4_1}
ACTIVATIONS = {"silu": SILU, "gelu_new": GELU, "gelu_pytorch_tanh": GELU}
NUMBERS = "code x y added outputs inputs group tasks heads kv_heads window block_size rope "
PLACES = "weight scale minimum bias q_norm k_norm keys values"


class Operator(Structure):
    """See `step.cpp`."""

    _fields_ = [(name, c_int64) for name in (NUMBERS + PLACES).split()] + [
        ("factor", c_double)
    ]


def make_operator(x: int, y: int, **fields: Any) -> Operator:
    """Return an operator from columns at `x` to columns at `y`. Tensors are given by their addresses."""
    given = {
        name: v.data_ptr() if isinstance(v, Tensor) else v or 0 for name, v in fields.items()
    }
    return Operator(x=x, y=y, **given)


def block_fields(layer: BlockLinear) -> dict[str, Any]:
    """Return the fields of a product with a GGUF file's blocks."""
    outputs, inputs = layer.shape
    tensors = {"weight": layer.data, "scale": layer.scale, "minimum": layer.minimum}
    sizes = {"outputs": outputs, "inputs": inputs, "tasks": min(-(-outputs // BLOCK), TASKS)}
    return {"code": BLOCKS[layer.kind], **sizes, **tensors}


def whole_tiles(count: int) -> int:
    """Return the rows of a workspace for `count` tokens: one, or a multiple of `SIDE`."""
    return 1 if count == 1 else -(-count // SIDE) * SIDE


def call_step(
    call: Any,
    operators: Any,
    space: Tensor,
    count: int,
    positions: Tensor | None = None,
    tables: Tensor | None = None,
    half: bool = False,
) -> None:
    """Run operators over the first `count` rows of a workspace; see `step.cpp`."""
    places = [
        0 if tensor is None else tensor.data_ptr() for tensor in (space, positions, tables)
    ]
    columns = 0 if tables is None else tables.shape[1]
    sizes = [len(operators), count, space.shape[1], columns, half, torch.get_num_threads()]
    call(operators, *map(c_int64, [*places, *sizes]))


class OneCall:
    """A `StepExecutor`: a model's operators over a workspace, of which each request has a row.

    Raises:
        NotImplementedError: something that `step.cpp` does not compute.
    """

    def __init__(self, library: CDLL, runner: PagedRunner) -> None:
        self.runner = runner
        self.pool = runner.attention.pool
        self.call = library.run
        self.model = model = cast(Any, runner.model)
        self.kept: list[Any] = []
        self.config = config = model.config
        named = config.family in ("llama", "mistral", "qwen2", "qwen3", "gemma3")
        exact = (
            config.activation in ACTIVATIONS and model.dtype in PRODUCTS and self.pool.exact
        )
        refused = config.experts or config.attention_soft_cap or config.final_soft_cap
        if not named or not exact or refused or config.head_dim % WIDTH:
            raise NotImplementedError
        self.gemma = config.family == "gemma3"
        self.ropes = [model.rope_global, model.rope_local] if self.gemma else [model.rope]
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        size = max(
            heads, 4 * config.head_dim, config.hidden_size, 2 * config.intermediate_size
        )
        self.x, self.h, self.y, self.mixed, self.wide, self.rope, self.logits = range(
            0, 7 * size, size
        )
        self.width = self.logits + config.vocab_size
        made = [operator for block in model.layers for operator in self.block(block)]
        made += [
            self.norm(ADD, model.norm),
            *self.products(model, self.h, self.logits, "lm_head"),
        ]
        self.operators = (Operator * len(made))(*made)

    def operator(self, code: int, x: int, y: int, tasks: int = 1, **fields: Any) -> Operator:
        """An operator from columns at `x` to columns at `y`; the tensors that it points to are kept."""
        self.kept += fields.values()
        defaults = {
            "inputs": self.config.hidden_size,
            "factor": self.config.norm_eps,
            "added": self.y,
        }
        return make_operator(x, y, code=code, tasks=tasks, **defaults | fields)

    def block(self, block: Any) -> list[Operator]:
        """Attention, then the MLP; Gemma normalizes what they return."""
        config = self.config
        attention = block.self_attn
        spec = block.self_attn.spec
        cache, children = self.pool.layers[spec.index], dict(block.self_attn.named_children())
        turns, gate = spec.num_heads + spec.num_kv_heads, ACTIVATIONS[config.activation]
        local = self.gemma and spec.sliding_window is not None
        heads = {
            "inputs": spec.head_dim,
            "heads": spec.num_heads,
            "kv_heads": spec.num_kv_heads,
        }
        heads |= {"keys": cache.k, "values": cache.v, "block_size": self.pool.data.shape[3]}
        heads |= {
            "window": spec.sliding_window or 1 << 62,
            "rope": self.rope + 2 * spec.head_dim * local,
        }
        norms = {name: self.factors(children.get(name)) for name in ("q_norm", "k_norm")}
        before = (
            block.pre_feedforward_layernorm if self.gemma else block.post_attention_layernorm
        )
        return [
            self.norm(ADD, block.input_layernorm),
            *self.products(
                attention, self.h, self.wide, "qkv_proj", "q_proj", "k_proj", "v_proj"
            ),
            self.operator(TURN, self.wide, self.wide, turns, **heads, **norms),
            self.operator(
                ATTEND, self.wide, self.mixed, spec.num_heads, factor=spec.scale, **heads
            ),
            *self.products(attention, self.mixed, self.y, "o_proj"),
            *([self.norm(NORM, block.post_attention_layernorm)] if self.gemma else []),
            self.norm(ADD, before),
            *self.products(
                block.mlp, self.h, self.wide, "gate_up_proj", "gate_proj", "up_proj"
            ),
            self.operator(gate, self.wide, self.wide, inputs=config.intermediate_size),
            *self.products(block.mlp, self.wide, self.y, "down_proj"),
            *([self.norm(NORM, block.post_feedforward_layernorm)] if self.gemma else []),
        ]

    def products(self, owner: nn.Module, x: int, y: int, *names: str) -> Iterator[Operator]:
        """Linear layers of one input, those of the names that there are; outputs lie one behind the other."""
        children = dict[str, Any](owner.named_children())
        for layer in (children[name] for name in names if name in children):
            if isinstance(layer, BlockLinear):
                if layer.shape[0] % SIDE:
                    raise NotImplementedError
                bias = None if layer.bias is None else layer.bias.float()
                yield self.operator(x=x, y=y, bias=bias, **block_fields(layer))
                y += layer.shape[0]
                continue
            quantized = isinstance(layer, QuantLinear)
            exact = quantized and layer.scheme.activations is None and layer.order is None
            if not exact and not isinstance(layer, nn.Linear):
                raise NotImplementedError
            group = layer.scheme.group if quantized and layer.tiles is not None else 0
            weight = layer.tiles if group else layer.data if quantized else layer.weight
            scale = layer.scale_zero if group else layer.scale.float() if quantized else None
            bias = None if layer.bias is None else layer.bias.float()
            outputs, inputs = weight.shape[0], weight.shape[1] * (2 if group else 1)
            code, side = (INT4, BLOCK) if group else (PRODUCTS.get(weight.dtype), SIDE)
            if (
                code is None
                or (code == INT4 and not WIDE)
                or inputs % WIDTH
                or outputs % side
                or not weight.is_contiguous()
            ):
                raise NotImplementedError
            about = {
                "weight": weight,
                "scale": scale,
                "bias": bias,
                "outputs": outputs,
                "inputs": inputs,
            }
            yield self.operator(
                code, x, y, min(-(-outputs // BLOCK), TASKS), group=group, **about
            )
            y += outputs

    def norm(self, code: int, norm: nn.Module) -> Operator:
        """A norm over a vector: of what a layer returned, in place; or of `x` when that is added to it."""
        x, y = (self.y, self.y) if code == NORM else (self.x, self.h)
        return self.operator(code, x, y, weight=self.factors(norm))

    def factors(self, norm: Any) -> Tensor | None:
        """Return the factors of a norm in float32; None for no norm."""
        return None if norm is None else norm.weight.float() + (1 if self.gemma else 0)

    def supports(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Steps in which each of few requests computes one token, and samples the next."""
        return (
            len(works) <= MOST
            and all(work.count == 1 == len(work.sampled_requests) for work in works)
        ) or None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """The first half of a step, and its logits."""
        works = sorted(works, key=lambda work: work.row)
        self.runner.refresh(works)
        batch = cast(PagedBatch, self.runner.prepare(works))
        count, tables = len(works), batch.block_tables.contiguous()
        space = torch.zeros(whole_tiles(count), self.width)
        x, scale = (
            self.model.embed_tokens(batch.input_ids),
            self.config.hidden_size**0.5 if self.gemma else 1,
        )
        space[:count, : x.shape[1]] = x * torch.tensor(scale, dtype=x.dtype)
        turns = torch.cat([turn for rope in self.ropes for turn in rope(batch.positions)], -1)
        space[:count, self.rope : self.rope + turns.shape[-1]] = turns[:, 0]
        half = x.dtype == torch.bfloat16
        call_step(self.call, self.operators, space, count, batch.positions, tables, half)
        hidden = space[:count, self.h : self.h + x.shape[1]].to(x.dtype)
        return Forwarded(works, batch, hidden, logits=space[:count, self.logits :])


class BlockProduct:
    """A `quant.blocks.Product` in C++: rows of the weight are unpacked once for all tokens of a call."""

    def __init__(self, library: CDLL, layer: BlockLinear) -> None:
        self.call = library.run
        self.operators = (Operator * 1)(
            make_operator(0, layer.shape[1], **block_fields(layer))
        )

    def __call__(self, layer: BlockLinear, x: Tensor) -> Tensor:
        """`[..., K]` float32 -> `[..., N]`."""
        outputs, inputs = layer.shape
        flat = x.reshape(-1, inputs)
        space = torch.empty(whole_tiles(len(flat)), inputs + outputs)
        space[: len(flat), :inputs] = flat
        space[len(flat) :, :inputs] = 0
        call_step(self.call, self.operators, space, len(flat))
        return space[: len(flat), inputs:].view(*x.shape[:-1], outputs)


@dataclass(frozen=True)
class CpuStep(Feature):
    """Decode steps of few requests are one call of compiled C++."""

    name: ClassVar[str] = "cpu_step"
    phase: ClassVar[int] = 9

    @classmethod
    def enabled_by_default(
        cls, device: torch.device, others: Mapping[str, Feature | None]
    ) -> bool:
        """On a CPU with registers of 8 numbers or 16, around PyTorch's layers."""
        return device.type == "cpu" and CAPABLE and others.get("kernels") is None

    def install(self, builder: EngineBuilder) -> None:
        """Multiply by a GGUF file's blocks, and meet the engine when its layers are what they will be."""
        if builder.model.device.type != "cpu":
            return
        builder.stages["connect"].append(connect)
        if not any(isinstance(layer, BlockLinear) for layer in builder.model.modules()):
            return
        compiled = library()
        if compiled is None:
            return
        for layer in builder.own_model().modules():
            if isinstance(layer, BlockLinear) and layer.shape[0] % SIDE == 0:
                layer.product = BlockProduct(compiled, layer)


def connect(builder: EngineBuilder) -> None:
    """Add the plan, where the engine's parts are those that the step computes."""
    runner, compiled = cast(PagedRunner, builder.engine.runner), library()
    if compiled is not None and type(runner.attention) is TorchPagedAttention:
        with suppress(NotImplementedError):
            runner.plans = [OneCall(compiled, runner), *runner.plans]


def instructions() -> str:
    """Return the instructions that compiled steps use here; empty without a compiler."""
    compiled = library()
    if compiled is None:
        return ""
    return {16: "AVX-512", 8: "AVX2"}.get(compiled.register_width(), "registers of 16 bytes")


@cache
def library() -> CDLL | None:
    """Return the compiled step; None, and a line on standard error, where it cannot be had."""
    command = [os.environ.get("CXX", "g++"), *FLAGS, *os.environ.get("CXXFLAGS", "").split()]
    try:
        return load_library(SOURCE, command)
    except (OSError, subprocess.SubprocessError) as error:
        err.print(
            f"decode steps stay hundreds of calls of PyTorch, and a GGUF file's weights are float32: {error}",
            markup=False,
            soft_wrap=True,
        )
        return None
