"""The host's part of steps that draft on the device: when they are launched, which requests may take part,
room for the farthest they can get, and what came of it, one step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch

from common.request import Request
from common.sampling.sampler import HostSampled, Sampled, SamplingFlags
from continuous.engine import Engine
from continuous.rows import write
from continuous.runner import Pending, Token
from continuous.work import Work
from cuda_graphs.buckets import decode_sizes, smallest
from cuda_graphs.capture import Capturer
from cuda_graphs.decode_graph import CAPTURED, captured
from cuda_graphs.executors import SMALL_BATCH
from cuda_graphs.memory import PER_GRAPH
from cuda_graphs.runner import GraphRunner
from cuda_graphs.staging import Staging
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.memory import activation_bytes
from phases.appendix.drafting_in_graphs.graph import DraftingGraph, Pair
from speculative.head import HeadSource
from speculative.loops import HostDrafter, needs_finished_step
from speculative.speculation import SpeculativeRunner

FEW_LOOKED_UP = 4
"""Requests in a graph that looks n-grams up, at most. Every engine pays for these graphs with memory and time
at its start, and few have texts that repeat themselves."""


class DraftedStep(Pending):
    """A step whose beginning the host does not know while it is on its way.

    drafts: of each request. blank: rows without a guess; known when the step before has landed.
    made: for each work, once it has landed, the drafts behind it; -1: filler, which is no guess.
    """

    def __init__(
        self, works: Sequence[Work], drafts: int, host_output: HostSampled, blank: set[int]
    ) -> None:
        super().__init__(works, None)
        self.drafts = drafts
        self._told = host_output
        self.blank = blank
        self.made: dict[int, list[int]] = {}

    def get(self) -> list[list[Token]]:
        """See `Pending.get`. All tokens before this step are known now, and so is where it began."""
        numbers = [number for number, _ in self._told.get()]
        k, width = self.drafts, 2 * self.drafts + 2
        works, found = list[Work](), list[list[Token]]()
        for place, given in enumerate(self.works):
            right, *rest = numbers[place * width : (place + 1) * width]
            work = given._replace(start=len(given.request.tokens) - 1)
            if work.row in self.blank and not right:
                work = work._replace(count=1, drafts=())  # what was not guessed was not wrong
                if (
                    work.request.row == work.row
                ):  # a step without drafts counts its token in advance
                    work.request.num_computed_tokens = work.start + 1
            works.append(work)
            self.made[id(work)] = rest[k + 1 :]
            found.append([(token, None) for token in rest[: right + 1]])
        self.works = works
        return found


class GraphDrafter(HostDrafter):
    """A `Drafter` around a speculator, which launches steps that verify and draft in one graph.

    Args:
        speculator: over a `HeadSource` with a `GraphRunner` of its own, or over `NGrams`.
        most: drafts of a request in a step, as far as the decode kernel takes them.

    begun: what `begin` will return for the next step, if it has been asked already: an ordinary step in the
        place of one in a graph begins only once.
    made: see `DraftedStep`, of the one that is being collected. replays: steps that were launched.
    blank: rows behind whose newest token stand no guesses, as far as the host knows.
    """

    def __init__(self, speculator: SpeculativeRunner, most: int) -> None:
        self.inner = self.speculator = speculator
        self.stats, self.most = speculator.stats, most
        self.source = speculator.source if isinstance(speculator.source, HeadSource) else None
        self.begun: bool | None = None
        self.made: dict[int, list[int]] = {}
        self.replays = 0
        self.blank: set[int] = set()

    def attach(self, engine: PagedEngine) -> None:
        """Meet the engine, and capture the graphs of its steps."""
        assert isinstance(engine.runner, GraphRunner)
        self.engine, self.runner = engine, engine.runner
        self.runners = [engine.runner]
        if self.source is not None:
            assert isinstance(self.source.runner, GraphRunner)
            self.runners.append(self.source.runner)
        device = engine.runner.model.device
        self.next_at = torch.zeros(
            engine.scheduler.rows.count, dtype=torch.int64, device=device
        )
        attentions = [runner.machine.attention for runner in self.runners]
        self.lengths = draft_lengths(
            min([self.most, *(one.most_queries - 1 for one in attentions)])
        )
        self.sizes = request_sizes(engine.scheduler.rows.count, models=len(self.runners))
        self._staging = Staging(4 * self.sizes[-1], device)
        kept = None if self.source is None else self.source.hooks.kept
        large, *small = (runner.machine for runner in self.runners)
        pair = Pair(large, small[0] if small else None, self.next_at, kept)
        capturer = Capturer(device)
        self._graphs: dict[tuple[int, int, SamplingFlags], DraftingGraph] = {}
        with torch.inference_mode():
            for size, k, kind in product(
                reversed(self.sizes), reversed(self.lengths), CAPTURED
            ):
                given = self._staging.device[: 4 * size].view(4, size)
                self._graphs[size, k, kind] = DraftingGraph(
                    pair, size, k, given, kind, capturer
                )

    def begin(self, running: Sequence[Request]) -> bool:
        """See `SpeculativeRunner.begin`."""
        begun, self.begun = self.begun, None
        return self.speculator.begin(running) if begun is None else begun

    @torch.inference_mode()
    def launch(self, before: DraftedStep | None) -> DraftedStep | None:
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
        self.begun = None  # no ordinary step comes in its place
        for request in running:
            request.in_flight += 1
            request.placeholders += 1
        with self.engine.failing(works):
            for runner in self.runners:
                runner.refresh(())  # blocks that a write is about to part are copied before it
            self._stage(running, size, behind + k)
            graph = self._graphs[size, k, kind]
            graph.replay()
            self.replays += 1
            return DraftedStep(
                works,
                k,
                Sampled(graph.host_output[: len(running)].flatten()).to_host(),
                self.blank,
            )
        return None

    def _kind(
        self, running: Sequence[Request], before: DraftedStep | None
    ) -> SamplingFlags | None:
        """Return how the running requests are sampled in a graph; None if they cannot all take part."""
        scheduler = self.engine.scheduler
        if not running or len(running) > self.sizes[-1]:
            return None
        if scheduler.rows.free and scheduler.waiting:  # an ordinary step may admit a request
            return None
        in_flight_step = 0 if before is None else 1
        for request in running:  # one with a token in flight is in that step
            if (
                request.siblings
                or request.in_flight != in_flight_step
                or (not in_flight_step and request.prefilling)
            ):
                return None
        works = [Work(r, r.row, 0, 1, (), (r,)) for r in running]
        if self.engine.masks.needs_mask(works):
            return None
        plan = self.runner.sampler.plan([request.row for request in running])
        return plan.features if captured(plan) else None

    def _enter(self, running: Sequence[Request]) -> int:
        """Guess as before an ordinary step, and put the guesses where the graph reads them."""
        self.begun, guesses = self.speculator.begin(running), self.speculator.guesses
        if any(request not in guesses for request in running):
            return 0
        lengths = [len(guesses[request]) for request in running]
        # Where a model has not guessed it has no room. N-grams are looked up behind the next token, too.
        wanted = max(lengths) if self.source is None else min(lengths)
        if not wanted:
            return 0
        k = max(length for length in self.lengths if length <= wanted)
        self.blank = {r.row for r in running if not guesses[r]}
        if (
            max(len(request.tokens) for request in running) - 1 + k
            >= self.engine.scheduler.rows.max_len
        ):
            return 0
        drafts = [
            (r.row, len(r.tokens), [*guesses[r], *[r.tokens[-1]] * k][:k]) for r in running
        ]
        write(self.engine.runner.rows.tokens, drafts)
        write(self.next_at[:, None], [(r.row, 0, [len(r.tokens) - 1]) for r in running])
        return k

    def _go_on(self, running: Sequence[Request]) -> int:
        """Return how many of the drafts that are on the device already are to be verified."""
        self.begun = False
        self.speculator.guesses.clear()
        wanted = max(self.speculator.throttle.lengths(running))
        if not wanted:
            return 0
        if self.source is not None and any(
            request not in self.source.shadows for request in running
        ):
            return 0
        return smallest(self.lengths, wanted) or self.lengths[-1]

    def _reserve(self, request: Request, behind: int, k: int) -> bool:
        """Room for all that two steps may write, however much of the one on its way is right."""
        newest = len(request.tokens) - 1 + behind  # at most
        last = newest + 1 + 2 * k  # the last draft, if all before it are right
        if last >= self.engine.scheduler.rows.max_len:
            return False
        fits = self.engine.cache.reserve(request, newest + k + 1)
        if self.source is None:
            return fits
        shadow = self.source.shadows.get(request)
        if shadow is None:
            return False
        last -= len(request.tokens) - len(shadow.request.tokens)
        return (
            fits
            and last < self.source.rows.max_len
            and self.source.cache.reserve(shadow.request, last)
        )

    def _stage(self, running: Sequence[Request], size: int, ahead: int) -> None:
        owns = (
            running
            if self.source is None
            else [self.source.shadows[r].request for r in running]
        )
        rows = np.array([request.row for request in running])
        small_rows = np.array([own.row for own in owns])
        base = np.array(
            [len(r.tokens) - len(own.tokens) for r, own in zip(running, owns, strict=True)]
        )
        longest = (
            max(len(request.tokens) for request in running) + ahead + self.lengths[-1] + 1
        )
        for runner, some in zip(self.runners, (rows, small_rows), strict=False):
            runner.tables.update(
                some, min(runner.cache.blocks_for(longest), runner.cache.tables.shape[1])
            )
        with self._staging.fill(4 * size) as flat:
            given = flat.reshape(4, size)
            given[0, len(rows) :], given[1:, len(rows) :] = -1, 0
            given[:, : len(rows)] = (
                rows,
                small_rows,
                base,
                self.engine.scheduler.rows.prompt_lens[rows],
            )

    def on_step_finished(self, work: Work, accepted: int) -> None:
        """Bring the books up to what the device has done."""
        drafts = self.made.pop(id(work), None)
        if drafts is None:  # an ordinary step
            self.speculator.on_step_finished(work, accepted)
            return
        self.speculator.count(work, accepted)
        (self.blank.discard if drafts[0] >= 0 else self.blank.add)(work.row)
        if (
            self.source is not None
            and work.request.row >= 0
            and work.request in self.source.shadows
        ):
            self.source.carried(work.request, drafts)


def draft_lengths(most: int) -> list[int]:
    """Drafts a request for which there are graphs: one, two, and the most."""
    return sorted({length for length in (1, 2, most) if 1 <= length <= most})


def request_sizes(rows: int, *, models: int) -> list[int]:
    """Requests for which there are graphs, of engines with so many rows."""
    return decode_sizes(min(SMALL_BATCH if models > 1 else FEW_LOOKED_UP, rows))


def drafting_graph_bytes(model: Model, rows: int, drafts: int, *, models: int) -> int:
    """Return what the graphs take, an estimate from above; `models` counts the model itself."""
    sizes, lengths = request_sizes(rows, models=models), draft_lengths(drafts)
    tokens = sizes[-1] * (drafts + 1)
    graphs = len(sizes) * len(lengths) * len(CAPTURED)
    return activation_bytes(model, tokens, tokens) + models * graphs * PER_GRAPH


class GraphDraftingLoop:
    """A `Loop` around another one: while all that runs is decodes, the device drafts.

    The next step is launched before the host knows how far the last one came: the device knows, and that is
    enough. Whatever else there is to do (a request waits, a prompt is not done, a request wants
    log-probabilities) is done by steps of the inner loop, as soon as that last one has landed.

    ahead: launches such steps. flight: the newest of them.
    """

    flight: DraftedStep | None = None

    def __init__(self, engine: PagedEngine, ahead: GraphDrafter) -> None:
        self.inner, self.ahead = engine.loop, ahead
        ahead.attach(engine)

    @property
    def idle(self) -> bool:
        """True if no step of either kind is under way."""
        return self.inner.idle and self.flight is None

    def advance(self, engine: Engine) -> None:
        """Launch the next step that drafts and collect the one before; or advance the inner loop."""
        if needs_finished_step(engine):
            self.inner.finish_steps(engine)
        if self.inner.idle:
            before, self.flight = self.flight, None
            self.flight = self.ahead.launch(before)
            if self.flight is None and before is not None:
                self.ahead.speculator.throttle.skip()  # two will have landed
            if before is not None:
                self._collect(engine, before)
            if self.flight is not None or (before is not None and engine.scheduler.idle):
                return
        self.inner.advance(engine)

    def finish_steps(self, engine: Engine) -> None:
        """Collect what is under way."""
        landing, self.flight = self.flight, None
        if landing is not None:
            self._collect(engine, landing)
        self.inner.finish_steps(engine)

    def _collect(self, engine: Engine, flight: DraftedStep) -> None:
        self.ahead.made = flight.made
        engine.collect(flight)
