"""Grammars in an engine: each request's place in its own, and the masks of a step on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from common.request import Request
from common.sampling.params import SamplingParams
from common.sampling.sampler import Allowed
from continuous.work import Work
from structured.matcher import Job, Matcher, Words
from structured.pool import Compilation, GrammarPool


@dataclass(eq=False)
class Constraint:
    """A request's place in its grammar.

    taken: how many of its output tokens the matcher has seen. Nothing has to happen when a request is
        preempted: its tokens stay, and so does this.
    """

    matcher: Matcher
    taken: int = 0

    def follow(self, request: Request) -> str:
        """Take the tokens that are new since the last call; returns what is wrong, if anything is."""
        new = request.tokens[request.prompt_len + self.taken :]
        count = self.matcher.advance(new) if new else 0
        self.taken += count
        if self.matcher.problem:
            return self.matcher.problem
        if count < len(new):
            return f"token {self.taken} of the output, id {new[count]}, is not in the grammar"
        return ""


class GrammarMasks:
    """`Masks` that follow grammars; see `continuous.seams`.

    A step is: launch forward n + 1, read token n, and then, while the device computes, `fill`: advance every
    matcher by token n, and write the masks of n + 1. Last the sampling of n + 1 is launched.

    Args:
        pool: where compiled grammars come from.
        vocab_size: `V`.
        eos: the tokens that end an output.
        device: where masks go.
        refusal: why grammars cannot be had at all, for an engine without a tokenizer; empty if they can.

    filled: masks made up to now.
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
        self.pool, self.eos, self.refusal = pool, frozenset(eos), refusal
        self.vocab_size, self.device = vocab_size, device
        self.filled = 0
        self._any = False  # whether a grammar was ever asked for
        self._failed: list[tuple[Request, Exception]] = []
        self._staging = MaskStaging(-(-vocab_size // 32), device)

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
        if compiled is not None:
            request.constraint = Constraint(compiled.matcher())
        return compiled is not None

    def settle(self, params: SamplingParams) -> None:
        """Wait for a grammar."""
        if params.grammar is not None:
            self.pool.ask(params.grammar).wait()

    # In a step.

    def wants(self, works: Sequence[Work]) -> bool:
        """Whether any taker has a grammar; until the first grammar comes, this costs nothing."""
        return self._any and any(taker.constraint is not None for work in works for taker in work.takers)

    def fill(self, works: Sequence[Work]) -> Allowed | None:
        """The masks of those samples of the step that have a grammar; None if none has."""
        jobs: list[Job] = []
        owners: list[Request] = []
        places: list[int] = []
        place = 0
        for work in works:
            for request in work.takers:
                count = len(work.drafts) + 1
                constraint = request.constraint
                # One that has ended meanwhile gets some token, which nobody reads.
                if isinstance(constraint, Constraint) and request.finish_reason is None:
                    wrong = constraint.follow(request)
                    if wrong:
                        self._fail(request, wrong)
                    else:
                        jobs.append(Job(constraint.matcher, len(places), work.drafts))
                        owners.append(request)
                        places += range(place, place + count)
                place += count
        if not jobs:
            return None
        words = self._staging.host(len(places))
        self.pool.backend.fill(jobs, words)
        for job, request in zip(jobs, owners, strict=True):
            if job.matcher.problem:
                self._fail(request, job.matcher.problem)
            elif request.params.min_tokens or request.params.ignore_eos:
                self._hold_back(request, words[job.row : job.row + len(job.drafts) + 1])
        self.filled += len(places)
        return self._staging.send(np.array(places, np.int64))

    def take_failed(self) -> list[tuple[Request, Exception]]:
        """Requests whose grammar cannot be followed any further."""
        failed, self._failed = self._failed, []
        return failed

    def _fail(self, request: Request, problem: str) -> None:
        error = UserError(f"grammar ({request.params.grammar}) cannot be followed: {problem}")
        self._failed.append((request, error))

    def _hold_back(self, request: Request, words: Words) -> None:
        """Keep the end from an output that is to be longer, as far as its grammar lets it go on."""
        params = request.params
        length = len(request.tokens) - request.prompt_len
        for row in words:  # of the output's token number length + 1, and the next
            length += 1
            short = length <= params.min_tokens
            ends = self.eos if short or params.ignore_eos else frozenset()
            ends |= frozenset(params.stop_token_ids if short else ())
            before = row.copy()
            for token in ends:
                row[token >> 5] &= ~np.int32(np.uint32(1 << (token & 31)).view(np.int32))
            if not row.any():
                row[:] = before


class MaskStaging:
    """Masks on their way to the device, through one buffer on each side.

    One is enough: a step's masks are made when the tokens of the step before are known, and then its masks
    have been read. On a GPU the copy has a stream of its own, beside the forward pass that is running.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width, self.device = width, device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._buffers: tuple[Tensor, Tensor] | None = None

    def host(self, count: int) -> Words:
        """`[count, W]`, zeros: the next masks."""
        if self._buffers is None or len(self._buffers[0]) < count:
            size = 1 << (count - 1).bit_length()
            cuda = self._stream is not None
            host = torch.zeros(size, self.width, dtype=torch.int32, pin_memory=cuda)
            self._buffers = host, host.to(self.device) if cuda else host
        if self._stream is not None:
            self._stream.synchronize()  # after a step that failed its copy may still be on its way
        words: Words = self._buffers[0][:count].numpy()
        words[:] = 0
        return words

    def send(self, places: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Allowed:
        """The masks that were written last, for these places of the batch."""
        assert self._buffers is not None
        host, device = (buffer[: len(places)] for buffer in self._buffers)
        where = torch.from_numpy(places)
        if self._stream is None:
            return Allowed(device, where)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            device.copy_(host, non_blocking=True)
            where = where.pin_memory().to(self.device, non_blocking=True)
        where.record_stream(current)
        current.wait_stream(self._stream)
        return Allowed(device, where)
