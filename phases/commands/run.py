"""`ladder run`: generate text with one phase."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from common.console import err, out
from common.device import pick_device, pick_dtype
from common.errors import UserError
from common.models.hub import model_folder
from common.neighbours import usage, warn
from common.sampling.defaults import sampling_defaults
from common.text.tokenizer import Tokenizer
from common.words import count
from phases import Phase, phase_named
from phases.commands.engines import DEFAULT_PROMPT, DEFAULT_QUESTION, Served, serve
from phases.commands.grammars import check_grammar, show_trace
from phases.commands.work import counted, describe_work
from phases.registry import check_options, load_folder

LONGEST_HEADING = 500
"""Characters of a prompt that are shown in front of its text."""
SPECULATES = 11
"""The first phase that drafts tokens."""


def run(given: SimpleNamespace) -> int:
    """Run `ladder run`: generate text for prompts with one phase's engine, and print it.

    given: the arguments of the command line. `said`: the sampling settings that were given; `options`: those
        of the engine.

    Returns the exit code: 0, or 1 when a request failed inside the engine.
    """
    begun = usage()
    phase = phase_named(given.phase)
    model = given.model
    params = given.params
    where = pick_device(given.device)
    pick_dtype(given.dtype, where)  # what is wrong must not wait for a download
    options = check_options(phase, given.options, where)
    if given.stats and phase.number < SPECULATES:
        raise UserError(
            f"--stats is for phases from {SPECULATES} on, but the phase is {phase.name}"
        )
    if given.trace and (given.as_json or given.stats):
        raise UserError(
            f"--trace and {'--json' if given.as_json else '--stats'} are both given, but a trace has a form "
            "of its own"
        )
    check_grammar(phase, params, given.trace, len(given.prompts))
    folder = model_folder(model)
    own = sampling_defaults(folder, given.generation_config)
    params = replace(
        params, **{name: value for name, value in own.items() if name not in given.said}
    )
    tokenizer = Tokenizer(folder)
    chat = tokenizer.templates.available if given.chat is None else given.chat
    prompts = given.prompts or [DEFAULT_QUESTION if chat else DEFAULT_PROMPT]
    ids = [
        tokenizer.chat([{"role": "user", "content": t}]) if chat else tokenizer.encode(t)
        for t in prompts
    ]
    engine: Any = load_folder(options, str(folder), where, given.dtype, tokenizer)
    if given.verbose and (memory_plan := getattr(engine, "memory_plan", None)) is not None:
        err.print(f"[dim]{memory_plan}[/dim]")
    if given.trace:
        return show_trace(engine, tokenizer, ids[0], params)
    show = (lambda index, text: None) if given.as_json else screen(prompts)
    guesses = getattr(
        getattr(getattr(engine, "scheduler", None), "drafter", None), "stats", None
    )
    coloured = guesses is not None and out.is_terminal and not out.no_color
    decorate = highlighter(guesses) if coloured else None
    with counted(phase, engine) as work:
        served = serve(engine, tokenizer, ids, params, show, decorate)
    if given.as_json:
        whole = to_json(phase, model, prompts, served)
        # Where the output cannot show a character, JSON can still say which it is.
        out.out(
            json.dumps(whole, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"),
            highlight=False,
        )
    else:
        show(len(prompts) - 1, "\n")
        err.print(f"[dim]{describe(served)}[/dim]", soft_wrap=True)
        done = describe_work(phase, engine, work, served.completions, guesses)
        err.print(f"[dim]{phase.name}: {done}[/dim]", soft_wrap=True)
    if given.stats:
        lines = ["speculation: off"] if guesses is None else guesses.lines()
        err.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if where.type == "cpu":
        warn(begun)
    failed = [str(c.index + 1) for c in served.completions if c.finish_reason == "error"]
    if failed:
        err.print(f"error: generation failed for prompt {', '.join(failed)}")
    return int(bool(failed))


def to_json(
    phase: Phase, model: str, prompts: Sequence[str], served: Served
) -> dict[str, object]:
    """Return the object that `--json` prints: phase, model, completions, token counts, and seconds.

    prompts: their texts. served: the output of the engine for them.
    """
    return {
        "phase": phase.name,
        "model": model,
        "completions": [
            {
                "prompt": prompt,
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
            }
            for prompt, completion in zip(prompts, served.completions, strict=True)
        ],
        "prompt_tokens": served.prompt_tokens,
        "completion_tokens": served.completion_tokens,
        "seconds": served.seconds,
        "tokens_per_second": served.tokens_per_second,
        "time_to_first_token": served.first_token,
    }


def describe(served: Served) -> str:
    """Return one line about the numbers of prompt tokens and generated tokens, the seconds and the speed."""
    first = (
        ""
        if served.first_token is None
        else f", first token after {served.first_token * 1e3:,.0f} ms"
    )
    return (
        f"{count(served.prompt_tokens, 'prompt token')}, {served.completion_tokens:,} generated "
        f"in {served.seconds:.2f} s: {served.tokens_per_second:,.1f} tokens/s{first}"
    )


def screen(prompts: Sequence[str]) -> Callable[[int, str], None]:
    """Return a function `show(prompt index, text)` that prints pieces of text, each prompt before its text.

    The heading of a single prompt goes to standard error, so that a file gets the text alone.
    """
    shown = -1

    def show(index: int, text: str) -> None:
        nonlocal shown
        if index != shown:
            heading = prompts[index]
            if len(heading) > LONGEST_HEADING:
                heading = f"{heading[:LONGEST_HEADING]} ..."
            if len(prompts) == 1:
                err.print(heading, style="bold", markup=False, soft_wrap=True)
            else:
                gap = "\n\n" if index else ""
                heading = f"{gap}[{index + 1}/{len(prompts)}] {heading}"
                out.print(heading, style="bold", markup=False)
        shown = index
        out.file.write(text)
        out.file.flush()

    return show


def highlighter(stats: Any) -> Callable[[str, int, int], str]:
    """Return a function that colours the text of accepted draft tokens (speculative decoding).

    It maps (text of a token, index of its prompt, index in the output) to the text, in green if the token was
    a draft. stats: counts of drafts; this call lets them note the positions of such tokens.
    """
    stats.marks = marks = dict[tuple[int, int], set[int]]()  # by (prompt index, sample)

    def coloured(text: str, index: int, place: int) -> str:
        return f"\x1b[32m{text}\x1b[0m" if place in marks.get((index, 0), ()) else text

    return coloured
