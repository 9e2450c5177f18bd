"""Confine a student's process by the operating system: files, network, processes, memory, time.

Two means of Linux, each used where the system has it. *Namespaces* give a process a network of its own with
a loopback alone, process numbers of its own, and mounts that are read-only. *Landlock* lets it open only the
files that are named here. Neither needs a privilege. Limits hold everywhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FILE_BYTES = 1 << 26
"""Largest file that a run may write; what it prints is in a file, too."""
SCRATCH_BYTES = 1 << 30
"""Bytes of all temporary files of a run together."""
MEMORY = 12 << 30
"""Bytes that a process of a run may allocate."""
PROCESSES = 200
"""Processes of a run at a time; a run that starts more is killed with all of them."""
TOO_MANY_PROCESSES = 120
"""The exit status of a run that was killed because it started more."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
READABLE = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/proc",
    "/sys",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/hosts",
    "/etc/passwd",
    "/etc/group",
    "/etc/nsswitch.conf",
)
"""Files and folders that Python and its libraries need beside their own."""

# Numbers of <linux/sched.h>, <sys/mount.h>, <linux/landlock.h> and <sys/prctl.h>. The system calls have the
# same numbers on every architecture that PyTorch runs on.
CLONE_NEWNS = 0x20000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_PRIVATE = 1 << 18
SYS_MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
SYS_LANDLOCK_CREATE_RULESET = 444
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
RULE_PATH_BENEATH = 1
EXECUTE = 1
WRITE_FILE = 2
READ_FILE = 4
READ_DIR = 8
TRUNCATE = 1 << 14
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522
SIOCSIFFLAGS = 0x8914
INTERFACE_UP = 1

_libc = ctypes.CDLL(None, use_errno=True)


def limit_resources(seconds: float) -> None:
    """Limit the processor time (`seconds`), memory and file size of this process and each that it starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If memory runs out, the kernel ends a run before it ends the grader.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def enter_namespaces(scratch: Path) -> None:
    """Continue in a new process that sees no network and no other process, and can write in `scratch` alone.

    The calling process waits for the new one, and ends with its status; so this returns in the new one only.

    Raises:
        OSError: the system has no such namespaces, or forbids them.
    """
    user, group = os.geteuid(), os.getegid()
    _succeeds(
        _libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC)
    )
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", INTERFACE_UP))
    read_only = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, MS_PRIVATE, 0)
    _succeeds(
        _libc.syscall(
            SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, read_only, len(read_only)
        )
    )
    for place in (scratch, Path("/dev/shm")):
        _mount("tmpfs", place, MS_NOSUID | MS_NODEV, f"size={SCRATCH_BYTES}")
    _continue_in_child()
    most = 0
    # A container may hide parts of /proc, and then there is no mounting it anew.
    with suppress(OSError):
        _mount("proc", Path("/proc"), MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "")
        most = PROCESSES
    # The first process of a namespace ignores most signals, so a second one does the work.
    _continue_in_child(most)
    # What it executes does not get back what it loses.
    _succeeds(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _succeeds(_libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)))


def restrict_files(folder: Path, scratch: Path) -> None:
    """Let this process and its children read only `folder` and what Python needs, and write only in
    `scratch`.

    Raises:
        OSError: the system has no Landlock.
    """
    version = _succeeds(_libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, 0, 1))
    # One right was added by each of versions 2 and 3.
    handled = (1 << min(12 + version, 15)) - 1
    scopes = SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, 0, scopes)
    rules = _succeeds(
        _libc.syscall(SYS_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    )
    read = EXECUTE | READ_FILE | READ_DIR
    packages = [
        entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))
    ]
    readable: list[str | Path] = [*READABLE, sys.base_prefix, sys.prefix, *packages, folder]
    allowed = {Path(path): read for path in readable}
    allowed |= dict.fromkeys(map(Path, DEVICES), READ_FILE | WRITE_FILE | TRUNCATE)
    allowed |= dict.fromkeys([scratch, Path("/dev/shm")], handled)
    for place, rights in allowed.items():
        if place.exists():
            rights &= handled if place.is_dir() else handled & ~READ_DIR
            opened = os.open(place, os.O_PATH)
            rule = struct.pack("=Qi", rights, opened)
            _succeeds(_libc.syscall(SYS_LANDLOCK_ADD_RULE, rules, RULE_PATH_BENEATH, rule, 0))
            os.close(opened)
    _succeeds(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _succeeds(_libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, rules, 0))
    os.close(rules)


def works(step: Callable[[], None]) -> bool:
    """Return True if `step`, a means of sandboxing, raises no error in a process of its own."""
    if sys.platform != "linux":
        return False
    child = os.fork()
    if child == 0:
        try:
            step()
        except (OSError, AttributeError):  # a C library may lack a function
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def describe_gaps(namespaces: bool, landlock: bool) -> str:
    """Return one line about the means of sandboxing that this system lacks; "" if it has them all.

    namespaces, landlock: whether the system has each.
    """
    lacks = (
        []
        if namespaces
        else ["no user namespaces: a run may use the network and signal others"]
    )
    lacks += [] if landlock else ["no Landlock: a run may read what you may"]
    if not lacks:
        return ""
    found = ", and ".join(lacks)
    return f"this system has {found}. Grade strangers' work in a container without network"


def _continue_in_child(most: int = 0) -> None:
    """Continue in a new process; the calling process waits for it, and ends with its exit status.

    most: if not 0, the child is the first process of a PID namespace, and all processes there are ended
        as soon as /proc shows more than `most` of them.
    """
    child = os.fork()
    if child == 0:
        return
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
        if most and sum(name.isdigit() for name in os.listdir("/proc")) > most:
            os._exit(TOO_MANY_PROCESSES)
        time.sleep(0.02)


def _mount(kind: str, place: Path, flags: int, options: str) -> None:
    _succeeds(
        _libc.mount(
            kind.encode(), bytes(place), kind.encode(), ctypes.c_ulong(flags), options.encode()
        )
    )


def _succeeds(result: int) -> int:
    """Return `result`, what a C function returned; raise `OSError` with its errno if it is -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
