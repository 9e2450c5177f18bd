"""Constraints of outputs: their positions in grammars, and the end tokens that their settings forbid."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from common.request import Request
from continuous.work import Work
from structured.matcher import Matcher, Words


@dataclass(eq=False)
class Constraint:
    """A request's position in its grammar.

    matcher: follows the output through the grammar. accepted: number of output tokens that the matcher has
        accepted; a preempted request keeps its tokens, and so this count.
    """

    matcher: Matcher
    accepted: int = 0

    def unseen(self, request: Request) -> list[int]:
        """Return the output tokens that the matcher has not accepted yet."""
        return request.tokens[request.prompt_len + self.accepted :]

    def follow(self, request: Request) -> str:
        """Let the matcher accept the request's output tokens that it has not accepted yet.

        Returns:
            An error text if the grammar does not allow one of them, or a limit is exceeded; otherwise "".
        """
        new = self.unseen(request)
        return self.count(new, self.matcher.advance(new))

    def count(self, new: Sequence[int], accepted: int) -> str:
        """Record that the matcher has accepted the first `accepted` of the new output tokens `new`.

        Returns:
            An error text if the matcher has not accepted all of `new`, or a limit is exceeded; otherwise "".
        """
        self.accepted += accepted
        if self.matcher.problem or accepted == len(new):
            return self.matcher.problem
        return (
            f"token {self.accepted} of the output, id {new[accepted]}, is not in the grammar"
        )

    def masks(self, drafts: Sequence[int], width: int) -> Words:
        """Return bit masks `[drafts + 1, width]`, int32, of the next token and of the token after each draft.

        width: int32 numbers in a mask. The mask after a draft is made when the matcher has accepted that
            draft. A draft that it does not accept is forbidden or ends the output, so nothing is sampled
            after it: the masks after it and after all later drafts are zero. At the end all drafts are
            undone in the matcher.
        """
        words = np.zeros((len(drafts) + 1, width), np.int32)
        self.matcher.fill(words[0])
        accepted = 0
        while accepted < len(drafts) and self.matcher.advance(drafts[accepted : accepted + 1]):
            accepted += 1
            self.matcher.fill(words[accepted])
        self.matcher.rollback(accepted)
        return words


def constrained(
    works: Sequence[Work],
) -> Iterator[tuple[int, Sequence[int], Request, Constraint]]:
    """Yield the outputs that get tokens in a step and follow a grammar.

    works: for each request of the step, its tokens and drafts.

    Yields:
        The index of the output's first sample among all samples of the step, its draft tokens, its request,
        and the constraint of the request.
    """
    position = 0
    for work in works:
        for request in work.sampled_requests:
            if isinstance(request.constraint, Constraint) and request.finish_reason is None:
                yield position, work.drafts, request, request.constraint
            position += len(work.drafts) + 1


# End tokens that a mask must not have.


def forbidden_ends(
    request: Request, eos: Collection[int], row: int, count: int
) -> list[tuple[int, int]]:
    """Return the end tokens that `min_tokens` and `ignore_eos` forbid: (row of the mask, token id) pairs.

    End tokens are `eos` and, below `min_tokens`, also the request's `stop_token_ids`.

    request: whose masks. eos: the model's end-of-sequence tokens. row: index, among the masks of a step, of
        the mask of the request's next token. count: number of the request's masks, which begin there: one
        for the next token and one after each draft.
    """
    params, length = request.params, len(request.tokens) - request.prompt_len
    found = list[tuple[int, int]]()
    for number in range(count):
        short = length + number < params.min_tokens
        tokens = [*eos] if short or params.ignore_eos else []
        tokens += params.stop_token_ids if short else ()
        found += [(row + number, token) for token in tokens]
    return found


def hold_back(words: Words, held: Sequence[tuple[int, int]]) -> None:
    """Forbid tokens in bit masks, in place, but not in rows that would allow no token then.

    words: the masks, int32 `[M, ceil(V / 32)]`. held: (row, token id) pairs of the tokens to forbid.
    """
    if not held:
        return
    rows, tokens = np.array(held).T
    at, bits = tokens >> 5, (1 << (tokens & 31)).astype(np.uint32).view(np.int32)
    allowed = words[rows, at] & bits
    np.bitwise_and.at(words, (rows, at), ~bits)
    empty = ~words[rows].any(axis=1)
    np.bitwise_or.at(words, (rows[empty], at[empty]), allowed[empty])
