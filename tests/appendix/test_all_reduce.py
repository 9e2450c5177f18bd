"""Sums over ranks by the kernels, in Triton's interpreter, and what they are compiled to."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel
from common.errors import UserError
from tests.programs import environment
from tests.ranks_kit import SMALL, end_worker_groups, in_ranks, write_checkpoint


@pytest.fixture(scope="module", autouse=True)
def _end_worker_groups() -> Iterator[None]:
    yield
    end_worker_groups()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint(folder)
    return folder


class Files:
    """Memory that every rank has: files, for the kernels in Triton's interpreter."""

    def __init__(self, ranks: Any, size: int) -> None:
        name = int(ranks.first(torch.tensor([uuid.uuid4().int >> 66])))
        paths = [Path("/dev/shm") / f"ladder-{name:x}-{rank}" for rank in range(ranks.size)]
        with paths[ranks.rank].open("wb") as file:
            file.truncate(size)
        ranks.smallest(0)  # until all are there
        self.own = [
            torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
            for path in paths
        ]
        ranks.smallest(0)  # until each has all
        os.unlink(paths[ranks.rank])
        self.table = torch.tensor([part.data_ptr() for part in self.own])
        self.stop = torch.zeros(1, dtype=torch.int32)


def _sums(ranks: Any) -> list[str]:
    """What is wrong with sums of some shapes, one after the other in the same places."""
    from phases.appendix.all_reduce import symmetric as module

    module.SymmetricBuffer = Files  # type: ignore[assignment,misc]
    module.PROGRAMS = 3  # so that programs have several rows, and some have more than others
    hidden, wrong = 24, []
    reducer = module.SymmetricMemoryReducer(ranks, hidden, torch.float32, 1 << 12)
    for turn, rows in enumerate((1, 7, 2, 5, 60)):  # the last is too large for shared memory
        parts = [
            torch.randn(rows, hidden, generator=torch.Generator().manual_seed(9 * turn + r))
            for r in range(ranks.size)
        ]
        whole, residual = torch.stack(parts).sum(0), torch.full((rows, hidden), 0.25)
        for name, here, right in (
            ("sum", reducer.sum(ranks, parts[ranks.rank].clone()), whole),
            (
                "sum and residual",
                reducer.sum(ranks, parts[ranks.rank].clone(), residual),
                whole + residual,
            ),
        ):
            if not torch.allclose(here, right, atol=1e-5):
                wrong.append(f"rank {ranks.rank}, {rows} rows: {name} is wrong")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_shared_memory(size: int) -> None:
    for rank, wrong in enumerate(parallel.together(size, _sums)):
        assert not wrong, f"rank {rank}: {wrong}"


COMPILED = """
import re, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from phases.appendix.all_reduce.kernel import all_reduce_kernel as kernel
place = 1 << 16
fixed = {"RANK": 1, "RANKS": 4, "SIZE": 4096, "SIZE_PAD": 4096, "SLOT": place}
fixed |= {"HALF": 128 * place, "COUNTERS": 256 * place, "PDL": False}
kinds = {"table": "*i64", "barriers_passed": "*i64", "stop": "*i32", "rows": "i32"}
names = kernel.arg_names
signature = {n: "constexpr" if n in fixed else kinds.get(n, "*bf16") for n in names}
aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
constants = {(names.index(name),): value for name, value in fixed.items()}
source = ASTSource(kernel, signature, constants, aligned)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
print(" ".join(sorted(set(re.findall(r"(?:ld|st|atom|red)[.]global[.a-z0-9]+", made.asm["ptx"])))))
"""


@pytest.mark.slow
def test_numbers_go_over_the_wire_sixteen_bytes_at_a_time() -> None:
    """Compiled for an H200 without one: what it says to memory is in the assembly."""
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(TRITON_INTERPRET="0"),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.split()
    narrow = [name for name in found if name.endswith(("b16", "v2.b16"))]
    assert not narrow, f"{narrow}: it is not known that peers' places are aligned"
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= set(found), found
    released = [
        name for name in found if name.startswith(("atom", "red")) and ".release" in name
    ]
    assert released and all(".sys" in name for name in released), (
        f"{found}: other GPUs must see the numbers before the counter"
    )
    assert any(".acquire" in name and ".sys" in name for name in found), (
        f"{found}: numbers are read that may not be there yet"
    )


@pytest.mark.slow
def test_kernels_are_refused_without_kernels(llama: Path) -> None:
    with pytest.raises(UserError, match="own_sums is on, but needs kernels, which is off"):
        in_ranks(str(llama), 2, SMALL | {"own_sums": True})
