"""Choose the device and the number format to compute in, wait for the device, and read its free memory."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import psutil
import torch

from common.device_names import check_device, check_dtype
from common.errors import UserError


def pick_device(name: str = "auto") -> torch.device:
    """Return the device called `name`: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto` for the fastest one present.

    Raises:
        UserError: the name is unknown, or this machine has no such device.
    """
    kind, index = check_device(name)
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UserError(f"device is {name!r}, but PyTorch finds {count} CUDA devices here")
        return torch.device("cuda", int(index) if index else torch.cuda.current_device())
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device is 'mps', but this PyTorch finds no Apple GPU")
    return torch.device(kind)


def pick_dtype(name: str = "auto", device: torch.device | str = "cpu") -> torch.dtype:
    """Return the number format called `name`, or with `auto` the one that suits `device`.

    `auto` means float32 on a CPU (not every one computes fast in half precision), bfloat16 on a CUDA device
    of compute capability 8.0 (Ampere) or later, float16 on an older one, which can only emulate bfloat16, and
    on Apple GPUs.

    Raises:
        UserError: the name is none of auto, float32, bfloat16, float16.
    """
    if check_dtype(name) != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    device = torch.device(device)
    if device.type == "cuda":
        ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if ampere else torch.float16
    return torch.float16 if device.type == "mps" else torch.float32


def synchronize(device: torch.device | str) -> None:
    """Wait until `device` has finished all queued work; returns at once for a CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def free_memory(device: torch.device | str) -> tuple[int, int]:
    """Return (free bytes, total bytes) of a GPU's memory, or of the machine's for other devices.

    What PyTorch's allocator has reserved on a GPU but does not use counts as free.
    """
    if torch.device(device).type != "cuda":
        memory = psutil.virtual_memory()
        return memory.available, memory.total
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, total


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the GPU, or of the processor.

    A virtual machine's processor often hides its generation under a bare "AMD EPYC", so its family and
    model numbers are appended.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    fields = dict(
        re.findall(r"^(model name|cpu family|model)\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    )
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    if {"cpu family", "model"} <= set(fields) and not re.search(
        r"\d{3}", fields["model name"]
    ):
        return (
            f"{fields['model name']}, family {fields['cpu family']}, model {fields['model']}"
        )
    return fields["model name"]
