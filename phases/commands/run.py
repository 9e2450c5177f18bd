"""`ladder run`: generate text with one phase."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from common.console import err, out
from common.device import pick_device, pick_dtype
from common.errors import UserError
from common.models.hub import model_folder
from common.neighbours import usage, warn
from common.sampling.defaults import sampling_defaults
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from common.words import count
from phases import Phase, phase_named
from phases.commands.engines import Served, encode, serve
from phases.commands.grammars import check_grammar, show_trace
from phases.registry import check_options, load_engine, missing_for

SPECULATES = 11
"""The phase that guesses."""


def run(
    given: SimpleNamespace, prompts: Sequence[str], params: SamplingParams, grammar: Grammar | None
) -> int:
    """Generate and print.

    given: the arguments of the command line; `said` are those of sampling, `options` those of the engine.

    Returns the exit code: 0, or 1 when a request failed inside the engine.
    """
    begun, phase, model = usage(), phase_named(given.phase), given.model
    options: dict[str, Any] = given.options
    where = pick_device(given.device)
    pick_dtype(given.dtype, where)  # what is wrong must not wait for a download
    check_options(phase, options, where)
    params = replace(params, grammar=grammar)
    if given.stats and phase.number < SPECULATES:
        raise UserError(f"--stats is for phases from {SPECULATES} on, but the phase is {phase.name}")
    check_grammar(phase, params, given.trace, len(prompts))
    if model.startswith("random:"):
        raise UserError(f"model is {model!r}, but `ladder run` needs a model with a tokenizer")
    folder = model_folder(model)
    own = sampling_defaults(folder, given.generation_config)
    params = replace(params, **{name: value for name, value in own.items() if name not in given.said})  # type: ignore[arg-type]
    tokenizer = Tokenizer(folder)
    ids = [encode(tokenizer, text, given.chat) for text in prompts]
    missing = missing_for(phase, where)
    if missing:
        err.print(
            f"[dim]{phase.name} needs {missing} to be fast; here it may take minutes.[/dim]", soft_wrap=True
        )
    engine = load_engine(
        phase, str(folder), device=str(where), dtype=given.dtype, tokenizer=tokenizer, **options
    )
    if given.verbose and (ledger := getattr(engine, "ledger", None)) is not None:
        err.print(f"[dim]{ledger}[/dim]")
    if given.trace:
        return show_trace(engine, tokenizer, ids[0], params)
    screen = Screen(prompts, quiet=given.as_json)
    guesses = getattr(getattr(getattr(engine, "scheduler", None), "drafter", None), "stats", None)
    decorate = Tint(guesses) if guesses is not None and out.is_terminal and not out.no_color else untouched
    served = serve(engine, tokenizer, ids, params, screen.show, decorate)
    screen.close()
    made_up = getattr(guesses, "mark", "")  # numbers that synthetic acceptance made are marked
    mark = {"speculation": made_up} if made_up else {}
    if given.as_json:
        whole = to_json(phase, model, prompts, served) | mark
        # Where the output cannot show a character, JSON can still say which it is.
        out.out(json.dumps(whole, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"), highlight=False)
    else:
        by = "".join(f", by {value}" for value in mark.values())
        err.print(f"[dim]{describe(served)}{by}[/dim]", soft_wrap=True)
    if given.stats:
        lines = ["speculation: off"] if guesses is None else guesses.lines()
        err.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if where.type == "cpu":
        warn(begun)
    return _exit_code(served)


def _exit_code(served: Served) -> int:
    """Return 1 after naming the prompts whose requests failed inside the engine, or 0."""
    failed = [c.index for c in served.completions if c.finish_reason == "error"]
    if failed:
        err.print(f"error: generation failed for prompt {', '.join(str(index + 1) for index in failed)}")
    return 1 if failed else 0


def to_json(phase: Phase, model: str, prompts: Sequence[str], served: Served) -> dict[str, object]:
    """The object that `--json` prints."""
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
    """One line about what was generated and how fast."""
    first = "" if served.first_token is None else f", first token after {served.first_token * 1e3:,.0f} ms"
    return (
        f"{count(served.prompt_tokens, 'prompt token')}, {served.completion_tokens:,} generated "
        f"in {served.seconds:.2f} s: {served.tokens_per_second:,.1f} tokens/s{first}"
    )


class Screen:
    """Writes completions as they come; with several prompts, each under a heading."""

    def __init__(self, prompts: Sequence[str], *, quiet: bool = False) -> None:
        self.prompts, self.quiet, self.shown = prompts, quiet, -1

    def show(self, index: int, text: str) -> None:
        """Write the next piece of a completion's text. Pieces come in the order of the prompts."""
        if self.quiet:
            return
        self._begin(index)
        self._write(text)

    def close(self) -> None:
        """End the last line; prompts whose completions are empty get their headings too."""
        if not self.quiet:
            self._begin(len(self.prompts) - 1)
            self._write("\n")

    def _begin(self, index: int) -> None:
        while self.shown < index:
            if self.shown >= 0:
                self._write("\n")
            self.shown += 1
            if len(self.prompts) > 1:
                heading = f"[{self.shown + 1}/{len(self.prompts)}] {self.prompts[self.shown]}"
                gap = "\n" if self.shown else ""
                out.print(f"{gap}{heading}", style="bold", markup=False)

    @staticmethod
    def _write(text: str) -> None:
        out.file.write(text)
        out.file.flush()


class Tint:
    """Colours the text of tokens that were guessed and accepted."""

    def __init__(self, stats: Any) -> None:
        stats.marks = self.marks = dict[tuple[int, int], set[int]]()

    def __call__(self, text: str, index: int, place: int) -> str:
        """The text that came with output token `place` of a prompt."""
        return f"\x1b[32m{text}\x1b[0m" if place in self.marks.get((index, 0), ()) else text


def untouched(text: str, index: int, place: int) -> str:
    """The text as it is."""
    return text
