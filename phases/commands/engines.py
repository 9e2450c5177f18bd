"""From what a person typed to a phase's engine and its prompts, and from there to text on the screen."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from common.errors import UserError
from common.generation import Completion, Streams, TextStream
from common.sampling_params import SamplingParams
from common.tokenizer import Tokenizer
from phases import PHASES, Phase, find_phase


def phase_named(text: str, *others: str) -> Phase:
    """The phase meant by `1`, `01`, `forward` or `01_forward`.

    Raises:
        UserError: there is none. It names the phases and the `others` that the caller takes as well.
    """
    phase = find_phase(text)
    if phase is None:
        names = [*(phase.name for phase in PHASES), *others]
        raise UserError(f"phase is {text!r}, but it must be one of {', '.join(names)}")
    return phase


def import_phase(phase: Phase) -> ModuleType:
    """The phase's package. Raises `UserError` when it cannot be used here.

    Phase 06 chooses Triton's interpreter when it is imported, which must be before Triton is; PyTorch imports
    that as soon as it makes random weights.
    """
    try:
        package = importlib.import_module(phase.package)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UserError(
            f"phase {phase.name} needs triton, which is not installed: see `ladder doctor`"
        ) from None
    if not hasattr(package, "load"):
        raise UserError(f"phase {phase.name} has no engine yet: its package has no load()")
    return package


def load_engine(phase: Phase, model: Any, **options: Any) -> Streams:
    """What the phase's package loads for a model's name or a loaded model."""
    engine: Streams = import_phase(phase).load(model, **options)
    return engine


def missing_for(phase: Phase, device: torch.device) -> str:
    """What `phase` needs that is not here, or nothing when it runs natively on `device`."""
    if phase.needs == "cuda" and device.type != "cuda":
        return "a CUDA device" if not torch.cuda.is_available() else "--device cuda"
    return ""


def read_prompts(prompt: str | None, prompts_file: Path | None, default: str) -> list[str]:
    """The prompts of a command: the text given, or one a line of a file (blank lines skipped).

    Raises:
        UserError: both are given, the prompt is empty, or the file cannot be read or holds none.
    """
    if prompts_file is None:
        if prompt == "":
            raise UserError("--prompt is empty, but it must have at least 1 character")
        return [default if prompt is None else prompt]
    if prompt is not None:
        raise UserError("--prompt and --prompts-file are both given, but only one of them can be")
    try:
        lines = prompts_file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"--prompts-file {prompts_file} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"--prompts-file {prompts_file} cannot be read: {error.strerror}") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts-file {prompts_file} holds no prompt, but must have at least 1 line")
    return prompts


def encode(tokenizer: Tokenizer, prompt: str, chat: bool) -> list[int]:
    """Token ids of a text to continue, or of a question in the model's chat form."""
    if chat:
        return tokenizer.chat([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


@dataclass(frozen=True)
class Served:
    """What a phase generated. `first_token` and `seconds` count from the start; the first may be missing."""

    completions: list[Completion]
    seconds: float
    first_token: float | None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(completion.prompt_ids) for completion in self.completions)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all completions, those that ended them included."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over all the time."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


def serve(
    engine: Streams,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    show: Callable[[int, str], None] = lambda index, text: None,
) -> Served:
    """Generate for all prompts; `show` gets each piece of text as it comes, in the order of the prompts.

    A prompt's text is shown live when those before it are done, and held back until then.
    """
    ids = [list(prompt) for prompt in prompts]
    start = time.perf_counter()
    completions = [Completion(index, 0, prompt, start) for index, prompt in enumerate(ids)]
    texts = [TextStream(tokenizer, params) for _ in ids]
    held, current = [""] * len(ids), 0
    for event in engine.stream(ids, params):
        completion = completions[event.index]
        completion.add(event)
        held[event.index] += texts[event.index].push(event)
        completion.text = texts[event.index].text
        while current < len(ids):
            if held[current]:
                show(current, held[current])
                held[current] = ""
            if completions[current].finish_reason is None:
                break
            current += 1
    seconds = time.perf_counter() - start
    firsts = [completion.times[0] - start for completion in completions if completion.times]
    return Served(completions, seconds, min(firsts, default=None))
