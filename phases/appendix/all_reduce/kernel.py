"""One-shot all-reduce over peers' memory, with the residual addition in the same kernel.

One-shot: every rank reads the inputs of all ranks and adds them up by itself.

Program `b` of every rank works with program `b` of all other ranks and with no other program. Each program
has a slot for its inputs in its rank's shared memory, and a counter there, to which each peer adds one at a
barrier. Barrier number n is over when the counter has reached n times the number of peers. A slow rank cannot
be counted as two: to reach the next barrier a rank must leave this one, and the first to leave has seen all
others. So counters only grow, and are never reset.

Slots alternate between two halves of the memory by the number of the barrier. So no rank waits at the end: a
rank that writes to a half again has left a barrier that all others reached after they had read that half.
Counters and barrier numbers lie in memory, not in arguments, so a CUDA graph of the kernel can be replayed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PROGRAMS = 128
"""At most: fewer than multiprocessors, so that no program waits for one that has no place."""
ALIGN = tl.constexpr(128)
"""Bytes that every rank's memory, and each place in it, begins at a multiple of."""


@triton.jit
def address_of(table, peer, offset, kind: tl.constexpr):
    """Return byte `offset` of rank `peer`'s shared memory as a pointer of type `kind`.

    table: `[RANKS]` int64, the address at which each rank's memory begins. That address is read from memory,
        so the code states that it is aligned to 16 bytes: else the compiler would load numbers over NVLink
        one by one.
    """
    return tl.multiple_of((tl.load(table + peer) + offset).to(kind), 16)


@triton.jit
def barrier(
    counter, table, barrier_number, stop,
    RANK: tl.constexpr, RANKS: tl.constexpr, LOOK: tl.constexpr = 256,
):  # fmt: skip
    """Wait until the same program of every rank is at this barrier, and its writes are visible.

    counter: offset of the program's counter in a rank's memory, in bytes.
    table: `[RANKS]` int64, where each rank's memory begins.
    barrier_number: number of the program's barriers so far, this one included; from 1.
    stop: pointer to int32 in host memory; anything but 0 ends the wait, since a rank is lost.
    RANK, RANKS: this rank, and the number of ranks. LOOK: polls of the counter between two polls of `stop`.
    """
    tl.debug_barrier()  # all threads' stores come before the counters
    peers = tl.arange(0, triton.next_power_of_2(RANKS))
    others = (peers < RANKS) & (peers != RANK)
    theirs = tl.load(table + peers, mask=others, other=0) + counter
    tl.atomic_add(
        theirs.to(tl.pointer_type(tl.int64)),
        tl.full([peers.shape[0]], 1, tl.int64),
        mask=others,
        sem="release",
        scope="sys",
    )
    own = (tl.load(table + RANK) + counter).to(tl.pointer_type(tl.int64))
    looks, stopped = 0, 0
    # Adding nothing is compiled to a load.
    come = tl.atomic_add(own, 0, sem="acquire", scope="sys")
    while (come < barrier_number * (RANKS - 1)) & (stopped == 0):
        come = tl.atomic_add(own, 0, sem="acquire", scope="sys")
        looks += 1
        if looks % LOOK == 0:
            # Every thread reads the same.
            stopped = tl.atomic_add(stop, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def all_reduce_kernel(
    out, part, residual, table, barriers_passed, stop, rows,
    RANK: tl.constexpr, RANKS: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    SLOT: tl.constexpr, HALF: tl.constexpr, COUNTERS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the sum of all ranks' `part [rows, SIZE]`, plus `residual` if any, to `out [rows, SIZE]`.

    Program `b` of `n` computes the rows `b, b + n, ...`. A rank's shared memory holds two halves of HALF
    bytes for the ranks' inputs, with SLOT bytes for each program, and from byte COUNTERS on a barrier counter
    for each program.

    residual: `[rows, SIZE]`, or None. SIZE_PAD: SIZE rounded up to a power of two.
    table: `[RANKS]` int64, where each rank's memory begins.
    barriers_passed: `[programs]` int64, how many barriers each of this rank's programs has passed.
    stop: pointer to int32 in host memory; anything but 0 ends waits, since a rank is lost.
    PDL: the kernel runs under programmatic dependent launch, so it waits for the kernel before.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()  # which read nothing but weights before their own wait
        gdc_wait()
    i = tl.arange(0, SIZE_PAD)
    inside = i < SIZE
    barrier_number = tl.load(barriers_passed + program) + 1
    parts = (barrier_number % 2) * HALF + program.to(tl.int64) * SLOT
    kind: tl.constexpr = tl.pointer_type(part.dtype.element_ty)
    mine = address_of(table, RANK, parts, kind)
    count = tl.cdiv(rows - program, programs)
    for number in range(count):
        row = program + number * programs
        value = tl.load(part + row.to(tl.int64) * SIZE + i, mask=inside, other=0.0)
        tl.store(mine + number * SIZE + i, value, mask=inside)
    barrier(
        COUNTERS + program.to(tl.int64) * ALIGN,
        table,
        barrier_number,
        stop,
        RANK,
        RANKS,
    )
    for number in range(count):
        value = tl.zeros([SIZE_PAD], tl.float32)
        # In the same order on every rank: the same bits.
        for peer in tl.static_range(0, RANKS):
            theirs = address_of(table, peer, parts, kind)
            value += tl.load(theirs + number * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        at = (program + number * programs).to(tl.int64) * SIZE + i
        if residual is not None:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    tl.store(barriers_passed + program, barrier_number)
