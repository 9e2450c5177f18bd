"""Properties of the GPU that the kernels depend on."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = (9, 0)
"""Compute capability of the first GPUs with a tensor memory accelerator and dependent launches."""


@cache
def at_least(device: torch.device, capability: tuple[int, int]) -> bool:
    """Return True if `device` is a CUDA GPU of this compute capability, such as (9, 0), or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability


def dependent_launch(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Return launch options that let a kernel start while the one before it runs, if the device can do so.

    That is programmatic dependent launch (Hopper and later). The options are the kernel's constant `PDL`
    and Triton's own `launch_pdl`: both True, or both False if the device cannot or `wanted` is False.
    """
    early = wanted and at_least(device, HOPPER)
    return {"PDL": early, "launch_pdl": early}


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 for a CPU, where an interpreter runs programs."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use; on a CPU (interpreter) those of an H100."""
    if device.type != "cuda":
        return 232_448
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
