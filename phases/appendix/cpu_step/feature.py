"""Decode steps of few requests as one call of `step.cpp`, which reads weights and cache where they lie."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL, Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from common.console import err
from common.paths import cache_home
from continuous.runner import Forwarded
from continuous.work import Work
from forward.cpu_linear import FlippedLinear
from paged_cache import Feature, PagedRunner, Parts
from paged_cache.attention import PagedBatch, TorchPagedAttention
from quant.linear import QuantLinear

SOURCE = Path(__file__).with_name("step.cpp")
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC", "-x", "c++")

MOST = 16
"""Requests in such a step; PyTorch's products of matrices are the faster ones for more."""
WIDTH, SIDE, ROWS = 16, 4, 32
"""Inputs and outputs of a product are multiples of the first two; outputs in a task."""
NORM, ADD, SILU, GELU, TURN, ATTEND = range(3, 9)
PRODUCTS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
ACTIVATIONS = {"silu": SILU, "gelu_new": GELU, "gelu_pytorch_tanh": GELU}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
NUMBERS = "code", "x", "y", "outputs", "inputs", "tasks", "heads", "kv_heads", "window", "block_size", "rope"
PLACES = "weight", "scale", "bias", "q_norm", "k_norm", "keys", "values"


class Operator(Structure):
    """See `step.cpp`."""

    _fields_ = [(name, c_int64) for name in NUMBERS] + [(name, c_void_p) for name in PLACES]
    _fields_ += [("factor", c_double)]


class OneCall:
    """A `StepPlan`: a model's operators over a workspace, of which each request has a row.

    Raises:
        NotImplementedError: something that `step.cpp` does not compute.
    """

    def __init__(self, library: CDLL, runner: PagedRunner) -> None:
        self.runner, self.pool, self.call = runner, runner.attention.pool, library.run
        self.model = cast(Any, runner.model)
        self.kept: list[Tensor] = []
        self.config = config = runner.model.config
        named = config.experts is None and config.family in FAMILIES and config.activation in ACTIVATIONS
        exact = self.model.dtype in PRODUCTS and self.pool.exact and config.head_dim % WIDTH == 0
        if not (named and exact) or config.attention_soft_cap or config.final_soft_cap:
            raise NotImplementedError
        self.gemma = config.family == "gemma3"
        self.ropes = [self.model.rope_global, self.model.rope_local] if self.gemma else [self.model.rope]
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        sizes = [config.hidden_size] * 3 + [heads, max(heads, 2 * config.intermediate_size)]
        sizes += [2 * config.head_dim * len(self.ropes), config.vocab_size]
        columns = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self.x, self.h, self.y, self.mixed, self.wide, self.rope, self.logits, self.width = columns
        made = [operator for block in self.model.layers for operator in self.block(block)]
        made += [self.norm(self.model.norm, self.x, self.h)]
        made += self.products(self.model, self.h, self.logits, "lm_head")
        self.operators = (Operator * len(made))(*made)

    def operator(self, code: int, x: int, y: int, tasks: int = 1, **fields: Any) -> Operator:
        """An operator from columns at `x` to columns at `y`; the tensors that it points to are kept."""
        self.kept += [value for value in fields.values() if isinstance(value, Tensor)]
        places = {name: value.data_ptr() for name, value in fields.items() if isinstance(value, Tensor)}
        return Operator(code=code, x=x, y=y, tasks=tasks, **fields | places)

    def block(self, block: Any) -> list[Operator]:
        """Attention, then the MLP; Gemma normalizes what they return."""
        config, attention, spec = self.config, block.self_attn, block.self_attn.spec
        cache, children = self.pool.layers[spec.index], dict(block.self_attn.named_children())
        local = self.gemma and spec.sliding_window is not None
        heads = {"inputs": spec.head_dim, "heads": spec.num_heads, "kv_heads": spec.num_kv_heads}
        heads |= {"keys": cache.k, "values": cache.v, "block_size": self.pool.data.shape[3]}
        norms = {name: self.factors(children.get(name)) for name in ("q_norm", "k_norm")}
        turns, gate = spec.num_heads + spec.num_kv_heads, ACTIVATIONS[config.activation]
        turned = {"rope": self.rope + 2 * spec.head_dim * local, "factor": config.norm_eps}
        scores = {"factor": spec.scale, "window": spec.sliding_window or 0}
        before = block.pre_feedforward_layernorm if self.gemma else block.post_attention_layernorm
        return [
            self.norm(block.input_layernorm, self.x, self.h),
            *self.products(attention, self.h, self.wide, "qkv_proj", "q_proj", "k_proj", "v_proj"),
            self.operator(TURN, self.wide, self.wide, turns, **heads, **norms, **turned),
            self.operator(ATTEND, self.wide, self.mixed, spec.num_heads, **heads, **scores),
            *self.products(attention, self.mixed, self.y, "o_proj"),
            *([self.norm(block.post_attention_layernorm, self.y, self.y)] if self.gemma else []),
            self.operator(ADD, self.y, self.x, inputs=config.hidden_size),
            self.norm(before, self.x, self.h),
            *self.products(block.mlp, self.h, self.wide, "gate_up_proj", "gate_proj", "up_proj"),
            self.operator(gate, self.wide, self.wide, inputs=config.intermediate_size),
            *self.products(block.mlp, self.wide, self.y, "down_proj"),
            *([self.norm(block.post_feedforward_layernorm, self.y, self.y)] if self.gemma else []),
            self.operator(ADD, self.y, self.x, inputs=config.hidden_size),
        ]

    def products(self, owner: nn.Module, x: int, y: int, *names: str) -> list[Operator]:
        """Linear layers of one input, those of the names that there are; outputs lie one behind the other."""
        made, children = [], dict[str, Any](owner.named_children())
        for layer in (children[name] for name in names if name in children):
            quantized = isinstance(layer, QuantLinear)
            exact = quantized and layer.scheme.activations is None and layer.order is None
            if not exact and type(layer) not in (nn.Linear, FlippedLinear):
                raise NotImplementedError
            weight, scale = (layer.data, layer.scale.float()) if quantized else (layer.weight, None)
            (outputs, inputs), code = weight.shape, PRODUCTS.get(weight.dtype)
            if code is None or inputs % WIDTH or outputs % SIDE or not weight.is_contiguous():
                raise NotImplementedError
            about: dict[str, Any] = {"outputs": outputs, "inputs": inputs, "weight": weight, "scale": scale}
            about["bias"] = None if layer.bias is None else layer.bias.float()
            made.append(self.operator(code, x, y, -(-outputs // ROWS), **about))
            y += outputs
        return made

    def norm(self, norm: nn.Module, x: int, y: int) -> Operator:
        """A norm over a whole vector."""
        about: dict[str, Any] = {"inputs": self.config.hidden_size, "factor": self.config.norm_eps}
        return self.operator(NORM, x, y, weight=self.factors(norm), **about)

    def factors(self, norm: Any) -> Tensor | None:
        """Return the factors of a norm in float32; None for no norm."""
        return None if norm is None else norm.weight.float() + (1 if self.gemma else 0)

    def takes(self, works: Sequence[Work], masked: bool) -> bool | None:
        """Steps in which each of few requests computes one token, and samples the next."""
        return (len(works) <= MOST and all(work.count == 1 == len(work.takers) for work in works)) or None

    def run(self, works: Sequence[Work], ticket: bool) -> Forwarded:
        """The first half of a step, and its logits."""
        works = sorted(works, key=lambda work: work.row)
        self.runner.refresh(works)
        batch = cast(PagedBatch, self.runner.prepare(works))
        count, tables = len(works), batch.block_tables.contiguous()
        padded = 1 if count == 1 else -(-count // SIDE) * SIDE  # products read whole tiles
        space = torch.zeros(padded, self.width)
        x = self.model.embed_tokens(batch.input_ids)
        space[:count, : self.h] = x * torch.tensor(x.shape[1] ** 0.5 if self.gemma else 1.0, dtype=x.dtype)
        turns = [turn for rope in self.ropes for turn in rope(batch.positions)]
        space[:count, self.rope : self.logits] = torch.cat(turns, -1)[:, 0]
        places = space.data_ptr(), self.width, batch.positions.data_ptr(), tables.data_ptr(), tables.shape[1]
        how = x.dtype == torch.bfloat16, torch.get_num_threads()
        self.call(self.operators, *map(c_int64, (len(self.operators), count, *places, *how)))
        hidden = space[:count, self.h : self.y].to(x.dtype)
        return Forwarded(works, batch, hidden, logits=space[:count, self.logits :])


@dataclass(frozen=True)
class CpuStep(Feature):
    """Decode steps of few requests are one call of compiled C++."""

    name: ClassVar[str] = "cpu_step"
    phase: ClassVar[int] = 9

    @classmethod
    def pays(cls, device: torch.device, others: Mapping[str, Feature | None]) -> bool:
        """On a CPU with registers of 16 numbers, around PyTorch's layers."""
        wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
        return device.type == "cpu" and wide and others.get("kernels") is None

    def install(self, parts: Parts) -> None:
        """Meet the engine when its layers are what they will be."""
        if parts.model.device.type == "cpu":
            parts.stages["connect"].append(connect)


def connect(parts: Parts) -> None:
    """Add the plan, where the engine's parts are those that the step computes."""
    runner, compiled = cast(PagedRunner, parts.engine.runner), library()
    if compiled is not None and type(runner.attention) is TorchPagedAttention:
        with suppress(NotImplementedError):
            runner.plans = [OneCall(compiled, runner), *runner.plans]


@cache
def library() -> CDLL | None:
    """Return the compiled step; None, and a line on standard error, where it cannot be had.

    Its name in the cache folder says source, compiler, and what `native` means to it here.
    """
    command = [os.environ.get("CXX", "g++"), *FLAGS]
    try:
        native = subprocess.run([*command, "-E", "-###", os.devnull], capture_output=True, check=True).stderr
        name = hashlib.sha256(SOURCE.read_bytes() + native).hexdigest()[:16]
        path = cache_home() / "compiled" / f"step-{name}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            subprocess.run([*command, SOURCE, "-o", unfinished], capture_output=True, check=True)
            unfinished.replace(path)
        return CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        err.print(f"decode steps stay hundreds of calls of PyTorch: {error}", markup=False, soft_wrap=True)
        return None
