"""Matrix products of two to eight tokens, which are the columns of a tensor core: calls of `columns.cu`.

Kernels in CUDA C++ are compiled while the program runs, for what Triton has no words for. The compiler
(NVRTC) and the driver are reached through `cuda.bindings`, which PyTorch installs where it is built for
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
from phases.appendix.latency.small_batch import MAX_SMALL_BATCH
from triton_paged_attention.hardware import HOPPER, at_least, multiprocessors
from triton_paged_attention.kernels.norms import NormWeights
from triton_paged_attention.layers import FusedAttention, FusedBlock, FusedMLP
from triton_paged_attention.linear import FusedLinear

SIZES: dict[type, Any] = {int: ctypes.c_longlong, float: ctypes.c_float}
"""C types of a kernel's arguments: int -> `long long`, float -> `float`."""


@cache
def available(device: torch.device) -> bool:
    """Return True if the device is a GPU of Hopper or later, and NVRTC is installed."""
    if not at_least(device, HOPPER):
        return False
    try:
        _checked(import_module("cuda.bindings.nvrtc").nvrtcVersion())
    except (ImportError, RuntimeError):  # not installed; installed without the library itself
        return False
    return True


def _checked(answer: Sequence[Any]) -> Any:
    """Return the values of a `cuda.bindings` call without its status. Raises `RuntimeError` unless that is
    success.
    """
    status, *values = answer
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else values


class CudaKernel:
    """A kernel from a file of CUDA C++, compiled for a device.

    Args:
        source: a file `NAME.cu` with a kernel called `NAME`.
        constants: macros that are defined as numbers for the compiler.
        device: a GPU.
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
        """Launch the kernel on the current stream; it may start while the kernel before it still runs.

        programs, threads: blocks of the grid, and threads of a block. args: the kernel's arguments in
            order.
        """
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
"""Numbers of inputs that a warp may have."""
MOST_WARPS = 12
TILE = 16
"""Rows of a tensor core's tile."""
MOST_WEIGHTS = 6144
"""Most weights of a warp: 96 registers in each lane."""
MOST_SPLITS = 8
"""Most splits of attention: four lanes have a token, and each weighs two."""


class ColumnShape(NamedTuple):
    """Partition of a matrix over programs and warps.

    part: inputs of a warp, one of `PARTS`.
    tiles: tiles of `TILE` rows in a program.
    """

    part: int
    tiles: int


@cache
def shape_of(rows: int, size: int, gated: bool, device: torch.device) -> ColumnShape | None:
    """Return the partition of a matrix `[rows, size]` (gated: gate rows above up rows); None: no kernel fits
    it.

    There are as many programs as run side by side, and no more tiles in each than that needs.
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
    """Compile `columns.cu` with these constants, once for each set of them, and return the kernel."""
    return CudaKernel(Path(__file__).with_name("columns.cu"), constants, device)


def columns(
    x: Tensor,  # [T, K] bfloat16
    weight: Tensor,  # [N, K]; with a gate [2 N, K]
    shape: ColumnShape,
    *,
    norm: NormWeights | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,  # [T, N]
    trigger_early: bool = True,
) -> Tensor:
    """Return `residual + act(weight @ norm(x))`, `[T, N]`, for at most `MAX_SMALL_BATCH` tokens.

    norm: of the input; None: it is not normalized.
    gate: "silu" or None. With a gate the result is `silu(gate rows) * up rows`.
    trigger_early: see `latency.gemv.FusedOperators`.
    shape: of the matrix, see `shape_of`.
    """
    tokens, size = x.shape
    assert tokens <= MAX_SMALL_BATCH, f"x has {tokens} tokens, but may have {MAX_SMALL_BATCH}"
    outputs = weight.shape[0] // (1 if gate is None else 2)
    norm_weight, eps, one_plus = norm if norm is not None else (x, 0.0, False)
    call = kernel(
        x.device, K=size, N=outputs, EACH=shape.part, TILES=shape.tiles, NORM=norm is not None,
        ONE_PLUS=one_plus, GATED=gate is not None, ADD=residual is not None, TRIGGER_EARLY=trigger_early,
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
    """Return `residual + weight @ (attention's output)`, `[T, N]`, from attention's splits in the workspace.

    Rows of padding are copies of their residual.
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
        ADD=1, TRIGGER_EARLY=1, SPLITS=config.splits, D=layer.head_dim, H=layer.num_heads,
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
    """Return the number of programs of a launch, and the threads of each."""
    rows, size = weight.shape
    return -(-rows // (TILE * shape.tiles)), size // shape.part * 32


def shape_for(linear: nn.Module, gate: str | None) -> ColumnShape | None:
    """Return the partition of a layer's weight, or None: it is quantized, has a bias or a gate that is not
    SiLU, or no fit.
    """
    if (
        not isinstance(linear, nn.Linear)
        or linear.bias is not None
        or gate not in (None, "silu")
    ):
        return None
    return shape_of(*linear.weight.shape, gate is not None, linear.weight.device)


class Columns:
    """A `LinearKernel` for `fewest` to `MAX_SMALL_BATCH` tokens, as columns of a tensor core.

    linear: the layer, in bfloat16.
    fewest: smallest number of tokens that it computes, 1 or more.
    trigger_early: see `latency.gemv.FusedOperators`.
    """

    def __init__(self, linear: nn.Linear, *, fewest: int, trigger_early: bool) -> None:
        self.linear = linear
        self.fewest = fewest
        self.trigger_early = trigger_early

    def supports(self, tokens: int, gate: str | None) -> bool:
        """Return True for `fewest` to `MAX_SMALL_BATCH` tokens, if the matrix has a partition
        with this gate.
        """
        return (
            self.fewest <= tokens <= MAX_SMALL_BATCH
            and shape_for(self.linear, gate) is not None
        )

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
            trigger_early=self.trigger_early,
        )


def by_columns(fused: FusedLinear, *, fewest: int = 2) -> FusedLinear:
    """Add a `Columns` kernel to a layer that has a `LatencyKernel`, and return the same layer.

    Layers of other dtypes, on other devices, or without a `LatencyKernel` stay as they are.
    """
    for kernel in fused.kernels:
        if isinstance(kernel, LatencyKernel) and _can(kernel.linear):
            fused.kernels.insert(
                0, Columns(kernel.linear, fewest=fewest, trigger_early=kernel.trigger_early)
            )
            break
    return fused


def _can(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16 and available(linear.weight.device)


def install(model: Model, *, fewest: int = 2) -> None:
    """Let blocks compute `fewest` to eight tokens by `Columns`, attention's splits included.

    A block of which one matrix has no partition stays as it is.
    """
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
            direct.small_batch = True
            if (
                attend.o_proj.total is None
                and shape
                and attend.spec.head_dim % shape.part == 0
            ):
                direct.small_batch_heads = partial(project_heads_in_columns, linear, shape)
