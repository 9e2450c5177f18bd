"""Rank 0's decisions about drafts and masks, and how the other ranks take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.request import Request
from common.sampling.params import SamplingParams
from common.sampling.sampler import TokenBitmask
from continuous.seams import NoGrammarManager
from continuous.work import Work
from parallel.messages import BroadcastChannel, Drafts, FailedGrammars
from parallel.worker_group import WorkerGroup
from speculative.loops import HostDrafter
from structured.loop import NONE_LANDED, EarlyGrammarManager, Landed


class BroadcastProposer(HostDrafter):
    """Rank 0's drafter: the one that it would have by itself, and a note of what it said."""

    def __init__(self, inner: HostDrafter) -> None:
        self.inner = inner
        self.stats = getattr(inner, "stats", None)
        self._asks = False
        self._drafts: dict[int, tuple[int, ...]] = {}

    def said(self) -> Drafts:
        """Return what was noted of the step that has just been scheduled."""
        return Drafts(self._asks, self._drafts)

    def begin(self, running: Sequence[Request]) -> bool:
        """Return what the inner drafter says, and note it; the drafts of the step before are forgotten."""
        self._asks, self._drafts = self.inner.begin(running), {}
        return self._asks

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return what the inner drafter proposes, asked once, and note it by the request's id, if any."""
        drafts = tuple(self.inner.propose(request, most))
        if drafts:
            self._drafts[request.id] = drafts
        return drafts


class ReplicatedProposer(HostDrafter):
    """Any other rank's drafter: what rank 0's has said.

    waits: rank 0's drafter waited before the step was scheduled.
    """

    needs_finished_step = False

    def __init__(self, line: BroadcastChannel) -> None:
        self.line = line
        self._said = Drafts(False, {})

    def begin(self, running: Sequence[Request]) -> bool:
        """Wait for rank 0's message about this step, keep it, and return whether a drafter was asked there.

        It is the next that `line` receives: rank 0 sends it as soon as it has scheduled the step.
        """
        said = self.line.receive()
        assert isinstance(said, Drafts), f"drafts were to come, and not {said!r}"
        self._said = said
        return said.asks

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Return the drafts that rank 0 has proposed for the request at this step, or none."""
        return self._said.drafts.get(request.id, ())


class RankZeroGrammarManager(EarlyGrammarManager):
    """Rank 0's masks: those that it would have by itself.

    Where a step is masked, rank 0 chooses and the others take its tokens, so all must know that it is, even
    if no mask is left to apply. With the masks the others hear which grammars have failed: those requests end
    at the same place of a step on all ranks.
    """

    def __init__(
        self,
        inner: EarlyGrammarManager,
        workers: WorkerGroup,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.inner, self.workers = inner, workers
        self._nothing = nothing(vocab_size, device)
        self._failed: list[tuple[Request, Exception]] = []

    def check(self, params: SamplingParams) -> None:
        """See `GrammarManager`; so are the others."""
        self.inner.check(params)

    def ready(self, request: Request) -> bool:
        """Only then the other ranks hear of it."""
        return self.inner.ready(request)

    def wait_until_compiled(self, params: SamplingParams) -> None:
        """See `GrammarManager.wait_until_compiled`."""
        self.inner.wait_until_compiled(params)

    def needs_mask(self, works: Sequence[Work]) -> bool:
        """See `GrammarManager.needs_mask`."""
        return self.inner.needs_mask(works)

    def begin(self, works: Sequence[Work], landed: Landed = NONE_LANDED) -> bool:
        """See `GrammarManager.begin`. Masks are sent at one point of a step, however early."""
        self.inner.begin(works, landed)
        return False

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask | None:
        """Return the masks of the step; `nothing` if no request has a grammar."""
        found, self._failed = self.inner.fill_bitmask(works), self.inner.pop_failed_requests()
        self.workers.tell(FailedGrammars([request.id for request, _ in self._failed]))
        return self._nothing if found is None else found

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """See `GrammarManager.pop_failed_requests`."""
        failed, self._failed = self._failed, []
        return failed


class WorkerGrammarManager(NoGrammarManager):
    """Any other rank's masks: it knows which steps are masked, and is told which grammars have failed."""

    def __init__(self, line: BroadcastChannel, vocab_size: int, device: torch.device) -> None:
        self.line = line
        self._nothing = nothing(vocab_size, device)
        self._failed: list[tuple[Request, Exception]] = []

    def check(self, params: SamplingParams) -> None:
        """Rank 0 has done it, as it has waited, and tells which grammars have failed."""

    def begin(self, works: Sequence[Work], landed: Landed = NONE_LANDED) -> bool:
        """Begin like rank 0."""
        return False

    def needs_mask(self, works: Sequence[Work]) -> bool:
        """Return True if any taker has a grammar."""
        return any(
            sampled_request.params.grammar is not None
            for work in works
            for sampled_request in work.sampled_requests
        )

    def fill_bitmask(self, works: Sequence[Work]) -> TokenBitmask:
        """Return masks for no place: rank 0 masks."""
        said = self.line.receive()
        assert isinstance(said, FailedGrammars), (
            f"failed grammars were to come, and not {said!r}"
        )
        sampled_requests = [
            sampled_request
            for work in works
            for sampled_request in work.sampled_requests
            if sampled_request.id in said.ids
        ]
        self._failed = [
            (sampled_request, RuntimeError("rank 0 could not follow its grammar"))
            for sampled_request in sampled_requests
        ]
        return self._nothing

    def pop_failed_requests(self) -> list[tuple[Request, Exception]]:
        """See `GrammarManager.pop_failed_requests`."""
        failed, self._failed = self._failed, []
        return failed


def nothing(vocab_size: int, device: torch.device) -> TokenBitmask:
    """Masks for no place of a batch."""
    words = torch.zeros(0, -(-vocab_size // 32), dtype=torch.int32, device=device)
    return TokenBitmask(words, torch.zeros(0, dtype=torch.int64, device=device))
