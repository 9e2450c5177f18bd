"""Decode steps of at most 16 requests as one call of `step.cpp`, without copies of weights or KV cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes import CDLL, Structure, c_double, c_int64
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from common.console import err
from continuous.runner import Forwarded
from continuous.work import Work
from paged_cache import EngineBuilder, Feature, PagedRunner, find
from paged_cache.attention import PagedBatch, TorchPagedAttention
from phases.appendix.cpu_step.build import load_library
from triton_paged_attention import Kernels

if TYPE_CHECKING:
    from quant.blocks import BlockLinear

# Registers of 16 numbers, for which PyTorch orders weights of four bits.
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
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
# PyTorch's order. A product has TASKS at most: a task prefetches beyond its end, so more would be slower.
WIDTH = 16
SIDE = 4
BLOCK = 64
TASKS = 32
INT4, Q8_0, Q4_1, ADD, NORM, SILU, GELU, TURN, ATTEND = range(3, 12)
PRODUCTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
BLOCKS = {"q8_0": Q8_0, "q4_1": Q4_1}
ACTIVATIONS = {"silu": SILU, "gelu_new": GELU, "gelu_pytorch_tanh": GELU}
NUMBERS = "code x y added outputs inputs group tasks heads kv_heads window block_size rope "
POINTERS = "weight scale minimum bias q_norm k_norm keys values"


class Operator(Structure):
    """One operator (product, norm, attention, ...) of a compiled decode step, laid out as in `step.cpp`.

    Its fields are numbers, and then addresses of tensors.
    """

    _fields_ = [(name, c_int64) for name in (NUMBERS + POINTERS).split()] + [
        ("factor", c_double)
    ]


def make_operator(x: int, y: int, **fields: Any) -> Operator:
    """Return an `Operator` that reads a workspace from column `x` on and writes to it from column `y` on.

    fields: further fields of `Operator`: numbers, tensors (their addresses are stored), or None for 0.
    """
    given = {
        name: v.data_ptr() if isinstance(v, Tensor) else v or 0 for name, v in fields.items()
    }
    return Operator(x=x, y=y, **given)


def block_fields(layer: BlockLinear) -> dict[str, Any]:
    """Return the fields, by name, of an `Operator` that multiplies by a GGUF file's weight.

    They are the operator's code, the sizes, and the weight's tensors.
    """
    outputs, inputs = layer.shape
    tensors = {"weight": layer.data, "scale": layer.scale, "minimum": layer.minimum}
    sizes = {"outputs": outputs, "inputs": inputs, "tasks": min(-(-outputs // BLOCK), TASKS)}
    return {"code": BLOCKS[layer.kind], **sizes, **tensors}


def whole_tiles(count: int) -> int:
    """Return the rows of a workspace for `count` tokens: 1 for 1, else rounded up to a multiple of `SIDE`."""
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
    """Run operators in C++ over the first `count` rows of a workspace, which they change in place.

    call: the C++ function. operators: a ctypes array of `Operator`. space: `[rows, columns]` float32, the
        workspace, with a row for each token.
    positions, tables: positions and block tables of the requests; None if no operator is attention.
    half: whether the KV cache has bfloat16 instead of float32.
    """
    addresses = [
        0 if tensor is None else tensor.data_ptr() for tensor in (space, positions, tables)
    ]
    columns = 0 if tables is None else tables.shape[1]
    sizes = [len(operators), count, space.shape[1], columns, half, torch.get_num_threads()]
    call(operators, *map(c_int64, [*addresses, *sizes]))


class OneCall:
    """An executor of decode steps (it runs their forward pass) by one call of C++.

    The call runs the model's operators over a workspace, which has a row for each request.

    library: the compiled `step.cpp`. runner: the engine's, with model and KV cache.

    Raises:
        NotImplementedError: the model has something that `step.cpp` does not compute.
    """

    order: ClassVar[int] = 0

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
        refused = config.experts or config.final_soft_cap
        if not named or not exact or refused or config.head_dim % WIDTH:
            raise NotImplementedError
        self.gemma = config.family == "gemma3"
        self.ropes = [model.rope_global, model.rope_local] if self.gemma else [model.rope]
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        size = max(
            heads, 4 * config.head_dim, config.hidden_size, 2 * config.intermediate_size
        )
        self.x, self.h, self.y, self.mixed, self.projected, self.rope, self.logits = range(
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
        """Return an `Operator`, one operation of `step.cpp`, over the workspace (a row for each request).

        code: which operation, a constant such as `NORM`. x, y: first columns that it reads and writes.
            tasks: parts that threads can take. fields: further fields of `Operator`, whose tensors are kept
            alive; the model's hidden size and norm epsilon are the defaults.
        """
        self.kept += fields.values()
        defaults = {
            "inputs": self.config.hidden_size,
            "factor": self.config.norm_eps,
            "added": self.y,
        }
        return make_operator(x, y, code=code, tasks=tasks, **defaults | fields)

    def block(self, block: Any) -> list[Operator]:
        """Return the `Operator`s (C++ operations) of a transformer block in order: attention, then the MLP.

        block: a layer of phase 01's model; Gemma's also normalizes the outputs of attention and MLP.
        """
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
            *self.products(attention, self.h, self.projected, "q_proj", "k_proj", "v_proj"),
            self.operator(TURN, self.projected, self.projected, turns, **heads, **norms),
            self.operator(
                ATTEND, self.projected, self.mixed, spec.num_heads, factor=spec.scale, **heads
            ),
            *self.products(attention, self.mixed, self.y, "o_proj"),
            *([self.norm(NORM, block.post_attention_layernorm)] if self.gemma else []),
            self.norm(ADD, before),
            *self.products(block.mlp, self.h, self.projected, "gate_proj", "up_proj"),
            self.operator(
                gate, self.projected, self.projected, inputs=config.intermediate_size
            ),
            *self.products(block.mlp, self.projected, self.y, "down_proj"),
            *([self.norm(NORM, block.post_feedforward_layernorm)] if self.gemma else []),
        ]

    def products(self, owner: nn.Module, x: int, y: int, *names: str) -> Iterator[Operator]:
        """Yield the `Operator`s (products in C++) of linear layers with one input; outputs lie side by side.

        Args:
            owner: the module with the layers.
            x, y: first columns of the workspace for the input and for the outputs.
            names: of the layers, children of `owner`, in the order of their outputs.
        """
        for name in names:
            layer: Any = owner.get_submodule(name)
            fields = self.product_fields(layer)
            bias = None if layer.bias is None else layer.bias.float()
            yield self.operator(x=x, y=y, bias=bias, **fields)
            y += fields["outputs"]

    def product_fields(self, layer: Any) -> dict[str, Any]:
        """Return the fields, by name, of the C++ operator that multiplies by a linear layer: the number of
        its kind, sizes, and addresses of weight and scales.

        layer: an `nn.Linear`, or a quantized one of phase 10.

        Raises:
            NotImplementedError: `step.cpp` has no product for it.
        """
        group, side = 0, SIDE
        scale = None
        if isinstance(layer, nn.Linear):
            weight = layer.weight
        else:
            # Phase 10 is there, or all layers would be plain.
            from quant.blocks import BlockLinear
            from quant.cpu import CpuLinear

            if isinstance(layer, BlockLinear) and layer.shape[0] % SIDE == 0:
                return block_fields(layer)
            if (
                not isinstance(layer, CpuLinear)
                or layer.scheme.activations
                or layer.order is not None
            ):
                raise NotImplementedError
            weight, scale = layer.data, layer.scale.float()
            if layer.tiles is not None:
                group, side = layer.scheme.group, BLOCK
                weight, scale = layer.tiles, layer.scale_zero
        outputs, inputs = weight.shape[0], weight.shape[1] * (2 if group else 1)
        code = INT4 if group else PRODUCTS.get(weight.dtype)
        unknown = code is None or (code == INT4 and not AVX512)
        if unknown or inputs % WIDTH or outputs % side or not weight.is_contiguous():
            raise NotImplementedError
        sizes = {
            "outputs": outputs,
            "inputs": inputs,
            "tasks": min(-(-outputs // BLOCK), TASKS),
        }
        return {"code": code, "group": group, "weight": weight, "scale": scale, **sizes}

    def norm(self, code: int, norm: nn.Module) -> Operator:
        """Return the `Operator` of an RMSNorm over the workspace (a row for each request).

        code: `NORM`: normalize a layer's output in place. `ADD`: add that output to the residual stream, and
            write the normalized sum into columns of its own. norm: the module with the weights.
        """
        x, y = (self.y, self.y) if code == NORM else (self.x, self.h)
        return self.operator(code, x, y, weight=self.factors(norm))

    def factors(self, norm: Any) -> Tensor | None:
        """Return the factors `[size]` of a norm in float32 (Gemma's are 1 + weight); None for no norm."""
        return None if norm is None else norm.weight.float() + (1 if self.gemma else 0)

    def supports(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Return True if this executor can run a step, else None, so that another executor runs it.

        It runs steps of at most `MOST` (16) requests that each compute and sample one token.

        works: the step's requests with the tokens that each computes.
        masked: whether a grammar masks the logits, which makes no difference here.
        """
        return (
            len(works) <= MOST
            and all(work.count == 1 == len(work.sampled_requests) for work in works)
        ) or None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """Run a step's forward pass; return a `Forwarded`: hidden states and logits, to be sampled.

        works: the step's requests, one token each; the result has them in the order of their rows.
        ticket: what `supports` returned.
        """
        works = sorted(works, key=lambda work: work.row)
        self.runner.refresh(works)
        batch = cast(PagedBatch, self.runner.prepare(works))
        count, tables = len(works), batch.block_tables.contiguous()
        space = torch.zeros(whole_tiles(count), self.width)
        x = self.model.embed_tokens(batch.input_ids)
        scale = self.config.hidden_size**0.5 if self.gemma else 1
        space[:count, : x.shape[1]] = x * torch.tensor(scale, dtype=x.dtype)
        turns = torch.cat([turn for rope in self.ropes for turn in rope(batch.positions)], -1)
        space[:count, self.rope : self.rope + turns.shape[-1]] = turns[:, 0]
        half = x.dtype == torch.bfloat16
        call_step(self.call, self.operators, space, count, batch.positions, tables, half)
        hidden = space[:count, self.h : self.h + x.shape[1]].to(x.dtype)
        return Forwarded(works, batch, hidden, logits=space[:count, self.logits :])


@dataclass(frozen=True)
class CpuStep(Feature):
    """Run decode steps of at most 16 requests as one call of compiled C++."""

    name = "cpu_step"
    phase = 9

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True on a CPU with AVX2 or AVX-512, unless Triton kernels are switched on.

        others: the features that are switched on.
        """
        return device.type == "cpu" and CAPABLE and find(others, Kernels) is None

    def install(self, builder: EngineBuilder) -> None:
        """Register the compiled step as an executor of decode steps, if the model is on the CPU.

        Models and caches that `step.cpp` cannot compute keep PyTorch's step.
        """
        if builder.model.device.type == "cpu":
            builder.executors[OneCall] = one_call


def one_call(runner: PagedRunner) -> OneCall | None:
    """Return the executor that runs a runner's decode steps in C++; None if there can be none.

    There is none without a compiler, with an attention other than PyTorch's, or if `step.cpp` cannot compute
    the model.
    """
    compiled = library()
    if compiled is not None and type(runner.attention) is TorchPagedAttention:
        with suppress(NotImplementedError):
            return OneCall(compiled, runner)
    return None


@cache
def library() -> CDLL | None:
    """Return the compiled `step.cpp`; None, after a line on standard error, if it cannot be compiled."""
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
