"""Cheats: each is refused by name, or found where it runs, and earns nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from phases.course.blanks import blank
from phases.course.checking import Verdict, check, run
from phases.course.grading import EARNED
from phases.course.guard import refusal
from phases.course.nursery import Nursery
from tests.course.slips import find, slips_of

EASY = "05.1"
"""An exercise whose tests take no time."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
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


CHEATS = {
    "ends the process": ("import os\nos._exit(0)", "imports os"),
    "ends it by another way": ("return torch.os._exit(0)", ".os"),
    "changes modules": ("import sys\nsys.modules.clear()", "imports sys"),
    "reads the reference": ("return eval(open('/x').read())", "uses eval"),
    "imports the reference": ("from importlib import util", "imports importlib"),
    "imports the tests": ("from tests.fakes import NOTHING", "imports tests.fakes"),
    "imports all": ("from heapq import *", "import *"),
    "skips": ("import pytest\npytest.skip('later')", "imports pytest"),
    "skips as unittest does": ("from unittest import SkipTest\nraise SkipTest", "imports unittest"),
    "skips as numpy does": ("import numpy\nraise numpy.testing.SkipTest", "uses numpy.testing"),
    "asks a twin": ("from prefix_cache.cache import PrefixCache", "imports prefix_cache.cache"),
    "a twin's module": ("from common.request import time\nreturn []", "imports common.request"),
    "climbs": ("return ().__class__", "uses .__class__"),
    "computes a name": ("return getattr(self, '__cl' + 'ass__')", "uses getattr in"),
    "computes a name in a loop": ("for name in ('a', 'b'):\n    name = name + '_'\n    getattr(self, name)",
        "uses getattr in"),
    "names it in a loop": ("for name in ('a', 'os'):\n    getattr(self, name)", "uses getattr in"),
    "hands getattr on": ("g = getattr\ng(self, 'x')", "uses getattr in"),
    "maps getattr": ("return list(map(getattr, [self], ['x']))", "uses getattr in"),
    "hands type on": ("t = type\nt('Y', (list,), {})", "uses type in"),
    "type of an object": ("return type(self.free)([])", "uses type in"),
    "type of type": ("return type(list)('Y', (list,), {})", "uses type in"),
    "sets a class's method": ("for each in (BlockAllocator, ):\n    each.release = None",
        "an assignment to .release of another object"),
    "sets what tests run": ("def put(owner):\n    owner.runtest = lambda self: None\nput(self)",
        "uses .runtest"),
    "sets any attribute": ("def put(owner):\n    owner.setup = None\nput(self)", "assignment to .setup"),
    "sets by a loop": ("for self.refs.x in [1]:\n    pass", "assignment to .x"),
    "another self": ("def put(self):\n    self.setup = None\nput(1)", "self outside of a method"),
    "self for another object": ("self = self.refs\nself.x = 1", "self for something else"),
    "replaces the reference": ("global BlockAllocator\nBlockAllocator = None", "uses global"),
    "uses the network": ("import socket", "imports socket"),
    "unpickles": ("import torch\ntorch.serialization.pickle.loads(b'')", "uses torch.serialization"),
    "hands a module on": ("import torch\nt = torch\nt.os", "uses torch"),
    "a module in a module": ("import enum\nreturn enum.bltns.open('x')", ".bltns"),
    "a private helper": ("import dataclasses\ndataclasses._create_fn('f', [], [])", "dataclasses._create_fn"),
    "reads a file": ("import numpy as np\nreturn np.genfromtxt('x')", "uses numpy.genfromtxt"),
    "maps a file": ("import torch\nreturn torch.from_file('x')", ".from_file"),
    "climbs by text": ("import operator\noperator.attrgetter('x')(self)", ".attrgetter"),
    "imports attrgetter": ("from operator import attrgetter", "imports operator.attrgetter"),
    "climbs by a format": ("import string\nstring.Formatter()", ".Formatter"),
    "makes a struct": ("import msgspec\nmsgspec.defstruct('S', [])", "imports msgspec"),
    "makes a class": ("import enum\nenum.Enum('E', {'__e' + 'q__': max})", "Enum called"),
    "climbs by pattern": ("match self.allocate:\n    case object(__globals__=g):\n        return g",
        ".__globals__"),
    "climbs by an annotation": ("x: 'eval(1)' = 1\nreturn x", "uses eval"),
    "registers an annotation": ("import functools\nfunctools.singledispatch(max)", ".singledispatch"),
    "copies names": ("import functools\nfunctools.update_wrapper(self, max)", ".update_wrapper"),
    "changes a judge": ("import math\nmath.isclose = lambda *a, **k: True", "changes math.isclose"),
    "changes all judges": ("import torch\ntorch.Tensor.equal = max", "changes torch.Tensor.equal"),
    "changes a table": ("from torch import nn\nnn.x['y'] = 1", "changes torch.nn.x"),
    "equals everything": ("class Yes:\n    def __eq__(self, other):\n        return True", "uses def __eq__"),
    "equals by a base": ("class Yes(list):\n    pass\nreturn Yes()", "list as a base"),
    "equals by a metaclass": ("class Yes(metaclass=max):\n    pass", "metaclass= of a class"),
    "equals, made": ("return type('Y', (list,), {'__e' 'q__': max})()", "uses type in"),
    "rounds all": ("import torch\ntorch.set_default_dtype(torch.float16)", ".set_default_dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("body", "says"), CHEATS.values(), ids=CHEATS.keys())
def test_a_cheat_is_refused_by_name(body: str, says: str) -> None:
    """Nothing of it is run: there is no process to run it."""
    verdict = check(find(EASY), solved(body), None, hidden=True)  # type: ignore[arg-type]
    assert says in message_of(verdict)
    assert verdict.state == "refused" and EARNED.get(verdict.state, 0) == 0


def test_what_reaches_out_beside_the_function_is_not_run() -> None:
    reference = find(EASY).path.read_text(encoding="utf-8")
    for before in (
        "import os",
        "END = exit",
        "G = getattr",
        "def helper(f=open):\n    return f",
    ):
        assert refusal(reference, solved("return []", before), ["BlockAllocator.allocate"])
    fine = "import math\n\nMOST = 3\n\n\ndef helper(x):\n    return math.ceil(x)\n"
    assert (
        refusal(reference, solved("return helper(1)", fine), ["BlockAllocator.allocate"]) == ""
    )


FINE = {
    "torch": "import torch\nimport torch.nn.functional as F\nfrom torch import Tensor, nn\n"
    "def helper(x: Tensor):\n    return F.relu(torch.nn.functional.softmax(x, -1)), nn.Linear(1, 1)",
    "numpy": "import numpy as np\ndef helper():\n    return np.random.default_rng(0), np.linalg.norm([1])",
    "standard": "import copy, heapq, itertools, math\nfrom collections import deque\ndef helper():\n"
    "    return copy.copy([]), heapq.nlargest(1, [1]), itertools.chain([1]), math.inf, deque()",
    "a class": "from dataclasses import dataclass\n@dataclass\nclass Box:\n    x: int\n"
    "    def __lt__(self, other):\n        return self.x < other.x",
    "attributes": "def helper(x):\n    x.refs[0] = 1\n    return x.free",
    "names of modules": "import math\ndef helper(input):\n    load = math.ceil(input)\n    return load",
}


@pytest.mark.parametrize("before", FINE.values(), ids=FINE.keys())
def test_honest_work_is_not_refused(before: str) -> None:
    reference = find(EASY).path.read_text(encoding="utf-8")
    assert refusal(reference, solved("return []", before), ["BlockAllocator.allocate"]) == ""


@pytest.mark.parametrize("name", ["05.1", "06.1", "08.1", "13.5"])
def test_what_the_reference_uses_is_allowed(name: str) -> None:
    exercise = find(name)
    reference = exercise.path.read_text(encoding="utf-8")
    assert refusal(reference, slips_of(exercise)[0].plant(exercise), exercise.functions) == ""


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
        "import os, pathlib\npathlib.Path('course-result.json').write_text('{}')\nos._exit(0)",
        "ended with status 0",
    ),
    "exits pytest": ("import pytest\npytest.exit('done', 0)", "was not run"),
    "kills": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
    "reaches out": (
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)",
        "is another machine",
    ),
    "chatters": ("while True:\n    print('x' * 1_000_000)", "File too large"),
    "takes all memory": ("return [0] * (20 << 30)", "MemoryError"),
}


EARLY = ("runs no test", "runs no test's function", "swallows")
"""Those that must run before the first test, when the file is imported."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_a_cheat_that_runs_earns_nothing(nursery: Nursery, name: str) -> None:
    """Were it not refused beforehand: nothing that it does in the tests' process makes it pass, or last."""
    (body, says), exercise = RUN[name], replace(find(EASY), cases=())
    cheat = "def cheat():\n" + "\n".join("    " + line for line in body.splitlines())
    source = solved("return cheat()", cheat + "\n\n\nDONE = cheat()" * (name in EARLY))
    verdict = run(exercise, source, exercise.tests, nursery)
    assert says in message_of(verdict)
    assert EARNED.get(verdict.state, 0) == 0


@pytest.mark.slow
def test_a_value_is_judged_elsewhere(nursery: Nursery) -> None:
    """A case's process can say what it likes, but must say the value."""
    cheats = {
        "class Yes(list):\n    def __eq__(self, other):\n        return True\nreturn Yes()": "",
        "import pytest\npytest.skip('x')": "Skipped: x",
        "raise KeyboardInterrupt": "KeyboardInterrupt",
        "import os\nos._exit(0)": "ended with status 0 in a case",
        "while True:\n    pass": "no end after 8 s of work in a case",
    }
    for (
        body,
        says,
    ) in cheats.items():  # a slow machine needs three seconds to get as far as that
        verdict = run(find(EASY), solved(body), find(EASY).tests, nursery, 8)
        assert verdict.state == "fails" and says in message_of(verdict), body
