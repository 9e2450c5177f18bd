"""The block allocator: which KV cache blocks are free, and how many users each of the others has."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """A free list of block numbers `0 .. count - 1` with reference counts; a block without users is free."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.refs = [0] * count
        self._free = list(range(count - 1, -1, -1))  # a stack, lowest block on top

    @property
    def free(self) -> int:
        """Return the number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with the caller as its one user, and return their numbers.

        Raises:
            AssertionError: fewer blocks are free; the caller should have checked.
        """
        if count > len(self._free):
            raise AssertionError(f"{count} blocks wanted, {len(self._free)} free")
        if count == 0:
            return []
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add one user to each of these blocks.

        Raises:
            AssertionError: a block has no user: it is free.
        """
        for block in blocks:
            if self.refs[block] < 1:
                raise AssertionError(f"block {block} is free and cannot be retained")
            self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one user from each of these blocks; a block without users is free.

        Raises:
            AssertionError: a block was free already.
        """
        for block in blocks:
            refs = self.refs[block] = self.refs[block] - 1
            if refs == 0:
                self._free.append(block)
            elif refs < 0:
                raise AssertionError(f"block {block} was released once too often")

    def check(self, users: Iterable[int]) -> None:
        """Raise `AssertionError` unless `users` has each block's number once for each of its users."""
        counted = [0] * self.count
        for block in users:
            counted[block] += 1
        if counted != self.refs:
            wrong = next(b for b in range(self.count) if counted[b] != self.refs[b])
            raise AssertionError(
                f"block {wrong} has {counted[wrong]} users, but {self.refs[wrong]} are booked"
            )
        free = sorted(self._free)
        if free != [block for block in range(self.count) if self.refs[block] == 0]:
            raise AssertionError("the free blocks are not the blocks without users")
