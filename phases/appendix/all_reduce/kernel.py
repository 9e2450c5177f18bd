"""All-reduce over peers' memory, with the residual addition behind it in the same kernel.

In one shot: every rank reads all parts and adds them up by itself.

Program `b` of every rank works with program `b` of all others and with no other program: it has a place of
its own in the memory, and a counter of its own, to which each peer adds one when it comes to a meeting. The
n-th meeting is over when the counter has come to n times the peers. No rank is counted twice in the place of
one that is late: to come to the next meeting, a rank has to leave this one, and the first to leave has seen
all others. So counters only grow, and are never reset.

Places alternate between two halves of the memory by the number of meetings. So no rank waits at the end: one
that writes to a half again has left a meeting to which all others came after they had read it. All of it lies
in memory, not in arguments, so a graph can be replayed.
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
def place_of(table, peer, offset, kind: tl.constexpr):
    """A place in a peer's memory. Where that begins is read from memory, so it has to be said that it is
    aligned, or numbers would go over the wire one by one."""
    return tl.multiple_of((tl.load(table + peer) + offset).to(kind), 16)


@triton.jit
def barrier(
    counter, table, meeting, stop,
    RANK: tl.constexpr, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr, LOOK: tl.constexpr = 256,
):  # fmt: skip
    """All ranks' programs of this number come to a meeting; what they wrote before is then there to be read.

    counter: where the program's counter is in a rank's memory. meeting: its number, from 1. LOOK: every so
    many looks at the counter one at the word that says that a rank is gone.
    """
    tl.debug_barrier()  # all threads' stores come before the counters
    peers = tl.arange(0, RANKS_PAD)
    others = (peers < RANKS) & (peers != RANK)
    theirs = tl.load(table + peers, mask=others, other=0) + counter
    tl.atomic_add(
        theirs.to(tl.pointer_type(tl.int64)),
        tl.full([RANKS_PAD], 1, tl.int64),
        mask=others,
        sem="release",
        scope="sys",
    )
    own = (tl.load(table + RANK) + counter).to(tl.pointer_type(tl.int64))
    looks, gone = 0, 0
    come = tl.atomic_add(
        own, 0, sem="acquire", scope="sys"
    )  # adding nothing is compiled to a load
    while (come < meeting * (RANKS - 1)) & (gone == 0):
        come = tl.atomic_add(own, 0, sem="acquire", scope="sys")
        looks += 1
        if looks % LOOK == 0:
            gone = tl.atomic_add(stop, 0, sem="acquire", scope="sys")  # for all threads alike
    tl.debug_barrier()


@triton.jit
def all_reduce_kernel(
    out, part, residual, table, meetings, stop, rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, RANKS_PAD: tl.constexpr,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    PLACE: tl.constexpr, HALF: tl.constexpr, COUNTERS: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program `b` has rows `b`, `b + programs`, ...

    A rank's memory: two halves of HALF bytes for parts, with a place of PLACE bytes for each program, and
    from COUNTERS on the counters. table: `[RANKS]` int64, where each rank's memory begins. meetings:
    `[programs]` int64, how many there were, this rank's own.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if PDL:
        gdc_launch_dependents()  # which read nothing but weights before their own wait
        gdc_wait()
    i = tl.arange(0, SIZE_PAD)
    inside = i < SIZE
    meeting = tl.load(meetings + program) + 1
    parts = (meeting % 2) * HALF + program.to(tl.int64) * PLACE
    kind: tl.constexpr = tl.pointer_type(part.dtype.element_ty)
    mine = place_of(table, RANK, parts, kind)
    count = tl.cdiv(rows - program, programs)
    for number in range(count):
        row = program + number * programs
        value = tl.load(part + row.to(tl.int64) * SIZE + i, mask=inside, other=0.0)
        tl.store(mine + number * SIZE + i, value, mask=inside)
    barrier(
        COUNTERS + program.to(tl.int64) * ALIGN, table, meeting, stop, RANK, RANKS, RANKS_PAD
    )
    for number in range(count):
        value = tl.zeros([SIZE_PAD], tl.float32)
        for peer in tl.static_range(
            0, RANKS
        ):  # in the same order on every rank: the same bits
            theirs = place_of(table, peer, parts, kind)
            value += tl.load(theirs + number * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        at = (program + number * programs).to(tl.int64) * SIZE + i
        if ADD:
            value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    tl.store(meetings + program, meeting)
