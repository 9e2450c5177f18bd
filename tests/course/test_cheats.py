"""Cheats: each is found where it runs, and earns nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phases import ROOT
from phases.course.blanks import MASKED, blank
from phases.course.checking import Verdict, _record, check, copy_reference, run
from phases.course.exercises import Case
from phases.course.fork_server import ForkServer
from phases.course.grading import EARNED
from phases.course.sandbox import PROCESSES, describe_gaps
from tests.course.slips import find

EASY = "05.1"
"""An exercise whose tests take no time."""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("LADDER_SECRET", "x")
        with ForkServer() as started:
            yield started


def solved(body: str, before: str = "") -> str:
    """The allocator with another `allocate`, and something before its class."""
    exercise = find(EASY)
    source = exercise.path.read_text(encoding="utf-8")
    made = blank(source, {"BlockAllocator.allocate": EASY})
    lines = "\n".join("        " + line for line in body.splitlines())
    made = made.replace(f'        raise NotImplementedError("exercise {EASY}")', lines)
    return made.replace("class BlockAllocator", before + "\n\nclass BlockAllocator")


def message_of(verdict: Verdict) -> str:
    assert verdict.failure is not None
    return verdict.failure.message


RUN = {
    "skips": (
        "import pytest\npytest.skip('x')",
        "is skipped with it, and passes with the reference",
    ),
    "expects to fail": ("import pytest\npytest.xfail('x')", "is xfailed with it"),
    "skips as unittest does": (
        "import unittest\nraise unittest.SkipTest",
        "is skipped with it",
    ),
    "runs no test": (
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\nreturn []",
        "a test passes that must fail",
    ),
    "runs no test's function": (
        "from _pytest.python import Function\n"
        "Function.obj = property(lambda self: lambda **k: None)\nreturn []",
        "a test passes that must fail",
    ),
    "swallows": (
        "import _pytest.runner as r\nold = r.CallInfo.from_call\n"
        "def new(func, when, reraise=None):\n"
        "    return old((lambda: None) if when == 'call' else func, when, reraise)\n"
        "r.CallInfo.from_call = new\nreturn []",
        "a test passes that must fail",
    ),
    "changes a judge": (
        "import math\nmath.isclose = lambda *a, **k: True\nreturn []",
        "assert (0 == 3)",
    ),
    "ends": ("import os\nos._exit(0)", "ended with status 0"),
    "ends with a record": (
        "import os\nfor number in range(3, 64):\n    try:\n        os.write(number, b'{}')\n"
        "    except OSError:\n        pass\nos._exit(0)",
        "ended with status 0",
    ),
    "exits pytest": ("import pytest\npytest.exit('done', 0)", "was not run"),
    "kills": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
    "chatters": ("while True:\n    print('x' * 1_000_000)", "File too large"),
    "takes all memory": ("return [0] * (20 << 30)", "MemoryError"),
    "forks without end": (
        "import os\nwhile True:\n    os.fork()",
        f"more than {PROCESSES} processes",
    ),
}


EARLY = ("runs no test", "runs no test's function", "swallows")
"""Those that must run before the first test, when the file is imported."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_cheat_that_runs_earns_nothing(server: ForkServer, name: str) -> None:
    """Nothing that it does in the tests' process makes it pass, or last."""
    (body, says), exercise = RUN[name], replace(find(EASY), cases=())
    cheat = "def cheat():\n" + "\n".join("    " + line for line in body.splitlines())
    source = solved("return cheat()", cheat + "\n\n\nDONE = cheat()" * (name in EARLY))
    verdict = run(exercise, source, exercise.tests, server)
    assert says in message_of(verdict)
    assert EARNED.get(verdict.state, 0) == 0


HOSTILE = """
import os, pathlib, socket, subprocess
def tried(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"
def datagram():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", ("192.0.2.1", 53))
def near():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        socket.create_connection(listening.getsockname(), 1).close()
def fill():
    for number in range(30):
        (temporary / str(number)).write_bytes(bytes(60 << 20))
    return "filled"
temporary = pathlib.Path(os.environ["TMPDIR"])
checkout, page = pathlib.Path(CHECKOUT), pathlib.Path(CHECKOUT, "README.md")
"""
ATTEMPTS = {
    "use the loopback": ("near()", True),
    "use a temporary file": ("(temporary / 'x').write_text('x')", True),
    "start a process": ("subprocess.run(['true'], check=True)", True),
    "write into the checkout": ("(checkout / 'spoiled').write_text('x')", False),
    "write by a serializer": ("__import__('torch').save({}, checkout / 'spoiled')", False),
    "change a page": ("page.write_text('x')", False),
    "change a page's rights": ("page.chmod(0)", False),
    "delete a page": ("page.unlink()", False),
    "read the expected values": (
        "(checkout / 'phases/05_paged_cache/exercises.toml').read_text()",
        False,
    ),
    "read a home": ("os.listdir(HOME)", False),
    "spoil its own copy": ("pathlib.Path('common/events.py').write_text('')", False),
    "leave a file": ("pathlib.Path('/tmp/left-by-a-student').write_text('x')", False),
    "fill the disk": ("fill()", False),
    "open a connection": ("socket.create_connection(('192.0.2.1', 80), 1)", False),
    "send a datagram": ("datagram()", False),
    "end the grader": (f"os.kill({os.getpid()}, 0)", False),
    "see the grader's environment": ("os.environ['LADDER_SECRET']", False),
}
"""Of what a hostile exercise tries, whether it may: tests need the first three themselves."""


@pytest.mark.slow
def test_a_hostile_exercise_is_confined(server: ForkServer, tmp_path: Path) -> None:
    """The operating system refuses each attempt; the checkout is as it was."""
    if server.gaps:
        pytest.skip(server.gaps)
    copy_reference(tmp_path)
    setup = HOSTILE.replace("CHECKOUT", repr(str(ROOT))) + f"HOME = {str(Path.home())!r}\n"
    cases = tuple(
        Case(f"tried(lambda: {attempt})", "''", setup) for attempt, _ in ATTEMPTS.values()
    )
    before = (ROOT / "README.md").stat()
    record = _record(tmp_path, replace(find(EASY), cases=cases), [], server, 60)
    assert (ROOT / "README.md").stat() == before
    assert not (ROOT / "spoiled").exists() and not Path("/tmp/left-by-a-student").exists()
    for (name, (_, allowed)), said in zip(ATTEMPTS.items(), record["cases"], strict=True):
        assert (said.get("got") == "'done'") == allowed, f"{name}: {said}"


def test_what_a_system_cannot_confine_is_said_in_a_line() -> None:
    assert describe_gaps(namespaces=True, landlock=True) == ""
    assert "user namespaces" in describe_gaps(namespaces=False, landlock=True)
    assert "has no Landlock" in describe_gaps(namespaces=True, landlock=False)
    gaps = describe_gaps(namespaces=False, landlock=False)
    assert "namespaces" in gaps and "Landlock" in gaps and "\n" not in gaps


TWINS = {
    "17.3": ("    return (state * q.unsqueeze(-1)).sum(-2), state\n",
        "    tokens = DeltaTokens(*(x.unsqueeze(-3) for x in (q, k, v)), decay[None], beta[None])\n"
        "    out, state = one_chunk(state, tokens)\n    return out[0], state\n"),
    "12.1": ("        for _ in range(node.low):\n",
        "        self.members(Members((), node.part, node.part), begin, end)\n"
        "        for _ in range(node.low):\n"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_function_beside_it_does_not_do_the_work(server: ForkServer, name: str) -> None:
    """Where cases are tried, the twins of an exercise's functions in its file are blank, too."""
    exercise, (old, new) = find(name), TWINS[name]
    reference = exercise.path.read_text(encoding="utf-8")
    assert old in reference
    verdict = check(exercise, reference.replace(old, new), server)
    assert verdict.state == "fails" and MASKED in message_of(verdict)


@pytest.mark.slow
def test_a_value_is_judged_elsewhere(server: ForkServer) -> None:
    """A case's process can say what it likes, but must say the value."""
    cheats = {
        "class Yes(list):\n    def __eq__(self, other):\n        return True\nreturn Yes()": "",
        "import pytest\npytest.skip('x')": "Skipped: x",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
        "import os\nos._exit(0)": "ended with status 0 in a case",
        "while True:\n    pass": "no end after 5 s of work in a case",
    }
    for body, says in cheats.items():
        verdict = run(find(EASY), solved(body), find(EASY).tests, server, 60)
        assert verdict.state == "fails" and says in message_of(verdict), body
