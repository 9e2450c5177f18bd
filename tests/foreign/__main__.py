"""`python -m tests.foreign SUITE CHECKOUT`: a foreign suite against our server, and its results in a file."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from common.models.hub import model_folder
from tests.foreign.suites import SUITES, Files, Suite
from tests.servers import Running

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SECONDS = 180
"""For one case."""
SERVER = (
    "--max-len",
    "2048",
    "--max-rows",
    "16",
    "--cache-bytes",
    str(1 << 28),
    "--access-log",
    "none",
)


def main() -> int:
    """Run one suite; returns 1 if a case has neither passed nor a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("checkout", type=Path, help="folder of the project's sources")
    parser.add_argument(
        "--python", default=sys.executable, help="an interpreter with what the suite imports"
    )
    parser.add_argument("--version", default="", help="of the sources, to be written down")
    args = parser.parse_args()
    suite, cases = SUITES[args.suite], dict[str, dict[str, str]]()
    for group in suite.groups:
        cases |= run(suite, group, args.checkout, args.python)
        write(suite, args.version, cases)
    unknown = [
        name
        for name, case in cases.items()
        if case["result"] != "passed" and "reason" not in case
    ]
    print(f"{suite.name}: {dict(Counter(case['result'] for case in cases.values()))}")
    for name in unknown:
        print(f"  {name}: {cases[name].get('message', '')}")
    return int(bool(unknown))


def run(suite: Suite, group: Files, checkout: Path, python: str) -> dict[str, dict[str, str]]:
    """Serve, run the files, read what came of each case."""
    folder = (checkout / suite.folder).resolve()
    with (
        Running("--name", group.model, *SERVER, *group.flags, model="smollm2") as server,
        tempfile.TemporaryDirectory() as scratch,
    ):
        report = Path(scratch) / "report.xml"
        words = {
            "port": str(server.port),
            "url": server.url,
            "folder": str(model_folder("smollm2")),
        }
        env = {name: text.format(**words) for name, text in suite.env.items()}
        paths = [str(folder / path) for path in env.pop("PYTHONPATH", "").split(":") if path]
        env["PYTHONPATH"] = os.pathsep.join(paths)
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        command += [f"--rootdir={folder}", f"--timeout={SECONDS}"]
        command += ["-o", "addopts=", "-o", "asyncio_mode=auto"]
        subprocess.run([*command, *group.paths], cwd=folder, env=os.environ | env, check=False)
        return read(suite, report) if report.exists() else {}


def read(suite: Suite, report: Path) -> dict[str, dict[str, str]]:
    """Cases of a report, by `file::case`."""
    found: dict[str, dict[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name', '')}"
        bad = next(
            (child for child in case if child.tag in ("failure", "error", "skipped")), None
        )
        if bad is None:
            found[name] = {"result": "passed"}
            continue
        message = " ".join((bad.get("message") or "").split())[:300]
        one = {"result": "skipped" if bad.tag == "skipped" else "failed", "message": message}
        text = bad.text or ""
        reason = next(
            (why for part, why in suite.reasons if part in f"{name} {message}"), None
        )
        reason = reason or next((why for part, why in suite.reasons if part in text), None)
        if one["result"] == "skipped":
            reason = reason or "the suite itself skips it"
        found[name] = one | ({"reason": reason} if reason else {})
    return found


def write(suite: Suite, version: str, cases: dict[str, Any]) -> None:
    """Put the results of a suite beside those of the others."""
    every = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    cases = {  # without the messages: they quote the other project
        name: {key: case[key] for key in ("result", "reason") if key in case}
        for name, case in cases.items()
    }
    every[suite.name] = {"version": version, "cases": dict(sorted(cases.items()))}
    RESULTS.write_text(
        json.dumps(dict(sorted(every.items())), indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    sys.exit(main())
