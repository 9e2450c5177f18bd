"""The table of planted bugs in `docs/planted_bugs.md`, written by the runs themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phases import PHASES
from tests.planted.planting import ROOT, Bug, Outcome

PAGE = ROOT / "docs" / "planted_bugs.md"
SUMMARY = re.compile(r"(<!-- planted: summary -->\n).*?(<!-- /planted -->)", re.DOTALL)
SECTIONS = re.compile(r"<!-- planted: (\d\d) -->\n(.*?)<!-- /planted -->\n*", re.DOTALL)
ROW = re.compile(r"^\| `([^`]+)` \| (.*) \|$", re.M)
LIVES = "**survives**"


def recorded(page: str, phase: str) -> dict[str, bool]:
    """For each bug of a phase that the page names: whether it was killed."""
    sections = {found[1]: found[2] for found in SECTIONS.finditer(page)}
    return {row[1]: LIVES not in row[2] for row in ROW.finditer(sections.get(phase, ""))}


def written(page: str, phase: str, outcomes: Mapping[Bug, Outcome]) -> str:
    """The page with this phase's section, and the summary, made anew; other phases' stay as they are."""
    sections = {found[1]: found[2] for found in SECTIONS.finditer(page)}
    sections[phase] = _section(phase, outcomes)
    head = SECTIONS.sub("", page).rstrip("\n")
    parts = [f"<!-- planted: {name} -->\n{sections[name]}<!-- /planted -->\n" for name in sorted(sections)]
    page = head + "\n\n" + "\n".join(parts)
    lines = ["| phase | planted | killed | alive |", "| --- | ---: | ---: | --- |"]
    for name in sorted(sections):
        bugs = recorded(page, name)
        alive = ", ".join(f"`{bug}`" for bug, killed in bugs.items() if not killed)
        lines.append(f"| {_title(name)} | {len(bugs)} | {sum(bugs.values())} | {alive} |")
    return SUMMARY.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], page)


def _section(phase: str, outcomes: Mapping[Bug, Outcome]) -> str:
    lines = [f"## {_title(phase)}", "", "| bug | the mistake | found by |", "| --- | --- | --- |"]
    for bug, outcome in outcomes.items():
        if outcome.verdict == "killed":
            test, message = outcome.test.partition("[")[0], _cell(outcome.message, 110)
            fate = f"`{test}`: {message}"
        else:
            fate = f"{LIVES}: {_cell(bug.unseen or outcome.verdict)}"
        lines.append(f"| `{bug.name}` | {_cell(bug.mistake)} | {fate} |")
    return "\n".join(lines) + "\n"


def _title(phase: str) -> str:
    return next(f"{phase} · {known.title}" for known in PHASES if known.number == int(phase))


def _cell(text: str, longest: int = 1000) -> str:
    """Text that a table's cell holds as it is: no columns, no markup, no links."""
    text = text if len(text) <= longest else text[: longest - 1].rstrip() + "…"
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", text)
