"""`ladder demo`: run the same questions through every phase, and print a table of what each changes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from rich.rule import Rule
from rich.table import Table

from common.console import out, table
from common.device import pick_device, pick_dtype
from common.events import Completion
from common.models.hub import model_folder
from common.neighbours import usage, warn
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from forward.model import Model
from paged_cache.memory import weight_bytes
from phases import PHASES, Phase
from phases.commands.engines import serve
from phases.commands.work import COUNTS, counted, model_of
from phases.registry import BLOCKS, ROWS, load_engine, missing_for

RULES = (
    "You are a helpful assistant who answers a question about the world, about animals, food, colors, "
    "numbers and places. Answer in one short and friendly sentence, with no list, no explanation and nothing "
    "that was not asked for."
)
"""Text before every question: the common beginning of all prompts, which phase 08 computes once."""
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
MAX_LEN = 192
"""Tokens of a request that a row of phase 04 has room for; a question and its completion take half."""
MEMORY_ROWS = 2
"""Rows of a batch in phase 03, and of the cache that every phase from 04 on has."""
CHUNK = 64
"""Tokens of a step from phase 07 on."""
CHUNKED = 7


SHOWS = {
    1: ("Every new token computes all tokens before it again.", "computed"),
    2: ("Keys and values are kept, so every step computes one token.", "computed"),
    3: ("Questions share each step: the weights are read once for them.", "steps"),
    4: (
        "A finished answer leaves the batch at once, and a waiting question takes its place.",
        "steps",
    ),
    5: (
        "The cache is blocks handed out on demand, so more requests fit the same memory.",
        "at_once",
    ),
    6: ("Kernels read the blocks where they lie: compare the speed.", ""),
    7: ("Long prompts are cut into chunks, so that no request waits for one.", "largest"),
    8: ("Prompts that begin alike are computed once.", "computed"),
    9: (
        "The next step is scheduled while this one runs. With CUDA, a step is one launch: see its speed.",
        "",
    ),
    10: ("Weights and keys may have 8 or 4 bits; here weights have 8.", "weights"),
    11: ("Tokens are guessed and checked in one step; the text stays the same.", "steps"),
}
"""Number of a phase -> what it adds, in a sentence, and the key in `COUNTS` of a number that shows it, if one
does. Phases for which questions show nothing are missing.
"""
ROUNDS = 10
"""The phase whose completions may differ, since its weights are rounded."""
ELSEWHERE = {
    12: "ladder run 12 --chat --prompt 'Is the sky blue?' --choice yes,no --trace",
    14: "ladder run 14 --tensor-parallel 3",
    15: "ladder serve --replicas 2",
    16: "ladder serve Qwen/Qwen3-30B-A3B --phase 16",
    17: "ladder run 17 --model gemma3-270m",
    18: "ladder serve --phase 18",
    19: "ladder serve --phase 19 --disk-folder blocks",
}


def run(given: SimpleNamespace) -> int:
    """Run `ladder demo`: complete the same questions with every phase that runs here, and print a table.

    given: the arguments of the command line: model, device, dtype.

    Returns:
        The exit code, 0.
    """
    begun, model = usage(), given.model
    where = pick_device(given.device)
    pick_dtype(given.dtype, where)  # what is wrong must not wait for a download
    folder = model_folder(model)
    tokenizer = Tokenizer(folder)
    questions = [QUESTION, *OTHERS]
    rules = {"role": "system", "content": RULES}
    prompts = [
        tokenizer.chat([rules, {"role": "user", "content": question}])
        for question in questions
    ]
    loaded = load_model(folder, device=str(where), dtype=given.dtype)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    out.print(f"[bold]{QUESTION}[/bold]")
    out.print(
        f"{model} on {where}, {len(questions)} questions at once; the first answer is shown.",
        style="dim",
        markup=False,
    )
    made = table("Phase", "What it is for, in this run", right=("tokens/s",))
    completions, before = dict[int, list[Completion]](), dict[str, float]()
    for number, (why, _) in SHOWS.items():
        phase = PHASES[number - 1]
        if missing := missing_for(phase, where):
            out.print(f"[dim]{phase.name} is left out: it needs {missing}[/dim]")
            continue
        out.print(Rule(f"{phase.name}: {phase.title}", align="left", style="dim"))
        out.print(f"[dim]{why}[/dim]")
        engine = load(phase, loaded)
        # The first steps pay for allocations and compilation. Reversed: no prefix cache finds it later.
        serve(engine, tokenizer, [prompts[0][::-1]], SamplingParams(max_tokens=2))
        with counted(phase, engine) as work:
            served = serve(engine, tokenizer, prompts, params, _show_first)
        work["weights"] = weight_bytes(model_of(phase, engine)) / 2**20
        out.file.write("\n")
        said = change(phase, before, work)
        out.print(f"[dim]{said}[/dim]")
        speed = f"{served.tokens_per_second:,.1f}"
        made.add_row(phase.name, said or "the speed, on a GPU", speed)
        completions[number], before = served.completions, work
        del engine
        gc.collect()  # the next engine may want the memory of this one's cache
    _summary(made, completions, where)
    warn(begun)
    out.print("[dim]`make serve` answers over HTTP, and has a page with a chat.[/dim]")
    return 0


def _show_first(index: int, text: str) -> None:
    """Print a piece of text if it belongs to the first completion (index 0)."""
    if index == 0:
        out.file.write(text)
        out.file.flush()


def _summary(
    made: Table, completions: Mapping[int, list[Completion]], device: torch.device
) -> None:
    out.print(Rule(style="dim"))
    out.print(QUESTION, style="bold")
    out.print(f"{completions[max(completions)][0].text.strip()}\n", markup=False)
    out.print(made)
    elsewhere = "; ".join(f"{number}: {command}" for number, command in ELSEWHERE.items())
    out.print(
        f"[dim]All questions together, on {device}. Each rung "
        f"has those below it, and from phase {ROWS:02d} on the memory of {MEMORY_ROWS} rows. Not in this "
        f"table, as its questions do not show them: {elsewhere}[/dim]"
    )
    plain = [found for number, found in completions.items() if number != ROUNDS]
    texts = {tuple(tuple(each.token_ids) for each in found) for found in plain}
    if len(texts) == 1:
        out.print(
            "[dim]Every phase gave the same answers, token for token (but for 8-bit weights).[/dim]"
        )


# Rungs: what each is for, and a number for it, counted so that no neighbour changes it.


def load(phase: Phase, model: Model) -> Any:
    """Return a phase's engine for the demo; from phase 04 on, with memory for 2 full requests.

    model: the loaded model.
    """
    options: dict[str, Any] = {"quantization": "int8"} if phase.number == ROUNDS else {}
    if phase.number == ROWS - 1:
        options["batch_size"] = MEMORY_ROWS
    if phase.number >= ROWS:
        options |= {"max_len": MAX_LEN, "max_rows": MEMORY_ROWS}
        options["cache_bytes"] = (
            MEMORY_ROWS * (MAX_LEN + 16) * model.config.kv_bytes_per_token(model.dtype)
        )
    if phase.number >= BLOCKS:
        options["max_rows"] = 8
    if phase.number >= CHUNKED:
        options["step_tokens"] = CHUNK
    return load_engine(phase, model, **options)


def change(phase: Phase, before: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Return text about what a phase has changed: `tokens computed: 9,812 to 642 (15× fewer)`.

    before, now: counts of the phase before and of this one, by the names of `COUNTS`.
    If they are equal, the text has only the new count; it is "" if the demo shows no count for this phase.
    """
    _, name = SHOWS[phase.number]
    if not name:
        return ""
    new, old = round(now[name]), round(before.get(name, 0))
    if not old or not new or old == new:
        return f"{COUNTS[name]}: {new:,}"
    factor, more = max(new, old) / min(new, old), "more" if new > old else "fewer"
    return f"{COUNTS[name]}: {old:,} to {new:,} ({factor:.2g}× {more})"
