"""`ladder demo`: one real model climbs the ladder, and a table says what each rung was worth."""

from __future__ import annotations

import gc
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from rich.rule import Rule

from benchmarks.roofline import ceilings, generation_work, ideal_seconds
from benchmarks.server import Server
from common.console import out, table
from common.device import pick_device, pick_dtype
from common.models.hub import model_folder
from common.neighbours import usage, warn
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from phases import PHASES, Phase
from phases.commands.demo_rungs import ELSEWHERE, MEMORY_ROWS, ROUNDS, SHOWS, change, counted, load
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


@dataclass(frozen=True)
class Rung:
    """One phase's turn. fraction: of what the device could do at best."""

    phase: Phase
    served: Served
    work: Mapping[str, float]
    fraction: float


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
        # The first steps pay for allocations and compilation. Reversed: no prefix cache finds it later.
        serve(engine, tokenizer, [prompts[0][::-1]], SamplingParams(max_tokens=2))
        with counted(phase, engine) as work:
            served = serve(engine, tokenizer, prompts, params, _show_first)
        out.file.write("\n")
        lengths = [len(completion.token_ids) for completion in served.completions]
        least = generation_work(loaded.config, kind, [len(p) for p in prompts], lengths, batch=len(prompts))
        rungs.append(Rung(phase, served, work, ideal_seconds(least, top) / served.seconds))
        out.print(f"[dim]{change(phase, rungs[-2].work if rungs[1:] else None, work)}[/dim]")
        del engine
        gc.collect()  # the next engine may want the memory of this one's cache
    _summary(rungs, where)
    warn(begun)
    _over_http(model, str(where), dtype)
    return 0


def _show_first(index: int, text: str) -> None:
    """Write the first answer as it comes."""
    if index == 0:
        out.file.write(text)
        out.file.flush()


def _summary(rungs: list[Rung], device: torch.device) -> None:
    out.print(Rule(style="dim"))
    out.print(f"[bold]{QUESTION}[/bold]\n{rungs[-1].served.completions[0].text.strip()}\n")
    made = table("Phase", "What it is for, in this run", right=("tokens/s", "roofline"))
    for before, rung in pairwise([None, *rungs]):
        assert rung is not None
        shown = change(rung.phase, before.work if before else None, rung.work) or "the speed, on a GPU"
        made.add_row(rung.phase.name, shown, f"{rung.served.tokens_per_second:,.1f}", f"{rung.fraction:.0%}")
    out.print(made)
    elsewhere = "; ".join(f"{number}: {command}" for number, command in ELSEWHERE.items())
    out.print(
        f"[dim]All questions together, on {device}. Roofline: share of what it could do at best. Each rung "
        f"has those below it, and from phase {ROWS:02d} on the memory of {MEMORY_ROWS} rows. Not in this "
        f"table, as its questions do not show them: {elsewhere}[/dim]"
    )
    plain = [rung for rung in rungs if rung.phase.number != ROUNDS]
    texts = {tuple(tuple(c.token_ids) for c in rung.served.completions) for rung in plain}
    if len(texts) == 1:
        out.print("[dim]Every phase gave the same answers, token for token (but for 8-bit weights).[/dim]")


def _over_http(model: str, device: str, dtype: str) -> None:
    """Start the server, ask it as `curl` would, and say where its page is."""
    out.print(Rule("and over HTTP", align="left", style="dim"))
    with Server(model, device=device, dtype=dtype) as server:
        url = f"http://{server.target.host}:{server.target.port}"
        messages = [{"role": "user", "content": QUESTION}]
        body = json.dumps({"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0})
        out.print(
            f"[dim]curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'[/dim]"
        )
        asked = urllib.request.Request(
            f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            out.print(json.load(answer)["choices"][0]["message"]["content"].strip(), markup=False)
        out.print(f"[dim]The page at {url} shows a chat and the engine; `make serve` keeps it open.[/dim]")
