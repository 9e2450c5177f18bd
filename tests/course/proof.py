"""The proof of an exercise: the reference passes, the blank fails, and so does every planted mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from phases import PHASES, ROOT, Phase
from phases.course.blanks import blank, graft
from phases.course.checking import Verdict, check, run
from phases.course.exercises import Exercise, exercises, questions
from phases.course.fork_server import ForkServer
from tests.course.slips import Slip, slips_of

PAGE = ROOT / "tests" / "course" / "README.md"
SECTION = re.compile(r"<!-- exercises: (\d\d) -->\n(.*?)<!-- /exercises -->\n*", re.DOTALL)
SUMMARY = re.compile(r"(<!-- exercises: summary -->\n).*?(<!-- /exercises -->)", re.DOTALL)
ROW = re.compile(r"^\| (\d\d\.\d+) \| [^|]* \| [^|]* \| \d+ \| \d+ s \| (.*?) \|$", re.M)
BLOCK = re.compile(r"(<!-- exercises -->\n)(.*?)(<!-- /exercises -->)", re.DOTALL)
HEAD = (
    "| id | exercise | functions | points | reference | planted mistakes, and what finds them |",
    "| --- | --- | --- | ---: | ---: | --- |",
)
END = "<!-- /exercises -->"
UNTRIED = "Not tried out yet: "
SHOWN = ""
HIDDEN = " (hidden)"
LATER = " (later phase)"


@dataclass(frozen=True)
class Fate:
    """What became of one mistake: by which test it was found, and whether a student sees that test."""

    name: str
    found: str
    how: str
    message: str = ""


@dataclass(frozen=True)
class Proof:
    """What was tried out of one exercise."""

    exercise: Exercise
    seconds: float
    fates: tuple[Fate, ...]
    wrong: tuple[str, ...]
    """What is not as it should be; empty for a proof."""


def reference_passes(exercise: Exercise, server: ForkServer) -> Verdict:
    """The verdict on the reference's own functions, with hidden tests."""
    return check(exercise, exercise.path.read_text(encoding="utf-8"), server, hidden=True)


def blank_fails(exercise: Exercise, server: ForkServer) -> Verdict:
    """The verdict on blank functions when they are run."""
    source = exercise.path.read_text(encoding="utf-8")
    text = blank(source, dict.fromkeys(exercise.functions, exercise.id))
    return run(exercise, text, exercise.tests, server)


def slip_fails(exercise: Exercise, slip: Slip, server: ForkServer) -> tuple[Verdict, Fate]:
    """The verdict on a planted mistake."""
    planted = slip.plant(exercise)
    assert (
        graft(exercise.path.read_text(encoding="utf-8"), planted, exercise.functions)
        == planted
    ), f"{exercise.id} {slip.name} is not in the exercise's functions"
    verdict = check(exercise, planted, server, hidden=True)
    failure = verdict.failure
    if failure is None:
        return verdict, Fate(slip.name, "", "")
    whole = failure.test.partition(" of phase ")[0]
    test = whole.partition("[")[0]
    shown = any(node.split("::")[-1] in (test, whole) for node in exercise.tests)
    hidden = not shown and any(
        node.split("::")[-1] in (test, whole) for node in exercise.hidden
    )
    how = LATER if verdict.state == "breaks a later phase" else HIDDEN if hidden else SHOWN
    found = f"`{test}`" if test else "a case" if failure.call else "the time limit"
    if verdict.state == "refused":  # it was not tried
        found = ""
    return verdict, Fate(
        slip.name,
        found,
        how,
        failure.message or f"expected {failure.expected}, got {failure.got}",
    )


def prove(exercise: Exercise, server: ForkServer) -> Proof:
    """Try everything out."""
    wrong = []
    fates = []
    before = server.seconds
    verdict = reference_passes(exercise, server)
    seconds = server.seconds - before  # of work: the machine may be busy
    if not verdict.right:
        wrong.append(f"the reference {verdict.state}: {verdict.failure}")
    if seconds > 60:
        wrong.append(f"its tests take {seconds:.0f} s")
    if blank_fails(exercise, server).right:
        wrong.append("the blank passes")
    slips = slips_of(exercise)
    if len(slips) < 5:
        wrong.append(f"{len(slips)} mistakes are planted, not 5")
    for slip in slips:
        verdict, fate = slip_fails(exercise, slip, server)
        fates.append(fate)
        if verdict.state not in ("fails", "breaks a later phase"):
            wrong.append(f"{slip.name} {verdict.state}: {verdict.failure}")
    return Proof(exercise, seconds, tuple(fates), tuple(wrong))


def written(page: str, proofs: Iterable[Proof]) -> str:
    """The page with the rows of these exercises, and the summary, made anew; other rows stay as they are."""
    rows = {found[1]: found[0] for found in ROW.finditer(page)} | {
        one.exercise.id: _row(one) for one in proofs
    }
    head = SECTION.sub("", page).rstrip("\n")
    known = [one for one in exercises() if one.id in rows]
    parts = []
    for phase in PHASES:
        own = [rows[one.id] for one in known if one.phase is phase]
        if own:
            title = f"## {phase.number:02d} · {phase.title}"
            parts.append(
                "\n".join(
                    [
                        f"<!-- exercises: {phase.number:02d} -->",
                        title,
                        "",
                        *HEAD,
                        *own,
                        END,
                        "",
                    ]
                )
            )
    page = head + "\n\n" + "\n".join(parts)
    told = recorded(page)
    lines = [
        "| phase | exercises | points | planted | killed |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for phase in PHASES:
        mine = [one for one in known if one.phase is phase]
        fates = [fate for one in mine for fate in told[one.id].values()]
        points, title = sum(one.points for one in mine), f"{phase.number:02d} · {phase.title}"
        if mine:
            lines.append(f"| {title} | {len(mine)} | {points} | {len(fates)} | {sum(fates)} |")
    left = [one.id for one in exercises() if one.id not in rows]
    if left:
        lines += ["", f"{UNTRIED}{', '.join(left)}."]
    return SUMMARY.sub(lambda found: found[1] + "\n".join(lines) + "\n" + found[2], page)


def untried(page: str) -> list[str]:
    """The exercises of which the page says that they were not tried out yet."""
    found = re.search(rf"^{UNTRIED}(.*)\.$", page, re.M)
    return found[1].split(", ") if found else []


def _row(proof: Proof) -> str:
    one = proof.exercise
    names = ", ".join(f"`{name}`" for name in one.functions)
    fates = "; ".join(
        f"`{fate.name}`: {fate.found or '**lives**'}{fate.how}" for fate in proof.fates
    )
    return f"| {one.id} | {one.title} | {names} | {one.points} | {max(1, proof.seconds):.0f} s | {fates} |"


def short(name: str, phase: Phase) -> str:
    """A method's name without its class, unless exercises of the phase ask for two of this name."""
    asked = [
        function for one in exercises() if one.phase is phase for function in one.functions
    ]
    last = name.rpartition(".")[2]
    twice = sum(function.rpartition(".")[2] == last for function in asked) > 1
    return name if twice else last


def block(phase: Phase) -> str:
    """The exercises of a phase as its lesson lists them."""
    lines = [
        f"`ladder course make DIR --phases {phase.number:02d}` copies the code with blanks for the functions",
        "below. `ladder course check` tests what you write ([how](../../docs/coursework.md)).",
        "",
        "| id | write | points |",
        "| --- | --- | ---: |",
    ]
    for one in exercises():
        if one.phase is phase:
            names = ", ".join(f"`{short(name, phase)}`" for name in one.functions)
            lines.append(f"| {one.id} | {one.title}: {names} | {one.points} |")
    asked = [one for one in questions() if one.phase is phase]
    if asked:
        each = " and ".join(
            f"{one.id} ({'predict' if 'p' in one.id else 'measure'}, {one.points} points)"
            for one in asked
        )
        lines += [
            "",
            f"Answer {each}. `ladder course answer {asked[0].id}` asks the question.",
        ]
    return "\n".join(lines) + "\n"


def listed(phase: Phase) -> str | None:
    """What a lesson lists between its marks, or None where it has none."""
    found = BLOCK.search((phase.folder / "README.md").read_text(encoding="utf-8"))
    return found[2] if found else None


def list_them(phase: Phase) -> None:
    """Write the list between a lesson's marks."""
    path = phase.folder / "README.md"
    text = path.read_text(encoding="utf-8")
    path.write_text(
        BLOCK.sub(lambda found: found[1] + block(phase) + found[3], text), encoding="utf-8"
    )


def recorded(page: str) -> Mapping[str, Mapping[str, bool]]:
    """For each exercise that the page names: its planted mistakes, and whether they were found."""
    found: dict[str, dict[str, bool]] = {}
    for row in ROW.finditer(page):
        fates = re.findall(r"(?:^|; )`([^`]+)`: (\*\*lives\*\*)?", row[2])
        found[row[1]] = {name: not lives for name, lives in fates}
    return found
