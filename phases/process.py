"""The main function of every command: signals, standard streams, and one line for an error.

The exit codes:

    0    done; also when the reader of its output, such as `head`, has seen enough
    1    not done: its output or a file cannot be written, or a request failed
    2    wrong input
    130  Ctrl-C
    143  SIGTERM

Any other error is a defect and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from common.error_lines import one_line, visible
from common.errors import EngineLost, UserError
from common.interrupts import INTERRUPTED, TERMINATED

LONGEST_LINE = 1000
"""Characters of an error message; a longer one loses its middle."""
CANNOT_WRITE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOSPC,
    errno.EPERM,
    errno.EROFS,
}


def exit_code(command: Callable[[], int]) -> int:
    """Run a command and return the process's exit code; an error is printed as one line on standard error.

    command: returns the code. An exception that is a defect of this program is raised again.
    """
    with signals() as caught:
        streams: tuple[Any, ...] = ()
        try:
            streams = (
                sys.stdout,
                sys.stderr,
            )  # Typer replaces them when a pipe breaks
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")  # `?` for what the output cannot show
            code = command()
            print(end="", flush=True)
            line = (
                "interrupted" if code == INTERRUPTED else ""
            )  # Typer catches KeyboardInterrupt itself
        except BaseException as error:
            judged = _judge(error, caught[-1] if caught else 0)
            if judged is None:
                raise
            code, line = judged
        if line:
            _say(line)
        _flush(streams)
    return code


@contextmanager
def signals() -> Iterator[list[int]]:
    """Let SIGTERM unwind a `with` block as Ctrl-C does, so that child processes and files are cleaned up.

    A signal that has a handler or is ignored, as under `nohup` and `&`, keeps that.

    Yields:
        A list that gets the number of each such signal, since an interrupted import, as of PyTorch, may turn
        the signal's exception into another error.
    """
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)  # a second one does not wait
            raise SystemExit(TERMINATED)
        raise KeyboardInterrupt

    default_handlers: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    main = threading.current_thread() is threading.main_thread()
    taken = [
        number
        for number, handler in default_handlers.items()
        if main and signal.getsignal(number) == handler
    ]
    try:
        for number in taken:
            signal.signal(number, catch)
        yield caught
    finally:
        for number in taken:
            signal.signal(number, default_handlers[number])


def _judge(error: BaseException, caught: int) -> tuple[int, str] | None:
    """Return the exit code and the line to print for an exception; None if it is a defect of this program.

    caught: number of the last signal, 0 if none came.
    """
    if caught == signal.SIGTERM:
        return TERMINATED, ""
    if caught == signal.SIGINT or isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    # Rich and Typer make SystemExit(1) of a broken pipe.
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        return 0, ""
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else int(error.code is not None)), ""
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, EngineLost):
        return 1, f"error: {error}"
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        return (
            1,
            f"error: {error.filename or 'the output'} cannot be written: {error.strerror}",
        )
    return None


def _say(line: str) -> None:
    line = visible(one_line(line))
    if len(line) > LONGEST_LINE:
        half = LONGEST_LINE // 2
        line = f"{line[:half]} ... {line[-half:]}"
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr)


def _flush(streams: tuple[Any, ...]) -> None:
    """Flush `streams` now; those that cannot be written are pointed at /dev/null.

    Without that Python would print an error when it exits.
    """
    for stream in filter(None, streams):  # there is none where it was closed
        try:
            stream.flush()
        except (OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
