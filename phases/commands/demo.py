"""`ladder demo`: one real model climbs the ladder, and a table says what each rung was worth."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch
from rich.rule import Rule
from rich.table import Table

from benchmarks.roofline import ceilings, generation_work, ideal_seconds
from common.console import err, out
from common.device import pick_device, pick_dtype
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from phases import PHASES, Phase
from phases.commands import demo_server
from phases.commands.engines import Served, encode, serve
from phases.commands.fetch import fetch_with_progress
from phases.registry import load_engine, missing_for

QUESTION = "What is the capital of France? Answer in one sentence."
OTHERS = (
    "What is the largest planet in the solar system?",
    "How many days are there in a week?",
    "What color is the sky on a clear day?",
    "What is the opposite of hot?",
    "Which animal says meow?",
    "What do bees make?",
    "Name three kinds of fruit.",
)
MAX_TOKENS = 24

WHY = {
    "01_forward": "Every new token computes all tokens before it again.",
    "02_kv_cache": "Keys and values are kept, so every step computes one token.",
    "03_batching": "All questions share each step: the weights are read once for all of them.",
    "04_continuous": "A finished answer leaves the batch at once, and a waiting question takes its place.",
    "05_paged_cache": "The cache is blocks handed out on demand, so more requests fit the same memory.",
    "06_triton_paged_attention": "Kernels read the blocks where they lie.",
    "07_chunked_prefill": "Long prompts are cut into chunks, so that nobody waits for one.",
    "08_prefix_cache": "Prompts that begin alike are computed once.",
    "09_cuda_graphs": "The next step is scheduled while this one runs. With CUDA, a step is one launch.",
    "10_quant": "Weights and keys may have 8 or 4 bits. Without an option this is phase 09.",
}


@dataclass(frozen=True)
class Rung:
    """One phase's turn."""

    phase: Phase
    served: Served
    fraction: float
    """Share of the roofline."""


def run(model: str, device: str, dtype: str) -> int:
    """Fetch the model, answer the same questions with every phase that runs here, print the table."""
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    folder = fetch_with_progress(model)
    tokenizer = Tokenizer(folder)
    questions = [QUESTION, *OTHERS]
    prompts = [encode(tokenizer, question, chat=True) for question in questions]
    loaded = load_model(str(folder), device=str(where), dtype=str(kind).removeprefix("torch."))
    top = ceilings(where, kind)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    out.print(f"[bold]{QUESTION}[/bold]")
    out.print(
        f"[dim]{model} on {where}, {len(questions)} questions at once; the first answer is shown.[/dim]"
    )
    rungs: list[Rung] = []
    for phase in PHASES:
        if phase.number == demo_server.SERVING:  # its engine is the one before it: it is asked over HTTP
            continue
        missing = missing_for(phase, where)
        if missing:
            out.print(f"[dim]{phase.name} is left out: it needs {missing}[/dim]")
            continue
        out.print(Rule(f"{phase.name}: {phase.title}", align="left", style="dim"))
        out.print(f"[dim]{WHY.get(phase.name, phase.summary)}[/dim]")
        engine = load_engine(phase, loaded)
        _warm(engine, tokenizer, prompts[:1])
        served = serve(engine, tokenizer, prompts, params, _Answers().show)
        out.file.write("\n")
        lengths = [len(completion.token_ids) for completion in served.completions]
        work = generation_work(loaded.config, kind, [len(p) for p in prompts], lengths, batch=len(prompts))
        rungs.append(Rung(phase, served, ideal_seconds(work, top) / served.seconds))
        del engine
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
    serve(engine, tokenizer, prompts, SamplingParams(max_tokens=2))  # type: ignore[arg-type]


def _summary(rungs: list[Rung], device: torch.device) -> None:
    if not rungs:
        err.print("No phase runs here: see `ladder doctor`.")
        return
    answer = rungs[-1].served.completions[0].text.strip()
    out.print(Rule(style="dim"))
    out.print(f"[bold]{QUESTION}[/bold]\n{answer}\n", markup=True)
    table = Table("Phase", box=None, pad_edge=False, header_style="bold")
    for name in ("tokens/s", "gain", "roofline"):
        table.add_column(name, justify="right")
    before: Rung | None = None
    for rung in rungs:
        rate = rung.served.tokens_per_second
        gain = f"{rate / before.served.tokens_per_second:.1f}×" if before else ""
        table.add_row(rung.phase.name, f"{rate:,.1f}", gain, f"{rung.fraction:.0%}")
        before = rung
    out.print(table)
    out.print(f"[dim]All questions together, on {device}. Roofline: share of what it could do at best.[/dim]")
    texts = {tuple(tuple(c.token_ids) for c in rung.served.completions) for rung in rungs}
    if len(texts) == 1:
        out.print("[dim]Every phase gave the same answers, token for token.[/dim]")
