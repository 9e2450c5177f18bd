"""The pages on the server say what it does: flags, limits, metrics, and a unit that loads."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import typer.main

from common.http.limits import Limits
from phases import ROOT
from phases.appendix.observability.exposition import lines
from phases.appendix.server import whole_app
from phases.cli import app
from phases.commands.flags import add_engine_flags
from serving.client import EngineClient
from tests.servers import tokenizer_for
from tests.serving_kit import metrics

SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
PAGES = SERVING + OPERATIONS
UNIT = re.search(r"```ini\n(.*?)```", OPERATIONS, re.DOTALL)[1]


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command].params
    return {name for param in found for name in (*param.opts, *param.secondary_opts)}


def engine_options() -> set[str]:
    def command() -> int:
        return 0

    add_engine_flags(command, server=True)
    return {"--" + name.replace("_", "-") for name in inspect.signature(command).parameters}


def test_every_limit_is_listed_with_its_default():
    rows = [line for line in OPERATIONS.splitlines() if line.startswith("|")]
    for limit in fields(Limits):
        flag = "--" + limit.name.replace("_", "-")
        line = next((row for row in rows if f"`{flag}`" in row), None)
        assert line is not None, f"the page says nothing of {flag}"
        value = limit.default
        shown = {4 << 20: "4 MiB", 64 << 10: "64 KiB"}.get(value, f"{value:,.0f}")
        assert shown in line, f"{flag} is {shown}, but the page says {line}"


def test_every_flag_exists():
    known = options_of("serve") | options_of("load") | options_of("run") | engine_options()
    ours = "\n".join(line for line in PAGES.splitlines() if "python -m " not in line)
    said = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours))
    assert said <= known, f"there is no {sorted(said - known)}"


def test_every_metric_exists(tmp_path: Path):
    app = whole_app(EngineClient(), tokenizer_for(tmp_path, 257), "tiny")
    there = "\n".join(lines(metrics(app)))
    for name in re.findall(r"`((?:vllm|ladder):\w+)`", PAGES):
        assert f"# TYPE {name} " in there, f"there is no metric {name}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path):
    folder = tmp_path / "units"
    folder.mkdir()
    ours = UNIT.replace(
        "/opt/inference-ladder/.venv/bin/ladder", shutil.which("true") or "/bin/true"
    )
    (folder / "ladder.service").write_text(ours)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(folder / "ladder.service")],
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if "ladder.service" in line]
    assert not said, said
