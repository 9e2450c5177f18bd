"""Compile kernels for GPUs that are not here: `python -m tests.compiled 80 90`, for these capabilities; with
`--quant` behind it those of phase 10, with `--experts` those of phase 16, with `--delta` those of layers with
states, with `--moves` the copies of phase 19.

A variable that gets another shape in a branch, a tile that no tensor core has, more registers than there are:
the interpreter minds none of these. Triton needs no device to compile for one, only not to be interpreting,
so this is a program of its own. It prints one line a kernel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import phases  # noqa: F401  # puts every phase's package on the path
from batch_invariance.kernels.attention import chunked_attention_kernel
from batch_invariance.kernels.product import TILES, descriptor_kernel, product_kernel
from experts.kernels.grouped import LARGE, OLDER, TABLE, add_choices_kernel, grouped_kernel
from experts.kernels.routing import count_kernel, place_kernel, route_kernel
from experts.kernels.small_batch import SHAPES, small_batch_expert_kernel
from moving_blocks.kernels import WORDS, move_kernel
from phases.appendix.delta_layers import kernels as delta_layers
from phases.appendix.quant_kernels.configs import loop_config
from phases.appendix.quant_kernels.gemv import gemv8_kernel
from phases.appendix.quant_kernels.gemv4 import gemv4_kernel

HOPPER, ADA = 90, 89
TYPES = {
    "block_table": "*i32", "context_len": "*i32", "query_starts": "*i32", "arrived": "*i32", "slots": "*i64",
    "cos": "*fp32", "sin": "*fp32", "partial": "*fp32", "lse": "*fp32",
    "eps": "fp32", "scale": "fp32",
    "block_stride": "i32", "slot_stride": "i32", "head_stride": "i32", "tokens": "i32", "N": "i32",
    "scale_stride": "i32", "weight_scale": "*fp32", "zero": "*u8",
}  # fmt: skip
"""Of arguments; the others point to numbers of half precision."""


def spills(
    kernel: Any,
    capability: int,
    constants: Mapping[str, Any],
    *,
    warps: int,
    stages: int,
    types: Mapping[str, str],
) -> int:
    """Compile a kernel; returns the bytes that registers could not hold. Raises what the compiler does."""
    names = kernel.arg_names
    known = TYPES | types
    given = {name: known.get(name, "*bf16") for name in names if name not in constants}
    source = ASTSource(
        fn=kernel,
        signature={name: given.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={  # as the launcher finds of memory from torch
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in given.items()
            if kind.startswith("*") or "stride" in name
        },
    )
    options = {"num_warps": warps, "num_stages": stages}
    if constants.get("PDL"):
        options["launch_pdl"] = True
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        name = f"sm_{capability}{'a' if capability >= HOPPER else ''}"
        call = [
            get_ptxas(capability).path,
            "-v",
            f"--gpu-name={name}",
            file.name,
            "-o",
            os.devnull,
        ]
        said = subprocess.run(call, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", said)
    assert found is not None, said
    return int(found[1])


Kernel = tuple[str, Any, dict[str, Any], int, int, dict[str, str]]
"""Name, function, constants, warps, stages, and types of arguments that `TYPES` does not know."""


def main() -> None:
    """The kernels that are asked for."""
    wanted = sys.argv[1:]
    kinds = {
        "--quant": few_bits,
        "--experts": experts,
        "--delta": delta,
        "--chunks": chunks,
        "--moves": moves,
    }
    kernels = next(kinds[kind] for kind in wanted if kind in kinds)
    for capability in map(int, filter(str.isdigit, wanted)):
        for name, kernel, constants, warps, stages, types in kernels(capability):
            lost = spills(
                kernel, capability, constants, warps=warps, stages=stages, types=types
            )
            print(f"sm_{capability} {name}: spills {lost}", flush=True)


def moves(capability: int) -> Iterator[Kernel]:
    """Copies of blocks, both ways, at the full rate and with pauses."""
    types = dict.fromkeys(("pool", "host", "index"), "*i64")
    types |= dict.fromkeys(("count", "pool_blocks", "parts", "width", "pause"), "i32")
    for to_host, gently in product((True, False), repeat=2):
        constants = {"TO_HOST": to_host, "GENTLY": gently, "BLOCK": WORDS}
        yield f"{to_host=}, {gently=}", move_kernel, constants, 8, 3, types


def few_bits(capability: int) -> Iterator[Kernel]:
    """One token in eight bits and in four: Qwen3-8B's products behind a norm, and before a residual."""
    for size, matrices in ((4096, 2), (12_288, 1)):
        around = {
            "K": size, "bias": None, "GATED": matrices == 2, "KIND": 0,
            "PDL": capability >= HOPPER, "TRIGGER": 0,
        }  # fmt: skip
        around |= {"residual" if matrices == 2 else "norm_weight": None}
        for kind in ("fp8", "int8", "int4"):
            if kind == "fp8" and capability < ADA:
                continue
            bits = 4 if kind == "int4" else 8
            shape = loop_config(4096, size, matrices, bits, torch.device("cpu"))
            tile = {"ROWS": shape.rows, "BLOCK_K": shape.block_k}
            if kind == "int4":
                how = {"GROUP": 128, "ASM": True}
                kernel, types = gemv4_kernel, {"weight": "*i32", "scale": "*fp16"}
            else:
                how = {
                    "SIDE": 0, "ROUND": True, 
                    "WHOLE": kind == "int8", "HARDWARE": kind == "fp8", "WORDS": kind,
                }  # fmt: skip
                kernel, types = gemv8_kernel, {"weight": "*i32"}
            name = f"one token, {kind}, {size} inputs"
            yield name, kernel, around | tile | how, shape.num_warps, 1, types


def experts(capability: int) -> Iterator[Kernel]:
    """Both products of Qwen3-30B-A3B's experts by every tile, plain and in e4m3; and what stands around."""
    types = dict.fromkeys(("order", "table", "tiles", "counts"), "*i32")
    types |= dict.fromkeys(("weights", "x_scale", "scale", "logits"), "*fp32") | {
        "chosen": "*i64"
    }
    types |= dict.fromkeys(("most", "choices", "E"), "i32")
    early = capability >= HOPPER
    route_by = {"E": 128, "E_PAD": 128, "TOP_K": 8, "NORMALIZE": True, "PDL": early}
    place_by = {"E": 128, "ROWS": 16, "BLOCK": 2048, "TILES": 64}
    yield "route", route_kernel, route_by, 1, 1, types
    yield "count", count_kernel, {"BLOCK": 2048}, 8, 1, types
    yield "place", place_kernel, place_by, 8, 1, types
    yield "add", add_choices_kernel, {"SIZE": 2048, "TOP_K": 8, "BLOCK_N": 1024}, 4, 1, types
    for eight in (False, True) if capability >= ADA else (False,):
        numbers = dict.fromkeys(("x", "data"), "*fp8e4nv") if eight else {}
        for up, (block_n, block_k, warps) in zip((True, False), SHAPES, strict=True):
            around: dict[str, Any] = {
                "N": 768 if up else 2048, "K": 2048 if up else 768, "TOP_K": 8, "UP": up, "KIND": 0,
                "LIMIT": 0.0, "CHANNEL": eight, "SIDE": 0, "bias": None,
            }  # fmt: skip
            around |= {} if eight else {"x_scale": None}
            few = around | {"BLOCK_N": block_n, "BLOCK_K": block_k, "PDL": early}
            yield (
                f"few, {up=}, {eight=}",
                small_batch_expert_kernel,
                few,
                warps,
                1,
                types | numbers,
            )
            for tile in (
                *(tile for _, tile in TABLE),
                LARGE if capability >= HOPPER else OLDER,
            ):
                cut = {
                    "ROWS": tile.rows,
                    "BLOCK_N": tile.block_n // (1 + up),
                    "BLOCK_K": tile.block_k,
                }
                name, how = (
                    f"{tile.rows} rows, {up=}, {eight=}",
                    (tile.num_warps, tile.num_stages),
                )
                yield name, grouped_kernel, around | cut, *how, types | numbers


def delta(capability: int) -> Iterator[Kernel]:
    """Kernels between two projections of Qwen3.5's layers, for one token and for prompts."""
    types = {
        "query_starts": "*i32",
        "step": "*i32",
        "requests": "i32",
        "states": "*fp32",
        "totals": "*fp32",
    }
    tables = (
        "tables",
        "page_tables",
        "context_lens",
        "blocks",
        "states",
        "tokens_after_snapshot",
    )
    numbers = dict.fromkeys(("requests", "tokens", "width", "pages", "null"), "i32") | {
        "page_slots": "*i64"
    }
    numbers |= {"slots": "*i64"} | types | dict.fromkeys(tables, "*i32")
    layer = {
        "KH": 16, "GROUPS": 2, "DK": 128, "DV": 128, "C": 8192, "W": 4, "WIDTH": 12_352,
        "PDL": capability >= HOPPER, "PRECISION": "tf32",
    }  # fmt: skip
    gate = {"SIZE": 2048, "BLOCK": 1024, "PDL": capability >= HOPPER}
    for name, kernel, constants, warps, more in (
        ("step", delta_layers.step_kernel, layer, 8, types),
        (
            "prepare",
            delta_layers.prepare_kernel,
            layer | {"CHUNK": delta_layers.CHUNK},
            4,
            types,
        ),
        ("scan", delta_layers.scan_kernel, layer | {"CHUNK": delta_layers.CHUNK}, 8, types),
        ("begin", delta_layers.begin_kernel, {"P": 64, "KINDS": 6, "BLOCK": 128}, 1, numbers),
        ("gate", delta_layers.apply_gate_kernel, gate, 4, {"stride": "i32"}),
    ):
        own = {key: value for key, value in constants.items() if key in kernel.arg_names}
        yield name, kernel, own, warps, 1, more


def chunks(capability: int) -> Iterator[Kernel]:
    """Attention over chunks of keys, of prompts and of one token, and products in every tile."""
    types = dict.fromkeys(("tiles", "block_tables", "context_lens", "requests"), "*i32")
    types |= dict.fromkeys(
        ("chunk_acc", "chunk_m", "chunk_total", "k_scale", "v_scale"), "*fp32"
    )
    types |= dict.fromkeys(("table_stride", "most_chunks", "rows"), "i32")
    around = {
        "H": 16, "GROUP": 2, "P": 64, "WINDOW": 0, "RAGGED": False, "SUBSET": False,
        "CHUNK": 256, "SCALED": False,
    }  # fmt: skip
    for d, rows, keys, stages in ((64, 128, 64, 2), (128, 128, 64, 3), (256, 64, 32, 2)):
        head = around | {"D": d, "D_PAD": d, "BLOCK_N": keys}
        tiled = {"TILED": True, "SPLIT": False, "ROWS": rows, "BLOCK_M": rows}
        yield f"prompts, {d}", chunked_attention_kernel, head | tiled, 8, stages, types
        for split in (False, True):
            one = {"TILED": False, "SPLIT": split, "ROWS": 2, "BLOCK_M": 16}
            yield (
                f"one token, {d}, {split=}",
                chunked_attention_kernel,
                head | one,
                4,
                3,
                types,
            )
    for tile in TILES:
        sizes = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        own = sizes | {"BIAS": False, "N": 4096, "K": 4096}
        how = tile.num_warps, tile.num_stages
        if not tile.descriptors:
            yield f"{tile}", product_kernel, own, *how, types
            continue
        m, n, k = sizes.values()
        shapes = {"out": (m, n), "x": (m, k), "weight": (n, k)}
        own_types = {name: f"tensordesc<bf16[{a},{b}]>" for name, (a, b) in shapes.items()}
        own_types |= {"rows": "i32", "programs": "i32"}
        yield f"{tile}", descriptor_kernel, own | {"GROUP": 8}, *how, own_types


if __name__ == "__main__":
    main()
