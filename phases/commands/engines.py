"""Read prompts from the command line, run an engine on them, and print text as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError, text
from common.events import Completion, Streams, follow
from common.files import read_text
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer

LARGEST_FILE = 1 << 25
MOST_PROMPTS = 10_000
DEFAULT_PROMPT = "The capital of France is"
DEFAULT_QUESTION = "What is the capital of France?"


def read_prompts(given: Sequence[str] | None, prompts_file: Path | None) -> list[str]:
    """Return the prompts of a command: the texts `given`, or one a line of a file (blank lines skipped).

    None means not given; if both are None, the list is empty.

    Raises:
        UserError: both are given, the prompt is empty or no text, or the file cannot be read, is no text,
            or holds no prompt or too many.
    """
    if prompts_file is not None:
        if given:
            raise UserError(
                "--prompt and --prompts-file are both given, but only one of them can be"
            )
        return _read_lines(prompts_file)
    given = given or []
    if not all(given):
        raise UserError("--prompt is empty, but it must have at least 1 character")
    return [text("--prompt", prompt) for prompt in given]


def _read_lines(path: Path) -> list[str]:
    content, name = read_text(path, "--prompts-file", LARGEST_FILE), f"--prompts-file {path}"
    if "\0" in content:
        raise UserError(f"{name} is not text: it holds a NUL character")
    # Not splitlines(), which also ends a line at characters that may stand inside a text, such as U+2028.
    lines = [line.removesuffix("\r") for line in content.split("\n")]
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"{name} holds no prompt, but must have at least 1 line")
    if len(prompts) > MOST_PROMPTS:
        raise UserError(
            f"{name} holds {len(prompts):,} prompts, but may hold {MOST_PROMPTS:,}"
        )
    return prompts


@dataclass(frozen=True)
class Served:
    """The output of an engine for a list of prompts.

    completions: in (prompt, sample) order.
    seconds: from the start to the last token.
    first_token: seconds from the start to the first token; None: there was none.
    """

    completions: list[Completion]
    seconds: float
    first_token: float | None

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens of all prompts, summed over the completions."""
        return sum(len(completion.prompt_ids) for completion in self.completions)

    @property
    def completion_tokens(self) -> int:
        """Return the number of generated tokens of all completions, end-of-sequence tokens included."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Return the number of generated tokens divided by `seconds`; 0.0 if no time has passed."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


def serve(
    engine: Streams,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    show: Callable[[int, str], None] = lambda index, text: None,
    decorate: Callable[[str, int, int], str] | None = None,
) -> Served:
    """Generate for all prompts (token ids), and call `show(prompt index, piece of text)` as text comes.

    A prompt's text is shown live when the prompts before it are done, and held back until then. Each prompt
    gets at least one call, if only with an empty text.

    decorate: called with (text of a token, prompt index, index of the token in the output); returns the text
        to show instead.

    Returns:
        The completions and times.
    """
    start = time.perf_counter()
    completions = {}
    held, current = [""] * len(prompts), 0
    for completion, new in follow(engine, prompts, params, tokenizer):
        index = completion.index
        completions[index] = completion
        held[index] += (
            decorate(new, index, len(completion.token_ids) - 1) if new and decorate else new
        )
        while current in completions:
            show(current, held[current])
            held[current] = ""
            if completions[current].finish_reason is None:
                break
            current += 1
    seconds = time.perf_counter() - start
    found = [completions[index] for index in sorted(completions)]
    firsts = [completion.times[0] - start for completion in found if completion.times]
    return Served(found, seconds, min(firsts, default=None))
