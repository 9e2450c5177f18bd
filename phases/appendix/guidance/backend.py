"""llguidance: an Earley parser over a lexer of regex derivatives, in Rust (Moskal et al., 2024).

https://github.com/guidance-ai/llguidance. It makes no table ahead of time, so it compiles in milliseconds; it
refuses what it does not know; and every kind of work has a limit.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, cast
from weakref import WeakSet

import llguidance as ll

from common.errors import UserError, one_line
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
"""What the library says of a mask in which there is no token, and nothing else."""

SMALL_BATCH = 4
"""Up to so many masks are made by the thread that asks: waking others takes longer. As many outputs share a
lexer before another one is taken."""
FEW_ALONE = 32
"""The same where a single other thread could make them: with one processor more, nothing is made sooner."""
SPACING = 0.004
"""Seconds between the beginnings of two compilations. However short each is, threads that compile one after
the other ask for Python's lock again and again, and the engine has to wait for it as often."""
MOST_THREADS = 16
MAKING = 0.02
"""Seconds that may go into the lexers of one grammar, while the requests that want it wait."""
CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [f"{CHARACTER}{{1,{most}}}" for most in (*range(5, 13), 14, 18, 30)] + [
    f"{CHARACTER}+"
]
"""Tokens by their length, as they stand in a string of JSON. As long as all of a slice fit, none of its
tokens is looked at. The library has three slices; where strings are short, these halve the time of a mask.
The slices that do not fit are looked through one by one, so where most tokens are too long few are best."""
BASE_BYTES, BYTES_PER_CHARACTER = 100_000, 60
"""About what a compiled grammar takes, by its source: measured as the growth of a process."""


class GuidanceGrammar(Compiled):
    """A grammar: parsers at its start, each with a lexer of its own.

    An output gets a copy of a parser, and shares that one's lexer: what it has learnt for one output is known
    to the others, but only one thread at a time may use it. So a few outputs share one, and many are spread.

    size: see `Compiled.bytes`. eos: see `GuidanceMatcher`.
    """

    def __init__(self, starts: Sequence[ll.LLMatcher], eos: Sequence[int], size: int) -> None:
        self._starts = starts
        self._eos = eos
        self.bytes = size
        self._users = [WeakSet[GuidanceMatcher]() for _ in starts]
        self._lock = threading.Lock()

    def matcher(self) -> GuidanceMatcher:
        """Copy a parser at its start, whose lexer has few outputs: the first such, which has learnt most."""
        with self._lock:
            counts = [len(users) for users in self._users]
            number = next(
                (n for n, count in enumerate(counts) if count < SMALL_BATCH),
                counts.index(min(counts)),
            )
            made = GuidanceMatcher(self._starts[number].deep_copy(), number, self._eos)
            self._users[number].add(made)
            return made


class GuidanceBackend(Backend):
    """Compiles by llguidance; moves many matchers, and fills many masks, by its threads."""

    vocabulary: Spelling

    def __init__(self, vocabulary: Spelling) -> None:
        super().__init__(vocabulary)
        self.tokenizer = tokenizer_of(vocabulary)
        # For Lark grammars that ask for tokens which are text elsewhere, such as Qwen's `<think>`.
        self._asked = lru_cache(4)(lambda tokens: tokenizer_of(vocabulary, tokens))
        self.limits = ll.LLParserLimits(**LIMITS)
        threads = max(1, min(MOST_THREADS, len(processors()) - 1))
        self.threads, self._few = (
            ll.LLExecutor(threads),
            FEW_ALONE if threads == 1 else SMALL_BATCH,
        )
        # Of a grammar. Some masks take a hundred times longer than most, and those of the same lexer wait for
        # them: 256 masks take 15 threads 3.7 ms with a lexer for each, and 2.7 with four times as many.
        self.lexers = 1 if threads == 1 else 4 << (threads - 1).bit_length()
        self.asker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._beginning, self._begun = threading.Lock(), 0.0  # when the last compilation has

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        """See `Backend.compile`."""
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
        return GuidanceGrammar(starts, self.vocabulary.eos, size)

    def _parser(self, source: str, tokenizer: ll.LLTokenizer) -> ll.LLMatcher:
        """At its start; its lexer has made the first mask, and is warm for the next."""
        made = ll.LLMatcher(tokenizer, source, limits=self.limits, log_level=0)
        if not made.is_error():
            made.compute_bitmask()
        return made

    def advance(self, moves: Sequence[tuple[GuidanceMatcher, Sequence[int]]]) -> list[int]:
        """Call `Matcher.advance` of many matchers: without Python's lock of those that take one token."""
        single = {
            matcher: tokens[0]
            for matcher, tokens in moves
            if len(tokens) == 1 and tokens[0] not in matcher.eos and not matcher.effort.watched
        }
        moved: dict[GuidanceMatcher, int] = {}
        if len(single) > self._few:
            begun = time.perf_counter()
            counts = self.threads.consume_token_par(
                [(one.inner, token) for one, token in single.items()]
            )
            moved = dict(zip(single, map(int, counts), strict=True))
            slow = time.perf_counter() - begun > SLOW
            for matcher in moved:
                matcher.effort.watched = slow
        return [
            moved[one] if one in moved else one.advance(tokens) if tokens else 0
            for one, tokens in moves
        ]

    def begin(self, jobs: Sequence[Job], words: Words) -> Future[None] | None:
        """Begin to fill the rows of `words [M, ceil(V / 32)]`, in threads; None: it is done.

        No matcher of these may be used until it is. A thread asks the library's threads, so that the caller
        can go on meanwhile. It needs Python's lock for a moment to hand over the matchers. The caller waits
        until it runs: it would get the lock when its turn comes, 5 ms later.
        """
        if sum(len(drafts) + 1 for _, _, drafts in jobs) <= self._few:
            fill_in_turn(jobs, words)
            return None
        running = threading.Event()

        def ask() -> None:
            running.set()
            self._fill_together(jobs, words)

        done = self.asker.submit(ask)
        running.wait()
        return done

    def _fill_together(self, jobs: Sequence[Job], words: Words) -> None:
        """Fill masks by several threads, without Python's lock.

        How long that takes this thread cannot say: at the end it waits for the lock.
        """
        at = words.ctypes.data
        width = words.strides[0]
        count = len(words)
        watched = [job for job in jobs if job[0].effort.watched]
        rest = [job for job in jobs if not job[0].effort.watched]
        begun = time.perf_counter()
        if plain := [(matcher.inner, row) for matcher, row, drafts in rest if not drafts]:
            self.threads.unsafe_compute_mask_ptr(plain, at, width, count)
        if drafted := [
            (matcher.inner, row, list(drafts)) for matcher, row, drafts in rest if drafts
        ]:
            self.threads.unsafe_compute_mask_ptr_with_draft_token(drafted, at, width, count)
        if time.perf_counter() - begun > SLOW:
            for matcher, _, _ in jobs:
                matcher.effort.watched = True
        fill_in_turn(watched, words)


def fill_in_turn(jobs: Sequence[Job], words: Words) -> None:
    """Fill masks one after the other."""
    for matcher, row, drafts in jobs:
        matcher.fill(words[row])
        for place, draft in enumerate(drafts, start=row + 1):
            matcher.advance((draft,))
            matcher.fill(words[place])
        matcher.rollback(len(drafts))


def source_of(grammar: Grammar, vocabulary: Spelling) -> tuple[str, set[int]]:
    """Write a grammar in the library's own notation.

    A schema is put there as it stands, wherever that can be: reading it would hold Python's lock, and with it
    the engine's step, a millisecond for every 100 kB.

    Args:
        grammar: in ours.
        vocabulary: whose tokens the grammar may ask for; returned are those of its `added` ones.
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
    """Rewrite the text of a schema inside a Lark grammar, which may have options of its own."""
    schema = json.loads(source) if SUSPECT.search(source) else None
    if not isinstance(schema, dict):
        return source
    options = {OWN_OPTIONS: schema.pop(OWN_OPTIONS)} if OWN_OPTIONS in schema else {}
    return json.dumps(exact(schema) | options)


class TokenizerObject:
    """A vocabulary in the shape that the library reads.

    tokens: bytes of each; of a special token its name.
    special_token_ids: tokens that are no text: only a Lark grammar may ask for one, by `<name>`.
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
        """Return tokens of a text; the library's threads ask for those of a forced one."""
        return self.encode(text)


def tokenizer_of(vocabulary: Spelling, asked: Collection[int] = ()) -> ll.LLTokenizer:
    """Make the library's tokenizer of an object, and not of a `tokenizer.json`.

    Of a file it takes every added token `<...>` for a special one, whatever the file says: it would force the
    text of Qwen's `<think>`, and refuse its token.

    Args:
        vocabulary: the tokens.
        asked: tokens of `vocabulary.added` that are no text here.
    """
    return ll.LLTokenizer(
        cast(ll.TokenizerWrapper, TokenizerObject(vocabulary, asked)),
        n_vocab=len(vocabulary.tokens),
        eos_token=list(vocabulary.eos),
        slices=SLICES,
    )
