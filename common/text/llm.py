"""A class that completes texts: an engine behind a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from common.errors import UserError, shown
from common.events import Completion, follow, generate, params_per_prompt
from common.models.hub import RANDOM, model_folder
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer

Message = Mapping[str, str]
Prompt = str | Sequence[Message]


class LLM:
    """A model that completes texts: `LLM("smollm2").generate(["The sea is"], SamplingParams(max_tokens=20))`.

    Args:
        model: a bundled model, a folder, or a hub id.
        load: makes the engine, a phase's `load`; each phase exports an `LLM` with its own.
        show_memory_plan: print how the memory is divided, if the engine knows it.
        options: passed to `load`.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        load: Callable[..., Any],
        show_memory_plan: bool = False,
        **options: Any,
    ) -> None:
        if str(model).startswith(RANDOM):
            raise UserError(
                f"model is {str(model)!r}, but texts need a model with a tokenizer"
            )
        self.tokenizer = Tokenizer(model_folder(str(model)))
        self.engine = load(model, tokenizer=self.tokenizer, **options)
        if show_memory_plan and self.engine.memory_plan is not None:
            print(self.engine.memory_plan)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a text, or of a conversation up to where the assistant's turn begins.

        A conversation is a list of messages `{"role": ..., "content": ...}`.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not _conversation(prompt):
            raise UserError(
                f"a prompt is {shown(prompt)}, but must be a text or a list of messages"
            )
        return self.tokenizer.chat(prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete texts or conversations, and wait until all are done.

        Args:
            prompts: a text or a conversation, or a list of them.
            params: for all prompts, or one for each; None: the defaults.

        Returns:
            Completions with their texts, in (prompt, sample) order.

        Raises:
            UserError: there is no prompt, or one is neither a text nor a conversation.
        """
        ids, each = self._encoded(prompts, params)
        return generate(self.engine, ids, each, tokenizer=self.tokenizer)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[Completion, str]]:
        """Complete texts or conversations, and yield each piece of text as soon as it is there.

        prompts: a text or a conversation, or a list of them. params: for all, or one for each; None: the
            defaults.

        Yields:
            The completion that has got a token, and the text that this token adds, which may be empty.
            A completion's `index` is that of its prompt; its `text` is set when it has ended.
        """
        ids, each = self._encoded(prompts, params)
        return follow(self.engine, ids, each, self.tokenizer)

    def _encoded(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        ids = [self.encode(prompt) for prompt in _several(prompts)]
        return ids, params_per_prompt(ids, SamplingParams() if params is None else params)


def _several(prompts: object) -> list[Prompt]:
    """Return a list of prompts; a single text or conversation becomes a list of one."""
    if isinstance(prompts, str) or _conversation(prompts):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts is {shown(prompts)}, but must be a text, a list of messages, or a list of these"
        )
    found = list(prompts)
    if not found:
        raise UserError("prompts is empty, but must hold at least 1 prompt")
    return found


def _conversation(prompt: object) -> bool:
    """Return True if `prompt` is a list of messages."""
    several = isinstance(prompt, Sequence) and len(prompt) > 0
    return several and all(
        isinstance(message, Mapping) for message in cast(Sequence[object], prompt)
    )
