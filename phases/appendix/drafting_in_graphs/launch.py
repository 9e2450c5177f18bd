"""Kernels in CUDA C++, compiled while the program runs: for what Triton has no words for.

The compiler (NVRTC) and the driver are reached through `cuda.bindings`, which PyTorch brings along where it
is built for CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triton_paged_attention.hardware import HOPPER, at_least

SIZES: dict[type, Any] = {int: ctypes.c_longlong, float: ctypes.c_float}
"""How Python's numbers reach a kernel: a whole one as a `long long`, any other as a `float`."""


@cache
def available(device: torch.device) -> bool:
    """Return True if there are clusters (from Hopper on), and a compiler for them."""
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
        source: a file of CUDA C++ with a kernel of its name, and with `bytes_shared`, the shared memory
            that it wants to be given. It may include the headers (`.cuh`) beside it and here.
        constants: names that are numbers in it.
    """

    def __init__(self, source: Path, constants: Mapping[str, int], device: torch.device) -> None:
        self._driver = import_module("cuda.bindings.driver")
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context
            image = self._compile(source, constants, device)
            self._module = _checked(self._driver.cuModuleLoadData(image))
        name = source.stem.encode()
        self._function = _checked(self._driver.cuModuleGetFunction(self._module, name))
        place, size = _checked(self._driver.cuModuleGetGlobal(self._module, b"bytes_shared"))
        held = bytearray(size)
        _checked(self._driver.cuMemcpyDtoH(held, place, size))
        self._shared = int.from_bytes(held, "little")
        most = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(self._driver.cuFuncSetAttribute(self._function, most, self._shared))

    @staticmethod
    def _compile(source: Path, constants: Mapping[str, int], device: torch.device) -> bytes:
        nvrtc = import_module("cuda.bindings.nvrtc")
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17"]
        options += [f"-D{name}={int(value)}" for name, value in constants.items()]
        headers = sorted({*Path(__file__).parent.glob("*.cuh"), *source.parent.glob("*.cuh")})
        texts, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
        text, name = source.read_bytes(), source.name.encode()
        program = _checked(nvrtc.nvrtcCreateProgram(text, name, len(headers), texts, names))
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
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [early], 1
        values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
        kinds = tuple(ctypes.c_void_p if isinstance(arg, Tensor) else SIZES[type(arg)] for arg in args)
        _checked(driver.cuLaunchKernelEx(config, self._function, (values, kinds), 0))
