"""Checking and grading, as a student who works."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from common.errors import UserError
from phases.cli import main
from phases.commands import course
from phases.commands.course import lines_about
from phases.course import checking, grading, hints, making
from phases.course.checking import Failure
from phases.course.exercises import find_question, of_phases
from phases.course.fork_server import ForkServer
from phases.course.grading_process import raised
from tests.course.proof import blank_fails, reference_passes, slip_fails
from tests.course.slips import find, slips_of
from tests.course.test_cheats import EASY, message_of, server

__all__ = ["server"]


@pytest.mark.slow
def test_a_proof(server: ForkServer) -> None:
    """The whole is run by `python -m tests.course`."""
    exercise = find(EASY)
    assert reference_passes(exercise, server).right
    assert blank_fails(exercise, server).state == "fails"
    verdict, _ = slip_fails(exercise, slips_of(exercise)[0], server)
    assert verdict.state == "fails"


def ladder(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["course", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out + err


@pytest.mark.slow
def test_as_a_student(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    server: ForkServer,
) -> None:
    folder, exercise = tmp_path / "copy", find(EASY)
    code, said = ladder(capsys, "make", str(folder), "--phases", "05")
    assert code == 0 and f"{len(of_phases('05'))} exercises" in said
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    code, said = ladder(capsys, "check", EASY)
    assert code == 0 and "not started" in said
    # The first has started one of its own; for the others it need not import PyTorch again.
    monkeypatch.setattr(course, "ForkServer", lambda: nullcontext(server))
    path = folder / exercise.file
    reference = exercise.path.read_text(encoding="utf-8")
    path.write_text(reference.replace("if refs == 0:", "if refs <= 1:"), encoding="utf-8")
    code, said = ladder(capsys, "check", EASY)
    assert code == 1 and "fails" in said
    assert (
        "expected" in said and "got" in said and "trap      a block given back twice" in said
    )
    assert "given     from paged_cache" in said, "what was given is not whole"
    path.write_text(reference, encoding="utf-8")
    code, said = ladder(capsys, "check", EASY)
    assert code == 0 and "passes here" in said
    for level, word in enumerate(("refs[b]", "->", "allocate(count)"), start=1):
        code, said = ladder(capsys, "hint", EASY)
        assert code == 0 and f"hint {level} of 3" in said and word in said
    code, said = ladder(capsys, "solution", "05.6")
    assert code == 0 and "+    while True:" in said
    assert '-    raise NotImplementedError("exercise 05.6")' in said
    for name, value, wrong in (("05.p1", "9", 1), ("05.p1", "4.0", 0), ("05.m1", "99", 1)):
        assert ladder(capsys, "answer", name, value)[0] == wrong
    code, said = ladder(capsys, "grade", str(folder), "--json")
    scores = {one["id"]: one for one in json.loads(said[said.index("{") :])["exercises"]}
    assert scores[EASY]["points"] == 10 and scores[EASY]["hints"] == 3
    assert scores["05.p1"]["guesses"] == 2 and scores["05.m1"]["guesses"] == 1
    assert scores["05.6"]["points"] == 0 and scores["05.6"]["solution_shown"]
    assert scores["05.p1"]["points"] == 3 and scores["05.m1"]["points"] == 0
    true = f"{grading.truth(find_question('05.m1')):.3g}"
    assert true not in scores["05.m1"]["reason"], "a grade is no oracle of the right answer"
    code, said = ladder(capsys, "grade", str(folder), "--phases", "04-05", "--key", "--json")
    asked = {one["id"]: one for one in json.loads(said[said.index("{") :])["exercises"]}
    assert true in asked["05.m1"]["reason"], "a teacher's key names it"
    assert asked["04.1"]["state"] == "not in this copy" and asked["04.1"]["most"] > 0
    changed = folder / "tests/phases/test_05_paged_cache.py"
    changed.unlink()  # it cannot be written
    changed.write_text("def test_any_schedule(): pass\n")
    code, said = ladder(capsys, "grade", str(folder), "--gradescope")
    result = json.loads(said[said.index("{") :])
    assert result["score"] == 13, "what became of a test in the copy does not count"


def test_of_a_group_the_first_failure_is_told_with_its_example() -> None:
    first = AssertionError("5 blocks are lost")
    first.add_note("Falsifying example: test_any_schedule(\n    seed=3,\n)")
    both = ExceptionGroup("Hypothesis found 2 distinct failures.", [first, ValueError("x")])
    said = raised(both, Path("x"))["message"]
    assert said.startswith("5 blocks are lost\nFalsifying example: test_any_schedule(\n")
    assert "seed=3" in said and "distinct" not in said


def test_what_was_given_is_shown_whole() -> None:
    lines = [f"x{n} = {n}" for n in range(12)]
    said = lines_about(
        Failure(
            setup="\n".join(lines), call="f(x1)", expected="1", got="2", trap="one too many"
        )
    )
    assert [line.removeprefix("given").strip() for line in said] == [
        *lines, "f(x1)", "expected  1", "got       2", "trap      one too many"
    ]  # fmt: skip


def test_the_trap_is_shown_whole() -> None:
    trap = "a request is preempted while its token is in flight: " + "counted twice " * 9
    said = lines_about(Failure(message="x" * 200, trap=trap))
    assert said[-1] == f"trap      {trap}", "a sentence of the lesson is no output of a test"
    assert said[0].endswith("...")


def test_a_server_that_is_interrupted_while_it_starts_is_ended() -> None:
    begun, before = ForkServer(), signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)  # PyTorch is not imported by then
    try:
        with pytest.raises(KeyboardInterrupt):
            begun.__enter__()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert begun._process.poll() == -signal.SIGTERM


@pytest.mark.parametrize("state", ["message", "got", "printed", "place"])
def test_a_student_does_not_steer_the_terminal(state: str) -> None:
    spoken = lines_about(Failure(**{state: "one\n\x1b[2J\x1b]0;mine\x07\u202e of 5"}))
    assert "[2J" in "".join(spoken), "the text itself is shown"
    assert not [c for line in spoken for c in line if c != "\n" and not c.isprintable()]


@pytest.mark.slow
def test_a_case_says_what_it_printed_and_does_not_take_a_minute(server: ForkServer) -> None:
    exercise = find("01.1")
    reference = exercise.path.read_text(encoding="utf-8")
    line = "    distance = query_positions"
    assert line in reference
    noisy = reference.replace(line, f"    print('seen', window)\n    return None\n{line}", 1)
    failure = checking.run(exercise, noisy, [], server).failure
    assert failure and failure.got == "None" and failure.printed == "seen None\n"
    endless = reference.replace(line, f"    while True:\n        pass\n{line}", 1)
    before = server.seconds
    failure = checking.run(exercise, endless, [], server).failure
    assert failure and failure.message.startswith("no end after 5 s of work in a case")
    assert server.seconds - before < 15


def test_a_later_phase_is_named_and_its_traps_are_not_this_ones() -> None:
    exercise = find("04.1")
    told_of = {"outcome": "failed", "message": "no", "kind": "AssertionError"}
    verdict = checking._failed(exercise, exercise.later[0], told_of)
    assert verdict.state == "breaks a later phase" and verdict.failure
    assert (
        verdict.failure.test.endswith(" of phase 07_chunked_prefill")
        and verdict.failure.trap == ""
    )


def test_only_files_of_the_copy_are_read(tmp_path: Path) -> None:
    copy = making.make(tmp_path / "copy", of_phases("05"))
    exercise = find(EASY)
    (copy.folder / exercise.file).unlink()
    os.symlink(exercise.path, copy.folder / exercise.file)
    verdict = checking.check_file(copy.folder, exercise, None)  # type: ignore[arg-type]
    assert verdict.state == "refused" and "no file of this copy" in message_of(verdict)
    (copy.folder / exercise.file).unlink()
    (copy.folder / exercise.file).write_bytes(b"\xff\xfe")
    assert "cannot be read" in message_of(checking.check_file(copy.folder, exercise, None))  # type: ignore[arg-type]
    renamed = exercise.path.read_text(encoding="utf-8").replace("def retain", "def keep")
    for text, says in (
        ("def broken(:\n", "line 1"),
        (renamed, "BlockAllocator.retain is missing"),
    ):
        (copy.folder / exercise.file).write_text(text)
        assert says in message_of(checking.check_file(copy.folder, exercise, None))  # type: ignore[arg-type]


def test_a_copy_counts_all_exercises_of_its_phases(tmp_path: Path) -> None:
    """Whatever is written into its list, points are of whole phases, and of those it was made with."""
    copy = making.make(tmp_path / "copy", of_phases("02-03"))
    about = copy.folder / making.COURSE
    facts = json.loads(about.read_text())
    about.write_text(json.dumps(facts | {"exercises": ["02.1"]}))
    assert making.opened(copy.folder).exercises == of_phases("02-03")
    about.write_text(json.dumps(facts | {"phases": [2]}))
    with pytest.raises(UserError, match=r"another version.*new copy.*course-log"):
        grading.grade(copy.folder, None)  # type: ignore[arg-type]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["a pipe", "a link", "too deep", "too large"])
def test_what_is_handed_in_may_be_anything(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to would hold up the grader for ever, and so would a link to a device."""
    copy = making.make(tmp_path / "copy", of_phases("02"))
    test = "tests/phases/test_02_kv_cache.py"
    monkeypatch.setattr(making, "LARGEST", 1 << 19)

    def spoil(file: str) -> None:
        path = copy.folder / file
        path.unlink(missing_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a link":
            os.symlink("/dev/zero", path)
        else:
            path.write_text(
                "[" * (200_000 if kind == "too deep" else 1 << 20) + "\n", encoding="utf-8"
            )

    for file in (hints.LOG, test, find("02.1").file):
        spoil(file)
    assert grading.given(hints.logged(copy.folder, "02.p1", "answer")) is None
    assert hints.logged(copy.folder, "02.1", "hint") == []
    if kind == "too deep":
        hints.log(copy.folder, "hint", "02.1", level=1)
        assert len(hints.logged(copy.folder, "02.1", "hint")) == 1, (
            "nonsense hides what was asked for"
        )
    verdict = checking.check_file(copy.folder, find("02.1"), None)  # type: ignore[arg-type]
    assert verdict.state == "refused"
    about = copy.folder / making.COURSE
    about.write_text(about.read_text().replace(copy.made_from, "0" * 16))
    with pytest.raises(UserError, match="another version"):
        grading.grade(copy.folder, None)  # type: ignore[arg-type]
    spoil(making.COURSE)
    with pytest.raises(UserError, match="is no working copy"):
        making.opened(copy.folder)


@pytest.mark.parametrize("text", [None, "def broken(:\n"])
def test_the_solution_is_shown_whatever_state_a_file_is_in(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str | None,
) -> None:
    copy = making.make(tmp_path / "copy", of_phases("02"))
    path = copy.folder / find("02.1").file
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(copy.folder)
    for name in ("02.1", "2.1"):
        code, said = ladder(capsys, "solution", name)
        assert code == 0 and "+def " in said.replace("+    def", "+def"), said


def test_wrong_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, says in {
        ("check",): "is in no working copy",
        ("grade", "."): "is no working copy",
        ("make", ".", "--phases", "x"): "--phases is 'x'",
        ("answer", "05.p9", "1"): "question is '05.p9'",
        ("hint", "05.1", "--level", "4"): "is in no working copy",
    }.items():
        code, said = ladder(capsys, *arguments)
        assert code == 2 and says in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("02.p1", "nan", "NUMBER is nan, but must be between 0 and 1e+09"),
        ("02.p1", "inf", "NUMBER is inf, but must be between 0 and 1e+09"),
        ("05.p1", "3", "question is '05.p1', but must be one of 02.p1, 02.m1"),
    ],
)
def test_what_is_no_answer_is_not_logged_as_a_guess(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    says: str,
) -> None:
    copy = making.make(tmp_path / "copy", of_phases("02"))
    monkeypatch.chdir(copy.folder)
    code, said = ladder(capsys, "answer", name, value)
    assert code == 2 and says in said and len(said.splitlines()) == 1, said
    assert hints.logged(copy.folder, name, "answer") == [], f"{name}: {value} is no guess"
