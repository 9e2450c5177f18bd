"""A smaller model with the same tokenizer generates the drafts: Leviathan et al. and Chen et al., 2023.

It is a whole small engine without a scheduler: rows, a paged cache and a runner of its own, with graphs where
the large one has graphs. Its sampler has the same settings, seed and step numbers as the large model's, so
both add the same noise to their logits, and a sampled draft is right nearly as often as any could be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from common.request import Request
from continuous.rows import write
from continuous.runner import Pending
from continuous.work import Work
from paged_cache import PagedEngine
from speculative.proposer import Proposer


@dataclass(eq=False, slots=True)
class Shadow:
    """A copy of a request in the draft model's engine.

    request: the copy, with a row, blocks and settings of that engine; its `num_computed_tokens` counts no
        drafts.
    drafts: the tokens guessed last, which follow the copy's tokens; all but the last draft are computed.
    known: how many tokens the large model's request had when the drafts were guessed; -1: there are none.
    """

    request: Request
    drafts: tuple[int, ...] = ()
    known: int = -1


class DraftModel(Proposer):
    """A proposer of drafts by a smaller model, which generates for all requests at once.

    engine: the smaller model's engine, whose steps `guess` runs.
    """

    def __init__(self, engine: PagedEngine) -> None:
        self.engine = engine
        self.runner = engine.runner
        self.cache = engine.cache
        self.rows = engine.scheduler.rows
        self.shadows: dict[Request, Shadow] = {}

    def guess(
        self, requests: Sequence[Request], lengths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Return the draft tokens of each request, at most as many as its entry in `lengths`.

        A request for which the draft model's engine has no room gets no drafts: ().
        """
        ready: dict[Request, Shadow] = {}
        behind: list[tuple[Shadow, int]] = []
        for request, length in zip(requests, lengths, strict=True):
            shadow = self.shadows.get(request)
            if shadow is not None and shadow.known == len(request.tokens):
                ready[request] = shadow  # of a step that it had no turn in
            elif (shadow := self._ready(request, length)) is not None:
                ready[request] = shadow
                behind.append((shadow, length))
        if behind:
            self._write(sorted(behind, key=lambda pair: pair[0].request.row))
        for request, shadow in ready.items():
            shadow.known = len(request.tokens)
        asked = zip(requests, lengths, strict=True)
        return [
            ready[request].drafts[:most] if request in ready else () for request, most in asked
        ]

    def _ready(self, request: Request, length: int) -> Shadow | None:
        """Return the draft model's copy of a request, updated and with room for `length` drafts, or None.

        The request's new tokens are appended to the copy, except its first `_skipped` tokens. The copy's old
        drafts are dropped, but where the new tokens agree with them, up to the first that differs, they count
        as computed. The last draft does not, since it never was, and the newest token never does.

        Without a copy, a request gets one (`_enter`). None is returned if a new copy finds no free row or its
        tokens do not fit; or if a copy has no room for `length` more tokens, in which case it is removed.
        """
        shadow = self.shadows.get(request)
        if shadow is None:
            if not (self.rows.free and self.cache.fits(request)):
                return None
            shadow = self.shadows[request] = self._enter(request)
        own = shadow.request
        known = len(own.tokens)
        own.tokens += request.tokens[self._skipped(request) + known :]
        right = 0
        while known + right < len(own.tokens) - 1 and right < len(shadow.drafts) - 1:
            if own.tokens[known + right] != shadow.drafts[right]:
                break
            right += 1
        own.num_computed_tokens = min(own.num_computed_tokens + right, len(own.tokens) - 1)
        shadow.drafts = ()
        end = len(own.tokens) + length
        if end > self.rows.max_len or not self.cache.reserve(own, end):
            self.leave(request)
            return None
        return shadow

    def _skipped(self, request: Request) -> int:
        """Return how many of a request's first tokens the draft model's copy does not have; here 0."""
        return 0

    def _enter(self, request: Request) -> Shadow:
        """Return a new copy of a request in a row of the draft model's engine; no token is computed yet."""
        skipped, params = self._skipped(request), replace(request.params, logprobs=None)
        tokens, prompt_len = request.tokens[skipped:], request.prompt_len - skipped
        own = Request(request.id, tokens, prompt_len, request.limit, params, seed=request.seed)
        self.rows.acquire(own)
        return Shadow(own)

    def _write(self, some: Sequence[tuple[Shadow, int]]) -> None:
        """Compute the known tokens of requests' copies, generate drafts, and store these in the copies.

        some: pairs of a copy and its number of drafts. All steps are launched before any is read.
        """
        owns = [shadow.request for shadow, _ in some]
        # The tokens that the draft model did not generate go into its rows; at most those it computes.
        lines = [
            (own.row, own.num_computed_tokens, own.tokens[own.num_computed_tokens :])
            for own in owns
        ]
        write(self.rows.tokens, lines)
        first = self._catch_up(owns)
        works = [Work(own, own.row, len(own.tokens), 1, (), (own,)) for own in owns]
        rest = []
        for step in range(max(length for _, length in some) - 1):
            indices = [index for index, (_, length) in enumerate(some) if length > step + 1]
            moved = [works[at]._replace(start=works[at].start + step) for at in indices]
            rest.append((indices, self._step(moved)))
        made = [[tokens[0][0]] for tokens in first.get()]
        for indices, pending in rest:
            for index, tokens in zip(indices, pending.get(), strict=True):
                made[index].append(tokens[0][0])
        for (shadow, length), drafts in zip(some, made, strict=True):
            shadow.drafts = tuple(
                max(token, 0) for token in drafts[:length]
            )  # any guess will do for NaN
            shadow.request.num_computed_tokens = len(shadow.request.tokens)

    def _catch_up(self, owns: Sequence[Request]) -> Pending:
        """Compute all known tokens of requests' copies in the draft model, and sample a first draft of each.

        owns: the copies. Prompts are computed in chunks, as many steps as that takes.

        Returns:
            The last step's results, the first drafts, which may still be on their way to the host.
        """
        budget = self.engine.scheduler.step_tokens
        left = {own: len(own.tokens) for own in owns}
        while True:
            behind = sum(end - own.num_computed_tokens for own, end in left.items())
            last = behind <= budget
            works = []
            free = budget
            for own, end in left.items():
                start, sampled_requests = own.num_computed_tokens, (own,) if last else ()
                count = min(
                    end - start - (not last), free
                )  # all are sampled together, in the last piece
                if count:
                    works.append(Work(own, own.row, start, count, (), sampled_requests))
                    own.num_computed_tokens += count
                    free -= count
            pending = self._step(works)
            if last:
                return pending

    def _step(self, works: list[Work]) -> Pending:
        return self.runner.sample(self.runner.forward(works))

    def leave(self, request: Request) -> None:
        """Remove a request's copy from the draft model, if it has one, and free the copy's row and blocks."""
        shadow = self.shadows.pop(request, None)
        if shadow is not None:
            self.cache.release(shadow.request)
            self.rows.release(shadow.request)
