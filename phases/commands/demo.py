"""`ladder demo`: one real model climbs the ladder, and a table says what each rung was worth."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import pairwise

import torch
from rich.rule import Rule

from benchmarks.roofline import ceilings, generation_work, ideal_seconds
from common.console import err, out, table
from common.device import pick_device, pick_dtype
from common.models.hub import model_folder
from common.neighbours import share, usage, warn
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from phases import PHASES, Phase
from phases.commands import demo_server
from phases.commands.demo_rungs import ELSEWHERE, MEMORY_ROWS, ROUNDS, SHOWS, Counter, RungWork, change, load
from phases.commands.engines import Served, serve
from phases.registry import ROWS, missing_for

RULES = (
    "You are a helpful assistant who answers a question about the world, about animals, food, colors, "
    "numbers and places. Answer in one short and friendly sentence, with no list, no explanation and nothing "
    "that was not asked for."
)
"""Before every question: what all prompts begin with is what phase 08 computes once."""
QUESTION = "What is the capital of France? Answer in one sentence."
OTHERS = (
    "What is the largest planet in the solar system?",
    "How many days are there in a week?",
    "What color is the sky on a clear day?",
    "What is the opposite of hot?",
    "Which animal says meow?",
    "What do bees make?",
    "Repeat these words: red, green, blue, red, green, blue, red, green, blue.",
)
MAX_TOKENS = 20
MEANINGLESS = 0.1
"""The others' share of the processor beyond which a speed says more about them."""


@dataclass(frozen=True)
class Rung:
    """One phase's turn. busy: the others' share of the processor meanwhile."""

    phase: Phase
    served: Served
    work: RungWork
    fraction: float
    busy: float


def run(model: str, device: str, dtype: str) -> int:
    """Fetch the model, answer the same questions with every phase that runs here, print the table."""
    begun = usage()
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    folder = model_folder(model)
    tokenizer = Tokenizer(folder)
    questions = [QUESTION, *OTHERS]
    rules = {"role": "system", "content": RULES}
    prompts = [tokenizer.chat([rules, {"role": "user", "content": question}]) for question in questions]
    loaded = load_model(str(folder), device=str(where), dtype=str(kind).removeprefix("torch."))
    top = ceilings(where, kind)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    out.print(f"[bold]{QUESTION}[/bold]")
    out.print(
        f"[dim]{model} on {where}, {len(questions)} questions at once; the first answer is shown.[/dim]"
    )
    warn(begun)
    rungs: list[Rung] = []
    for phase in PHASES:
        if phase.number not in SHOWS:
            continue
        missing = missing_for(phase, where)
        if missing:
            out.print(f"[dim]{phase.name} is left out: it needs {missing}[/dim]")
            continue
        show = SHOWS[phase.number]
        made_with = f" (here with {show.option[0]} {show.option[1]})" if show.option else ""
        out.print(Rule(f"{phase.name}: {phase.title}", align="left", style="dim"))
        out.print(f"[dim]{show.why}{made_with}[/dim]")
        engine = load(phase, loaded)
        _warm(engine, tokenizer, prompts[:1])
        before = usage()
        with Counter(phase, engine) as counter:
            served = serve(engine, tokenizer, prompts, params, _Answers().show)
        out.file.write("\n")
        lengths = [len(completion.token_ids) for completion in served.completions]
        work = generation_work(loaded.config, kind, [len(p) for p in prompts], lengths, batch=len(prompts))
        fraction = ideal_seconds(work, top) / served.seconds
        rungs.append(Rung(phase, served, counter.work, fraction, share(before, usage())))
        out.print(f"[dim]{change(phase, rungs[-2].work if rungs[1:] else None, counter.work)}[/dim]")
        del engine, counter
        gc.collect()  # the next engine may want the memory of this one's cache
    _summary(rungs, where)
    return demo_server.run(model, str(where), dtype)


class _Answers:
    """Writes the first answer as it comes, and then a dot for each of the others."""

    def __init__(self) -> None:
        self.index = 0

    def show(self, index: int, text: str) -> None:
        if index == 0:
            out.file.write(text)
        elif index != self.index:
            out.file.write("  ." if self.index == 0 else ".")
            self.index = index
        out.file.flush()


def _warm(engine: object, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    """The first steps pay for allocations and compilation, which are not what is compared."""
    other = [list(reversed(prompt)) for prompt in prompts]  # nothing that a prefix cache would find later
    serve(engine, tokenizer, other, SamplingParams(max_tokens=2))  # type: ignore[arg-type]


def _summary(rungs: list[Rung], device: torch.device) -> None:
    if not rungs:
        err.print("No phase runs here: see `ladder doctor`.")
        return
    answer = rungs[-1].served.completions[0].text.strip()
    out.print(Rule(style="dim"))
    out.print(f"[bold]{QUESTION}[/bold]\n{answer}\n", markup=True)
    made = table("Phase", "What it is for, in this run", right=("tokens/s", "roofline"))
    for before, rung in pairwise([None, *rungs]):
        assert rung is not None
        rate = f"{rung.served.tokens_per_second:,.1f}{'*' if rung.busy > MEANINGLESS else ''}"
        shown = change(rung.phase, before.work if before else None, rung.work) or "the speed, on a GPU"
        made.add_row(rung.phase.name, shown, rate, f"{rung.fraction:.0%}")
    out.print(made)
    elsewhere = "; ".join(f"{number}: {command}" for number, command in ELSEWHERE.items())
    out.print(
        f"[dim]All questions together, on {device}. Roofline: share of what it could do at best. Each rung "
        f"has those below it, and from phase {ROWS:02d} on the memory of {MEMORY_ROWS} rows. Not in this "
        f"table, as its questions do not show them: {elsewhere}[/dim]"
    )
    worst = max(rung.busy for rung in rungs)
    if worst > MEANINGLESS:
        out.print(
            f"[yellow]* Other programs took up to {worst:.0%} of the processor: these speeds say more about "
            "them than about the phases. The counts beside them stay as they are.[/yellow]"
        )
    plain = [rung for rung in rungs if rung.phase.number != ROUNDS]
    texts = {tuple(tuple(c.token_ids) for c in rung.served.completions) for rung in plain}
    if len(texts) == 1:
        out.print("[dim]Every phase gave the same answers, token for token (but for 8-bit weights).[/dim]")
