"""The compiled library on disk: loaded only if it is what was compiled here, and compiled again otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from phases.appendix.cpu_step import build
from phases.appendix.cpu_step.build import load_library

COMPILER = ("g++", "-shared", "-fPIC", "-x", "c++")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int seven() { return 7; }')
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("LADDER_HOME", str(path))
    return path


def stored(home: Path) -> Path:
    (found,) = (home / "compiled").glob("seven-*.so")
    return found


def inode(home: Path) -> int:
    return stored(home).stat().st_ino


def load(source: Path, said: pytest.CaptureFixture[str], *, lines: int = 0) -> str:
    assert load_library(source, COMPILER).seven() == 7
    text = said.readouterr().err
    assert len(text.splitlines()) == lines, text
    return text


def test_it_is_compiled_once(source: Path, home: Path, capsys: pytest.CaptureFixture[str]):
    load(source, capsys)
    first = inode(home)
    load(source, capsys)
    assert inode(home) == first
    source.write_text(source.read_text().replace("7", "3 + 4"))
    load_library(source, COMPILER)
    assert len(list((home / "compiled").glob("*.so"))) == 2, "another source is another file"


@pytest.mark.parametrize(
    "damage", ["", "cut", "flipped", "larger", "no record", "record", "folder", "other"]
)
def test_a_damaged_file_is_compiled_again(
    damage: str, source: Path, home: Path, capsys: pytest.CaptureFixture[str]
):
    load(source, capsys)
    path, first = stored(home), inode(home)
    record, image = path.with_name(path.name + ".sha256"), path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(image[: len(image) // 2])
        case "flipped":
            path.write_bytes(image[:100] + bytes([image[100] ^ 1]) + image[101:])
        case "larger":
            os.truncate(path, build.MOST_BYTES + 1)
        case "no record":
            record.unlink()
        case "record":
            record.write_bytes(b"\xff" * 9)
        case "folder":
            record.unlink()
            record.mkdir()
        case "other":
            path.chmod(0o666)
    load(source, capsys, lines=int(damage == "folder"))
    if damage == "folder":
        return
    assert (inode(home) == first) == (not damage)
    if damage:
        load(source, capsys)
        assert path.read_bytes() == image


@pytest.mark.parametrize("place", [".", "compiled"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_nothing_is_loaded_from_a_folder_that_others_can_write(
    place: str, mode: int, source: Path, home: Path, capsys: pytest.CaptureFixture[str]
):
    load(source, capsys)
    (home / place).chmod(mode)
    if place == "." and mode == 0o1777:
        load(source, capsys)  # as in /tmp, nobody else can replace this user's folder there
        return
    path = stored(home)
    path.write_bytes(b"of somebody else")
    text = load(source, capsys, lines=1)
    assert str((home / place).resolve()) in text.replace("\n", "")
    assert path.read_bytes() == b"of somebody else", "and nothing is written there"


def test_a_folder_of_another_user_is_not_trusted(
    source: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    load(source, capsys)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    if user == 0:
        os.chown(home, 12345, 12345)
    load(source, capsys, lines=1)


def test_a_folder_that_cannot_be_made_costs_the_cache_alone(
    source: Path, home: Path, capsys: pytest.CaptureFixture[str]
):
    home.write_text("a file")
    load(source, capsys, lines=1)


def test_a_compiler_that_hangs_is_given_up_with_its_children(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    script, child = tmp_path / "hangs", tmp_path / "child"
    script.write_text(f"#!/bin/sh\nsleep 100 &\necho $! >{child}\nwait\n")
    script.chmod(0o700)
    child.touch()
    for patience in (0.5, 4.0, 16.0):  # on a busy machine it is given up before it has begun
        monkeypatch.setattr(build, "PATIENCE", patience)
        begun = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            load_library(source, [str(script)])
        assert time.monotonic() - begun < patience + 20
        if child.read_text():
            break
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    end = time.monotonic() + 20  # of the child's 100
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < end, "the compiler's child lives on"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "script", ["exit 0", "exit 3", "echo no >&2; exit 1", "echo rubbish >$5; exit 0"]
)
def test_a_compiler_that_makes_no_library_is_an_error_not_the_end(
    script: str, source: Path, tmp_path: Path
):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    with pytest.raises((OSError, subprocess.SubprocessError)):
        load_library(source, [str(path)])


def test_what_killed_compilers_of_earlier_versions_left_is_deleted(
    source: Path, home: Path, capsys: pytest.CaptureFixture[str]
):
    (home / "compiled").mkdir(parents=True)
    left = [
        home / "compiled" / name
        for name in ("step-0.4711", ".4711-step-0.so", ".4711-seven-0.so")
    ]
    for path in left:
        path.touch()
    load(source, capsys)
    assert not any(path.exists() for path in left)
