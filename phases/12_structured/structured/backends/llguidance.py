"""llguidance: an Earley parser over a lexer of regex derivatives, in Rust (Moskal et al., 2024).

https://github.com/guidance-ai/llguidance. It makes no table ahead of time, so it compiles in milliseconds; it
refuses what it does not know; and every kind of work has a limit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import llguidance as ll

from common.errors import UserError
from common.sampling.grammar import Grammar
from structured.matcher import Backend, Compiled, Job, Matcher, Words
from structured.vocabulary import Vocabulary

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # of one or two kilobytes each
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
MOST_PROPERTIES = 2_000
"""Of one object: the library's time grows with their square, and 7,000 took 13 seconds."""

OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""Models like to indent. Without a limit some write spaces for ever, and every mask lets them."""

FEW = 4
"""Up to so many masks are made by the thread that asks: waking others takes longer."""
BASE_BYTES, BYTES_PER_CHARACTER = 100_000, 60
"""About what a compiled grammar takes, by its source: measured as the growth of a process."""


class GuidanceMatcher(Matcher):
    """One output in llguidance's parser."""

    def __init__(self, inner: ll.LLMatcher) -> None:
        self.inner = inner

    def fill(self, words: Words) -> None:
        """See `Matcher`; so are the others."""
        self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def advance(self, tokens: Sequence[int]) -> int:
        """Tokens that are not allowed leave the matcher as it is."""
        return self.inner.try_consume_tokens(list(tokens))

    def rollback(self, count: int) -> None:
        """The parser keeps its rows."""
        if count:
            self.inner.rollback(count)

    @property
    def accepting(self) -> bool:
        """Asks the parser."""
        return self.inner.is_accepting()

    @property
    def problem(self) -> str:
        """The first line of what the library says."""
        return self.inner.get_error().split("\n")[0][:200] if self.inner.is_error() else ""

    def forced(self) -> Sequence[int]:
        """What the library would fast-forward: its mask then allows these alone."""
        return self.inner.compute_ff_tokens()

    def agrees(self, tokens: Sequence[int]) -> int:
        """The library looks without taking."""
        return self.inner.validate_tokens(list(tokens))


class GuidanceGrammar(Compiled):
    """A grammar whose lexer all outputs share."""

    def __init__(self, inner: ll.LLMatcher, characters: int) -> None:
        self.inner = inner
        self.bytes = BASE_BYTES + BYTES_PER_CHARACTER * characters

    def matcher(self) -> Matcher:
        """A copy of the parser at its start."""
        return GuidanceMatcher(self.inner.deep_copy())


class GuidanceBackend(Backend):
    """Compiles by llguidance; fills masks by its threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.tokenizer = ll.LLTokenizer(
            ll.TokenizerWrapper(_Wrapped(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.eos),
        )
        self.limits = ll.LLParserLimits(**LIMITS)
        self.threads = ll.LLExecutor(max(1, min(16, (os.cpu_count() or 2) - 1)))

    def compile(self, grammar: Grammar) -> Compiled:
        """See `Backend.compile`."""
        if grammar.kind == "json_schema":
            _refuse_wide_objects(grammar)
        try:
            inner = ll.LLMatcher(self.tokenizer, source_of(grammar), limits=self.limits, log_level=0)
        except (ValueError, OverflowError) as error:
            raise UserError(f"grammar ({grammar}): {error}") from None
        if inner.is_error():
            said = " ".join(inner.get_error().split())[:300]
            raise UserError(f"grammar ({grammar}) is refused: {said}")
        return GuidanceGrammar(inner, len(grammar.source))

    def fill(self, jobs: Sequence[Job], words: Words) -> None:
        """Several matchers at a time, without Python's lock."""
        if len(words) <= FEW:
            super().fill(jobs, words)
            return
        at, width, count = words.ctypes.data, words.strides[0], len(words)
        plain = [(_inner(job), job.row) for job in jobs if not job.drafts]
        drafted = [(_inner(job), job.row, list(job.drafts)) for job in jobs if job.drafts]
        if plain:
            self.threads.unsafe_compute_mask_ptr(plain, at, width, count)
        if drafted:
            self.threads.unsafe_compute_mask_ptr_with_draft_token(drafted, at, width, count)


def _inner(job: Job) -> ll.LLMatcher:
    assert isinstance(job.matcher, GuidanceMatcher)
    return job.matcher.inner


def _refuse_wide_objects(grammar: Grammar) -> None:
    todo: list[Any] = [grammar.loaded()]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if len(part) > MOST_PROPERTIES:
                raise UserError(
                    f"grammar ({grammar}) is refused: an object in it has {len(part):,} keys, but may have "
                    f"{MOST_PROPERTIES:,}"
                )
            todo += part.values()
        elif isinstance(part, list):
            todo += part


def source_of(grammar: Grammar) -> str:
    """A grammar in the library's own notation."""
    if grammar.kind == "json_schema":
        source = {"true": "{}", "false": '{"not": {}}'}.get(grammar.source.strip(), grammar.source)
        return ll.LLMatcher.grammar_from_json_schema(source, defaults=OPTIONS)  # type: ignore[arg-type]
    if grammar.kind == "regex":
        return ll.LLMatcher.grammar_from_regex(grammar.source)
    return ll.grammar_from("choice" if grammar.kind == "choice" else "grammar", grammar.source)


class _Wrapped:
    """A vocabulary in the shape that the library reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.encode = vocabulary.encode
        self.eos_token_id, self.bos_token_id = vocabulary.eos[0], None
        self.tokens = list(vocabulary.tokens)
        for token in vocabulary.eos:
            self.tokens[token] = b"<|end|>"  # any name: it is special
        self.special_token_ids = list(vocabulary.eos)

    def __call__(self, text: str) -> list[int]:
        return list(self.encode(text))
