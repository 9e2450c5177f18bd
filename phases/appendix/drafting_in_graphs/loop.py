"""The host's part of speculative steps that draft on the device.

It decides when they are launched and which requests take part, reserves blocks for the longest outcome, and
collects each step's tokens one step later.
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
from cuda_graphs.overlap import OverlappedLoop
from cuda_graphs.runner import GraphRunner
from cuda_graphs.staging import Staging
from forward.model import Model
from paged_cache import PagedEngine
from paged_cache.memory import activation_bytes
from phases.appendix.drafting_in_graphs.graph import DraftingGraph, Pair
from speculative.head import HeadSource
from speculative.speculation import SpeculativeRunner
from speculative.wrapper import DrafterWrapper

MAX_NGRAM_REQUESTS = 4
"""Most requests in a graph that looks n-grams up. These graphs cost every engine memory and start time, and
most texts repeat nothing.
"""


class DraftedStep(Pending):
    """A step that was launched before the host knew where it begins.

    drafts: number of drafts of each request.
    blank: rows whose drafts are fillers, not guesses; known when the step before is collected.
    made: drafts behind each work, by `id(work)`, filled by `get`; -1 is a filler.
    """

    def __init__(
        self, works: Sequence[Work], drafts: int, host_output: HostSampled, blank: set[int]
    ) -> None:
        super().__init__(works, None)
        self.drafts = drafts
        self._host_output = host_output
        self.blank = blank
        self.made: dict[int, list[int]] = {}

    def get(self) -> list[list[Token]]:
        """Wait for the step; return each work's accepted tokens and its next one, and correct the works'
        positions.
        """
        numbers = [number for number, _ in self._host_output.get()]
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


class GraphDrafter(DrafterWrapper):
    """A `Drafter` around a `SpeculativeRunner` that launches steps that verify and draft in one graph.

    Args:
        speculator: over a `HeadSource` with a `GraphRunner` of its own, or over `NGrams`.
        most: most drafts of a request in a step.

    Attributes:
        begun: result of `begin` for the next step, if it was called already: an ordinary step in the place
            of one in a graph begins only once.
        made: `DraftedStep.made` of the step that is being collected.
        replays: number of steps launched.
        blank: rows whose newest token has no guesses behind it, as far as the host knows.
    """

    def __init__(self, speculator: SpeculativeRunner, most: int) -> None:
        super().__init__(speculator)
        self.speculator = speculator
        self.stats, self.most = speculator.stats, most
        self.source = speculator.source if isinstance(speculator.source, HeadSource) else None
        self.begun: bool | None = None
        self.made: dict[int, list[int]] = {}
        self.replays = 0
        self.blank: set[int] = set()

    def take_drafts(self, step: DraftedStep) -> None:
        """Note the drafts that a step has made, before its tokens are collected."""
        self.made = step.made

    def attach(self, engine: PagedEngine) -> None:
        """Bind to an engine and capture a graph for each number of requests, number of drafts, and kind of
        sampling.
        """
        super().attach(engine)
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
        """Launch the next step and return it; None: the scheduler has to make an ordinary step.

        before: the step in flight, whose tokens the host does not know yet; None: there is none.
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
        if self.engine.grammar_manager.needs_mask(works):
            return None
        plan = self.runner.sampler.plan([request.row for request in running])
        return plan.features if captured(plan) else None

    def _enter(self, running: Sequence[Request]) -> int:
        """Write the drafter's guesses where the graph reads them; return drafts per request, 0 if a graph
        cannot start.
        """
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
        """Return how many of the drafts that are on the device to verify; 0: the next step is
        an ordinary one.
        """
        self.begun = False
        self.speculator.guesses.clear()
        lengths = self.speculator.decide(running)
        if lengths is None:
            return 0
        if self.source is not None and any(
            request not in self.source.shadows for request in running
        ):
            return 0
        return smallest(self.lengths, max(lengths)) or self.lengths[-1]

    def _reserve(self, request: Request, behind: int, k: int) -> bool:
        """Reserve blocks for all that the step in flight and the next may write; return False if there is no
        room.

        behind: tokens that the step in flight adds at most. k: drafts of the next step.
        """
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

    def _stage(self, running: Sequence[Request], size: int, unconfirmed: int) -> None:
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
            max(len(request.tokens) for request in running)
            + unconfirmed
            + self.lengths[-1]
            + 1
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
        """Record a completed step: accepted drafts, rows without guesses, and the head's own request."""
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
    """Return the numbers of drafts for which graphs are captured: one, two and `most`."""
    return sorted({length for length in (1, 2, most) if 1 <= length <= most})


def request_sizes(rows: int, *, models: int) -> list[int]:
    """Return the numbers of requests for which graphs are captured, for an engine with `rows` rows.

    models: 2 with a draft head, 1 with n-grams.
    """
    return decode_sizes(min(SMALL_BATCH if models > 1 else MAX_NGRAM_REQUESTS, rows))


def drafting_graph_bytes(model: Model, rows: int, drafts: int, *, models: int) -> int:
    """Return the bytes that the graphs take, an estimate from above.

    models: 2 with a draft head, 1 with n-grams.
    """
    sizes, lengths = request_sizes(rows, models=models), draft_lengths(drafts)
    tokens = sizes[-1] * (drafts + 1)
    graphs = len(sizes) * len(lengths) * len(CAPTURED)
    return activation_bytes(model, tokens, tokens) + models * graphs * PER_GRAPH


class GraphDraftingLoop:
    """A `Loop` around another one: while only decodes run, graphs draft on the device.

    The next step is launched before the host knows the result of the last one, since the device knows it.
    Everything else (a request waits, a prompt is not done, a request wants log-probabilities) is done by
    steps of the inner loop, once the step in flight is collected.

    drafter: launches such steps.
    in_flight: the newest of them; None: there is none.
    """

    in_flight: DraftedStep | None = None

    def __init__(self, inner: OverlappedLoop, drafter: GraphDrafter) -> None:
        self.inner, self.drafter = inner, drafter

    @property
    def idle(self) -> bool:
        """True if no step of either loop is in flight."""
        return self.inner.idle and self.in_flight is None

    def advance(self, engine: Engine) -> None:
        """Launch the next drafting step and collect the one before; if none can run, advance
        the inner loop.
        """
        if engine.scheduler.drafter.needs_finished_step:
            self.inner.finish_steps(engine)
        if self.inner.idle:
            before, self.in_flight = self.in_flight, None
            self.in_flight = self.drafter.launch(before)
            if self.in_flight is None and before is not None:
                self.drafter.speculator.control.skip()  # two steps will be finished
            if before is not None:
                self._collect(engine, before)
            if self.in_flight is not None or (before is not None and engine.scheduler.idle):
                return
        self.inner.advance(engine)

    def _collect(self, engine: Engine, step: DraftedStep) -> None:
        self.drafter.take_drafts(step)
        engine.collect(step)
