"""Properties of the GPU that the kernels depend on."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = (9, 0)
"""Compute capability of the first GPUs with a tensor memory accelerator and dependent launches."""


@cache
def at_least(device: torch.device, capability: tuple[int, int]) -> bool:
    """Return True if `device` is a GPU of this compute capability or a later one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability


def dependent_launch(device: torch.device, wanted: bool = True) -> dict[str, bool]:
    """Return the launch options of a kernel that starts while the one before it runs (programmatic dependent
    launch), if that is `wanted` and the device can; else the same options with False.

    Returns: the kernel's constant `PDL`, and Triton's own `launch_pdl`.
    """
    early = wanted and at_least(device, HOPPER)
    return {"PDL": early, "launch_pdl": early}


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 for the CPU, where the interpreter runs programs one
    by one.
    """
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
