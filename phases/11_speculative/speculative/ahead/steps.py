"""The host's part of steps that draft on the device: who may take part, room for the farthest they can get,
and what came of it, one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.request import Request
from common.sampling.sampler import Feature, HostSampled, Sampled
from continuous.batch import upload
from continuous.runner import Pending, Token
from continuous.work import Work
from cuda_graphs.buckets import decode_sizes, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import CAPTURED, Machine
from cuda_graphs.memory import PER_GRAPH
from cuda_graphs.runner import FEW, GraphRunner
from cuda_graphs.staging import Staging
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.memory import activation_bytes
from speculative.ahead.graph import AheadGraph, Pair
from speculative.draft_model import DraftModel
from speculative.head import HeadSource
from speculative.speculator import Speculator


class Line(NamedTuple):
    """What a step tells of one request."""

    right: int
    sampled: list[int]
    drafts: list[int]


class Flight(Pending):
    """A step whose beginning the host does not know while it is on its way.

    drafts: of each request. lines: for each work, once it has landed.
    """

    def __init__(self, works: Sequence[Work], drafts: int, told: HostSampled) -> None:
        super().__init__(works, None)
        self.drafts, self._told = drafts, told
        self.lines: dict[int, Line] = {}

    def get(self) -> list[list[Token]]:
        """See `Pending.get`. All tokens before this step are known now, and so is where it began."""
        numbers = [number for number, _ in self._told.get()]
        k, width = self.drafts, 2 * self.drafts + 2
        works, found = list[Work](), list[list[Token]]()
        for place, given in enumerate(self.works):
            right, *rest = numbers[place * width : (place + 1) * width]
            work = given._replace(start=len(given.request.tokens) - 1)
            works.append(work)
            self.lines[id(work)] = Line(right, rest[: k + 1], rest[k + 1 :])
            found.append([(token, None) for token in rest[: right + 1]])
        self.works = works
        return found


class Ahead:
    """Launches steps that verify and draft in one graph.

    Args:
        engine: with a `GraphRunner`; its drafter is `speculator`.
        speculator: over a `DraftModel` with a `GraphRunner` of its own.
        most: drafts of a request in a step.

    landing: the flight that is being collected. replays: steps that were launched.
    """

    def __init__(self, engine: PagedEngine, speculator: Speculator, most: int) -> None:
        source = speculator.source
        assert isinstance(source, DraftModel) and isinstance(engine.runner, GraphRunner)
        assert isinstance(source.runner, GraphRunner)
        self.engine, self.runner, self.speculator, self.source = engine, engine.runner, speculator, source
        self.small = source.runner
        self.landing: Flight | None = None
        self.replays = 0
        device = engine.runner.model.device
        self.next_at = torch.zeros(engine.scheduler.rows.count, dtype=torch.int64, device=device)
        queries = min(runner.attention.most_queries for runner in (self.runner, self.small))
        self.lengths = draft_lengths(min(most, queries - 1))
        self.sizes = [size for size in decode_sizes(min(FEW, engine.scheduler.rows.count)) if size <= FEW]
        self._staging = Staging(4 * self.sizes[-1], device)
        pair = Pair(self._machine(self.runner), self._machine(self.small), self.next_at, self._states())
        capturer = Capturer(device)
        self._graphs: dict[tuple[int, int, Feature], AheadGraph] = {}
        with torch.inference_mode():
            for size, k, kind in product(reversed(self.sizes), reversed(self.lengths), CAPTURED):
                given = self._staging.device[: 4 * size].view(4, size)
                self._graphs[size, k, kind] = AheadGraph(pair, size, k, given, kind, capturer)

    @staticmethod
    def _machine(runner: GraphRunner) -> Machine:
        cache = runner.cache
        return Machine(
            runner.model, runner.attention, runner.sampler, runner.rows, runner.tables, cache.block_size
        )

    def _states(self) -> Callable[[Tensor], Tensor] | None:
        source = self.source
        if not isinstance(source, HeadSource):
            return None
        kept = source.taps.kept

        def states(hidden: Tensor) -> Tensor:
            return torch.cat((kept[: len(hidden)], hidden), dim=-1)

        return states

    # Launching.

    @torch.inference_mode()
    def launch(self, before: Flight | None) -> Flight | None:
        """The next step, or None: then an ordinary one is due.

        before: the step on its way, of which the host knows nothing yet.
        """
        running = self.engine.scheduler.running
        kind = self._kind(running, before)
        if kind is None:
            return None
        k = self._enter(running) if before is None else self._go_on(running)
        if not k:
            return None
        size = smallest(self.sizes, len(running))
        assert size is not None
        behind = 0 if before is None else before.drafts + 1
        if not all(self._reserve(request, behind, k) for request in running):
            return None
        works = [Work(r, r.row, len(r.tokens) - 1, k + 1, (-1,) * k, (r,)) for r in running]
        self.engine.stats.begin(works, len(running))
        self.speculator.went_ahead()
        for request in running:
            request.in_flight += 1
            request.placeholders += 1
        try:
            for runner in (self.runner, self.small):
                runner.refresh(())  # blocks that a write is about to part are copied before it
            self._stage(running, size, behind + k)
            graph = self._graphs[size, k, kind]
            graph.replay()
            self.replays += 1
            return Flight(works, k, Sampled(graph.told[: len(running)].flatten()).to_host())
        except BaseException as error:
            self.engine.fail(works, error)
            if not isinstance(error, Exception):
                raise
            return None

    def _kind(self, running: Sequence[Request], before: Flight | None) -> Feature | None:
        """How the running requests are sampled in a graph; None if they cannot all take part."""
        scheduler = self.engine.scheduler
        if not running or len(running) > self.sizes[-1]:
            return None
        if scheduler.rows.free and scheduler.waiting:  # an ordinary step may let somebody in
            return None
        flying = 0 if before is None else 1
        here = set() if before is None else {work.request for work in before.works}
        for request in running:
            if request.siblings or request.in_flight != flying:
                return None
            if request.prefilling if before is None else request not in here:
                return None
        works = [Work(r, r.row, 0, 1, (), (r,)) for r in running]
        if self.engine.masks.wants(works):
            return None
        plan = self.runner.sampler.plan([request.row for request in running])
        return plan.features if plan.features in CAPTURED and plan.wanted is None else None

    def _enter(self, running: Sequence[Request]) -> int:
        """Guess as before an ordinary step, and put the guesses where the graph reads them."""
        guesses = self.speculator.guesses(running)
        if not guesses or any(not guesses.get(request) for request in running):
            return 0
        shortest = min(len(guesses[request]) for request in running)
        k = max(length for length in self.lengths if length <= shortest)
        drafts = [list(guesses[request])[:k] for request in running]
        rows = np.array([request.row for request in running])
        newest = np.array([len(request.tokens) - 1 for request in running])
        columns = {
            "rows": rows,
            "newest": newest,
            "draft_rows": np.repeat(rows, k),
            "places": (newest[:, None] + 1 + np.arange(k)).ravel(),
            "drafts": np.array(drafts, np.int64).ravel(),
        }
        if int(newest.max()) + k >= self.engine.scheduler.rows.max_len:
            return 0
        moved = upload(self.next_at.device, columns)
        self.next_at[moved["rows"]] = moved["newest"]
        self.engine.runner.rows.tokens[moved["draft_rows"], moved["places"]] = moved["drafts"]
        return k

    def _go_on(self, running: Sequence[Request]) -> int:
        """How many of the drafts that are on the device already are to be verified."""
        wanted = self.speculator.wanted(running)
        if not wanted or any(request not in self.source.shadows for request in running):
            return 0
        return smallest(self.lengths, wanted) or self.lengths[-1]

    def _reserve(self, request: Request, behind: int, k: int) -> bool:
        """Room for all that two steps may write, however much of the one on its way is right."""
        shadow = self.source.shadows.get(request)
        if shadow is None:
            return False
        newest = len(request.tokens) - 1 + behind  # at most
        last = newest + 1 + 2 * k  # the last draft, if all before it are right
        base = len(request.tokens) - len(shadow.request.tokens)
        if last >= self.engine.scheduler.rows.max_len or last - base >= self.source.rows.max_len:
            return False
        fits = self.engine.cache.reserve(request, newest + k + 1)
        return fits and self.source.cache.reserve(shadow.request, last - base)

    def _stage(self, running: Sequence[Request], size: int, ahead: int) -> None:
        shadows = [self.source.shadows[request].request for request in running]
        rows = np.array([request.row for request in running])
        small_rows = np.array([own.row for own in shadows])
        base = np.array([len(r.tokens) - len(own.tokens) for r, own in zip(running, shadows, strict=True)])
        longest = max(len(request.tokens) for request in running) + ahead + self.lengths[-1] + 1
        for runner, some in ((self.runner, rows), (self.small, small_rows)):
            runner.tables.update(some, min(runner.cache.blocks_for(longest), runner.cache.tables.shape[1]))
        with self._staging.fill(4 * size) as flat:
            given = flat.reshape(4, size)
            given[0, len(rows) :], given[1:, len(rows) :] = -1, 0
            given[:, : len(rows)] = rows, small_rows, base, self.engine.scheduler.rows.prompt_lens[rows]

    # Landing.

    def landed(self, work: Work) -> bool:
        """Bring the drafter's books up to what the device has done; False: it was an ordinary step."""
        line = None if self.landing is None else self.landing.lines.pop(id(work), None)
        if line is None:
            return False
        if work.request.row >= 0 and work.request in self.source.shadows:
            self.source.carried(work.request, line.drafts)
        return True


def draft_lengths(most: int) -> list[int]:
    """Drafts a request for which there are graphs: one, two, and the most."""
    return sorted({length for length in (1, 2, most) if 1 <= length <= most})


def ahead_bytes(model: Model, rows: int, drafts: int) -> int:
    """What the graphs take, an estimate from above."""
    most = min(FEW, rows)
    tokens = most * (drafts + 1)
    graphs = len(decode_sizes(most)) * 3 * len(CAPTURED)
    return activation_bytes(model, tokens, tokens) + 2 * graphs * PER_GRAPH
