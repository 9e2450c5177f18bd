"""Grammars in an engine: each request's place in its own, and the masks of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import UserError
from common.request import Request
from common.sampling.params import SamplingParams
from common.sampling.sampler import TokenBitmask
from continuous.batch import upload
from continuous.work import Work
from structured.loop import NONE_LANDED, Landed
from structured.matcher import Matcher, Words
from structured.pool import Compilation, GrammarPool


@dataclass(eq=False)
class Constraint:
    """A request's place in its grammar.

    taken: how many of its output tokens the matcher has seen. Nothing has to happen when a request is
        preempted: its tokens stay, and so does this.
    """

    matcher: Matcher
    taken: int = 0

    def unseen(self, request: Request) -> list[int]:
        """Return the tokens that are new since the matcher was last moved."""
        return request.tokens[request.prompt_len + self.taken :]

    def follow(self, request: Request) -> str:
        """Move the matcher by the tokens that are new since the last call, if any; return what is wrong."""
        new = self.unseen(request)
        return self.moved(new, self.matcher.advance(new) if new else 0)

    def moved(self, new: Sequence[int], count: int) -> str:
        """Note that the matcher was given `new` and has taken `count` of them; returns what is wrong."""
        self.taken += count
        if count == len(new):
            return ""
        problem = self.matcher.problem
        return (
            problem
            or f"token {self.taken} of the output, id {new[count]}, is not in the grammar"
        )

    def masks(self, drafts: Sequence[int], width: int) -> Words:
        """Make the masks of the next token and of the one behind each draft: int32 `[drafts + 1, width]`.

        A mask behind a draft is made where the matcher stands when it has taken that draft. Behind a draft
        that it does not take (the grammar forbids it, or it ends the output) nothing is sampled: zeros, also
        for the drafts after it. In the end the matcher stands where it did.
        """
        words = np.zeros((len(drafts) + 1, width), np.int32)
        self.matcher.fill(words[0])
        taken = 0
        while taken < len(drafts) and self.matcher.advance(drafts[taken : taken + 1]):
            taken += 1
            self.matcher.fill(words[taken])
        self.matcher.rollback(taken)
        return words


class AutomataGrammarManager:
    """`EarlyGrammarManager` that follow grammars; see `continuous.seams.GrammarManager`.

    A step is: launch forward n + 1, read token n, and then `fill`: advance every matcher by token n, make the
    masks of n + 1 while the device computes, and send them. Last the sampling of n + 1 is launched.

    Args:
        pool: where compiled grammars come from.
        vocab_size: `V`.
        eos: the tokens that end an output.
        device: where masks go.
        refusal: why grammars cannot be had at all, for an engine without a tokenizer; empty if they can.
    """

    def __init__(
        self,
        pool: GrammarPool,
        vocab_size: int,
        eos: Sequence[int],
        device: torch.device,
        *,
        refusal: str = "",
    ) -> None:
        self.pool = pool
        self.eos = frozenset(eos)
        self.refusal = refusal
        self.vocab_size, self.device = vocab_size, device
        self._any = False  # whether a grammar was ever asked for
        self._failed: list[tuple[Request, Exception]] = []

    # Before a request runs.

    def check(self, params: SamplingParams) -> None:
        """Begin to compile a request's grammar."""
        if params.grammar is not None:
            if self.refusal:
                raise UserError(self.refusal)
            self._any = True
            self.pool.ask(params.grammar)

    def ready(self, request: Request) -> bool:
        """Tell whether a request's grammar is compiled, and give it its place there."""
        grammar = request.params.grammar
        if grammar is None or isinstance(request.constraint, Constraint):
            return True
        if (
            request.constraint is None
        ):  # so that no other grammar can drive it out of the pool's memory
            request.constraint = self.pool.ask(grammar)
        assert isinstance(request.constraint, Compilation)
        compiled = request.constraint.get()
        if compiled is not None:
            request.constraint = Constraint(compiled.matcher())
        return compiled is not None

    def wait_until_compiled(self, params: SamplingParams) -> None:
        """Wait for a grammar."""
        if params.grammar is not None:
            self.pool.ask(params.grammar).wait()

    # In a step.

    def needs_mask(self, works: Sequence[Work]) -> bool:
        """Tell whether any taker has a grammar; until the first grammar comes, this costs nothing."""
        return self._any and any(
            sampled_request.constraint is not None
            for work in works
            for sampled_request in work.sampled_requests
        )

    def begin(self, works: Sequence[Work], landed: Landed = NONE_LANDED) -> bool:
        """Begin nothing: `fill` does it all."""
        return True

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Make the masks of those samples of the step that have a grammar; None if none has."""
        found: list[Words] = []
        places: list[int] = []
        held: list[tuple[int, int]] = []
        for place, drafts, request, constraint in constrained(works):
            problem = constraint.follow(request)
            if not problem:
                found.append(constraint.masks(drafts, -(-self.vocab_size // 32)))
                held += self.held(request, len(places), len(drafts) + 1)
                places += range(place, place + len(drafts) + 1)
                problem = constraint.matcher.problem
            if problem:
                self._fail(request, problem)
        if not places:
            return None
        words = np.concatenate(found)
        hold_back(words, held)
        moved = upload(self.device, {"places": np.array(places), "words": words})
        return TokenBitmask(moved["words"], moved["places"])

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return requests whose grammar cannot be followed any further; asked when the step is on its way."""
        failed, self._failed = self._failed, []
        return failed

    def held(self, request: Request, row: int, count: int) -> list[tuple[int, int]]:
        """List the ends that a request's settings hold back, each behind the row of its mask.

        row: of the request's next token. count: masks from there on.
        """
        params, first = request.params, len(request.tokens) - request.prompt_len
        found = []
        for number in range(count) if params.ignore_eos or params.min_tokens else ():
            short = first + number < params.min_tokens
            if short or params.ignore_eos:
                ends = self.eos.union(params.stop_token_ids if short else ())
                found += [(row + number, token) for token in ends]
        return found

    def _fail(self, request: Request, problem: str) -> None:
        error = UserError(f"grammar ({request.params.grammar}) cannot be followed: {problem}")
        self._failed.append((request, error))


def constrained(
    works: Sequence[Work],
) -> Iterator[tuple[int, Sequence[int], Request, Constraint]]:
    """Find the outputs that follow a grammar; the first number is the place of their first sample."""
    place = 0
    for work in works:
        for request in work.sampled_requests:
            if isinstance(request.constraint, Constraint) and request.finish_reason is None:
                yield place, work.drafts, request, request.constraint
            place += len(work.drafts) + 1


def hold_back(words: Words, held: Sequence[tuple[int, int]]) -> None:
    """Take tokens out of their rows of masks `[M, ceil(V / 32)]`, unless nothing else is left there."""
    if not held:
        return
    rows, tokens = np.array(held).T
    at, bits = tokens >> 5, (1 << (tokens & 31)).astype(np.uint32).view(np.int32)
    there = words[rows, at] & bits != 0
    rows = rows[there]
    at = at[there]
    bits = bits[there]
    np.bitwise_and.at(words, (rows, at), ~bits)
    empty = ~words[rows].any(axis=1)
    np.bitwise_or.at(words, (rows[empty], at[empty]), bits[empty])
