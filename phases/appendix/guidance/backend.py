"""The grammar backend by llguidance: an Earley parser over a lexer of regex derivatives, in Rust.

Moskal et al., 2024, https://github.com/guidance-ai/llguidance. The library makes no tables beforehand, so it
compiles in milliseconds; it refuses what it does not know; and every kind of work has a limit.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from math import inf
from typing import Any, cast
from weakref import WeakSet

import llguidance as ll

from common.environment import quota
from common.error_lines import one_line
from common.errors import UserError
from common.neighbours import processors
from common.sampling.grammar import Grammar
from phases.appendix.guidance.exact import LARGEST, OPTIONS, OWN_OPTIONS, SUSPECT, exact
from phases.appendix.guidance.matcher import SLOW, GuidanceMatcher, Job
from phases.appendix.guidance.patterns import rewrite_lark, rewrite_regex
from phases.appendix.guidance.spelling import Spelling
from structured.matcher import Backend, Compiled, Words

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,  # what the widest schemas tried need; `Effort` bounds what items may cost
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # of one or two kilobytes each
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
NOTHING = "NoExtensionBias"
"""The beginning of the library's error for a grammar that allows no token."""

SMALL_BATCH = 4
"""Up to this many masks are made by the thread that asks, since to wake others takes longer. Up to this many
outputs share a lexer before the next lexer is used."""
SINGLE_THREAD_BATCH = 32
"""The limit in place of `SMALL_BATCH` if there is only one other thread: it makes small batches no faster."""
SPACING = 0.004
"""Least seconds between the beginnings of two compilations. Each takes Python's lock several times, and the
engine has to wait for it as often."""
MOST_THREADS = 16
ORDINARY = 1e-4
"""Seconds for each output of a call that handles several, before it counts as slow."""
MAKING = 0.02
"""Most seconds to make more lexers for one grammar, since its requests wait meanwhile."""
CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [f"{CHARACTER}{{1,{most}}}" for most in (*range(5, 13), 14, 18, 30)] + [
    f"{CHARACTER}+"
]
"""Sets of tokens of a JSON string, by length, for the library. As long as a whole set is allowed, none of its
tokens is checked by itself. The library has three sets by default; for short strings, these halve the time
of a mask."""
COUNTING = re.compile(r"\b(stop|max_tokens)\s*=")
"""In a Lark grammar: rules whose tokens the library cannot undo."""
BASE_BYTES, BYTES_PER_CHARACTER = 100_000, 60
"""Estimated memory of a compiled grammar by its source: measured as the growth of a process."""


class GuidanceGrammar(Compiled):
    """A compiled grammar of llguidance: several parsers at the grammar's start, each with its own lexer.

    starts: the parsers. eos: ids of the tokens that end an output. size: an estimate of its memory, in bytes.
    drafts: whether its tokens can be tried and undone.

    Each output gets a copy of a parser, which shares that parser's lexer. What a lexer has computed for one
    output, it caches for the others, but only one thread at a time may use it. So up to `SMALL_BATCH` outputs
    share the first lexer, then the next, and when all have as many, further outputs are spread evenly.
    """

    def __init__(
        self, starts: Sequence[ll.LLMatcher], eos: Sequence[int], size: int, drafts: bool
    ) -> None:
        self._starts = starts
        self._eos = eos
        self._drafts = drafts
        self.bytes = size
        self._users = [WeakSet[GuidanceMatcher]() for _ in starts]
        self._lock = threading.Lock()

    def matcher(self) -> GuidanceMatcher:
        """Return the matcher of a new output: a copy of a parser at the start of the grammar.

        The copy shares the first lexer with fewer than `SMALL_BATCH` outputs, or else the one with fewest.
        """
        with self._lock:
            counts = [len(users) for users in self._users]
            number = next(
                (n for n, count in enumerate(counts) if count < SMALL_BATCH),
                counts.index(min(counts)),
            )
            start = self._starts[number].deep_copy()
            made = GuidanceMatcher(start, number, self._eos, self._drafts)
            self._users[number].add(made)
            return made


class GuidanceBackend(Backend):
    """The grammar backend by llguidance; its matchers advance and masks are made in the library's threads.

    vocabulary: the tokens of the model.
    """

    vocabulary: Spelling

    def __init__(self, vocabulary: Spelling) -> None:
        super().__init__(vocabulary)
        self.tokenizer = tokenizer_of(vocabulary)
        # For Lark grammars that ask for tokens which are text elsewhere, such as Qwen's `<think>`.
        self._asked = lru_cache(4)(lambda tokens: tokenizer_of(vocabulary, tokens))
        self.limits = ll.LLParserLimits(**LIMITS)
        allowed = min(len(processors()), quota() or inf)  # a container's may be less
        threads = max(1, min(MOST_THREADS, int(allowed) - 1))
        self.threads = ll.LLExecutor(threads)
        self._small_batch = SINGLE_THREAD_BATCH if threads == 1 else SMALL_BATCH
        # Of a grammar: some masks take a hundred times longer than most, and masks of the same lexer wait for
        # them: 256 masks take 15 threads 3.7 ms with a lexer for each, and 2.7 with four times as many.
        self.lexers = 1 if threads == 1 else 4 << (threads - 1).bit_length()
        self.asker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._beginning, self._begun = threading.Lock(), 0.0  # when the last compilation has

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """Return the compiled form of a request's grammar.

        May sleep first: compilations begin at least `SPACING` seconds apart.

        Raises:
            UserError: the grammar is wrong or too large, or asks for what the library does not know.
        """
        with self._beginning:
            if (early := self._begun + SPACING - time.perf_counter()) > 0:
                time.sleep(early)
            self._begun = begun = time.perf_counter()
        try:
            source, asked = source_of(grammar, self.vocabulary)
            tokenizer = self._asked(frozenset(asked)) if asked else self.tokenizer
            inner = self._parser(source, tokenizer)
        except (ValueError, OverflowError) as error:
            raise UserError(f"grammar ({grammar}) is refused: {error}") from None
        if inner.is_error():
            said = one_line(inner.get_error())[:300]
            if grammar.kind == "regex":  # the place of the regex in the library's own notation
                said = said.removeprefix("line 1, character 8: ")
            if said.startswith(NOTHING):
                said = "no output satisfies it"
            raise UserError(f"grammar ({grammar}) is refused: {said}")
        starts = [inner]
        while len(starts) < self.lexers and time.perf_counter() - begun < MAKING:
            starts.append(self._parser(source, tokenizer))
        size = BASE_BYTES + BYTES_PER_CHARACTER * len(grammar.source)
        drafts = grammar.kind != "lark" or not COUNTING.search(grammar.source)
        return GuidanceGrammar(starts, self.vocabulary.eos, size, drafts)

    def _parser(self, source: str, tokenizer: ll.LLTokenizer) -> ll.LLMatcher:
        """Return a llguidance parser at the start of a grammar, whose first mask is already computed.

        An error in the grammar is kept in the parser (`is_error`). source: the grammar in the library's
        notation. tokenizer: the model's, in the library's form.
        """
        made = ll.LLMatcher(tokenizer, source, limits=self.limits, log_level=0)
        if not made.is_error():
            made.compute_bitmask()
        return made

    def advance(self, moves: Sequence[tuple[GuidanceMatcher, Sequence[int]]]) -> list[int]:
        """Advance each matcher by its tokens; return a list of how many tokens each has accepted.

        A token that ends the output is not accepted. moves: pairs (matcher, token ids); many with one token
        advance in the library's threads, without Python's lock.
        """
        single = {
            matcher: tokens[0]
            for matcher, tokens in moves
            if len(tokens) == 1 and tokens[0] not in matcher.eos and not matcher.effort.watched
        }
        moved: dict[GuidanceMatcher, int] = {}
        if len(single) > self._small_batch:
            begun = time.perf_counter()
            counts = self.threads.consume_token_par(
                [(one.inner, token) for one, token in single.items()]
            )
            moved = dict(zip(single, map(int, counts), strict=True))
            slow = took_long(begun, len(single))
            for matcher in moved:
                matcher.effort.watched = slow
        return [
            moved[one] if one in moved else one.advance(tokens) if tokens else 0
            for one, tokens in moves
        ]

    def begin(self, jobs: Sequence[Job], words: Words) -> Future[None] | None:
        """Begin to fill bit masks in threads; until these are done, nothing else may use the jobs' matchers.

        Args:
            jobs: triples (matcher, row of its first mask, draft tokens): a mask before each draft, and one
                after them, in consecutive rows.
            words: `[M, ceil(V / 32)]` int32, where the M masks of V tokens are written.

        Returns:
            A future that ends when all masks are made; None if they are made already.
        """
        if sum(len(drafts) + 1 for _, _, drafts in jobs) <= self._small_batch:
            fill_in_turn(jobs, words)
            return None
        # The thread needs Python's lock to hand over the matchers. The caller waits until it runs: otherwise
        # it would get the lock in its turn, 5 ms later.
        running = threading.Event()

        def ask() -> None:
            running.set()
            self._fill_together(jobs, words)

        done = self.asker.submit(ask)
        running.wait()
        return done

    def _fill_together(self, jobs: Sequence[Job], words: Words) -> None:
        """Fill masks in the library's threads, without Python's lock (the GIL), and wait for them.

        jobs: triples (matcher, row of its first mask, draft tokens). words: `[M, ceil(V / 32)]` int32, gets
            the masks.
        The time of the call includes the wait for the lock at its end. So a long call only shows that one of
        the jobs may be slow; all of the jobs are timed one by one from then on.
        """
        at = words.ctypes.data
        width = words.strides[0]
        count = len(words)
        watched = [job for job in jobs if job[0].effort.watched]
        rest = [job for job in jobs if not job[0].effort.watched]
        begun = time.perf_counter()
        plain = [(matcher.inner, row) for matcher, row, drafts in rest if not drafts]
        # The library keeps the results. Its threads would wait for the lock to ask for them.
        for inner, _ in plain:
            inner.compute_ff_tokens()
        if plain:
            self.threads.unsafe_compute_mask_ptr(plain, at, width, count)
        if drafted := [
            (matcher.inner, row, list(drafts)) for matcher, row, drafts in rest if drafts
        ]:
            self.threads.unsafe_compute_mask_ptr_with_draft_token(drafted, at, width, count)
        if took_long(begun, len(rest)):
            for matcher, _, _ in jobs:
                matcher.effort.watched = True
        fill_in_turn(watched, words)


def took_long(begun: float, count: int) -> bool:
    """Return True if a call for `count` outputs, begun at that time, took so long that one may be slow."""
    return time.perf_counter() - begun > SLOW + ORDINARY * count


def fill_in_turn(jobs: Sequence[Job], words: Words) -> None:
    """Fill masks in this thread, one after the other.

    jobs: triples (matcher, row of its first mask, draft tokens): a mask before each draft, and one after
        them.
    words: `[M, ceil(V / 32)]` int32, where the masks are written.
    """
    for matcher, row, drafts in jobs:
        matcher.fill(words[row])
        for below, draft in enumerate(drafts, start=row + 1):
            matcher.advance((draft,))
            matcher.fill(words[below])
        matcher.rollback(len(drafts))


def source_of(grammar: Grammar, vocabulary: Spelling) -> tuple[str, set[int]]:
    """Return a request's grammar in llguidance's notation, and the ids of added tokens that it asks for.

    Only a Lark grammar can ask for an added token, such as Qwen's `<think>`; elsewhere such a name is text.
    vocabulary: the model's tokens.

    Raises:
        ValueError: the library would give the grammar another meaning.

    The text of a JSON schema is used unchanged wherever it can be: to parse it would hold Python's lock, and
    so delay the engine's step, for a millisecond per 100 kB.
    """
    if grammar.kind == "json_schema":
        source = {"true": "{}", "false": '{"not": {}}'}.get(
            grammar.source.strip(), grammar.source.strip()
        )
        if SUSPECT.search(source):
            source = json.dumps(exact(json.loads(source)))
        rest = source[1:].lstrip()
        comma = "" if rest == "}" else ","
        options = f'"{OWN_OPTIONS}":{json.dumps(OPTIONS)}'
        return f'{{"grammars":[{{"json_schema":{{{options}{comma}{rest}}}]}}', set()
    if grammar.kind == "regex":
        return ll.LLMatcher.grammar_from_regex(rewrite_regex(grammar.source)), set()
    if grammar.kind == "choice":
        return ll.grammar_from("choice", grammar.source), set()
    if f"-{LARGEST + 1}" in grammar.source:  # in a schema inside the grammar
        raise ValueError(f"it has -{LARGEST + 1}, which is beyond 64 bits")
    lark, asked = rewrite_lark(
        ll.grammar_from("grammar", grammar.source), inner_schema, vocabulary
    )
    return ll.LLMatcher.grammar_from_lark(lark), asked


def inner_schema(source: str) -> str:
    """Rewrite a JSON schema inside a Lark grammar so that llguidance follows it exactly; return its text.

    source: the schema's text; the library's own options in it are kept.

    Raises:
        ValueError: the library cannot follow a keyword.
    """
    schema = json.loads(source) if SUSPECT.search(source) else None
    if not isinstance(schema, dict):
        return source
    options = {OWN_OPTIONS: schema.pop(OWN_OPTIONS)} if OWN_OPTIONS in schema else {}
    return json.dumps(exact(schema) | options)


class TokenizerObject:
    """A model's vocabulary with the attributes that llguidance reads from a tokenizer object.

    Args:
        vocabulary: the tokens.
        asked: ids of added tokens that a grammar asks for by name; they count as special.

    tokens: bytes of each token; of a special token, its name.
    special_token_ids: tokens that stand for no text; only a Lark grammar can ask for one, by `<name>`.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Spelling, asked: Collection[int]) -> None:
        self.encode, self.eos_token_id = vocabulary.encode, vocabulary.eos[0]
        self.tokens = list(vocabulary.tokens)
        names = dict.fromkeys(vocabulary.eos, "<|end|>") | dict(vocabulary.special)
        names |= {token: name for name, token in vocabulary.added.items() if token in asked}
        for token, name in names.items():
            self.tokens[token] = name.encode()
        self.special_token_ids = list(names)

    def __call__(self, text: str) -> Sequence[int]:
        """Return the token ids of a text; llguidance calls it for a text that a grammar forces."""
        return self.encode(text)


def tokenizer_of(vocabulary: Spelling, asked: Collection[int] = ()) -> ll.LLTokenizer:
    """Return llguidance's tokenizer for a vocabulary.

    asked: ids of added tokens that a grammar asks for by name; they count as special in this tokenizer.
    It is not made from a `tokenizer.json`, since the library takes every added token `<...>` of a file for a
    special one: it would force the text of Qwen's `<think>`, and refuse its token.
    """
    return ll.LLTokenizer(
        cast(ll.TokenizerWrapper, TokenizerObject(vocabulary, asked)),
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.eos),
        slices=SLICES,
    )
