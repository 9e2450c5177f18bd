"""Grammars in an engine: each request's place in its own, and the masks of a step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

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
        self.forced = ()
        if count == len(new):
            return ""
        problem = self.matcher.problem
        return problem or f"token {self.taken} of the output, id {new[count]}, is not in the grammar"


Followed = tuple[int, tuple[int, ...], Request, Constraint]
"""The first place in the batch of a request's samples, its drafts, itself, and where it stands."""


@dataclass
class Filling:
    """Masks of a step that are being made.

    works: of the step.
    jobs, owners: what is made, for whom.
    places: in the batch, one for each mask.
    words: where masks go.
    done: the threads that make them; None: they are made.
    """

    works: Sequence[Work]
    jobs: list[Job]
    owners: list[Request]
    places: list[int]
    words: Words
    done: Future[None] | None


class GrammarMasks:
    """`Masks` that follow grammars; see `continuous.seams`.

    A step is: launch forward n + 1, read token n, and then `begin`: advance every matcher by token n, and let
    threads write the masks of n + 1, while the device computes and the host deals out n and schedules n + 2.
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
        """Move the matchers, and begin to make the masks of those samples of the step that have a grammar."""
        self._finish()  # of a step that failed in between
        followed = self._follow(works, landed)
        jobs: list[Job] = []
        places: list[int] = []
        for place, drafts, _, constraint in followed:
            jobs.append(Job(constraint.matcher, len(places), drafts))
            places.append(place)
            if drafts:
                places += range(place + 1, place + len(drafts) + 1)
        for _, _, _, constraint in followed if len(works) <= self.most_forced else ():
            constraint.forced = constraint.matcher.forced()
        words = self._staging.host(len(places))
        if len(places) > len(jobs):  # behind a draft that ends the output no mask is made
            for job in jobs:
                words[job.row + 1 : job.row + 1 + len(job.drafts)] = 0
        done = self.pool.backend.begin(jobs, words) if jobs else None
        owners = [request for _, _, request, _ in followed]
        self._filling = Filling(works, jobs, owners, places, words, done)
        return done is None

    def fill(self, works: Sequence[Work]) -> Allowed | None:
        """The masks of those samples of the step that have a grammar; None if none has."""
        if self._filling is None or self._filling.works is not works:
            self.begin(works)
        assert self._filling is not None
        longer = Longer.of(self._filling.jobs, self._filling.owners)  # while masks are made
        made = self._finish()
        if made is None or not made.jobs:
            return None
        for job, request in zip(made.jobs, made.owners, strict=True):
            if job.matcher.problem:
                self._fail(request, job.matcher.problem)
        longer.apply(made.words, self._ends_at)
        for job, request in zip(made.jobs, made.owners, strict=True) if self.single else ():
            if request in self.single:
                self._note_single(request, made.words[job.row : job.row + len(job.drafts) + 1])
        self.filled += len(made.places)
        return self._staging.send(np.array(made.places, np.int64))

    def take_failed(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar cannot be followed any further."""
        failed, self._failed = self._failed, []
        return failed

    def _finish(self) -> Filling | None:
        """Wait for the masks that are being made."""
        made, self._filling = self._filling, None
        if made is not None and made.done is not None:
            made.done.result()
        return made

    def _follow(self, works: Sequence[Work], landed: Landed) -> list[Followed]:
        """Move the matchers of all takers to where their outputs are; returns those that could be moved.

        One that has ended meanwhile, or will with what has landed, is left out: it gets some token, which
        nobody reads.
        """
        found: list[Followed] = []
        moves: list[tuple[Matcher, list[int]]] = []
        place = 0
        for work in works:
            for request in work.takers:
                constraint = request.constraint
                if isinstance(constraint, Constraint) and request.finish_reason is None:
                    news = landed.get(request, ())
                    if not self._ends(request, news):
                        found.append((place, work.drafts, request, constraint))
                        moves.append((constraint.matcher, [*constraint.unseen(request), *news]))
                place += len(work.drafts) + 1
        counts = self.pool.backend.advance(moves)
        wrong = []
        for one, (_, new), count in zip(found, moves, counts, strict=True):
            if problem := one[3].moved(new, count):
                self._fail(one[2], problem)
                wrong.append(one)
        return [one for one in found if one not in wrong] if wrong else found

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
