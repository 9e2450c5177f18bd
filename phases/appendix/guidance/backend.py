"""llguidance: an Earley parser over a lexer of regex derivatives, in Rust (Moskal et al., 2024).

https://github.com/guidance-ai/llguidance. It makes no table ahead of time, so it compiles in milliseconds; it
refuses what it does not know; and every kind of work has a limit.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import llguidance as ll
import numpy as np

from common.errors import UserError
from common.sampling.grammar import Grammar
from phases.appendix.guidance.exact import LARGEST, OPTIONS, SUSPECT, exact
from phases.appendix.guidance.matcher import FIRST, SLOW, Effort, FastBackend, FastMatcher, Job, Trial
from phases.appendix.guidance.places import Place, PlacedOutput, Schema, Tokens
from phases.appendix.guidance.spelling import Spelling
from structured.matcher import Compiled, Matcher, Words
from structured.pool import step_back

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 5_000,  # what the widest schemas tried need; `Effort` bounds what items may cost
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,  # of one or two kilobytes each
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
OWN_OPTIONS = "x-guidance"
"""The key under which a schema has options for the library. Some of them let through what does not validate,
or is no JSON; `HARMLESS` ones do not, as long as white space is that of JSON."""
HARMLESS = ("whitespace_flexible", "whitespace_pattern")
WHITE_SPACE = re.compile(r"(\\x20|\\x0[9aAdD]|\\[nrt]|\{\d*,?\d*\}|[ \n\r\t\[\]()?*+|])*")
OLDER = re.compile(r"json-schema\.org/draft-0[3467]/")
"""Dialects to which a `$ref` overrules what stands beside it; to the library it does in none."""
REFERRED = ("$ref", "$schema", "$defs", "definitions")
NAMES = ("properties", "patternProperties", "$defs", "definitions")
VALUES = ("const", "enum", "default", "examples")

LONG = 16_384
"""Characters from which a schema is handed over inside a grammar in Lark's language, which the library reads
without Python's lock. JSON it reads with the lock: for a schema of 250 kB no step goes on for 2 ms. For short
ones that is nothing, and the language takes half a millisecond more."""
ESCAPED = re.compile(r"\\+u([0-9a-fA-F]{4})")
INSIDE = "failed to compile JSON schema: "
"""What the library says before what is wrong with a schema that came so."""

NOTHING = "NoExtensionBias"
"""What the library says of a mask in which there is no token, and nothing else."""

FEW = 4
"""Up to so many masks are made by the thread that asks: waking others takes longer. As many outputs share a
lexer before another one is made."""
FEW_ALONE = 32
"""The same where a single other thread could make them: with one processor more, nothing is made sooner."""
DEAR, AGAIN = 0.0003, 4
"""Seconds, and steps. If few masks took longer, others are woken for those of the next steps as well: one may
take a millisecond, and outputs that have begun together come to such masks together. Most are at the end of a
string, which is a few tokens long.
"""
MOST_KEPT = 4096
"""Masks: 78 MB of them, for a vocabulary of 150,000 tokens."""
SPACING = 0.004
"""Seconds between the beginnings of two compilations. However short each is, threads that compile one after
the other ask for Python's lock again and again, and who computes has to wait for it as often."""
LONG_WAIT, MOST_SUSPECTS = 0.002, 64
"""If a step has waited so many seconds for up to so many masks, one more of each grammar is timed."""
MOST_THREADS = 16
MAKING = 0.1
"""Seconds that may go into further lexers of one grammar."""
CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [f"{CHARACTER}{{1,{most}}}" for most in (*range(5, 13), 14, 18, 30)] + [f"{CHARACTER}+"]
"""Tokens by their length, as they stand in a string of JSON. As long as all of a slice fit, none of its
tokens is looked at. The library has three slices; where strings are short, these halve the time of a mask.
The slices that do not fit are looked through one by one, so where most tokens are too long few are best."""
BASE_BYTES, BYTES_PER_CHARACTER = 100_000, 60
"""About what a compiled grammar takes, by its source: measured as the growth of a process."""


class GuidanceMatcher(FastMatcher):
    """One output in llguidance's parser. Its group is the number of the lexer that it shares with others.

    output: where it stands in its schema, if that has places.
    mask: the next one, if it was made before it was asked for.
    eos: the tokens that end an output.
    effort: the processor time of masks and tokens.
    """

    def __init__(
        self, inner: ll.LLMatcher, lexer: int, schema: Schema | None, trial: Trial, eos: Sequence[int]
    ) -> None:
        self.inner, self.group, self.trial, self.eos = inner, lexer, trial, eos
        self.output = None if schema is None else PlacedOutput(schema)
        self.mask: Words | None = None
        self.effort = Effort()

    def fill(self, words: Words) -> None:
        """See `Matcher`; so are the others."""
        if self.mask is not None:
            words[:] = self.mask
        else:
            with self.effort.timed():
                self.inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def prepare(self) -> None:
        """Time it, too: what this thread computes, not what it waits for."""
        words, begun = np.zeros(self.trial.words, np.int32), time.thread_time()
        self.fill(words)
        self.trial.timed(time.thread_time() - begun)
        self.mask = words

    def advance(self, tokens: Sequence[int]) -> int:
        """Tokens that are not allowed leave the matcher as it is."""
        self.mask = None
        with self.effort.timed():
            count = self.inner.try_consume_tokens(self._before_end(tokens))
        if self.output is not None:
            for token in tokens[:count]:
                self.output.advance(token)
        return count

    def rollback(self, count: int) -> None:
        """The parser keeps its rows."""
        if count:
            self.mask = None
            self.inner.rollback(count)
            if self.output is not None and not self.output.rollback(count):
                self.output = None

    @property
    def accepting(self) -> bool:
        """Asks the parser."""
        return self.inner.is_accepting()

    @property
    def problem(self) -> str:
        """The first line of what the library says, or the budget that is used up."""
        return self.inner.get_error().split("\n")[0][:200] if self.inner.is_error() else self.effort.problem

    def forced(self) -> Sequence[int]:
        """Return what the library would fast-forward: its mask then allows these alone."""
        return self.inner.compute_ff_tokens()

    def agrees(self, tokens: Sequence[int]) -> int:
        """The library looks without taking."""
        return self.inner.validate_tokens(self._before_end(tokens))

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """Cut tokens before one that ends the output, which the library takes in some places only."""
        end = next((place for place, token in enumerate(tokens) if token in self.eos), len(tokens))
        return list(tokens[:end])


class GuidanceGrammar(Compiled):
    """A grammar and its lexers. An output gets a copy of a parser, and shares that one's lexer: what it has
    learnt for one output is known to the others, but only one thread at a time may use it. So there are some
    for each thread, if enough outputs want them, and each output gets the one that fewest have. More would
    only learn the same once more.

    Args:
        first: a parser at its start.
        make: makes another one, with a lexer of its own.
        seconds: what that takes.
        most: lexers.
        schema: with places, if it is one.
        trial: of its masks.
        maker: makes lexers for those who must not wait.
        eos: see `GuidanceMatcher`.
    """

    def __init__(
        self,
        first: ll.LLMatcher,
        make: Callable[[], ll.LLMatcher],
        seconds: float,
        most: int,
        characters: int,
        schema: Schema | None,
        trial: Trial,
        maker: Executor,
        eos: Sequence[int],
    ) -> None:
        self._make, self._maker, self._schema, self._trial, self._eos = make, maker, schema, trial, eos
        self._lexers = [Lexer(0, first)]
        self._most = max(1, min(most, int(MAKING / max(seconds, 1e-6))))
        self._lock = threading.Lock()
        self._making = False
        self.bytes = BASE_BYTES + BYTES_PER_CHARACTER * characters

    def matcher(self) -> Matcher:
        """A copy of a parser at its start."""
        with self._lock:
            lexer = self._fewest
            if lexer.users and len(self._lexers) < self._most:
                lexer = self._further(self._make())
            return lexer.output(self._schema, self._trial, self._eos)

    def soon(self) -> Matcher | None:
        """The same, but a few outputs share a lexer, and those behind them wait until a thread has made more,
        twice as many as there were.
        """
        with self._lock:
            lexer = self._fewest
            if len(lexer.users) < FEW or len(self._lexers) >= self._most:
                return lexer.output(self._schema, self._trial, self._eos)
            if not self._making:
                self._making = True
                self._maker.submit(self._double)
            return None

    @property
    def _fewest(self) -> Lexer:
        return min(self._lexers, key=lambda lexer: len(lexer.users))

    def _further(self, start: ll.LLMatcher) -> Lexer:
        self._lexers.append(Lexer(len(self._lexers), start))
        return self._lexers[-1]

    def _double(self) -> None:
        made = []
        try:
            made = [self._make() for _ in range(min(len(self._lexers), self._most - len(self._lexers)))]
        finally:
            with self._lock:
                for start in made:
                    self._further(start)
                if not made:  # what has failed once is not tried again
                    self._most = len(self._lexers)
                self._making = False


class Lexer:
    """One lexer of a grammar: a parser at its start, which has it, and the outputs that share it."""

    def __init__(self, number: int, start: ll.LLMatcher) -> None:
        self.number, self.start = number, start
        self.users: WeakSet[GuidanceMatcher] = WeakSet()

    def output(self, schema: Schema | None, trial: Trial, eos: Sequence[int]) -> GuidanceMatcher:
        """Return a new output's parser."""
        made = GuidanceMatcher(self.start.deep_copy(), self.number, schema, trial, eos)
        self.users.add(made)
        return made


class Unknown(NamedTuple):
    """The rest of a step's jobs when masks that are kept have been written.

    first: those of jobs whose masks are to be kept, by place. twins: not of jobs, but as one of `first`.
    """

    jobs: Sequence[Job]
    first: dict[Place, Job]
    twins: list[tuple[Place, Job]]


class GuidanceBackend(FastBackend):
    """Compiles by llguidance; fills masks by its threads."""

    vocabulary: Spelling

    def __init__(self, vocabulary: Spelling) -> None:
        super().__init__(vocabulary)
        # The library's threads ask what the tokenizer would make of what is forced. If it is ours that they
        # ask, each waits for Python's lock.
        self.tokenizer = self._reader(vocabulary.source) if vocabulary.source else self._exact
        self._changed = re.compile("|".join(map(re.escape, vocabulary.changed)) or "(?!)")
        self.limits = ll.LLParserLimits(**LIMITS)
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) - 1))
        self.threads, self._alone = ll.LLExecutor(threads), threads == 1
        self._few = FEW_ALONE if self._alone else FEW
        self._woken = 0  # steps for which few masks are made by others, too
        # Of a grammar. Some masks take a hundred times longer than most, and those of the same lexer wait for
        # them: 256 masks take 15 threads 3.7 ms with a lexer for each, and 2.7 with four times as many.
        self.lexers = 1 if threads == 1 else 4 << (threads - 1).bit_length()
        self.asker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self.maker = ThreadPoolExecutor(1, thread_name_prefix="lexers", initializer=step_back)
        self._tokens = Tokens(vocabulary.tokens)
        self._beginning, self._begun = threading.Lock(), 0.0  # when the last compilation has
        self._kept: deque[Place] = deque()  # that have masks
        self._jobs: Sequence[Job] = ()  # the last that were to be filled, and whether some have places
        self._placed = False
        self._asked: Sequence[Job] = ()  # the last that others filled, and what the library is told of them:
        self._plain: list[tuple[ll.LLMatcher, int]] = []
        self._drafted: list[tuple[ll.LLMatcher, int, list[int]]] = []

    def compile(self, grammar: Grammar) -> Compiled:
        """See `Backend.compile`."""
        with self._beginning:
            if (early := self._begun + SPACING - time.perf_counter()) > 0:
                time.sleep(early)
            self._begun = begun = time.perf_counter()
        try:
            source = source_of(grammar)
            inner = self._parser(source)
        except (ValueError, OverflowError) as error:
            raise UserError(f"grammar ({grammar}): {error}") from None
        if inner.is_error():
            said = inner.get_error()
            if grammar.kind == "json_schema" and INSIDE in said:  # behind the first line it shows the grammar
                said = said.split(INSIDE)[1].split("\n")[0]
            said = " ".join(said.split())[:300]
            if said.startswith(NOTHING):
                said = "no output satisfies it"
            raise UserError(f"grammar ({grammar}) is refused: {said}")
        seconds = time.perf_counter() - begun
        schema = self._schema(grammar)
        plain = grammar.kind == "choice" or (grammar.kind == "json_schema" and '"pattern' not in source)
        trial = Trial(self.vocabulary.words, 0 if plain else FIRST)
        make, size = partial(self._parser, source), len(grammar.source)
        eos = self.vocabulary.eos
        return GuidanceGrammar(inner, make, seconds, self.lexers, size, schema, trial, self.maker, eos)

    @cached_property
    def _exact(self) -> ll.LLTokenizer:
        """A tokenizer that keeps the bytes of every text."""
        return self._reader(ll.TokenizerWrapper(_Wrapped(self.vocabulary)))

    def _reader(self, source: str | ll.TokenizerWrapper) -> ll.LLTokenizer:
        size, eos = len(self.vocabulary.tokens), list(self.vocabulary.eos)
        return ll.LLTokenizer(source, n_vocab=size, eos_token=eos, slices=SLICES)

    def _schema(self, grammar: Grammar) -> Schema | None:
        """With places, if this is a schema that has some."""
        if grammar.kind != "json_schema":
            return None
        with suppress(RecursionError):
            schema = Schema(grammar.source, self._tokens)
            return schema if schema.has_places else None
        return None

    def _parser(self, source: str) -> ll.LLMatcher:
        """At its start; its lexer has made the first mask, and is warm for the next."""
        plain = ESCAPED.sub(lambda found: chr(int(found[1], 16)), source).replace("\\", "")
        tokenizer = self._exact if self._changed.search(plain) else self.tokenizer
        made = ll.LLMatcher(tokenizer, source, limits=self.limits, log_level=0)
        if not made.is_error():
            made.compute_bitmask()
        return made

    def advance(self, moves: Sequence[tuple[Matcher, Sequence[int]]]) -> list[int]:
        """Several matchers at a time, where each takes one token, without Python's lock."""
        own = cast("Sequence[tuple[GuidanceMatcher, Sequence[int]]]", moves)
        together = [
            len(tokens) == 1 and tokens[0] not in matcher.eos and not matcher.effort.watched
            for matcher, tokens in own
        ]
        single = [(move[0].inner, move[1][0]) for move, one in zip(own, together, strict=True) if one]
        if len(single) <= self._few:
            return super().advance(moves)
        begun = time.perf_counter()
        moved = iter(self.threads.consume_token_par(single))
        slow = time.perf_counter() - begun > SLOW
        counts = []
        for (matcher, tokens), one in zip(own, together, strict=True):
            if not one:
                counts.append(matcher.advance(tokens) if tokens else 0)
                continue
            counts.append(int(next(moved)))
            matcher.effort.watched = slow
            if counts[-1]:
                matcher.mask = None
                if matcher.output is not None:
                    matcher.output.advance(tokens[0])
        return counts

    def begin(self, jobs: Sequence[Job], words: Words) -> Future[None] | None:
        """A thread asks the library's threads, so that who calls this can go on meanwhile.

        It needs Python's lock for a moment to hand over the matchers, and gets it because this one waits
        until it runs: otherwise it would have to wait for its turn, which is 5 ms long.
        """
        unknown = self._known(jobs, words)
        if self._by_itself(unknown.jobs):
            self._fill_alone(unknown, words)
            return None
        running = threading.Event()

        def ask() -> None:
            running.set()
            self._fill_by_threads(unknown, words)

        done = self.asker.submit(ask)
        running.wait()
        return done

    def waited(self, jobs: Sequence[Job], seconds: float) -> None:
        """See `Backend.waited`. With many masks it is their number that takes time."""
        if seconds > LONG_WAIT and len(jobs) <= MOST_SUSPECTS:
            for job in jobs:
                trial = cast("GuidanceMatcher", job.matcher).trial
                trial.left = max(trial.left, 1)

    def fill(self, jobs: Sequence[Job], words: Words) -> None:
        """See `Backend.fill`."""
        unknown = self._known(jobs, words)
        if self._by_itself(unknown.jobs):
            self._fill_alone(unknown, words)
        else:
            self._fill_by_threads(unknown, words)

    def _known(self, jobs: Sequence[Job], words: Words) -> Unknown:
        """Write the masks that are kept; returns what is left to make."""
        if jobs is not self._jobs:
            self._jobs = jobs
            own = [cast("GuidanceMatcher", job.matcher) for job in jobs]
            self._placed = any([one.output is not None or one.mask is not None for one in own])
        if not self._placed:
            return Unknown(jobs, {}, [])
        left, first, twins = list[Job](), dict[Place, Job](), list[tuple[Place, Job]]()
        for job in jobs:
            matcher = cast("GuidanceMatcher", job.matcher)
            place = None if matcher.output is None or job.drafts else matcher.output.place
            if matcher.mask is not None and not job.drafts:
                words[job.row] = matcher.mask
            elif place is None:
                left.append(job)
            elif place.mask is not None:
                words[job.row] = place.mask
            elif place in first:
                twins.append((place, job))
            else:
                first[place] = job
                left.append(job)
        return Unknown(left, first, twins)

    def _keep(self, unknown: Unknown, words: Words) -> None:
        """Copy what has been made, if it went well, to those of the same place, now and later."""
        for place, job in unknown.first.items():
            if not job.matcher.problem:
                if len(self._kept) >= MOST_KEPT:
                    self._kept.popleft().mask = None
                place.mask = words[job.row].copy()
                self._kept.append(place)
        for place, job in unknown.twins:
            if place.mask is not None:
                words[job.row] = place.mask
            else:
                job.matcher.fill(words[job.row])

    def _by_itself(self, jobs: Sequence[Job]) -> bool:
        """Tell whether the thread that asks for these masks makes them."""
        few = len(jobs) <= self._few and sum(len(job.drafts) + 1 for job in jobs) <= self._few
        return not jobs or (few and (self._alone or self._woken == 0))

    def _fill_alone(self, unknown: Unknown, words: Words) -> None:
        """One after the other."""
        begun = time.perf_counter()
        super().fill(unknown.jobs, words)
        self._woken = AGAIN if time.perf_counter() - begun > DEAR else 0
        self._keep(unknown, words)

    def _fill_by_threads(self, unknown: Unknown, words: Words) -> None:
        """Several at a time, without Python's lock. How long that takes this thread cannot say: at the end it
        waits for the lock.
        """
        self._woken = max(0, self._woken - 1)
        at, width, count = words.ctypes.data, words.strides[0], len(words)
        own = cast("Sequence[tuple[GuidanceMatcher, int, Sequence[int]]]", unknown.jobs)
        watched = [job for job in own if job[0].effort.watched]
        if watched or unknown.jobs is not self._asked:
            rest = [job for job in own if not job[0].effort.watched]
            self._plain = [(matcher.inner, row) for matcher, row, drafts in rest if not drafts]
            self._drafted = [(matcher.inner, row, list(drafts)) for matcher, row, drafts in rest if drafts]
            self._asked = () if watched else unknown.jobs
        begun = time.perf_counter()
        if self._plain:
            self.threads.unsafe_compute_mask_ptr(self._plain, at, width, count)
        if self._drafted:
            self.threads.unsafe_compute_mask_ptr_with_draft_token(self._drafted, at, width, count)
        if time.perf_counter() - begun > SLOW:
            for matcher, _, _ in own:
                matcher.effort.watched = True
        super().fill([Job(*job) for job in watched], words)
        self._keep(unknown, words)


def source_of(grammar: Grammar) -> str:
    """A grammar in the library's own notation.

    A schema is put there as it stands, wherever that can be: reading it would hold Python's lock, and with it
    the engine's step, a millisecond for every 100 kB.
    """
    if grammar.kind == "json_schema":
        source = {"true": "{}", "false": '{"not": {}}'}.get(grammar.source.strip(), grammar.source.strip())
        # Behind a backslash a character may be hidden.
        if "\\" in source or OWN_OPTIONS in source or OLDER.search(source) or SUSPECT.search(source):
            schema: Any = exact(json.loads(source))
            source = json.dumps(schema)
            if OLDER.search(str(schema.get("$schema"))):
                schema = _alone(schema)
                source = json.dumps(schema)
            _check_options(schema)
        if OWN_OPTIONS in source or "\\" in source:
            return ll.LLMatcher.grammar_from_json_schema(source, defaults=OPTIONS)  # type: ignore[arg-type]
        rest = source[1:].lstrip()
        comma = "" if rest == "}" else ","
        schema = f'{{"{OWN_OPTIONS}":{json.dumps(OPTIONS)}{comma}{rest}'
        if len(schema) >= LONG:
            return f"start: %json {schema}"
        return f'{{"grammars":[{{"json_schema":{schema}}}]}}'
    if grammar.kind == "regex":
        return ll.LLMatcher.grammar_from_regex(grammar.source)
    if f"-{LARGEST + 1}" in grammar.source:  # in a schema inside the grammar
        raise ValueError(f"it has -{LARGEST + 1}, which is beyond 64 bits")
    return ll.grammar_from("choice" if grammar.kind == "choice" else "grammar", grammar.source)


def _check_options(schema: Any) -> None:
    """Raise `ValueError` for options with which an output might not be what the schema says."""
    given = schema.get(OWN_OPTIONS, {}) if isinstance(schema, dict) else {}
    if not isinstance(given, dict) or not given.keys() <= set(HARMLESS):
        raise ValueError(f"{OWN_OPTIONS} may have {' and '.join(HARMLESS)}, and nothing else")
    if not WHITE_SPACE.fullmatch(str(given.get("whitespace_pattern") or "")):
        raise ValueError(f"whitespace_pattern of {OWN_OPTIONS} must match nothing but JSON's white space")


def _alone(schema: Any, names: bool = False) -> Any:
    """A schema without what stands beside a `$ref`; `names`: its keys are names, not keywords."""
    if isinstance(schema, list):
        return [_alone(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    alone = not names and isinstance(schema.get("$ref"), str)
    return {
        key: part if key in VALUES and not names else _alone(part, key in NAMES and not names)
        for key, part in schema.items()
        if key in REFERRED or not alone
    }


class _Wrapped:
    """A vocabulary in the shape that the library reads."""

    def __init__(self, vocabulary: Spelling) -> None:
        self.encode = vocabulary.encode
        self.eos_token_id, self.bos_token_id = vocabulary.eos[0], None
        self.tokens = list(vocabulary.tokens)
        for token in vocabulary.eos:
            self.tokens[token] = b"<|end|>"  # any name: it is special
        self.special_token_ids = list(vocabulary.eos)

    def __call__(self, text: str) -> list[int]:
        return list(self.encode(text))
