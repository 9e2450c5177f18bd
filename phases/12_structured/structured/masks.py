"""Grammars in an engine: each request's place in its own, and the masks of a step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from common.errors import UserError
from common.request import Request
from common.rules import finish_reason
from common.sampling.params import SamplingParams
from common.sampling.sampler import Allowed
from continuous.seams import NOBODYS, Landed
from continuous.work import Work
from structured.longer import Longer
from structured.matcher import Job, Matcher, Words
from structured.pool import Compilation, GrammarPool
from structured.staging import MaskStaging


@dataclass(eq=False)
class Constraint:
    """A request's place in its grammar.

    taken: how many of its output tokens the matcher has seen. Nothing has to happen when a request is
        preempted: its tokens stay, and so does this.
    forced: tokens that must come next, if somebody has looked.
    """

    matcher: Matcher
    taken: int = 0
    forced: Sequence[int] = ()

    def unseen(self, request: Request) -> list[int]:
        """The tokens that are new since the matcher was last moved."""
        return request.tokens[request.prompt_len + self.taken :]

    def follow(self, request: Request) -> str:
        """Take the tokens that are new since the last call; returns what is wrong, if anything is."""
        new = self.unseen(request)
        count = self.matcher.advance(new) if new else 0
        return self.moved(new, count)

    def moved(self, new: Sequence[int], count: int) -> str:
        """The matcher was given `new` and has taken `count` of them; returns what is wrong."""
        self.taken += count
        if count:
            self.forced = ()  # they were those behind older tokens
        if count == len(new):
            return ""
        problem = self.matcher.problem
        return problem or f"token {self.taken} of the output, id {new[count]}, is not in the grammar"


class Taker(NamedTuple):
    """Somebody who is given masks in a step.

    place: in the batch, of its first sample; behind it those of its drafts.
    news: tokens that its matcher has not seen.
    """

    place: int
    drafts: Sequence[int]
    request: Request
    constraint: Constraint
    news: list[int]


@dataclass
class Filling:
    """Masks of a step that are being made.

    works: of the step.
    takers, jobs: for whom, and what is made.
    places: in the batch, one for each mask.
    words: where masks go.
    taken: of each taker's news, how many its matcher has taken, when all is made; None: nothing is made.
    """

    works: Sequence[Work]
    takers: list[Taker]
    jobs: list[Job]
    places: list[int]
    words: Words
    taken: Future[list[int]] | None


class GrammarMasks:
    """`Masks` that follow grammars; see `continuous.seams`.

    A step is: launch forward n + 1, read token n, and then `begin`: threads advance every matcher by token n
    and write the masks of n + 1, while the device computes and the host deals out n and schedules n + 2.
    `fill` waits for them and sends them off. Last the sampling of n + 1 is launched.

    Args:
        pool: where compiled grammars come from.
        vocab_size: `V`.
        eos: the tokens that end an output.
        device: where masks go.
        refusal: why grammars cannot be had at all, for an engine without a tokenizer; empty if they can.
        most_forced: works in a step, at most, for which somebody asks what is forced behind its tokens.

    filled: masks made up to now.
    single: of requests that somebody put here, the places of the output where one token alone was allowed.
    """

    def __init__(
        self,
        pool: GrammarPool,
        vocab_size: int,
        eos: Sequence[int],
        device: torch.device,
        *,
        refusal: str = "",
        most_forced: int,
    ) -> None:
        self.pool, self.eos, self.refusal = pool, frozenset(eos), refusal
        self._ends_at = np.array(sorted(eos), np.int64)
        self.most_forced = most_forced
        self.vocab_size, self.device = vocab_size, device
        self.filled = 0
        self.single: dict[Request, set[int]] = {}
        self._any = False  # whether a grammar was ever asked for
        self._failed: list[tuple[Request, Exception]] = []
        self._staging = MaskStaging(-(-vocab_size // 32), device)
        self._filling: Filling | None = None

    # Before a request runs.

    def check(self, params: SamplingParams) -> None:
        """Begin to compile a request's grammar."""
        if params.grammar is not None:
            if self.refusal:
                raise UserError(self.refusal)
            self._any = True
            self.pool.ask(params.grammar)

    def ready(self, request: Request) -> bool:
        """Whether its grammar is compiled."""
        grammar = request.params.grammar
        if grammar is None or isinstance(request.constraint, Constraint):
            return True
        if request.constraint is None:  # so that no other grammar can drive it out of the pool's memory
            request.constraint = self.pool.ask(grammar)
        assert isinstance(request.constraint, Compilation)
        compiled = request.constraint.get()
        matcher = None if compiled is None else compiled.soon()
        if matcher is not None:
            request.constraint = Constraint(matcher)
        return matcher is not None

    def settle(self, params: SamplingParams) -> None:
        """Wait for a grammar."""
        if params.grammar is not None:
            self.pool.ask(params.grammar).wait()

    # In a step.

    def wants(self, works: Sequence[Work]) -> bool:
        """Whether any taker has a grammar; until the first grammar comes, this costs nothing."""
        return self._any and any(taker.constraint is not None for work in works for taker in work.takers)

    def begin(self, works: Sequence[Work], landed: Landed = NOBODYS) -> bool:
        """Begin to move the matchers, and to make the masks of those samples that have a grammar."""
        self._finish()  # of a step that failed in between
        takers = self._takers(works, landed)
        if len(works) <= self.most_forced:
            takers = self._forced(takers)
        jobs: list[Job] = []
        places: list[int] = []
        for place, drafts, _, constraint, news in takers:
            jobs.append(Job(constraint.matcher, len(places), drafts, news))
            places.append(place)
            if drafts:
                places += range(place + 1, place + len(drafts) + 1)
        words = self._staging.host(len(places))
        if len(places) > len(jobs):  # behind a draft that ends the output no mask is made
            for job in jobs:
                words[job.row + 1 : job.row + 1 + len(job.drafts)] = 0
        taken = self.pool.backend.begin(jobs, words) if jobs else None
        self._filling = Filling(works, takers, jobs, places, words, taken)
        return taken is None or taken.done()

    def fill(self, works: Sequence[Work]) -> Allowed | None:
        """The masks of those samples of the step that have a grammar; None if none has."""
        if self._filling is None or self._filling.works is not works:
            self.begin(works)
        assert self._filling is not None
        owners = [taker.request for taker in self._filling.takers]
        longer = Longer.of(self._filling.jobs, owners)  # while masks are made
        made = self._finish()
        if made is None or not made.jobs:
            return None
        longer.apply(made.words, self._ends_at)
        for job, request in zip(made.jobs, owners, strict=True) if self.single else ():
            if request in self.single:
                self._note_single(request, made.words[job.row : job.row + len(job.drafts) + 1])
        self.filled += len(made.places)
        return self._staging.send(np.array(made.places, np.int64))

    def take_failed(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar cannot be followed any further."""
        failed, self._failed = self._failed, []
        return failed

    def _finish(self) -> Filling | None:
        """Wait for masks that are being made. Whoever could not be given one fails, and gets any token."""
        made, self._filling = self._filling, None
        if made is not None and made.taken is not None:
            for taker, job, count in zip(made.takers, made.jobs, made.taken.result(), strict=True):
                problem = taker.constraint.moved(taker.news, count) or job.matcher.problem
                if problem:
                    self._fail(taker.request, problem)
                    made.words[job.row : job.row + len(job.drafts) + 1] = -1
        return made

    def _takers(self, works: Sequence[Work], landed: Landed) -> list[Taker]:
        """Who needs masks, and what its matcher has to see before.

        One that has ended meanwhile, or will with what has landed, is left out: it gets some token, which
        nobody reads.
        """
        found: list[Taker] = []
        place = 0
        for work in works:
            for request in work.takers:
                constraint = request.constraint
                if isinstance(constraint, Constraint) and request.finish_reason is None:
                    news = landed.get(request, ())
                    if not self._ends(request, news):
                        unseen = [*constraint.unseen(request), *news]
                        found.append(Taker(place, work.drafts, request, constraint, unseen))
                place += len(work.drafts) + 1
        return found

    def _forced(self, takers: list[Taker]) -> list[Taker]:
        """Move matchers now: somebody will ask what is forced. Those that cannot be moved are left out."""
        counts = self.pool.backend.advance([(taker.constraint.matcher, taker.news) for taker in takers])
        moved = []
        for taker, count in zip(takers, counts, strict=True):
            if problem := taker.constraint.moved(taker.news, count):
                self._fail(taker.request, problem)
                continue
            taker.constraint.forced = taker.constraint.matcher.forced()
            moved.append(taker._replace(news=[]))
        return moved

    def _ends(self, request: Request, news: Sequence[int]) -> bool:
        """Whether a request's output ends with these tokens, as far as that shows without its text."""
        length, most = len(request.tokens) - request.prompt_len, request.limit - request.prompt_len
        params = request.params
        if length + len(news) < most and not params.stop_token_ids and self.eos.isdisjoint(news):
            return False  # nearly always
        for token in news:
            length += 1
            if finish_reason(token, length, params, self.eos, most) is not None:
                return True
        return False

    def _fail(self, request: Request, problem: str) -> None:
        error = UserError(f"grammar ({request.params.grammar}) cannot be followed: {problem}")
        self._failed.append((request, error))

    def _note_single(self, request: Request, words: Words) -> None:
        """Remember where a mask has one bit."""
        first = len(request.tokens) - request.prompt_len
        for place, row in enumerate(words, start=first):
            (used,) = np.nonzero(row)
            if len(used) == 1 and (int(row[used[0]]) & 0xFFFFFFFF).bit_count() == 1:
                self.single[request].add(place)
