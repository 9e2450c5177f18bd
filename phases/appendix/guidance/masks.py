"""Masks by threads: begun as soon as tokens are known, while the host deals out these and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from common.request import Request
from common.rules import finish_reason
from common.sampling.sampler import Allowed
from continuous.work import Work
from structured.loop import NONE_LANDED, Landed
from structured.masks import Constraint, GrammarMasks, hold_back
from structured.matcher import Matcher, Words
from structured.pool import GrammarPool

if TYPE_CHECKING:  # the library is imported when the first grammar comes
    from phases.appendix.guidance.backend import GuidanceBackend
    from phases.appendix.guidance.matcher import GuidanceMatcher


class MaskStaging:
    """Masks on their way to the device, through one buffer on each side, by one copy.

    One is enough: a step's masks are made when the tokens of the step before are known, and then its masks
    have been read. On a GPU the copy has a stream of its own, beside the forward pass that is running.

    A buffer holds the words of `M` masks and behind them their places.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device = width, device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._view: Words = np.zeros(0, np.int32)  # of the host's: tensors take longer to cut

    def host(self, count: int) -> Words:
        """`[count, W]`: the next masks, to be written over; they hold older ones."""
        size = self._places(count) + 2 * count
        if self._buffers is None or len(self._buffers[0]) < size:
            room = 1 << (size - 1).bit_length()
            cuda = self._stream is not None
            host = torch.zeros(room, dtype=torch.int32, pin_memory=cuda)
            self._buffers = host, host.to(self.device) if cuda else host
            self._view = host.numpy()
        if self._stream is not None:
            self._stream.synchronize()  # after a step that failed its copy may still be on its way
        return self._view[: count * self.width].reshape(count, self.width)

    def send(self, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Allowed:
        """The masks that were written last, for these places of the batch."""
        assert self._buffers is not None
        count = len(places)
        begin, end = self._places(count), self._places(count) + 2 * count
        host, device = self._buffers
        self._view[begin:end].view(np.int64)[:] = places
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            with torch.cuda.stream(self._stream):
                device[:end].copy_(host[:end], non_blocking=True)
            current.wait_stream(self._stream)
        words = device[: count * self.width].view(count, self.width)
        return Allowed(words, device[begin:end].view(torch.int64))

    def _places(self, count: int) -> int:
        """Return where the places begin: behind the masks, at a multiple of 8 bytes."""
        return count * self.width + count * self.width % 2


@dataclass(eq=False)
class EarlyConstraint(Constraint):
    """A request's place in its grammar, where threads make masks.

    forced: tokens that must come next, if a drafter has looked.
    """

    matcher: GuidanceMatcher
    forced: Sequence[int] = ()


class MaskedOutput(NamedTuple):
    """An output of a step, which follows a grammar.

    place: of the first of its samples in the batch. drafts: of its work. new: what its matcher has not seen.
    """

    place: int
    drafts: Sequence[int]
    request: Request
    constraint: EarlyConstraint
    new: Sequence[int]


class Filling(NamedTuple):
    """Masks of a step that are being made.

    works: of the step. rows: outputs with a grammar, and where their masks begin. places: of the masks in the
    batch. done: when they are made; None: they are.
    """

    works: Sequence[Work]
    rows: Sequence[tuple[MaskedOutput, int]]
    places: Sequence[int]
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
        most_forced: works in a step, at most, for which a drafter asks what is forced behind its tokens.
    """

    def __init__(self, plain: GrammarMasks, pool: GrammarPool, *, most_forced: int) -> None:
        super().__init__(pool, plain.vocab_size, sorted(plain.eos), plain.device, refusal=plain.refusal)
        self.most_forced = most_forced
        self._staging = MaskStaging(-(-plain.vocab_size // 32), plain.device)
        self._filling: Filling | None = None
        self._sent: Sequence[tuple[MaskedOutput, int]] = ()

    @property
    def backend(self) -> GuidanceBackend:
        """The pool's."""
        return cast("GuidanceBackend", self.pool.backend)

    def place(self, matcher: Matcher) -> Constraint:
        """Make the place of a new output."""
        return EarlyConstraint(cast("GuidanceMatcher", matcher))

    def begin(self, works: Sequence[Work], landed: Landed = NONE_LANDED) -> bool:
        """Move the matchers, and begin to make the masks of those samples of the step that have a grammar."""
        self._wait()  # for a step that failed in between
        rows, places = list[tuple[MaskedOutput, int]](), list[int]()
        for output in self._follow(works, landed):
            matcher = output.constraint.matcher
            output.constraint.forced = matcher.forced() if len(works) <= self.most_forced else ()
            rows.append((output, len(places)))
            places += range(output.place, output.place + len(output.drafts) + 1)
        words = self._staging.host(len(places))
        if len(words) > len(rows):  # behind a draft that ends the output no mask is made
            words[:] = 0
        jobs = [(output.constraint.matcher, row, output.drafts) for output, row in rows]
        done = self.backend.begin(jobs, words) if jobs else None
        self._filling = Filling(works, rows, places, words, done)
        return done is None

    def fill(self, works: Sequence[Work]) -> Allowed | None:
        """The masks of those samples of the step that have a grammar; None if none has."""
        if self._filling is None or self._filling.works is not works:
            self.begin(works)
        assert self._filling is not None
        made, held = self._filling, list[tuple[int, int]]()
        for output, row in made.rows:  # while masks are made
            held += self.held(output.request, row, len(output.drafts) + 1)
        self._wait()
        if not made.rows:
            return None
        hold_back(made.words, held)
        self._sent = made.rows
        return self._staging.send(np.array(made.places, np.int64))

    def take_failed(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar cannot be followed any further; asked when the step is on its way."""
        sent, self._sent = self._sent, ()
        for output, _ in sent:
            if problem := output.constraint.matcher.problem:
                self._fail(output.request, problem)
        return super().take_failed()

    def _wait(self) -> None:
        """Wait for the masks that are being made."""
        made, self._filling = self._filling, None
        if made is not None and made.done is not None:
            made.done.result()

    def _follow(self, works: Sequence[Work], landed: Landed) -> list[MaskedOutput]:
        """Move the matchers of all takers to where their outputs are; return those that could be moved."""
        outputs = list(self._outputs(works, landed))
        counts = self.backend.advance([(output.constraint.matcher, output.new) for output in outputs])
        moved = []
        for output, count in zip(outputs, counts, strict=True):
            if problem := output.constraint.moved(output.new, count):
                self._fail(output.request, problem)
            else:
                moved.append(output)
        # Threads divide the list. Neighbours should share what only one thread at a time may use.
        return sorted(moved, key=lambda output: output.constraint.matcher.lexer)

    def _outputs(self, works: Sequence[Work], landed: Landed) -> Iterator[MaskedOutput]:
        """Find the takers that have a grammar, but for those that end with what has landed."""
        place = 0
        for work in works:
            for request in work.takers:
                constraint = request.constraint
                if isinstance(constraint, EarlyConstraint) and request.finish_reason is None:
                    news = landed.get(request, ())
                    if not self._ends(request, news):
                        new = [*constraint.unseen(request), *news]
                        yield MaskedOutput(place, work.drafts, request, constraint, new)
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
