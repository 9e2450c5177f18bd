"""Tokens as columns of a tensor core: calls of `columns.cu`, and when it fits.

Kernels in CUDA C++ are compiled while the program runs, for what Triton has no words for. The compiler
(NVRTC) and the driver are reached through `cuda.bindings`, which PyTorch brings along where it is built for
CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from forward.model import Model
from phases.appendix.latency.layers import LatencyBlock, LatencyKernel
from phases.appendix.latency.single_request import SingleRequestSplits
from phases.appendix.latency.small_batch import FEW_TOKENS
from triton_paged_attention.hardware import HOPPER, at_least, multiprocessors
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP
from triton_paged_attention.linear import FusedLinear

SIZES: dict[type, Any] = {int: ctypes.c_longlong, float: ctypes.c_float}
"""How Python's numbers reach a kernel: a whole one as a `long long`, any other as a `float`."""


@cache
def available(device: torch.device) -> bool:
    """Return True if the device is of Hopper or later, and there is a compiler for it."""
    if not at_least(device, HOPPER):
        return False
    try:
        _checked(import_module("cuda.bindings.nvrtc").nvrtcVersion())
    except (ImportError, RuntimeError):  # not installed; installed without the library itself
        return False
    return True


def _checked(answer: Sequence[Any]) -> Any:
    """Return what a call of `cuda.bindings` returns beside its status, which must be success."""
    status, *values = answer
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else values


class CudaKernel:
    """A kernel from a file, compiled for a device with constants of its own.

    Args:
        source: a file of CUDA C++ with a kernel of its name.
        constants: names that are numbers in it.
    """

    def __init__(
        self, source: Path, constants: Mapping[str, int], device: torch.device
    ) -> None:
        self._driver = import_module("cuda.bindings.driver")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context
            image = self._compile(source, constants, device)
            self._module = _checked(self._driver.cuModuleLoadData(image))
        self._function = _checked(
            self._driver.cuModuleGetFunction(self._module, source.stem.encode())
        )

    @staticmethod
    def _compile(source: Path, constants: Mapping[str, int], device: torch.device) -> bytes:
        nvrtc = import_module("cuda.bindings.nvrtc")
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17"]
        options += [f"-D{name}={int(value)}" for name, value in constants.items()]
        text, name = source.read_bytes(), source.name.encode()
        program = _checked(nvrtc.nvrtcCreateProgram(text, name, 0, [], []))
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        if int(status):
            log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{source.name}: {status.name}\n{log.decode()}")
        image = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
        return bytes(image)

    def __call__(self, programs: int, threads: int, *args: Tensor | int | float) -> None:
        """Launch it on the current stream; it may start while the kernel before still runs."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX = programs
        config.gridDimY = 1
        config.gridDimZ = 1
        config.blockDimX = threads
        config.blockDimY = 1
        config.blockDimZ = 1
        config.hStream = torch.cuda.current_stream().cuda_stream
        early = driver.CUlaunchAttribute()
        early.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [early], 1
        values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
        kinds = tuple(
            ctypes.c_void_p if isinstance(arg, Tensor) else SIZES[type(arg)] for arg in args
        )
        _checked(driver.cuLaunchKernelEx(config, self._function, (values, kinds), 0))


PARTS = (64, 96, 128, 192, 256)
"""Inputs that a warp may have."""
MOST_WARPS = 12
TILE = 16
"""Rows of a tensor core's tile."""
MOST_WEIGHTS = 6144
"""Of a warp: 96 registers in each lane."""
MOST_SPLITS = 8
"""Of attention: four lanes have a token, and each weighs two."""


class ColumnShape(NamedTuple):
    """Partition of a matrix: inputs of a warp, and tiles of rows in a program."""

    part: int
    tiles: int


@cache
def shape_of(rows: int, size: int, gated: bool, device: torch.device) -> ColumnShape | None:
    """For a matrix `[rows, size]`, if gated of two, one below the other; None: it has no such kernel.

    All programs are to run side by side where their registers allow it, and as many as may.
    """
    part = next(
        (part for part in PARTS if size % part == 0 and size // part <= MOST_WARPS), None
    )
    tiles = 2 if gated else 1
    if part is None or rows % tiles or tiles * TILE * part > MOST_WEIGHTS:
        return None
    while (
        -(-rows // (TILE * tiles)) > multiprocessors(device)
        and 2 * tiles * TILE * part <= MOST_WEIGHTS
    ):
        tiles *= 2
    return ColumnShape(part, tiles)


@cache
def kernel(device: torch.device, **constants: int) -> CudaKernel:
    """The kernel with these constants, see `columns.cu`, compiled once."""
    return CudaKernel(Path(__file__).with_name("columns.cu"), constants, device)


def columns(
    x: Tensor,  # [T, K] bfloat16
    weight: Tensor,  # [N, K]; with a gate [2 N, K]
    shape: ColumnShape,
    *,
    norm: NormWeights | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,  # [T, N]
    run_ahead: bool = True,
) -> Tensor:
    """`residual + act(weight @ norm(x))` of a matrix that has a shape, each part if it is given: `[T, N]`."""
    tokens, size = x.shape
    assert tokens <= FEW_TOKENS, f"x has {tokens} tokens, but may have {FEW_TOKENS}"
    outputs = weight.shape[0] // (1 if gate is None else 2)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    call = kernel(
        x.device, K=size, N=outputs, EACH=shape.part, TILES=shape.tiles, NORM=norm is not None,
        ONE_PLUS=one_plus, GATED=gate is not None, ADD=residual is not None, AHEAD=run_ahead,
        SPLITS=0,
    )  # fmt: skip
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    added = x if residual is None else residual
    call(*_grid(weight, shape), out, x, weight, norm_weight, added, x, x, x, eps, tokens)
    return out


def project_heads_in_columns(
    linear: nn.Linear,  # weight [N, H D]
    shape: ColumnShape,
    parts: SingleRequestSplits,
    residual: Tensor,  # [T, N] bfloat16
) -> Tensor:
    """`residual + weight @ attention's output`, the output in the workspace as `parts`: `[T, N]`.

    Padding gets its residual.
    """
    layer = parts.layer
    space = parts.workspace
    config = parts.config
    weight, tokens = linear.weight, len(residual)
    outputs, size = weight.shape
    assert config.splits <= MOST_SPLITS and parts.query_starts is not None
    call = kernel(
        residual.device, K=size, N=outputs, EACH=shape.part, TILES=shape.tiles, NORM=0,
        ONE_PLUS=0, GATED=0,
        ADD=1, AHEAD=1, SPLITS=config.splits, D=layer.head_dim, H=layer.num_heads,
        CAPACITY=1 << (tokens - 1).bit_length(), BLOCK=config.block_n,
        WINDOW=layer.sliding_window or 0,
    )  # fmt: skip
    out = torch.empty_like(residual)
    call(
        *_grid(weight, shape), out, space.partial, weight, residual, residual,
        space.lse, parts.context_lens, parts.query_starts, 0.0, tokens,
    )  # fmt: skip
    return out


def _grid(weight: Tensor, shape: ColumnShape) -> tuple[int, int]:
    """Programs, and their threads."""
    rows, size = weight.shape
    return -(-rows // (TILE * shape.tiles)), size // shape.part * 32


def shape_for(linear: nn.Module, gate: str | None) -> ColumnShape | None:
    """Return how a layer's matrix is shared out, if it can be with such a gate."""
    if (
        not isinstance(linear, nn.Linear)
        or linear.bias is not None
        or gate not in (None, "silu")
    ):
        return None
    return shape_of(*linear.weight.shape, gate is not None, linear.weight.device)


class Columns:
    """A layer's way for a few tokens as columns of a tensor core, where its matrix has a shape.

    fewest: tokens that are; if that is one, a lone token is a column, too.
    """

    def __init__(self, linear: nn.Linear, *, fewest: int, run_ahead: bool) -> None:
        self.linear = linear
        self.fewest = fewest
        self.run_ahead = run_ahead

    def supports(self, tokens: int, gate: str | None) -> bool:
        """See `Way.supports`."""
        return self.fewest <= tokens <= FEW_TOKENS and shape_for(self.linear, gate) is not None

    def __call__(
        self, x: Tensor, *, norm: NormWeights | None, gate: str | None, residual: Tensor | None
    ) -> Tensor:
        """See `FusedLinear.forward`."""
        shape = shape_for(self.linear, gate)
        assert shape is not None
        return columns(
            x,
            self.linear.weight,
            shape,
            norm=norm,
            gate=gate,
            residual=residual,
            run_ahead=self.run_ahead,
        )


def by_columns(fused: FusedLinear, *, fewest: int = 2) -> FusedLinear:
    """Give a layer this way for so many tokens or more, and return it.

    Others stay as they are: of other dtypes, on other devices, and without a way for one token.
    """
    for kernel in fused.kernels:
        if isinstance(kernel, LatencyKernel) and _can(kernel.linear):
            fused.kernels.insert(
                0, Columns(kernel.linear, fewest=fewest, run_ahead=kernel.run_ahead)
            )
            break
    return fused


def _can(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16 and available(linear.weight.device)


def install(model: Model, *, fewest: int = 2) -> None:
    """Take a few tokens through blocks as columns, attention's splits too, where all matrices have shapes."""
    for block in model.modules():
        if not isinstance(block, FusedBlock):
            continue
        direct = next(iter(block.kernels), None)
        attend = block.self_attn
        mlp = block.mlp
        if isinstance(direct, LatencyBlock) and isinstance(
            mlp, FusedMLP
        ):  # experts have no columns
            assert isinstance(attend, FusedAttention)
            layers = (attend.qkv_proj, attend.o_proj, mlp.gate_up_proj, mlp.down_proj)
            gates = (None, None, mlp.kind, None)
            shapes = [
                shape_for(fused.linear, gate)
                for fused, gate in zip(layers, gates, strict=True)
            ]
            linear, shape = attend.o_proj.linear, shapes[1]
            if None in shapes or not isinstance(linear, nn.Linear) or not _can(linear):
                continue
            for fused in layers:
                by_columns(fused, fewest=fewest)
            direct.few = True
            if (
                attend.o_proj.total is None
                and shape
                and attend.spec.head_dim % shape.part == 0
            ):
                direct.few_heads = partial(project_heads_in_columns, linear, shape)
