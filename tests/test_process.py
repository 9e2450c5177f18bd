"""What stands around every command: codes, one line for what goes wrong, streams, signals, whole files.

Nothing here needs PyTorch, so that a process is cheap.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.evidence import check_folder
from common.errors import EngineLost, UserError
from common.files import whole
from phases import ROOT
from phases.process import exit_code


@contextmanager
def stdout(stream: Any) -> Iterator[None]:
    """Standard output is `stream`."""
    before, sys.stdout = sys.stdout, stream
    try:
        yield
    finally:
        sys.stdout = before


def nobody_reads() -> Any:
    """A pipe whose reader has gone, as `| head -1` leaves it."""
    reads, writes = os.pipe()
    os.close(reads)
    return open(writes, "w", encoding="utf-8")


def raises(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


def test_what_a_command_raises_becomes_a_code_and_a_line(capsys: Any) -> None:
    for error, code, line in (
        (UserError("x is 3"), 2, "error: x is 3\n"),
        # A template or a server may have written this.
        (UserError("é\x1b[2J\x9b3D\u202e\nx"), 2, "error: é?[2J?3D? x\n"),
        (EngineLost("rank 2 has ended"), 1, "error: rank 2 has ended\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 0, ""),
        (
            OSError(errno.ENOSPC, "No space left"),
            1,
            "error: the output cannot be written: No space left\n",
        ),
        (
            OSError(errno.EROFS, "Read-only", "/a"),
            1,
            "error: /a cannot be written: Read-only\n",
        ),
        (SystemExit(143), 143, ""),
        (SystemExit(), 0, ""),
    ):
        assert exit_code(raises(error)) == code, repr(error)
        assert capsys.readouterr() == ("", line), repr(error)
    assert exit_code(lambda: 130) == 130
    assert capsys.readouterr().err == "interrupted\n"
    for defect in (ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "No such file", "/a")):
        with pytest.raises(type(defect)):
            exit_code(raises(defect))


def process(*arguments: str, redirect: str = "", **environment: str) -> tuple[int, str, str]:
    """One call of a real process, through a shell."""
    line = f'"$0" -m phases {" ".join(arguments)} {redirect}'
    call = ["bash", "-o", "pipefail", "-c", line, sys.executable]
    done = subprocess.run(
        call,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_while_the_command_is_imported(tmp_path: Path) -> None:
    """Typer takes a tenth of a second to import, in which nobody has taken over the signals yet."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    code, out, err = process(
        "list", "--names", PYTHONPATH=os.pathsep.join((str(tmp_path), *sys.path))
    )
    assert (code, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("redirect", "code", "err"),
    [
        (">/dev/full", 1, "error: the output cannot be written: No space left on device\n"),
        ("<&- 2>&-", 0, ""),
        (">/dev/full 2>/dev/full", 1, ""),
        ("| head -1", 0, ""),
    ],
)
def test_streams_of_a_process(redirect: str, code: int, err: str) -> None:
    found, out, said = process("list", "--names", redirect=redirect)
    assert (found, said) == (code, err), "nothing else may be said when Python shuts down"
    assert out.startswith("01_forward\n") == (code == 0)


@pytest.mark.parametrize(
    ("number", "code", "says"), [("SIGINT", 130, "interrupted\n"), ("SIGTERM", 143, "")]
)
def test_a_signal_while_torch_is_imported(
    tmp_path: Path, number: str, code: int, says: str
) -> None:
    """PyTorch's and numpy's own code makes an ImportError of whatever comes up meanwhile."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        f"try:\n    os.kill(os.getpid(), signal.{number})\n    time.sleep(20)\n"
        "except BaseException:\n    raise ImportError('numpy failed to import')\n"
    )
    found = process("run", "1", PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT}/phases/05_paged_cache")
    assert found == (code, "", says)


def test_sigterm_ends_children_too(tmp_path: Path) -> None:
    # It tells of the child when it has it in hand: a signal before that would find nobody to end.
    program = (
        "import subprocess, sys\nfrom phases.process import exit_code\n"
        "def command():\n    child = subprocess.Popen(['sleep', '60'])\n"
        "    try:\n        print(child.pid, flush=True)\n        return child.wait()\n"
        "    finally:\n        child.kill()\n        child.wait()\n"
        "sys.exit(exit_code(command))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.terminate()
        assert parent.wait(20) == 143
    end = (
        time.monotonic() + 20
    )  # whoever adopts the orphan takes note of its end when it has time
    while running(child):
        assert time.monotonic() < end, "the child outlives a parent that was told to end"
        time.sleep(0.02)


def running(number: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "made" / "evidence.json"
    with whole(path) as scratch:
        scratch.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as on a full disk
    try:
        too_large = pytest.raises(
            UserError, match=r"evidence\.json cannot be written: File too large"
        )
        with too_large, whole(path) as scratch:
            scratch.write_bytes(bytes(5000))
        with pytest.raises(UserError, match="cannot be written: File too large"):
            check_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(KeyboardInterrupt), whole(path) as scratch:
        scratch.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and [file.name for file in path.parent.iterdir()] == [
        path.name
    ]
    check_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
