"""Masks by threads: begun as soon as tokens are known, while the host deals out these and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from common.request import Request
from common.sampling.sampler import TokenBitmask
from continuous.batch import upload
from continuous.work import Work
from structured.loop import NONE_LANDED, Landed
from structured.masks import AutomataGrammarManager, constrained, hold_back
from structured.matcher import Words
from structured.pool import GrammarPool

if TYPE_CHECKING:  # the library is imported when the first grammar comes
    from phases.appendix.guidance.backend import GuidanceBackend
    from phases.appendix.guidance.matcher import GuidanceMatcher, Job


class MaskStaging:
    """Masks `[M, W]` on their way to the device, through one buffer on each side.

    One is enough: a step's masks are made when the tokens of the step before are known, and then its masks
    have been read. On a GPU the copy has a stream of its own, beside the forward pass that is running.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.device = device
        self._host = self._there = torch.zeros(0, width, dtype=torch.int32)

    def host(self, count: int) -> Words:
        """Return the next masks, `[count, W]`, to be written over; they hold older ones."""
        if len(self._host) < count:
            shape = 1 << (count - 1).bit_length(), self._host.shape[1]
            self._host = torch.zeros(
                shape, dtype=torch.int32, pin_memory=self._stream is not None
            )
            self._there = self._host.to(self.device)
        if self._stream is not None:
            self._stream.synchronize()  # after a step that failed its copy may still be on its way
        words: Words = self._host[:count].numpy()
        return words

    def send(self, places: Sequence[int]) -> TokenBitmask:
        """Send the masks that were written last, for these places of the batch."""
        there, words = (
            upload(self.device, {"places": np.array(places)})["places"],
            self._there[: len(places)],
        )
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                words.copy_(self._host[: len(places)], non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return TokenBitmask(words, there)


class Filling(NamedTuple):
    """Masks of a step that are being made.

    works: of the step. places: of the masks in the batch. done: when they are made; None: they are.
    """

    works: Sequence[Work]
    places: Sequence[int]
    words: Words
    done: Future[None] | None


class LibraryGrammarManager(AutomataGrammarManager):
    """`AutomataGrammarManager` that are begun before they are asked for.

    A step is: launch forward n + 1, read token n, and then `begin`: advance every matcher by token n, and let
    threads write the masks of n + 1, while the device computes and the host deals out n and schedules n + 2.
    `fill` waits for them and sends them off. Last the sampling of n + 1 is launched.

    Args:
        plain: the masks of phase 12, in whose place these are.
        pool: where compiled grammars come from.
        most_forced: works in a step, at most, for which a drafter asks what is forced behind its tokens.
    """

    def __init__(
        self, plain: AutomataGrammarManager, pool: GrammarPool, *, most_forced: int
    ) -> None:
        super().__init__(
            pool, plain.vocab_size, sorted(plain.eos), plain.device, refusal=plain.refusal
        )
        self.most_forced = most_forced
        self._staging = MaskStaging(-(-plain.vocab_size // 32), plain.device)
        self._filling: Filling | None = None
        self._jobs: list[tuple[Request, Job]] = []  # of the newest step

    @property
    def backend(self) -> GuidanceBackend:
        """The pool's."""
        return cast("GuidanceBackend", self.pool.backend)

    def begin(self, works: Sequence[Work], landed: Landed = NONE_LANDED) -> bool:
        """Move the matchers, and begin to make the masks of those samples of the step that have a grammar."""
        self._wait()  # for a step that failed in between
        places, self._jobs = list[int](), []
        for place, drafts, request, matcher in self._follow(works, landed):
            matcher.certain = matcher.forced() if len(works) <= self.most_forced else ()
            self._jobs.append((request, (matcher, len(places), drafts)))
            places += range(place, place + len(drafts) + 1)
        words, jobs = self._staging.host(len(places)), [job for _, job in self._jobs]
        if len(words) > len(jobs):  # behind a draft that ends the output no mask is made
            words[:] = 0
        done = self.backend.begin(jobs, words) if jobs else None
        self._filling = Filling(works, places, words, done)
        return done is None

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """The masks of those samples of the step that have a grammar; None if none has."""
        if self._filling is None or self._filling.works is not works:
            self.begin(works)
        held = list[tuple[int, int]]()
        for request, (_, row, drafts) in self._jobs:  # while masks are made
            held += self.held(request, row, len(drafts) + 1)
        made = self._wait()
        if made is None or not made.places:
            return None
        hold_back(made.words, held)
        return self._staging.send(made.places)

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar cannot be followed any further; asked when the step is on its way."""
        jobs, self._jobs = self._jobs, []
        for request, (matcher, _, _) in jobs:
            if problem := matcher.problem:
                self._fail(request, problem)
        return super().pop_failed_requests()

    def _wait(self) -> Filling | None:
        """Wait for the masks that are being made, if any are, and return them."""
        made, self._filling = self._filling, None
        if made is not None and made.done is not None:
            made.done.result()
        return made

    def _follow(
        self, works: Sequence[Work], landed: Landed
    ) -> list[tuple[int, Sequence[int], Request, GuidanceMatcher]]:
        """Move the matchers to where their outputs are; return the outputs whose matchers could be moved.

        An output that ends with what has landed needs no mask: under a grammar an end token always ends it.
        """
        outputs = []
        moves: list[tuple[GuidanceMatcher, Sequence[int]]] = []
        for output in constrained(works):
            *_, request, constraint = output
            news = landed.get(request, ())
            if self.eos.isdisjoint(news):
                outputs.append(output)
                moves.append(
                    (
                        cast("GuidanceMatcher", constraint.matcher),
                        [*constraint.unseen(request), *news],
                    )
                )
        moved = []
        counts = self.backend.advance(moves)
        for (place, drafts, request, constraint), (matcher, new), count in zip(
            outputs, moves, counts, strict=True
        ):
            if problem := constraint.moved(new, count):
                self._fail(request, problem)
            else:
                moved.append((place, drafts, request, matcher))
        # Threads divide the list. Neighbours should share what only one thread at a time may use.
        return sorted(moved, key=lambda output: output[-1].lexer)
