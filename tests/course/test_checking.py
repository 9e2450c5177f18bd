"""Checking and grading, as a student who works and as one who cheats."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import UserError
from phases.cli import main
from phases.course import answers, checking, grading, hints, making
from phases.course.blanks import blank
from phases.course.checking import check, judged, run
from phases.course.exercises import find, of_phases
from phases.course.guard import refusal
from phases.course.nursery import Nursery
from tests.course.proof import blank_fails, reference_passes, slip_fails
from tests.course.slips import slips_of

EASY = "05.1"
"""An exercise whose tests take no time."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with checking.room() as started:
        yield started


def solved(body: str, before: str = "") -> str:
    """The allocator with another `allocate`."""
    exercise = find(EASY)
    source = exercise.path.read_text(encoding="utf-8")
    made = blank(source, {"BlockAllocator.allocate": EASY})
    made = made.replace(f'        raise NotImplementedError("exercise {EASY}")', body)
    return made.replace("class BlockAllocator", before + "\n\nclass BlockAllocator")


CHEATS = {
    "ends the process": ("        import os\n        os._exit(0)", "imports os"),
    "by another way": ("        return torch.os._exit(0)", ".os"),
    "changes modules": ("        import sys\n        sys.modules.clear()", "imports sys"),
    "reads the reference": ("        return eval(open('/x').read())", "it uses"),
    "imports the reference": ("        from importlib import util", "imports importlib"),
    "imports the tests": ("        from tests.fakes import NOTHING", "imports tests.fakes"),
    "asks a twin": ("        from prefix_cache.cache import PrefixCache", "imports prefix_cache.cache"),
    "climbs": ("        return ().__class__.__base__.__subclasses__()", "__base__"),
    "computes a name": ("        return getattr(self, '__cl' + 'ass__')", "getattr"),
    "uses the network": ("        import socket", "imports socket"),
    "unpickles": (
        "        import torch\n        torch.serialization.pickle.loads(b'')",
        "uses torch.serialization",
    ),
    "hands a module on": ("        import torch\n        t = torch\n        t.os", "uses torch"),
    "a module in a module": ("        import enum\n        return enum.bltns.open('x')", ".bltns"),
    "reads a file": (
        "        import numpy as np\n        return np.genfromtxt('x')",
        "uses numpy.genfromtxt",
    ),
    "climbs by text": ("        import operator\n        operator.attrgetter('x')(self)", ".attrgetter"),
    "climbs by pattern": (
        "        match self.allocate:\n            case object(__globals__=g):\n                return g",
        ".__globals__",
    ),
    "changes a judge": (
        "        import math\n        math.isclose = lambda *a, **k: True\n        return []",
        "changes math.isclose",
    ),
    "changes all judges": (
        "        import torch\n        torch.Tensor.equal = lambda *a: True\n        return []",
        "changes torch.Tensor.equal",
    ),
    "equals everything": (
        "        class Yes(list):\n            def __eq__(self, other):\n                return True\n"
        "        return Yes()",
        "uses def __eq__",
    ),
    "equals everything, made": ("        return type('Y', (list,), {'__e' 'q__': max})()", "type of three"),
    "a twin's module": (
        "        from common.request import time\n        return []",
        "imports common.request",
    ),
}


@pytest.mark.parametrize(("body", "says"), CHEATS.values(), ids=CHEATS.keys())
def test_what_reaches_out_is_not_run(body: str, says: str) -> None:
    reference = find(EASY).path.read_text(encoding="utf-8")
    assert says in refusal(reference, solved(body), ["BlockAllocator.allocate"])


def test_what_reaches_out_beside_the_function_is_not_run() -> None:
    reference = find(EASY).path.read_text(encoding="utf-8")
    for before in ("import os", "END = exit", "def helper(f=open):\n    return f"):
        assert refusal(reference, solved("        return []", before), ["BlockAllocator.allocate"])
    fine = "import math\n\nMOST = 3\n\n\ndef helper(x):\n    return math.ceil(x)\n"
    assert refusal(reference, solved("        return helper(1)", fine), ["BlockAllocator.allocate"]) == ""


FINE = {
    "torch": "import torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n"
    "def helper(x: Tensor):\n    return F.relu(torch.nn.functional.softmax(x, -1)), nn.Linear(1, 1)",
    "numpy": "import numpy as np\ndef helper():\n    return np.random.default_rng(0), np.linalg.norm([1])",
    "standard": "import copy, heapq, itertools, math\nfrom collections import deque\ndef helper():\n"
    "    return copy.copy([]), heapq.nlargest(1, [1]), itertools.chain([1]), math.inf, deque()",
    "a class": "from dataclasses import dataclass\n@dataclass\nclass Box:\n    x: int\n"
    "    def __lt__(self, other):\n        return self.x < other.x",
    "names of modules": "import math\ndef helper(input):\n    load = math.ceil(input)\n    return load",
}


@pytest.mark.parametrize("before", FINE.values(), ids=FINE.keys())
def test_honest_work_is_not_refused(before: str) -> None:
    reference = find(EASY).path.read_text(encoding="utf-8")
    assert refusal(reference, solved("        return []", before), ["BlockAllocator.allocate"]) == ""


@pytest.mark.parametrize("name", ["05.1", "06.1", "08.1", "13.6"])
def test_what_the_reference_uses_is_allowed(name: str) -> None:
    exercise = find(name)
    reference = exercise.path.read_text(encoding="utf-8")
    assert refusal(reference, slips_of(exercise)[0].plant(exercise), exercise.functions) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [EASY, "07.3"])
def test_a_few_proofs(nursery: Nursery, name: str) -> None:
    """The whole is run by `python -m tests.course`."""
    exercise = find(name)
    assert reference_passes(exercise, nursery).right
    assert blank_fails(exercise, nursery).state == "fails"
    for slip in slips_of(exercise)[:2]:
        verdict, _ = slip_fails(exercise, slip, nursery)
        assert verdict.state == "fails", f"{name} accepts {slip.name}"


@pytest.mark.slow
def test_code_that_misbehaves_is_stopped(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it not refused beforehand: nothing that the process does makes it pass, or last."""
    exercise = find(EASY)
    bodies = {
        "        import os\n        os._exit(0)": "ended with status 0",
        "        while True:\n            pass": "no end after 12 s of work in test_case",
        "        import os, pathlib\n        pathlib.Path('course-result.json').write_text('{}')\n"
        "        os._exit(0)": "ended with status 0",
        "        import os, signal\n        os.kill(os.getpid(), signal.SIGKILL)": "signal 9",
    }
    for body, says in bodies.items():
        limit = 12  # of work: a slow machine needs three to get as far as the first test
        verdict = judged(
            exercise, run(exercise, solved(body), exercise.tests, nursery, limit), exercise.tests
        )
        assert verdict.state == "fails" and verdict.failure and says in verdict.failure.message, body
    network = (
        "        import socket\n        try:\n            socket.create_connection(('192.0.2.1', 80), 1)\n"
    )
    network += "        except Exception:\n            pass\n        return []"
    verdict = judged(exercise, run(exercise, solved(network), exercise.tests, nursery), exercise.tests)
    assert verdict.state == "refused" and verdict.failure and "192.0.2.1" in verdict.failure.message
    judged_by_himself = "        import math\n        math.isclose = lambda *a, **k: True\n        return []"
    verdict = judged(
        exercise, run(exercise, solved(judged_by_himself), exercise.tests, nursery), exercise.tests
    )
    assert verdict.state == "refused" and "it changed math.isclose" in checking_message(verdict)
    chatter = "        while True:\n            print('x' * 1_000_000)"
    verdict = judged(exercise, run(exercise, solved(chatter), exercise.tests, nursery), exercise.tests)
    assert verdict.state == "fails" and "File too large" in checking_message(verdict)
    greedy = "        return [0] * (20 << 30)"
    verdict = judged(exercise, run(exercise, solved(greedy), exercise.tests, nursery), exercise.tests)
    assert verdict.state == "fails" and "MemoryError" in checking_message(verdict)
    forged = "        import pytest, sys\n        pytest.exit('done', 0)"
    verdict = judged(exercise, run(exercise, solved(forged), exercise.tests, nursery), exercise.tests)
    assert not verdict.right


def ladder(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["course", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out + err


@pytest.mark.slow
def test_as_a_student(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, exercise = tmp_path / "copy", find(EASY)
    code, said = ladder(capsys, "make", str(folder), "--phases", "05")
    assert code == 0 and "6 exercises" in said
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    code, said = ladder(capsys, "check", EASY)
    assert code == 0 and "not started" in said
    path = folder / exercise.file
    reference = exercise.path.read_text(encoding="utf-8")
    path.write_text(reference.replace("if refs == 0:", "if refs <= 1:"), encoding="utf-8")
    code, said = ladder(capsys, "check", EASY)
    assert code == 1 and "fails" in said
    assert "expected" in said and "got" in said and "trap      a block given back twice" in said
    assert len(said.splitlines()) <= 11
    path.write_text(reference, encoding="utf-8")
    code, said = ladder(capsys, "check", EASY)
    assert code == 0 and "passes here" in said
    for level, word in enumerate(("refs[b]", "->", "allocate(count)"), start=1):
        code, said = ladder(capsys, "hint", EASY)
        assert code == 0 and f"hint {level} of 3" in said and word in said
    code, said = ladder(capsys, "solution", "05.6")
    assert (
        code == 0 and "+    while True:" in said and '-    raise NotImplementedError("exercise 05.6")' in said
    )
    assert ladder(capsys, "answer", "05.p1", "4.0")[0] == 0
    assert ladder(capsys, "answer", "05.m1", "99")[0] == 1
    code, said = ladder(capsys, "grade", str(folder), "--json")
    scores = {one["id"]: one for one in json.loads(said[said.index("{") :])["exercises"]}
    assert scores[EASY]["points"] == 10 and scores[EASY]["hints"] == 3
    assert scores["05.6"]["points"] == 0 and scores["05.6"]["solution_shown"]
    assert scores["05.p1"]["points"] == 3 and scores["05.m1"]["points"] == 0
    (folder / "tests/phases/test_05_paged_cache.py").write_text("def test_any_schedule(): pass\n")
    code, said = ladder(capsys, "grade", str(folder), "--gradescope")
    result = json.loads(said[said.index("{") :])
    assert result["score"] == 3 and "was changed" in result["tests"][0]["output"]


def test_grading_refuses_another_version(tmp_path: Path) -> None:
    copy = making.make(tmp_path / "copy", of_phases("02"))
    about = copy.folder / making.COURSE
    about.write_text(about.read_text().replace(copy.made_from, "0" * 16))
    with pytest.raises(UserError, match="another version"):
        grading.grade(copy.folder, None)  # type: ignore[arg-type]


def test_only_files_of_the_copy_are_read(tmp_path: Path) -> None:
    copy = making.make(tmp_path / "copy", of_phases("05"))
    exercise = find(EASY)
    (copy.folder / exercise.file).unlink()
    os.symlink(exercise.path, copy.folder / exercise.file)
    verdict = checking.check_file(copy.folder, exercise, None)  # type: ignore[arg-type]
    assert verdict.state == "refused" and "no file of this copy" in checking_message(verdict)
    (copy.folder / exercise.file).unlink()
    (copy.folder / exercise.file).write_bytes(b"\xff\xfe")
    assert "cannot be read" in checking_message(checking.check_file(copy.folder, exercise, None))  # type: ignore[arg-type]
    (copy.folder / exercise.file).write_text("def broken(:\n")
    assert "line 1" in checking_message(checking.check_file(copy.folder, exercise, None))  # type: ignore[arg-type]


def checking_message(verdict: checking.Verdict) -> str:
    assert verdict.failure is not None
    return verdict.failure.message


def test_a_function_that_is_gone_is_named() -> None:
    exercise = find(EASY)
    source = exercise.path.read_text(encoding="utf-8").replace("def retain", "def keep")
    verdict = check(exercise, source, None)  # type: ignore[arg-type]
    assert verdict.state == "refused" and "BlockAllocator.retain is gone" in checking_message(verdict)


def test_the_log_survives_nonsense(tmp_path: Path) -> None:
    (tmp_path / hints.LOG).write_bytes(b"\xff not json\n")
    assert hints.logged(tmp_path, EASY, "hint") == []
    hints.log(tmp_path, "hint", EASY, level=1)
    assert len(hints.logged(tmp_path, EASY, "hint")) == 1, "nonsense hides what was asked for"


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
            path.write_text("[" * (200_000 if kind == "too deep" else 1 << 20), encoding="utf-8")

    for file in (making.ANSWERS, hints.LOG, test, find("02.1").file):
        spoil(file)
    assert answers.given(copy.folder) == {}
    assert hints.logged(copy.folder, "02.1", "hint") == []
    assert grading.changed_tests(copy, {test: "pass"}) == {test: "was changed"}
    verdict = checking.check_file(copy.folder, find("02.1"), None)  # type: ignore[arg-type]
    assert verdict.state == "refused"
    spoil(making.COURSE)
    with pytest.raises(UserError, match="is no working copy"):
        making.opened(copy.folder)


@pytest.mark.parametrize("text", [None, "def broken(:\n"])
def test_the_solution_is_shown_whatever_state_a_file_is_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    copy = making.make(tmp_path / "copy", of_phases("02"))
    path = copy.folder / find("02.1").file
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(copy.folder)
    code, said = ladder(capsys, "solution", "02.1")
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
