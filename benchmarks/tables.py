"""Fill in the tables of the READMEs from the evidence, so that no number in them is typed by hand.

A table stands between two comments in a Markdown file:

    <!-- table: ladder -->
    <!-- /table -->

    <!-- table: cpu/02_kv_cache workload=generate-256 columns=output_tokens_per_s,ttft_ms_p50 -->
    <!-- /table -->

`ladder` is the list of phases with what they answer, `gains` that with their gains on every device.
`peers NAME` compares an evidence file's phase with other engines. They have a file of their own
(`benchmarks.recorded_peers`), and the best of each
follows our rows in a table that chooses no variant. Any other name is an evidence file; words with `=` choose
its runs (variant, workload, model, dtype or an option) and `columns` its metrics, to which `gain` (over the
first row), `roofline` and `microseconds` (of the metric `seconds`) can be added. `rows` names options to show
(`rows=batch`) or `workload`, `sort` an option to sort by. A word with spaces is quoted (`"workload=a name"`).
`python -m benchmarks.tables` fills all tables in. A
table with `when=recorded` is empty until its file or its runs exist. `figure NAME "what it shows"`
is a figure, once it is drawn. `evidence` lists the files with commit, age, host and samples, and `others` the
peers with their dates, versions and flags.

`<!-- map -->` and `<!-- /map -->` hold the tree of the phases, in a lesson with its own phase marked. Numbers
in sentences are `benchmarks.numbers`, code is `benchmarks.excerpts`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import mode

from benchmarks import excerpts, numbers, records
from benchmarks.evidence import RESULTS, ROOT, Evidence, Run, results
from benchmarks.gains import factor_text, gain, gain_words, hides_appendix
from benchmarks.labels import axis_label, number, scale_of
from benchmarks.recorded_peers import PeerRun, beside, better, first_metric, versus
from common.errors import UserError
from common.files import whole
from phases import PHASES, Phase

TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?(<!-- /table -->)", re.DOTALL)
MAP = re.compile(r"^(<!-- map -->\n).*?^(<!-- /map -->)$", re.DOTALL | re.MULTILINE)
USUAL = "output tokens per second"
"""What a gain is of unless its note says otherwise."""
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


AGES = re.compile(r"^(\|.*\| `[0-9a-f]{8}` \|.*\|)[^|]*\|$", re.MULTILINE)
"""Rows of the table of evidence up to their last cell, commits behind, which changes with every commit."""
SERVERS = ROOT / "benchmarks" / "other_engines" / "recorded" / "llama_cpp_server.json"
PLACE = RESULTS.relative_to(ROOT)


def fill(text: str, root: Path = ROOT, file: Path | None = None) -> str:
    """`text` with every table in it made again. `file` says from where links to lessons start."""
    up = "../" * len(file.parent.relative_to(root).parts) if file else ""

    def filled(found: re.Match[str]) -> str:
        words = shlex.split(found[2])
        if words == ["evidence"] and not records.has_history(root):
            return found[0]
        return found[1] + _table(words, root, up) + found[3]

    # Every second piece is a block of code, in which comments are examples.
    pieces = FENCE.split(text)
    pieces[::2] = [TABLE.sub(filled, piece) for piece in pieces[::2]]
    return "".join(pieces)


def fill_all(root: Path = ROOT, *, write: bool = True) -> list[Path]:
    """Make tables and excerpts of code in all Markdown files again; returns the files that change."""
    changed = []
    for path in markdown_files(root):
        old = path.read_text(encoding="utf-8")
        new = numbers.fill(excerpts.fill(fill(old, root, path), path.parent))
        new = MAP.sub(lambda found: found[1] + phase_map(path.parent.name) + found[2], new)  # noqa: B023
        if AGES.sub(r"\1", new) != AGES.sub(r"\1", old) or (write and new != old):
            changed.append(path)
            if write:
                with whole(path) as scratch:
                    scratch.write_text(new, encoding="utf-8")
    return changed


def markdown_files(root: Path = ROOT) -> list[Path]:
    """The READMEs and documents of the checkout, without those of an environment inside it."""
    folders = [root / name for name in ("phases", "docs", "benchmarks", "notebooks", "tests")]
    found = [path for folder in folders for path in folder.rglob("*.md")]
    return sorted([*root.glob("*.md"), *found])


def _table(words: Sequence[str], root: Path, up: str) -> str:
    match words:
        case ["ladder"]:
            return _ladder(root, up)
        case ["gains"]:
            return _gains(root, up)
        case ["evidence"]:
            return _markdown(records.evidence_lines(root), text_columns=5)
        case ["llama_cpp_server"]:
            return _markdown(records.server_lines(Evidence.load(SERVERS)), text_columns=1)
        case ["others"]:
            return _markdown(records.peer_lines(root), text_columns=7)
        case ["peers", name]:
            return _peers(root / PLACE / f"{name}.json", root)
        case ["figure", name, *shows]:
            path = f"figures/{name}.png"
            said = shows[0] if shows else f"What was measured: {name}"
            return f"![{said}]({up}{path})\n" if (root / path).exists() else ""
    return _runs(words, root / PLACE)


def _runs(words: Sequence[str], folder: Path) -> str:
    """Runs of an evidence file, a row each."""
    path = folder / f"{words[0]}.json"
    if patient := "when=recorded" in words:
        words = [word for word in words if word != "when=recorded"]
        if not path.exists():
            return ""
    for word in words[1:]:
        if "=" not in word:
            raise UserError(f"the table {' '.join(words)} says {word!r}, which has no value")
    settings = dict(word.split("=", 1) for word in words[1:])
    columns = settings.pop("columns", "output_tokens_per_s").split(",")
    order = settings.pop("sort", None)
    shown = [name for name in settings.pop("rows", "").split(",") if name]
    evidence = Evidence.load(path)
    others = [] if "variant" in settings else beside(evidence, folder)
    runs = [run for run in [*evidence.runs, *others] if _matches(run, settings)]
    if order is not None:
        runs.sort(key=lambda run: run.options[order])
    if not runs and patient:
        return ""
    if not runs:
        raise UserError(
            f"the table {' '.join(words)} has no rows: no run of the evidence matches"
        )
    heads = [name.replace("_", " ") for name in shown]
    lines = [["variant", *heads, *(SPECIAL.get(name) or axis_label(name) for name in columns)]]
    for run in runs:
        said = (run.facts.get(name) for name in shown)
        cells = ["" if value is None else str(value) for value in said]
        cells += [_cell(run, runs[0], name, columns[0]) for name in columns]
        lines.append([run.variant, *cells])
    notes = ["With the appendix.\n"] if hides_appendix(evidence) else []
    peers = [run for run in runs if isinstance(run, PeerRun) and run.lacks]
    notes += dict.fromkeys(f"{run.variant} of {run.when} {PARTIAL}\n" for run in peers)
    return "\n".join([_markdown(lines, text_columns=1), *notes])


QUESTIONS = """\
How does a token come out of weights?
Why compute a token twice?
Why does one user pay for all the weights?
Why should a short answer wait for a long one?
Who reserved all that memory, and for what?
What does the GPU do between two operators?
Why does everybody stall when a long prompt comes?
Why compute the same beginning for everyone?
Who is waiting: the host or the device?
How few bits does a weight need?
Can one step make several tokens?
How can an answer be forced to parse?
What stands between an engine and its users?
What if a model is too large, or too slow, for one GPU?
Which copy of a server should get a request?
How can a model have more weights than it reads?
What if layers remember less than all?
Why does company change an answer?
Where does a block go when the GPU is full?
"""
"""What the phases answer, in order; the table of a later one has its summary."""
PARTIAL = "ran without parts of what it requires; docs/evidence.md names them."
SPEED = (6, 9, 14)
"""Phases whose speed needs a GPU."""
HOURS = re.compile(r"^\| \[(\d\d) .*?\| (\d+) \|", re.MULTILINE)
"""Of each phase in `docs/paths.md`."""


def _link(phase: Phase, root: Path, up: str) -> str:
    """A phase's number and title, with a link to its lesson where there is one."""
    lesson = f"phases/{phase.name}/README.md"
    short = f"{phase.number:02d} {phase.title}"
    return f"[{short}]({up}{lesson})" if (root / lesson).exists() else short


def _ladder(root: Path, up: str) -> str:
    """The phases with what each answers, its hours, and whether it needs a GPU."""
    hours = dict(HOURS.findall((root / "docs" / "paths.md").read_text(encoding="utf-8")))
    lines = [["phase", "what it answers", "hours", "GPU"]]
    for phase, question in zip_longest(PHASES, QUESTIONS.splitlines()):
        needs = "for its speed" if phase.number in SPEED else "no"
        spent = hours.get(f"{phase.number:02d}", "")
        lines.append([_link(phase, root, up), question or phase.summary, spent, needs])
    return _markdown(lines, text_columns=2)


def _gains(root: Path, up: str) -> str:
    """The phases with their gains as bare factors, and below them what each factor is of.

    The model of most gains on a device and the usual metric are named once.
    """
    found = {
        device: {phase: gain(phase, files.get(phase.name)) for phase in PHASES}
        for device, files in results(root / PLACE).items()
    }
    usual = {
        device: mode([*(one.after.model for one in gains.values() if one), ""])
        for device, gains in found.items()
    }
    models = ", ".join(f"{model} on {device}" for device, model in usual.items() if model)
    said = [f"Of output tokens a second, with {models}, unless said:", ""]
    lines = [["phase", "what it adds", *found]]
    for phase in PHASES:
        factors = [factor_text(gains[phase]) for gains in found.values()]
        lines.append([_link(phase, root, up), phase.summary, *factors])
        works, metrics = [], set()
        for device, gains in found.items():
            if one := gains[phase]:
                run = one.after
                model = "" if run.model == usual[device] else f" with {run.model}"
                works.append(f"{run.workload}{model} ({device})")
                metrics.add(gain_words(one.metric))
        if works:
            words = [f"{phase.number:02d}", *(metrics - {USUAL}), ", ".join(works)]
            said.append(f"- {': '.join(words)}")
    return "\n".join([_markdown(lines, text_columns=2), *said, ""])


def _peers(path: Path, root: Path) -> str:
    """Each workload that another engine ran too: the best of each engine, this course's engines, and the
    factor of the slowest of these that ran it over the best of the others.

    Below it what the engines' installations lacked.
    """
    evidence = Evidence.load(path)
    others = beside(evidence, root / PLACE)
    columns = list(dict.fromkeys(_column(run) for run in others))
    own = evidence.own()
    lines = [["workload", "model", *columns, *own, "our least over their best"]]
    shown: list[PeerRun] = []
    for model, workload in dict.fromkeys((run.model, run.workload) for run in others):
        found = [run for run in others if (run.model, run.workload) == (model, workload)]
        metric = first_metric(found[0])
        tried = [evidence.find(v, workload, model=model)[:1] for v in own.values()]
        ours = [run for runs in tried for run in runs]
        if not ours:
            continue
        theirs = {_column(run): f"{_value(run, metric)} ({run.version})" for run in found}
        rivals = [run for run in found if not run.way] or found
        choose, least = (min, max) if better(metric, 0.0, 1.0) else (max, min)
        best = choose(rivals, key=lambda run: run.median(metric))
        worst = least(ours, key=lambda run: run.median(metric))
        cells = [theirs.get(name, "") for name in columns]
        cells += [_value(runs[0], metric) if runs else "–" for runs in tried]
        said = versus(worst, best, metric) + (", with the appendix" if "–" in cells else "")
        lines.append([workload, model, *cells, said])
        shown += found
    notes = dict.fromkeys(
        f"{run.engine} {run.version} of {run.when} ran without: {run.lacks}.\n"
        for run in shown
        if run.lacks
    )
    return "\n".join([_markdown(lines, text_columns=2), *notes])


def _column(run: PeerRun) -> str:
    return f"{run.engine}, {run.way}" if run.way else run.engine


def _value(run: Run, metric: str) -> str:
    return number(run.median(metric)) + (" ms" if metric.startswith("ttft") else "")


def _matches(run: Run, settings: dict[str, str]) -> bool:
    # Not split: names of variants have commas.
    return all(f",{run.facts.get(name)}," in f",{value}," for name, value in settings.items())


SPECIAL = {"gain": "gain", "roofline": "share of roofline", "microseconds": "µs"}
"""Heads of columns that are no metrics."""


def _cell(run: Run, first: Run, name: str, metric: str) -> str:
    if name == "roofline":
        return f"{run.roofline_share:.0%}" if run.roofline_share else ""
    if name == "gain":
        if metric not in run.metrics or not first.median(metric):
            return ""
        return f"{run.median(metric) / first.median(metric):.2f}×"
    name, scale = ("seconds", 1e6) if name == "microseconds" else (name, scale_of(name))
    return number(run.median(name) * scale) if name in run.metrics else ""


def _markdown(lines: Sequence[Sequence[str]], text_columns: int) -> str:
    rule = [" --- " if column < text_columns else " ---: " for column in range(len(lines[0]))]
    head, *rest = ("| " + " | ".join(line) + " |\n" for line in lines)
    return head + "|" + "|".join(rule) + "|\n" + "".join(rest)


TREE = """\
trunk       01 ── 02 ── 03 ── 04 ── 05 ── 07 ── 08 ── 13
GPU                                 └─ 06 ── 09
branches    10    11    12    18  behind 09    14    15    16    17    19  behind 13
"""
"""The tree of phases: on the trunk each needs those before it; a branch can be read behind its root."""


def phase_map(folder: str) -> str:
    """Return the tree of the phases as a block of text, with the phase of this folder in brackets."""
    here = folder[:2]
    tree = re.sub(rf" {here}(?: |$)", f"[{here}]", TREE, count=1, flags=re.MULTILINE)
    place = [f"you are here: {here} {one.title}\n" for one in PHASES if one.name == folder]
    return "".join(["```\n", tree, *place, "```\n"])


if __name__ == "__main__":
    print(*fill_all(), sep="\n")
