"""The operators of a model's decode step, as `step.cpp` reads them: numbers, and addresses of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import Structure, c_double, c_int64
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paged_cache import BlockPool

if TYPE_CHECKING:
    from quant.blocks import BlockLinear

# Registers of 16 numbers, for which PyTorch orders weights of four bits.
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
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
    """One operator of a compiled decode step, laid out as in `step.cpp`."""

    _fields_ = [(name, c_int64) for name in (NUMBERS + POINTERS).split()] + [
        ("factor", c_double)
    ]


def make_operator(x: int, y: int, **fields: Any) -> Operator:
    """Return an operator that reads workspace columns from `x` on and writes columns from `y` on.

    fields: further fields of `Operator`: numbers, tensors (their addresses are stored), or None for 0.
    """
    given = {
        name: v.data_ptr() if isinstance(v, Tensor) else v or 0 for name, v in fields.items()
    }
    return Operator(x=x, y=y, **given)


def block_fields(layer: BlockLinear) -> dict[str, Any]:
    """Return `Operator` fields for a product with a GGUF file's weight: code, sizes, and its tensors."""
    outputs, inputs = layer.shape
    tensors = {"weight": layer.data, "scale": layer.scale, "minimum": layer.minimum}
    sizes = {"outputs": outputs, "inputs": inputs, "tasks": min(-(-outputs // BLOCK), TASKS)}
    return {"code": BLOCKS[layer.kind], **sizes, **tensors}


class Program:
    """The operators of a model's decode step over a workspace, in which each request has a row.

    operators: a C array of `Operator`. width: columns of the workspace.
    x, h, rope, logits: the columns where the step's inputs, final hidden states, cosines and sines of the
        positions, and logits begin. ropes: of which these are. gemma: whether it is a Gemma.

    Raises:
        NotImplementedError: the model has something that `step.cpp` does not compute.
    """

    def __init__(self, model: Any, pool: BlockPool) -> None:
        self.model, self.pool = model, pool
        self.kept: list[Any] = []
        self.config = config = model.config
        named = config.family in ("llama", "mistral", "qwen2", "qwen3", "gemma3")
        exact = config.activation in ACTIVATIONS and model.dtype in PRODUCTS and pool.exact
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
        """Return an operator from workspace columns at `x` to columns at `y`; it keeps its tensors alive.

        code: which operator, a constant such as `NORM`. tasks: parts that threads can take. fields: further
            fields of `Operator`; the model's hidden size and norm epsilon are filled in.
        """
        self.kept += fields.values()
        defaults = {
            "inputs": self.config.hidden_size,
            "factor": self.config.norm_eps,
            "added": self.y,
        }
        return make_operator(x, y, code=code, tasks=tasks, **defaults | fields)

    def block(self, block: Any) -> list[Operator]:
        """Return the records (for `step.cpp`) of a block's operators in order: attention, then the MLP.

        block: a layer of phase 01's model; Gemma's also normalizes the outputs of both.
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
            *self.products(
                attention, self.h, self.projected, "qkv_proj", "q_proj", "k_proj", "v_proj"
            ),
            self.operator(TURN, self.projected, self.projected, turns, **heads, **norms),
            self.operator(
                ATTEND, self.projected, self.mixed, spec.num_heads, factor=spec.scale, **heads
            ),
            *self.products(attention, self.mixed, self.y, "o_proj"),
            *([self.norm(NORM, block.post_attention_layernorm)] if self.gemma else []),
            self.norm(ADD, before),
            *self.products(
                block.mlp, self.h, self.projected, "gate_up_proj", "gate_proj", "up_proj"
            ),
            self.operator(
                gate, self.projected, self.projected, inputs=config.intermediate_size
            ),
            *self.products(block.mlp, self.projected, self.y, "down_proj"),
            *([self.norm(NORM, block.post_feedforward_layernorm)] if self.gemma else []),
        ]

    def products(self, owner: nn.Module, x: int, y: int, *names: str) -> Iterator[Operator]:
        """Yield the operators of linear layers with one input; their outputs lie next to each other.

        Args:
            owner: the module with the layers.
            x, y: columns of the workspace for the input and for the first output.
            names: of children of `owner`; those that it does not have are skipped.
        """
        children = dict[str, Any](owner.named_children())
        for layer in (children[name] for name in names if name in children):
            fields = self.product_fields(layer)
            bias = None if layer.bias is None else layer.bias.float()
            yield self.operator(x=x, y=y, bias=bias, **fields)
            y += fields["outputs"]

    def product_fields(self, layer: Any) -> dict[str, Any]:
        """Return an operator's fields for a linear layer's product: code, sizes, weight and scales.

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
        """Return the operator of an RMSNorm. code: which of two operators.

        `NORM`: normalize a layer's output in place. `ADD`: add that output to the residual stream, and write
        the normalized sum into columns of its own.
        """
        x, y = (self.y, self.y) if code == NORM else (self.x, self.h)
        return self.operator(code, x, y, weight=self.factors(norm))

    def factors(self, norm: Any) -> Tensor | None:
        """Return the factors `[size]` of a norm in float32 (Gemma's are 1 + weight); None for no norm."""
        return None if norm is None else norm.weight.float() + (1 if self.gemma else 0)
