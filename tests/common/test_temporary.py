"""Temporary folders and files: only this user's, and gone in any case."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.files import whole
from common.temporary import delete_folder, lock_path, sweep, temporary_folder
from phases import ROOT

WAITS = (
    "import sys, time; from common.temporary import temporary_folder; "
    "folder = temporary_folder(); (folder / 'file').touch(); print(folder, flush=True); time.sleep(100)"
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_this_users_alone_and_deleted_once():
    folder = temporary_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "inner").mkdir()
    delete_folder(folder)
    assert not folder.exists()
    delete_folder(folder)
    folder.mkdir()
    delete_folder(folder)
    assert folder.exists(), "a folder of somebody else by the same name"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_process_deletes_what_a_killed_one_has_left_and_nothing_else(
    number: int, place: Path
):
    ours = temporary_folder()
    foreign = [
        place / name for name in ("ladder-kit-abc", "ladder-1-models", "inference-ladder-x")
    ]
    for folder in foreign:
        folder.mkdir()
    environment = os.environ | {"TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], env=environment, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().decode().strip())
        delete_folder(temporary_folder())
        assert theirs.is_dir(), "its process lives"
        process.send_signal(number)
    assert theirs.is_dir()
    delete_folder(temporary_folder())
    assert not theirs.exists()
    assert ours.is_dir()
    assert all(folder.is_dir() for folder in foreign), "a folder of the user's was swept"


def test_a_folder_ends_with_its_process(place: Path):
    environment = os.environ | {"TMPDIR": str(place), "PYTHONPATH": str(ROOT)}
    program = WAITS.replace("time.sleep(100)", "sys.exit(3)")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 3 and not Path(done.stdout.decode().strip()).exists()


def test_links_and_locked_files_are_not_swept(place: Path):
    outside = place / "outside"
    outside.mkdir()
    link, held, left = (place / name for name in ("link", "held", "left"))
    link.symlink_to(outside)
    held.touch()
    left.touch()
    lock = lock_path(held)
    sweep([link, held, left, place / "absent"])
    assert outside.is_dir() and held.exists() and not left.exists()
    assert lock is not None
    os.close(lock)


def test_a_file_that_a_killed_process_left_half_written_is_deleted_with_the_next_write(
    place: Path,
):
    (place / ".12345-a.json").write_text("{")
    (place / ".12345-b.json").write_text("{")
    (place / ".777-a.json").write_text("[")
    (place / ".my-a.json").write_text("the user's own")
    lock = lock_path(place / ".777-a.json")  # of a process that lives
    assert lock is not None
    with whole(place / "a.json") as scratch:
        scratch.write_text("{}")
    assert sorted(path.name for path in place.iterdir()) == [
        ".12345-b.json",
        ".777-a.json",
        ".my-a.json",
        "a.json",
    ]
    os.close(lock)
