"""Masks of a step: follow the grammar of each request, and forbid the tokens that would leave it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.errors import UserError
from common.request import Request
from common.sampling.grammar import Grammar
from common.sampling.sampler import TokenBitmask
from continuous.batch import upload
from continuous.seams import GrammarManager
from continuous.work import Work
from structured.constraint import Constraint, constrained, forbidden_ends, hold_back
from structured.matcher import Words
from structured.pool import Compilation, GrammarPool


class AutomataGrammarManager(GrammarManager):
    """A grammar manager that masks tokens by the matchers of a backend, while the device computes.

    In a step the engine launches forward pass n + 1, reads token n, and calls `fill_bitmask`, which
    advances every matcher by token n and makes the masks of n + 1 while the device computes. Sampling comes
    last.

    Args:
        pool: compiles grammars.
        vocab_size: number of logits, `V`.
        eos: ids of the tokens that end an output.
        device: the device that masks are copied to.
        refusal: the error text for any request with a grammar, if this engine can follow none; else "".
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
        self._failed: list[tuple[Request, Exception]] = []

    # Before a request runs.

    def check(self, grammar: Grammar) -> None:
        """Begin to compile a request's grammar in a thread; any thread may call this.

        Raises:
            UserError: this engine cannot follow grammars.
        """
        if self.refusal:
            raise UserError(self.refusal)
        self.active = True
        self.pool.ask(grammar)

    def ready(self, request: Request) -> bool:
        """Return True if a request's grammar, if any, is compiled; the request then gets a matcher.

        Raises:
            UserError: the grammar cannot be compiled.
        """
        grammar = request.params.grammar
        if grammar is not None and request.constraint is None:
            # The request holds it, so that the pool cannot drop it meanwhile.
            request.constraint = self.pool.ask(grammar)
        if isinstance(request.constraint, Compilation):
            compiled = request.constraint.get()
            if compiled is None:
                return False
            request.constraint = Constraint(compiled.matcher())
        return True

    def wait_until_compiled(self, grammar: Grammar) -> None:
        """Wait until a grammar is compiled.

        Raises:
            UserError: the grammar cannot be compiled, or not in the time allowed.
        """
        self.pool.ask(grammar).wait()

    # In a step.

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return the bit masks of all samples that have a grammar, copied to the device; None if none has.

        A request whose output its grammar does not allow, or that no token continues, fails (see
        `pop_failed_requests`) and has no masks.
        End tokens that `min_tokens` or `ignore_eos` forbid are masked where another token is allowed. The
        result's `positions` has the index of each mask's sample among all samples of the step.

        works: for each request of the step, its tokens and drafts.
        """
        found = list[Words]()
        positions = list[int]()
        held = list[tuple[int, int]]()
        for position, drafts, request, constraint in constrained(works):
            problem = constraint.follow(request)
            masks = constraint.masks(drafts, -(-self.vocab_size // 32))
            if problem or not masks[0].any():
                self._fail(request, problem or "no token of the vocabulary goes on from here")
            else:
                found.append(masks)
                held += forbidden_ends(request, self.eos, len(positions), len(drafts) + 1)
                positions += range(position, position + len(drafts) + 1)
        if not positions:
            return None
        words = np.concatenate(found)
        hold_back(words, held)
        arrays = {"words": words, "positions": np.array(positions)}
        return TokenBitmask(**upload(self.device, arrays))

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """Return the requests that have failed since the last call, each with its error.

        They fail because their output cannot be followed in their grammar any further.
        """
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, request: Request, problem: str) -> None:
        words = f"grammar ({request.params.grammar}) cannot be followed: {problem}"
        self._failed.append((request, UserError(words)))
