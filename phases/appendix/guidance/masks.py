"""Make grammar masks in threads, while the host appends the last tokens and schedules a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from common.request import Request
from common.sampling.sampler import TokenBitmask
from continuous.batch import upload
from continuous.work import Work
from phases.appendix.guidance.drafter import MOST_OVERLAPPED
from structured.constraint import constrained, forbidden_ends, hold_back
from structured.masks import AutomataGrammarManager
from structured.matcher import Words
from structured.pool import GrammarPool

if TYPE_CHECKING:  # the library is imported when the first grammar comes
    from phases.appendix.guidance.backend import GuidanceBackend
    from phases.appendix.guidance.matcher import GuidanceMatcher, Job


class MaskStaging:
    """Copies grammar masks to the device, through one buffer on the host and one on the device.

    width: int32 words of a mask, `W`. device: the device to copy to.

    One buffer on each side is enough: the masks of a step are made when the tokens of the step before are
    known, and by then that step has read its masks. On a GPU the copy runs on its own stream, beside the
    forward pass.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self.device = device
        self._host = self._there = torch.zeros(0, width, dtype=torch.int32)

    def host(self, count: int) -> Words:
        """Return the host's buffer for `count` masks, int32 `[count, W]`; it still holds old masks."""
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

    def send(self, positions: Sequence[int]) -> TokenBitmask:
        """Begin to copy the masks in the host's buffer to the device; return them as a `TokenBitmask`.

        The device waits for the copy, the host does not.

        positions: of each mask, the row of the step's logits that it belongs to; their number is that of the
            masks.
        """
        there = upload(self.device, {"positions": np.array(positions)})["positions"]
        words = self._there[: len(positions)]
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                words.copy_(self._host[: len(positions)], non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return TokenBitmask(words, there)


class Filling(NamedTuple):
    """The bit masks of a step while threads write them.

    works: the step's requests, with the tokens that each computes.
    positions: of each mask, the row of the step's logits that it belongs to.
    words: `[M, W]` int32, the masks.
    done: a future that ends when the masks are made; None if they are made already.
    """

    works: Sequence[Work]
    positions: Sequence[int]
    words: Words
    done: Future[None] | None


class LibraryGrammarManager(AutomataGrammarManager):
    """A grammar manager whose masks llguidance makes in threads, before the sampler asks for them.

    plain: the manager of phase 12 that this one replaces. pool: compiles grammars.
    jump_forward: whether forced tokens are noted for a drafter, in steps of up to `MOST_OVERLAPPED` requests.

    In a step the engine launches forward pass n + 1, reads token n, and calls `begin`, which advances every
    matcher by token n. Threads then write the masks of n + 1, while the host distributes token n and
    schedules n + 2. `fill_bitmask` waits for the masks and copies them to the device. The sampling of n + 1
    comes last.
    """

    def __init__(
        self, plain: AutomataGrammarManager, pool: GrammarPool, jump_forward: bool
    ) -> None:
        super().__init__(
            pool, plain.vocab_size, sorted(plain.eos), plain.device, refusal=plain.refusal
        )
        self.jump_forward = jump_forward
        self._staging = MaskStaging(-(-plain.vocab_size // 32), plain.device)
        self._filling: Filling | None = None
        self._jobs: list[tuple[Request, Job]] = []  # of the newest step

    @property
    def backend(self) -> GuidanceBackend:
        """Return llguidance's grammar backend, which makes the masks."""
        return cast("GuidanceBackend", self.pool.backend)

    def begin(self, works: Sequence[Work], sampled: Mapping[Request, Sequence[int]]) -> bool:
        """Advance matchers by the newest tokens, and begin to compute the masks of a step in threads.

        works: the step's requests, with the tokens that each computes.
        sampled: newest tokens of requests, from the step before, which are not yet appended to the requests.

        Returns:
            True if the masks are made already; False if `fill_bitmask` may have to wait for them.
        """
        self._wait()  # for a step that failed in between
        positions, self._jobs = list[int](), []
        for position, drafts, request, matcher in self._follow(works, sampled):
            certain = self.jump_forward and len(works) <= MOST_OVERLAPPED
            matcher.certain = matcher.forced() if certain else ()
            self._jobs.append((request, (matcher, len(positions), drafts)))
            positions += range(position, position + len(drafts) + 1)
        words, jobs = self._staging.host(len(positions)), [job for _, job in self._jobs]
        if len(words) > len(jobs):  # behind a draft that ends the output no mask is made
            words[:] = 0
        done = self.backend.begin(jobs, words) if jobs else None
        self._filling = Filling(works, positions, words, done)
        return done is None

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Wait for the masks of a step, and return them on the device; None if no request has a grammar.

        works: the step's requests, with the tokens that each computes. Calls `begin` if that was not done for
            this step.
        """
        if self._filling is None or self._filling.works is not works:
            self.begin(works, {})
        held = list[tuple[int, int]]()
        for request, (_, row, drafts) in self._jobs:  # while masks are made
            held += forbidden_ends(request, self.eos, row, len(drafts) + 1)
        made = self._wait()
        if made is None or not made.positions:
            return None
        hold_back(made.words, held)
        return self._staging.send(made.positions)

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return (request, error) of requests whose output cannot follow its grammar, each only once."""
        jobs, self._jobs = self._jobs, []
        for request, (matcher, _, _) in jobs:
            if problem := matcher.problem:
                self._fail(request, problem)
        return super().pop_failed_requests()

    def _wait(self) -> Filling | None:
        """Wait for masks that `begin` lets threads make; return their `Filling`. None: there are none."""
        made, self._filling = self._filling, None
        if made is not None and made.done is not None:
            made.done.result()
        return made

    def _follow(
        self, works: Sequence[Work], sampled: Mapping[Request, Sequence[int]]
    ) -> list[tuple[int, Sequence[int], Request, GuidanceMatcher]]:
        """Advance each request's matcher by its new tokens; a request whose grammar refuses one fails.

        works: the step's requests, with the tokens that each computes.
        sampled: newest tokens of requests, which are not yet appended to the requests.

        Returns:
            (row of the step's logits, draft tokens, request, matcher) of each output that needs masks, sorted
            by lexer.
            Outputs that have sampled an end token need none, and are left out.
        """
        outputs = []
        moves: list[tuple[GuidanceMatcher, Sequence[int]]] = []
        for output in constrained(works):
            *_, request, constraint = output
            new = sampled.get(request, ())
            if self.eos.isdisjoint(new):
                outputs.append(output)
                moves.append(
                    (
                        cast("GuidanceMatcher", constraint.matcher),
                        [*constraint.unseen(request), *new],
                    )
                )
        moved = []
        counts = self.backend.advance(moves)
        for (position, drafts, request, constraint), (matcher, new), count in zip(
            outputs, moves, counts, strict=True
        ):
            if problem := constraint.count(new, count):
                self._fail(request, problem)
            else:
                moved.append((position, drafts, request, matcher))
        # Threads divide the list. Neighbours should share what only one thread at a time may use.
        return sorted(moved, key=lambda output: output[-1].lexer)
