"""`ladder doctor`: what this machine has, how fast it is, which phases it runs, and how to get the rest."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from types import SimpleNamespace

import psutil
import torch
from rich.markup import escape

from common.console import out, table
from common.device import device_name, pick_device, pick_dtype
from common.models.bundled import BUNDLED, damage
from common.neighbours import MOST, processors, share, usage
from common.paths import cache_home
from common.roofline import probe_matmul, probe_read
from phases import PHASES
from phases.appendix.cpu_step.feature import library
from phases.registry import missing_for

WAIT = 0.5


def run(given: SimpleNamespace) -> int:
    """Run `ladder doctor`: print tables about this machine; return 0, even if the machine lacks something.

    given: the arguments of the command line; it has none.
    """
    device = pick_device("auto")
    found = table("What", "Here", "Fix")
    for what, here, fix in chain(facts(device), speeds(device)):
        found.add_row(
            what, escape(here), f"[yellow]{fix}[/yellow]" if fix else "[green]ok[/green]"
        )
    out.print(found)
    if any(missing_for(phase, device) for phase in PHASES):
        out.print(
            "[dim]A phase that does not run natively is still tested here: its Triton kernels run in the "
            "interpreter (TRITON_INTERPRET=1), on tiny shapes. Its lesson shows what a GPU measured.[/dim]"
        )
    return 0


def facts(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yield rows of `ladder doctor`'s table: (name, what this machine has, what to do about it).

    The last is "" if nothing is to be done.
    """
    yield "Python", platform.python_version(), ""
    yield "PyTorch", torch.__version__, ""
    yield "Triton", *_triton(device)
    yield "Device", _device(device), _device_fix(device)
    yield "dtype", f"{_short(pick_dtype('auto', device))} by default", ""
    cores = f"cores: {len(processors())}, threads: {torch.get_num_threads()}"
    yield "Processor", f"{device_name(torch.device('cpu'))}, {cores}", ""
    compiled = library() is not None
    yield (
        "Decode steps in C++",
        torch.backends.cpu.get_cpu_capability() if compiled else "no",
        "" if compiled else "install g++, or set CXX",
    )
    yield "Neighbours", *_neighbours()
    free = psutil.virtual_memory().available / 1e9
    yield (
        "Memory",
        f"{free:.1f} GB free",
        "" if free > 3 else "3 GB are needed for the small models",
    )
    if device.type == "cuda":
        free, total = (value / 1e9 for value in torch.cuda.mem_get_info(device))
        yield "GPU memory", f"{free:.1f} of {total:.1f} GB free", ""
    disk = cache_home()
    while not disk.exists():
        disk = disk.parent
    space = shutil.disk_usage(disk).free / 1e9
    yield (
        "Model cache",
        f"{cache_home()}, {space:.0f} GB free",
        "" if space > 3 else "set LADDER_HOME",
    )
    needs = ", ".join(
        f"{one.name} needs {why}" for one in PHASES if (why := missing_for(one, device))
    )
    yield "Phases", f"natively all but: {needs}" if needs else "all run natively", ""
    for name, bundle in BUNDLED.items():
        wrong = damage(name)
        yield name, wrong or bundle.title, f"ladder fetch {name}" if wrong else ""


def speeds(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Measure read bandwidth and matrix rate, two seconds in all; yield (name, speed, what to do about it).

    The last is "" if nothing is to be done. `benchmarks.roofline.ceilings` would store what it measures as
    evidence, which this command must not change.
    """
    dtype = pick_dtype("auto", device)
    try:
        read, matmul = probe_read(device), probe_matmul(device, dtype)
    except RuntimeError as error:  # most often no memory for the probe's tensors
        why, _, _ = str(error).partition("\n")
        yield "Speed", f"not measured: {why}", "free some memory, then try again"
        return
    yield "Read bandwidth", f"{read / 1e9:,.1f} GB/s, measured now", ""
    yield "Matrix rate", f"{matmul / 1e9:,.0f} GFLOP/s in {_short(dtype)}, measured now", ""


def _triton(device: torch.device) -> tuple[str, str]:
    if importlib.util.find_spec("triton") is None:
        linux = sys.platform.startswith("linux")
        return "not installed", "make setup" if linux else "Triton is made for Linux only"
    return metadata.version("triton") + (
        "" if device.type == "cuda" else " (interpreter only)"
    ), ""


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        count = torch.cuda.device_count()
        more = f", {count} of them" if count > 1 else ""
        return f"cuda: {device_name(device)} (compute capability {major}.{minor}{more})"
    return f"{device.type}: {device_name(device)}"


def _device_fix(device: torch.device) -> str:
    if device.type != "cpu" or not shutil.which("nvidia-smi"):
        return ""
    if torch.version.cuda is None:
        return "there is an NVIDIA driver, but this PyTorch has no CUDA: install a CUDA build of it"
    return f"this PyTorch wants a driver for CUDA {torch.version.cuda}: update the driver"


def _neighbours() -> tuple[str, str]:
    """Return a text about the processor's load by other programs, measured for half a second, and what helps.

    The second text is "" if the load is low.
    """
    before = usage()
    time.sleep(WAIT)
    part = share(before, usage())
    says = f"other programs take {part:.0%} of the processor now"
    if part <= MOST:
        return says, ""
    return (
        says,
        "stop them, or set OMP_WAIT_POLICY=PASSIVE: beside them everything is several times slower",
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
