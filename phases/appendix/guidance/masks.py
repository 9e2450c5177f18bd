"""Masks by threads: begun as soon as tokens are known, while the host deals out these and schedules."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np

from common.request import Request
from common.rules import finish_reason
from common.sampling.sampler import Allowed
from continuous.work import Work
from phases.appendix.guidance.longer import Longer
from phases.appendix.guidance.matcher import FastBackend, FastMatcher, Job
from phases.appendix.guidance.staging import MaskStaging
from structured.loop import NOBODYS, Landed
from structured.masks import Constraint, GrammarMasks
from structured.matcher import Matcher, Words, allows_one
from structured.pool import GrammarPool


@dataclass(eq=False)
class EarlyConstraint(Constraint):
    """A request's place in its grammar, where threads make masks.

    forced: tokens that must come next, if somebody has looked.
    making: a thread that makes the mask behind `known` tokens (see `late`), and has the matcher until then.
    """

    matcher: FastMatcher
    forced: Sequence[int] = ()
    making: Future[None] | None = None
    known: int = 0

    def unseen(self, request: Request) -> list[int]:
        """Return the tokens that are new since the matcher was last moved."""
        if self.making is not None:
            wait((self.making,))
        return super().unseen(request)


Follower = tuple[int, tuple[int, ...], Request, EarlyConstraint, Sequence[int]]
"""The first place in the batch of a request's samples, its drafts, itself, where it stands, what is new."""


class Crowd:
    """The outputs of a step that have a grammar.

    Nearly every step is of the same requests as the one before, with a token each. What depends on nothing
    but who they are is kept then: with hundreds of them it takes as long as to move their matchers.

    shape: the takers and drafts of the step's works.
    owners, constraints, jobs, moves (a matcher, and its new tokens): of each output. places: of each mask.
    """

    def __init__(self, shape: Sequence[object] = (), found: Sequence[Follower] = ()) -> None:
        self.shape, self.places = shape, list[int]()
        lines = list[tuple[Job, Request, EarlyConstraint, Sequence[int]]]()
        for place, drafts, request, constraint, new in found:
            lines.append((Job(constraint.matcher, len(self.places), drafts), request, constraint, new))
            self.places.append(place)
            if drafts:
                self.places += range(place + 1, place + len(drafts) + 1)
        # Threads divide the list. Neighbours should share what only one thread at a time may use.
        lines.sort(key=lambda line: line[0].matcher.group)
        self.jobs = [job for job, _, _, _ in lines]
        self.owners = [request for _, request, _, _ in lines]
        self.constraints = [constraint for _, _, constraint, _ in lines]
        self.moves = [(job.matcher, new) for job, _, _, new in lines]
        self._stops = any([one.params.stop_token_ids for one in self.owners])

    def again(self, shape: Sequence[object], landed: Landed, ends: Set[int]) -> bool:
        """Tell whether a step is of the same, each has got one token, and all go on; `moves` are its then."""
        if shape != self.shape or self._stops or len(self.places) != len(self.owners) or not self.owners:
            return False
        news = [landed.get(request, ()) for request in self.owners]
        if (
            {*map(len, news)} != {1}
            or not ends.isdisjoint(chain.from_iterable(news))
            or any([request.finish_reason for request in self.owners])
            or min([request.limit - len(request.tokens) for request in self.owners]) <= 1
            or [c.taken for c in self.constraints] != [len(r.tokens) - r.prompt_len for r in self.owners]
        ):
            return False
        self.moves = [(job.matcher, new) for job, new in zip(self.jobs, news, strict=True)]
        return True


@dataclass
class Filling:
    """Masks of a step that are being made.

    works: of the step. crowd: those with a grammar. words: where masks go. done: when; None: they are made.
    """

    works: Sequence[Work]
    crowd: Crowd
    words: Words
    done: Future[None] | None


class ThreadedMasks(GrammarMasks):
    """`GrammarMasks` that are begun before they are asked for.

    A step is: launch forward n + 1, read token n, and then `begin`: advance every matcher by token n, and let
    threads write the masks of n + 1, while the device computes and the host deals out n and schedules n + 2.
    `fill` waits for them and sends them off. Last the sampling of n + 1 is launched.

    Args:
        plain: the masks of phase 12, in whose place these are.
        pool: where compiled grammars come from.
        most_forced: works in a step, at most, for which somebody asks what is forced behind its tokens.

    filled: masks made up to now.
    """

    def __init__(self, plain: GrammarMasks, pool: GrammarPool, *, most_forced: int) -> None:
        eos = sorted(plain.eos)
        super().__init__(pool, plain.vocab_size, eos, plain.device, refusal=plain.refusal)
        self._ends_at = np.array(eos, np.int64)
        self.most_forced = most_forced
        self.filled = 0
        self._staging = MaskStaging(-(-plain.vocab_size // 32), plain.device)
        self._filling: Filling | None = None
        self._crowd = Crowd()  # of the last step
        self._sent: Crowd | None = None

    @property
    def backend(self) -> FastBackend:
        """The pool's."""
        return cast(FastBackend, self.pool.backend)

    def place(self, matcher: Matcher) -> Constraint:
        """Make the place of a new output."""
        return EarlyConstraint(cast(FastMatcher, matcher))

    def begin(self, works: Sequence[Work], landed: Landed = NOBODYS) -> bool:
        """Move the matchers, and begin to make the masks of those samples of the step that have a grammar."""
        self._finish()  # of a step that failed in between
        crowd = self._follow(works, landed)
        asked = len(works) <= self.most_forced
        for constraint in crowd.constraints:
            constraint.forced = constraint.matcher.forced() if asked else ()
        jobs, words = crowd.jobs, self._staging.host(len(crowd.places))
        if len(words) > len(jobs):  # behind a draft that ends the output no mask is made
            for job in jobs:
                words[job.row + 1 : job.row + 1 + len(job.drafts)] = 0
        done = self.backend.begin(jobs, words) if jobs else None
        self._filling = Filling(works, crowd, words, done)
        return done is None

    def fill(self, works: Sequence[Work]) -> Allowed | None:
        """The masks of those samples of the step that have a grammar; None if none has."""
        if self._filling is None or self._filling.works is not works:
            self.begin(works)
        assert self._filling is not None
        crowd, words = self._filling.crowd, self._filling.words
        longer = Longer.of(crowd.jobs, crowd.owners)  # while masks are made
        places = np.array(crowd.places, np.int64)
        begun = time.perf_counter()
        if self._finish() is None or not crowd.jobs:
            return None
        self.backend.waited(crowd.jobs, time.perf_counter() - begun)
        longer.apply(words, self._ends_at)
        for job, request in zip(crowd.jobs, crowd.owners, strict=True) if self.single else ():
            if request in self.single:
                rows = words[job.row : job.row + len(job.drafts) + 1]
                numbered = enumerate(rows, start=len(request.tokens) - request.prompt_len)
                self.single[request].update(place for place, row in numbered if allows_one(row))
        self.filled += len(places)
        self._sent = crowd
        return self._staging.send(places)

    def take_failed(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar cannot be followed any further; asked when the step is on its way."""
        sent, self._sent = self._sent, None
        for job, request in zip(sent.jobs, sent.owners, strict=True) if sent is not None else ():
            if job.matcher.problem:
                self._fail(request, job.matcher.problem)
        return super().take_failed()

    def _finish(self) -> Filling | None:
        """Wait for the masks that are being made."""
        made, self._filling = self._filling, None
        if made is not None and made.done is not None:
            made.done.result()
        return made

    def _follow(self, works: Sequence[Work], landed: Landed) -> Crowd:
        """Move the matchers of all takers to where their outputs are; returns those that could be moved."""
        shape = [(work.takers, work.drafts) for work in works]
        if not self._crowd.again(shape, landed, self.eos):
            self._crowd = Crowd(shape, list(self._followers(works, landed)))
        crowd = self._crowd
        counts = self.backend.advance(crowd.moves)
        moved = zip(crowd.constraints, crowd.moves, counts, strict=True)
        problems = [seen.moved(new, count) for seen, (_, new), count in moved]
        if any(problems):
            wrong = {one: problem for one, problem in zip(crowd.owners, problems, strict=True) if problem}
            for request, problem in wrong.items():
                self._fail(request, problem)
            rest = [one for one in self._followers(works, landed) if one[2] not in wrong]
            self._crowd = Crowd(shape, rest)
        return self._crowd

    def _followers(self, works: Sequence[Work], landed: Landed) -> Iterator[Follower]:
        """The takers that have a grammar, but not who ends with what has landed: nobody reads his token."""
        place = 0
        for work in works:
            for request in work.takers:
                constraint = request.constraint
                if isinstance(constraint, EarlyConstraint) and request.finish_reason is None:
                    news = landed.get(request, ())
                    if not self._ends(request, news):
                        yield place, work.drafts, request, constraint, [*constraint.unseen(request), *news]
                place += len(work.drafts) + 1

    def _ends(self, request: Request, news: Sequence[int]) -> bool:
        """Tell whether a request's output ends with these tokens, as far as that shows without its text."""
        length, most = len(request.tokens) - request.prompt_len, request.limit - request.prompt_len
        params = request.params
        if length + len(news) < most and not params.stop_token_ids and self.eos.isdisjoint(news):
            return False  # nearly always
        for token in news:
            length += 1
            if finish_reason(token, length, params, self.eos, most) is not None:
                return True
        return False
