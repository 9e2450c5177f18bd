"""Mistakes in phase 05, the paged cache. The first is planted on every run of the test suite."""

from tests.planted.planting import Bug

CACHE = "phases/05_paged_cache/paged_cache/cache.py"
ALLOCATOR = "phases/05_paged_cache/paged_cache/allocator.py"
SCHEDULER = "phases/05_paged_cache/paged_cache/scheduler.py"
RUNNER = "phases/05_paged_cache/paged_cache/runner.py"
POOL = "phases/05_paged_cache/paged_cache/pool.py"
BASE = "phases/04_continuous/continuous/scheduler.py"

BUGS = (
    Bug(
        "one-block-too-many",
        CACHE,
        "return -(-tokens // self.block_size)",
        "return tokens // self.block_size + 1",
        "Takes a block too many when the tokens fill the last one.",
    ),
    Bug(
        "one-block-too-few",
        CACHE,
        "return -(-tokens // self.block_size)",
        "return tokens // self.block_size",
        "Rounds the blocks down.",
    ),
    Bug(
        "watermark-for-nobody",
        CACHE,
        "<= self.free - (0 if alone else self.reserve_blocks)",
        "<= self.free - self.reserve_blocks",
        "Keeps blocks for those that run when nobody runs: the largest request waits for ever.",
    ),
    Bug(
        "no-watermark",
        CACHE,
        "<= self.free - (0 if alone else self.reserve_blocks)",
        "<= self.free",
        "Admits into the last block, so that the next step preempts.",
    ),
    Bug(
        "fits-by-prompt",
        CACHE,
        "return self.blocks_for(len(request.tokens)) <= self.free",
        "return self.blocks_for(request.prompt_len) <= self.free",
        "Forgets that a preempted request comes back with output.",
    ),
    Bug(
        "holds-one-less",
        CACHE,
        "return self.blocks_for(tokens) <= min(",
        "return self.blocks_for(tokens) < min(",
        "Refuses a request that needs the whole pool.",
    ),
    Bug(
        "parent-writes-on",
        CACHE,
        "self._writable[child.row] = self._writable[parent.row] = full",
        "self._writable[child.row] = full",
        "After a fork the parent writes on into the block that it now shares.",
    ),
    Bug(
        "child-writes-on",
        CACHE,
        "self._writable[child.row] = self._writable[parent.row] = full",
        "self._writable[child.row] = len(blocks) * self.block_size\n"
        "        self._writable[parent.row] = full",
        "After a fork the child writes into the block that it shares.",
    ),
    Bug(
        "last-user-copies",
        CACHE,
        "self.allocator.refs[int(self.tables[row, shared])] > 1",
        "self.allocator.refs[int(self.tables[row, shared])] >= 1",
        "Copies a block that nobody else has any more.",
    ),
    Bug(
        "two-users-are-one",
        CACHE,
        "self.allocator.refs[int(self.tables[row, shared])] > 1",
        "self.allocator.refs[int(self.tables[row, shared])] > 2",
        "Writes into a block that has one other user.",
    ),
    Bug(
        "copy-without-room",
        CACHE,
        "if new + copy > self.free:",
        "if new > self.free:",
        "Does not count the block that a copy takes.",
    ),
    Bug(
        "source-is-kept",
        CACHE,
        "            self.allocator.release([source])\n",
        "",
        "Copies a block and stays a user of the original.",
    ),
    Bug(
        "copy-backwards",
        CACHE,
        "self._copies.append((source, target))",
        "self._copies.append((target, source))",
        "Copies the new block over the old one.",
    ),
    Bug(
        "copied-again",
        CACHE,
        "copies, self._copies = self._copies, []",
        "copies = self._copies",
        "Copies the same blocks in every step from then on.",
    ),
    Bug(
        "copies-for-who-has-left",
        CACHE,
        "        self._copies = [copy for copy in self._copies if copy[1] not in blocks]\n",
        "",
        "Copies blocks for requests that have left, into what may be somebody else's by now.",
    ),
    Bug(
        "row-stays-writable",
        CACHE,
        "self._owned[row] = self._writable[row] = 0",
        "self._owned[row] = 0",
        "The next request in the row thinks that it has blocks.",
    ),
    Bug(
        "fork-takes-all",
        CACHE,
        "blocks = self.blocks_of(parent.row)[: self.blocks_for(tokens)]",
        "blocks = self.blocks_of(parent.row)",
        "Shares blocks beyond the prompt, which hold nothing yet.",
    ),
    Bug(
        "fork-without-users",
        CACHE,
        "        self.allocator.retain(blocks)\n",
        "",
        "Shares blocks without counting the new user.",
    ),
    Bug(
        "free-too-soon",
        ALLOCATOR,
        "            if refs == 0:",
        "            if refs <= 1:",
        "Frees a block that has a user left.",
    ),
    Bug(
        "slots-in-32-bits",
        RUNNER,
        "return blocks.astype(np.int64) * size",
        "return blocks * size",
        "Computes slots in 32 bits, which a large pool overflows.",
    ),
    Bug(
        "slot-of-the-token",
        RUNNER,
        "+ host.positions % size",
        "+ host.positions",
        "Takes the position in the sequence for the place in the block.",
    ),
    Bug(
        "narrow-tables",
        RUNNER,
        "self.cache.blocks_for(int(host.context_lens.max()))",
        "int(host.context_lens.max()) // self.cache.block_size",
        "Cuts the block of the last tokens off the tables.",
    ),
    Bug(
        "copies-in-turn",
        POOL,
        "        self.data[:, :, targets] = self.data[:, :, sources]",
        "        for source, target in zip(sources, targets, strict=True):\n"
        "            self.data[:, :, target] = self.data[:, :, source]",
        "Copies one block after the other, though a target may be the source of the next.",
    ),
    Bug(
        "next-in-turn-is-preempted",
        SCHEDULER,
        "victim = max((request, *queue[at:]), key=by_rank)",
        "victim = queue[at] if at < len(queue) else request",
        "Preempts who would be served next.",
    ),
    Bug(
        "one-victim-at-most",
        SCHEDULER,
        "            if self.cache.reserve(request, upto):\n                return True",
        "            return self.cache.reserve(request, upto)",
        "Gives up when the first victim did not free enough.",
    ),
    Bug(
        "victim-still-served",
        SCHEDULER,
        "            queue.remove(victim)\n",
        "",
        "Serves a request in the step that has preempted it.",
    ),
    Bug(
        "room-of-the-victim-given-away",
        BASE,
        "                preempted = True\n",
        "",
        "Lets somebody new have the room that a preemption has just made.",
    ),
    Bug(
        "siblings-without-rows",
        SCHEDULER,
        "return self.rows.free > len(request.siblings) and super().admits(request)",
        "return super().admits(request)",
        "Counts one row for a request of several samples.",
    ),
    Bug(
        "siblings-at-the-end",
        SCHEDULER,
        "            insort(self.running, sibling, key=by_rank)",
        "            self.running.append(sibling)",
        "Puts siblings at the end of those that run, whatever their rank.",
    ),
    Bug(
        "rows-for-the-aborted",
        SCHEDULER,
        "[sibling for sibling in request.siblings if sibling.finish_reason is None]\n        for",
        "request.siblings\n        for",
        "Gives rows to siblings that were aborted while they waited.",
    ),
    Bug(
        "recomputed-in-one-step",
        SCHEDULER,
        "if request.limit - 1 > self.step_tokens:",
        "if request.prompt_len > self.step_tokens:",
        "Forgets that after a preemption the output is computed again too, in one step.",
    ),
    Bug(
        "too-many-samples",
        SCHEDULER,
        "requests[at : at + self.rows.count]",
        "requests[at:]",
        "Puts more samples in line together than there are rows, which wait for ever.",
    ),
)
