"""The third tier, after GPU and host memory: a file for each block, found by the block's name.

Any process of this user finds it. A file is used only if everything in it is right: its size, the names in
its header, its tokens, and the checksum over all of it. Otherwise it is a miss: the tokens are computed.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

import xxhash

from common.errors import UserError
from moving_blocks.names import DIGEST_BYTES, BlockName

log = logging.getLogger(__name__)

MAGIC = b"ladder block 1\r\n\0"
"""Begins every file."""
NAME = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}\.kv")
"""The name of a block's file: its digest."""
TEMPORARY = ".tmp"
STALE_SECONDS = 3600.0
"""Age of a temporary file that no living process writes any more."""
PAUSE_SECONDS = 60.0
"""After a write that failed, such as on a full disk, no other is tried for so long."""
ROOM = 0.9
"""Share of the budget that stays in use when files are evicted: not every write then has to look for one."""
NO_LINKS = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of `open`: a symbolic link is no block, and a pipe must not make the reader wait."""


class DamagedFile(OSError):
    """Raised inside `BlockFiles.read` for a file whose content is not the block that its name says."""


class BlockFiles:
    """The files of one folder, one for each block of keys and values.

    folder: made if it does not exist. It must belong to this user alone, since its files become text.
    budget: most bytes of all files. The least recently used are removed for new ones.
    block_bytes: bytes of the keys and values of one block; `budget` must have room for them.
    used: bytes of all files. known: digests (names) of blocks whose files were seen.
    Several processes may use a folder at the same time: files appear under their names only when they are
    complete, and a process notices a file that another has removed when it opens it.

    Raises:
        UserError: the folder cannot be used, or the budget has no room for one block.
    """

    def __init__(self, folder: Path, budget: int, block_bytes: int) -> None:
        self.folder = folder
        self.budget = budget
        self._paused_until = 0.0
        own_folder(folder)
        if budget < block_bytes + 4096:
            raise UserError(
                f"disk_bytes is {budget}, but one block takes {block_bytes + 4096} bytes"
            )
        self.scan()

    def path(self, digest: bytes) -> Path:
        """Return the path of the file of the block with this digest."""
        return self.folder / f"{digest.hex()}.kv"

    def contains(self, digest: bytes) -> bool:
        """Return True if there is a file for the block with this digest, whatever is in the file."""
        if digest not in self.known and self.path(digest).is_file():
            self.known.add(digest)  # another process wrote it
        return digest in self.known

    def read(self, name: BlockName, target: memoryview) -> bool:
        """Read the keys and values of the block `name` into `target`.

        Returns:
            True; or False if the file was removed or is not what its name says; `target` may then hold
            anything, and the log has one line about it.
        """
        path = self.path(name.digest)
        try:
            self._read(path, name, target)
        except OSError as error:
            self.known.discard(name.digest)
            log.warning("a block of the cache is computed again: %s: %s", path.name, error)
            if isinstance(error, DamagedFile):
                remove(path)
            return False
        return True

    def _read(self, path: Path, name: BlockName, target: memoryview) -> None:
        descriptor = os.open(path, os.O_RDONLY | NO_LINKS)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            header = header_of(name, len(target))
            size = len(header) + DIGEST_BYTES + len(target)
            if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                raise DamagedFile(f"it has {found.st_size} bytes, but must have {size}")
            if file.read(len(header)) != header:
                raise DamagedFile("its header names another block")
            checksum = file.read(DIGEST_BYTES)
            if file.readinto(target) != len(target):
                raise DamagedFile("it has become shorter")
            if checksum_of(header, target) != checksum:
                raise DamagedFile("its checksum is wrong")

    def write(self, name: BlockName, source: memoryview) -> bool:
        """Write the file of the block `name`, with the keys and values in `source`, unless it exists.

        The bytes go to a temporary name, to the disk, and only then to the file's own name: a reader
        sees all of it or nothing.

        Returns:
            True if the file was written. False if it exists already, or could not be written: the log then
            has one line about it, and for some seconds nothing is written.
        """
        path = self.path(name.digest)
        header = header_of(name, len(source))
        size = len(header) + DIGEST_BYTES + len(source)
        if name.digest in self.known or time.monotonic() < self._paused_until:
            return False
        temporary = ""
        try:
            self._make_room(size)
            descriptor, temporary = mkstemp(TEMPORARY, dir=self.folder)
            with open(descriptor, "wb") as file:
                file.writelines((header, checksum_of(header, source), source))
                file.flush()
                os.fsync(descriptor)
                now = time.time_ns()  # the file system's own clock is coarse
                os.utime(descriptor, ns=(now, now))
            os.replace(temporary, path)
        except OSError as error:
            remove(temporary)
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            log.warning(
                "blocks are not written for %d seconds: %s: %s",
                PAUSE_SECONDS,
                path.name,
                error,
            )
            return False
        self.known.add(name.digest)
        self.used += size
        return True

    def scan(self) -> list[tuple[int, int, Path]]:
        """Read the folder: set `used` and `known` by its files, and remove files left half written long ago.

        Returns:
            For each file: when it was last used, in ns since the epoch, its size in bytes, and its path.
        """
        files = []
        for path in list(self.folder.iterdir()):
            with suppress(OSError):  # another process has just removed it
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode):
                    continue
                if NAME.fullmatch(path.name):
                    files.append((found.st_mtime_ns, found.st_size, path))
                elif path.suffix == TEMPORARY and time.time() - found.st_mtime > STALE_SECONDS:
                    path.unlink()
        self.known = {bytes.fromhex(path.stem) for _, _, path in files}
        self.used = sum(size for _, size, _ in files)
        return files

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files, if need be, until `size` more bytes are within the budget."""
        if self.used + size <= self.budget:
            return
        goal = min(int(ROOM * self.budget), self.budget - size)
        for _, bytes_, path in sorted(self.scan()):
            if self.used <= goal:
                break
            remove(path)
            self.known.discard(bytes.fromhex(path.stem))
            self.used -= bytes_

    def touch(self, digests: Sequence[bytes]) -> None:
        """Record that the files of one sequence's blocks were used just now; its last block is evicted first.

        digests: of the blocks in order. Without the blocks before it, a block is of no use.
        """
        now = time.time_ns()
        for later, digest in enumerate(reversed(digests)):
            if digest in self.known:
                try:
                    os.utime(self.path(digest), ns=(now + later, now + later))
                except OSError:  # another process has evicted it
                    self.known.discard(digest)


def own_folder(folder: Path) -> None:
    """Make a folder, or check that it belongs to this user alone.

    Raises:
        UserError: it is a link, not a folder, another user's, or open to others.
    """
    why = "must be a folder of your own that no other user can read: chmod 700"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if mine and not stat.S_IMODE(found.st_mode) & 0o077:
            return
    except (OSError, ValueError) as error:
        why = f"cannot be used: {error}"
    raise UserError(f"disk_folder is {str(folder)!r}, but {why}")


def header_of(name: BlockName, size: int) -> bytes:
    """Return the first bytes of the file of the block `name`: magic number, digests, lengths and tokens.

    size: bytes of keys and values after the header.
    """
    lengths = len(name.key).to_bytes(8, "little") + size.to_bytes(8, "little")
    return MAGIC + name.digest + name.parent + lengths + name.key


def checksum_of(header: bytes, content: memoryview) -> bytes:
    """Return the checksum of a block's file: of its header and its keys and values (`content`)."""
    state = xxhash.xxh3_128(header)
    state.update(content)
    return bytes(state.digest())


def remove(path: str | Path) -> None:
    """Remove a file; do nothing if it does not exist or cannot be removed."""
    with suppress(OSError):
        os.unlink(path)
