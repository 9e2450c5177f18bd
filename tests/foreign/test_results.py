"""The list of what other projects' tests said: every case that has not passed has a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.foreign.__main__ import RESULTS, read
from tests.foreign.suites import SUITES, Suite

EVERY = json.loads(RESULTS.read_text(encoding="utf-8"))
REPORT = """<testsuites><testsuite>
<testcase classname="unit.test_a" name="test_good"/>
<testcase classname="unit.test_a" name="test_bad"><failure message="asks for /slots
here">...</failure></testcase>
<testcase classname="unit.test_a" name="test_odd"><error message="what"/></testcase>
<testcase classname="unit.test_a" name="test_not"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize("name", EVERY)
def test_every_case_that_has_not_passed_has_a_reason(name: str):
    assert name in SUITES
    cases = EVERY[name]["cases"]
    bare = [
        case
        for case, found in cases.items()
        if found["result"] != "passed" and not found.get("reason")
    ]
    assert not bare, f"{name} has cases that have neither passed nor a reason: {bare[:5]}"
    assert any(found["result"] == "passed" for found in cases.values()), (
        f"nothing of {name} has passed"
    )


def test_a_report_is_read(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    suite = Suite(
        "toy", ".", (), reasons=(("/slots", "asks for a route that only that server has"),)
    )
    found = read(suite, report)
    assert found["unit/test_a::test_good"] == {"result": "passed"}
    assert (
        found["unit/test_a::test_bad"]["reason"]
        == "asks for a route that only that server has"
    )
    assert found["unit/test_a::test_odd"]["result"] == "failed"
    assert "reason" not in found["unit/test_a::test_odd"], (
        "a failure nobody has looked at has no reason"
    )
    assert found["unit/test_a::test_not"]["reason"] == "the suite itself skips it"
