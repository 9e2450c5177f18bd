"""The commit that evidence belongs to, checked against the code that ran.

The code is what lies on disk in `FOLDERS`: a hash for each package, of the names and the contents of its
files. Git's own hash of a content is used, so that a commit's hashes come from its tree alone, and a copy
without history computes the same from its files. Where there is history, evidence is dirty if a package
differs from the commit. A copy without history is given the commit with its hash,

    LADDER_GIT_COMMIT=$(python -m benchmarks.provenance)

printed in the checkout that the copy was made of. A commit alone can be given too: then `dirty` is unknown
where it runs, the hashes go into the evidence, and a test compares them with the commit's.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from common.errors import UserError

VARIABLE = "LADDER_GIT_COMMIT"
GIVEN = re.compile(r"([0-9a-f]{40})(?::([0-9a-f]{16}))?")
FOLDERS = ("benchmarks", "common", "phases", "tests")
SUFFIXES = frozenset({".py", ".cu", ".cuh", ".html"})
"""Of what is code: not lessons, pictures and evidence, which are written between two measurements."""
DIGITS = 16
"""Of a package's hash."""


def git_state(root: Path) -> dict[str, Any]:
    """Return the commit of a checkout or a copy, `dirty`, and the hashes of the packages that run.

    dirty: True when they are not the commit's, None where that cannot be known.

    Raises:
        UserError: `LADDER_GIT_COMMIT` is no commit.
    """
    found = sources(root)
    try:
        commit = git(root, "rev-parse", "HEAD")
        dirty: bool | None = bool(differing(found, committed(root, commit)))
    except (OSError, subprocess.CalledProcessError):
        commit, whole = _given()
        dirty = None if not whole else whole != combined(found)
    return {"commit": commit, "dirty": dirty, "sources": found}


def clean(root: Path) -> None:
    """Check that what is measured now can be kept as evidence of a commit.

    Raises:
        UserError: no commit is known, or the code that runs is not the commit's (by package where the commit
            is at hand).
    """
    state = git_state(root)
    if not state["commit"]:
        raise UserError(
            f"evidence belongs to a commit, but there is no history here, and {VARIABLE} is not set"
        )
    if not state["dirty"]:
        return
    try:
        names = differing(state["sources"], committed(root, state["commit"]))
    except (OSError, subprocess.CalledProcessError):
        raise UserError(
            f"the code here is {combined(state['sources'])}, but {VARIABLE} says {os.environ[VARIABLE]}: "
            "it is no copy of that commit"
        ) from None
    raise UserError(
        f"evidence belongs to a commit, but {', '.join(names)} differ from {state['commit'][:8]}"
    )


def sources(root: Path) -> dict[str, str]:
    """Return a hash for each package, of the files on disk."""
    found = {}
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            name = path.relative_to(root).as_posix()
            if _is_code(name) and path.is_file():
                content = path.read_bytes()
                found[name] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return _by_package(found)


def committed(root: Path, commit: str) -> dict[str, str]:
    """Return the same hashes of a commit.

    Raises:
        CalledProcessError: there is no such commit.
    """
    listed = git(root, "ls-tree", "-r", "-z", commit, "--", *FOLDERS).split("\0")
    lines = (line.split("\t", 1) for line in listed if line)
    return _by_package({name: facts.split()[2] for facts, name in lines if _is_code(name)})


def differing(some: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the names of the packages that are not alike, in order."""
    return sorted(name for name in {*some, *others} if some.get(name) != others.get(name))


def combined(found: Mapping[str, str]) -> str:
    """Return one hash of all packages."""
    return _hash(f"{name} {value}" for name, value in sorted(found.items()))


def _by_package(blobs: Mapping[str, str]) -> dict[str, str]:
    packages: dict[str, list[str]] = defaultdict(list)
    for name, blob in sorted(blobs.items()):
        packages[_package(name)].append(f"{name} {blob}")
    return {package: _hash(lines) for package, lines in sorted(packages.items())}


def _package(name: str) -> str:
    """Of a file: `benchmarks`, `common`, `tests`, a phase, an appendix, or what lies beside those."""
    folder = PurePosixPath(name).parent
    deep = 3 if folder.parts[:2] == ("phases", "appendix") else 2
    return "/".join(folder.parts[: deep if folder.parts[0] == "phases" else 1])


def _is_code(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return path.suffix in SUFFIXES and not hidden


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGITS]


def _given() -> tuple[str, str]:
    """Return what the environment says: the commit, and the hash of all packages (else empty)."""
    text = os.environ.get(VARIABLE, "")
    found = GIVEN.fullmatch(text)
    if text and found is None:
        raise UserError(
            f"{VARIABLE} is {text!r}, which is not what `python -m benchmarks.provenance` prints"
        )
    return (found[1], found[2] or "") if found else ("", "")


def git(root: Path, *arguments: str) -> str:
    """Return what git says of a checkout."""
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, check=True, encoding="utf-8")
    return done.stdout.strip()


def main() -> None:
    """Print what `LADDER_GIT_COMMIT` must be in a copy of this commit."""
    root = Path(__file__).resolve().parent.parent
    commit = git(root, "rev-parse", "HEAD")
    print(f"{commit}:{combined(committed(root, commit))}")


if __name__ == "__main__":
    main()
