"""Grammars on the command line: read from files and flags, and their masks shown step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from common.console import err, out
from common.errors import UserError
from common.files import read_text
from common.sampling.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from phases import Phase

FIRST = 12
"""The first phase that has grammars."""
MOST_BYTES = 4 * MAX_GRAMMAR_CHARACTERS
TOP = 5
"""Number of the model's most likely tokens that the trace shows."""
FLAGS = ("--json-schema", "--regex", "--choice", "--grammar")


def chosen_grammar(
    json_schema: Path | None, regex: str | None, choice: str | None, grammar: Path | None
) -> Grammar | None:
    """Return the grammar that the flags of `ladder run` give; None: none is given.

    json_schema, grammar: files. regex: an expression. choice: texts with commas between them.

    Raises:
        UserError: two flags are given, or a file cannot be used.
    """
    values = dict(zip(FLAGS, (json_schema, regex, choice, grammar), strict=True))
    given = [flag for flag, value in values.items() if value is not None]
    if len(given) > 1:
        raise UserError(
            f"{given[0]} and {given[1]} are both given, but only one of them can be"
        )
    if json_schema is not None:
        return Grammar.json_schema(read_text(json_schema, "--json-schema", MOST_BYTES))
    if grammar is not None:
        return Grammar.lark(read_text(grammar, "--grammar", MOST_BYTES))
    if choice is not None:
        return Grammar.choice(choice.split(","))
    return None if regex is None else Grammar.regex(regex)


def check_grammar(phase: Phase, params: SamplingParams, trace: bool, prompts: int) -> None:
    """Raise `UserError` if a phase cannot use the grammar in `params`, or cannot show its trace.

    trace: True if each step's mask is to be shown: for that there must be a grammar, and one prompt.
    prompts: number of prompts.
    """
    if params.grammar is not None and phase.number < FIRST:
        raise UserError(
            f"a grammar is for phases from {FIRST} on, but the phase is {phase.name}"
        )
    if trace and params.grammar is None:
        raise UserError(
            f"--trace shows a grammar's masks, so one of {', '.join(FLAGS)} must be given"
        )
    if trace and prompts > 1:
        raise UserError(f"--trace shows one prompt, but there are {prompts}")


def show_trace(
    engine: Any, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams
) -> int:
    """Generate for one prompt (token ids) with a grammar, and print a line for each token.

    A line has the number of allowed tokens, the sampled token, and the model's most likely tokens; forbidden
    tokens are grey.

    Returns:
        The exit code: 1 if the request failed inside the engine, else 0.
    """
    assert params.grammar is not None
    matcher = engine.grammar_manager.pool.ask(params.grammar).wait().matcher()
    size = engine.config.vocab_size
    words = np.zeros(-(-size // 32), np.int32)
    out.print(
        f"{'step':>4}  {'allowed of ' + format(size, ','):>18}  chosen and the model's own favourites",
        style="bold",
    )
    reason, step = None, 0
    for event in engine.stream([prompt], replace(params, logprobs=TOP)):
        reason = event.finish_reason
        if event.token_id is None:
            continue
        step += 1
        words[:] = 0
        matcher.fill(words)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
        line = Text(f"{step:>4}  {int(allowed.sum()):>18,}  ")
        line.append(f"{_shown(tokenizer, event.token_id):<14}", style="bold green")
        for token, logprob in event.logprob.top if event.logprob else ():
            text = f" {_shown(tokenizer, token)} {np.exp(logprob):.0%}"
            line.append(text, style="" if allowed[token] else "bright_black strike")
        out.print(line, soft_wrap=True)
        matcher.advance((event.token_id,))
    ended = {
        "stop": "the grammar is satisfied",
        "length": "cut by max_tokens: the text may be incomplete",
    }
    err.print(f"[dim]{ended.get(reason or '', f'ended with {reason}')}[/dim]")
    return 1 if reason == "error" else 0


def _shown(tokenizer: Tokenizer, token: int) -> str:
    return repr(tokenizer.token_bytes[token].decode(errors="replace"))
