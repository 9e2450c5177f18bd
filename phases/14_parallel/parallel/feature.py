"""Tensor parallel as a feature of an engine."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import torch

from common.device import pick_device
from common.errors import UserError, choice, integer
from common.options import option
from continuous.seams import NO_DRAFTS, NO_MASKS
from forward.model import Model
from paged_cache import Feature, Ledger, Loader, PagedEngine, Parts, Recipe, build
from parallel import crew as crews
from parallel import engine as engines
from parallel.crew import Crew
from parallel.drafts import SplitSpeculate
from parallel.launch import meet, part
from parallel.loading import config_of, load_part
from parallel.member import Line
from parallel.messages import Build, Rehearsed
from parallel.ranks import Ranks, graphs_of
from parallel.reduce import PLAIN, Reducer
from parallel.sampler import RanksChooser, RanksPrompts
from parallel.shard import Shard
from parallel.told import FirstMasks, OtherMasks, Teller, Told
from speculative import Speculate
from speculative.loops import Watcher
from structured.loop import EarlyMasks

Way = Literal["auto", "nccl", "one-shot", "two-shot"]
MOST_RANKS = 64


@dataclass(frozen=True)
class Parallel(Feature):
    """The model is split over GPUs of one host, or over processes of a CPU."""

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    tensor_parallel: int = option(1, "GPUs (or processes) that share the model's heads, MLP and vocabulary")
    all_reduce: Way = option("auto", "how they add up: auto (by size), nccl, one-shot or two-shot")
    rank_check: int = option(100, "steps from one comparison of what the ranks have done to the next")

    def __post_init__(self) -> None:
        """Check the options."""
        integer("tensor_parallel", self.tensor_parallel, low=1, high=MOST_RANKS)
        choice("all_reduce", self.all_reduce, get_args(Way))
        integer("rank_check", self.rank_check, low=1)

    def make(self, recipe: Recipe) -> PagedEngine | None:
        """The engine of rank 0, with the other ranks behind it."""
        if self.tensor_parallel == 1:
            return None
        device = self.check(recipe)
        crew = crews.take(self.tensor_parallel)
        try:
            with crew.awaited():
                return lead(self, recipe, device, crew)
        except BaseException:
            crew.kill()
            raise

    def check(self, recipe: Recipe) -> torch.device:
        """Rank 0's device. Raises `UserError` for what cannot be done, before anything is started."""
        size = self.tensor_parallel
        if isinstance(recipe.model, Model):
            raise UserError(f"tensor_parallel is {size}, so model must be a name: every rank loads its part")
        Shard(0, size).config(config_of(str(recipe.model)))
        device = pick_device(recipe.device)
        if device.type == "mps":
            raise UserError(f"tensor_parallel is {size}, but device 'mps' is one GPU: take 'cpu' or 'cuda'")
        first = device.index or 0
        if device.type == "cuda" and torch.cuda.device_count() < first + size:
            raise UserError(
                f"tensor_parallel is {size}, but PyTorch finds {torch.cuda.device_count()} CUDA devices here"
            )
        return torch.device("cuda", first) if device.type == "cuda" else device

    def install(self, parts: Parts) -> None:
        """One rank is an engine as it was."""


def lead(options: Parallel, recipe: Recipe, device: torch.device, crew: Crew) -> PagedEngine:
    """Rank 0's engine; the others make theirs meanwhile."""
    ranks = meet(crew, device)
    tokenizer = None if recipe.tokenizer is None else str(recipe.tokenizer.folder)
    crew.tell(Build(replace(recipe, tokenizer=None, device=str(device)), tokenizer))
    try:
        engine = build(
            recipe.model,
            recipe.sizes,
            split(recipe, ranks, crew=crew),
            device=str(device),
            dtype=recipe.dtype,
            tokenizer=recipe.tokenizer,
        )
    except RuntimeError:
        crew.check(patient=True)
        raise
    assert isinstance(engine.loop, engines.Leader)
    engine.loop.release = weakref.finalize(engine, part, crew, ranks, graphs_of(engine))
    crew.check()
    return engine


def split(recipe: Recipe, ranks: Ranks, crew: Crew | None = None, line: Line | None = None) -> list[Feature]:
    """The features of a rank's own engine."""
    found: list[Feature] = []
    for feature in recipe.features:
        if isinstance(feature, Parallel):
            found.append(Split(feature, ranks, crew, line))
        elif isinstance(feature, Speculate):
            found.append(SplitSpeculate.of(feature, ranks, config_of(str(recipe.model))))
        else:
            found.append(feature)
    return found


@dataclass(frozen=True)
class Split(Feature):
    """`Parallel` inside a rank's own engine; nobody chooses it.

    crew: the others, on rank 0. line: to rank 0, on all others.
    """

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    options: Parallel
    ranks: Ranks
    crew: Crew | None = None
    line: Line | None = None

    def loader(self) -> Loader:
        """Every rank loads its part."""
        return partial(load_part, ranks=self.ranks)

    def install(self, parts: Parts) -> None:
        """Layers that add up, tokens chosen over ranks, and a loop that leads or follows."""
        ranks, model = self.ranks, parts.model
        if "kernels" in parts.features:
            from parallel.fused import install

            install(parts.own_model(), ranks)
        ranks.reducer = self._reducer(parts)
        kernels = getattr(parts.features.get("kernels"), "sampling", "") == "triton"
        if kernels:
            from parallel.winners import KernelRanksChooser  # Triton comes with it

            parts.chooser = KernelRanksChooser(ranks, parts.chooser, model.config.vocab_size)
        else:
            parts.chooser = RanksChooser(ranks, parts.chooser, model.config.vocab_size)
        parts.agree = self._agree
        if "graphs" in parts.features:  # where a step is masked, rank 0 tells the others what it has chosen
            parts.plans.pop("masked", None)
            # Graphs of full steps have not been tried in ranks: NCCL's sums would be in them.
            parts.plans["chunks"] = partial(parts.plans["chunks"], step_tokens=lambda: 0)
        about = model.config.vocab_size, model.device
        parts.loops["ranks"] = self._loop
        if self.crew is not None:
            if parts.drafter is not NO_DRAFTS:
                parts.drafter = Teller(cast(Watcher, parts.drafter))
            if parts.masks is not NO_MASKS:
                parts.masks = FirstMasks(cast(EarlyMasks, parts.masks), *about)
            if parts.rehearse is not None:
                parts.rehearse = self._rehearse(parts.rehearse, self.crew)
        else:
            assert self.line is not None
            if parts.drafter is not NO_DRAFTS:
                parts.drafter = Told(self.line)
            if parts.masks is not NO_MASKS:
                parts.masks = OtherMasks(*about)
            if parts.rehearse is not None:
                parts.rehearse = lambda engine: cast(engines.Follower, engine.loop).rehearse(engine)

    def _loop(self, engine: PagedEngine) -> engines.Leader | engines.Follower:
        """Rank 0's loop, or another's, around what it has without ranks."""
        made: engines.Leader | engines.Follower
        drafter = engine.scheduler.drafter
        if self.crew is not None:
            teller = drafter if isinstance(drafter, Teller) else None
            made = engines.Leader(engine.loop, self.crew, self.options.rank_check, teller)
            if isinstance(engine.masks, FirstMasks):
                engine.masks.failed = made.grammar_failed
        else:
            assert self.line is not None
            made = engines.Follower(engine.loop, self.line, self.options.rank_check)
        engine.journal = made
        engine.runner.prompts = RanksPrompts(self.ranks, engine.config.vocab_size)
        return made

    def _reducer(self, parts: Parts) -> Reducer:
        """How sums are made. Raises `UserError` for kernels where there can be none."""
        way, cuda = self.options.all_reduce, parts.model.device.type == "cuda"
        if way == "nccl" or (way == "auto" and not (cuda and "kernels" in parts.features)):
            return PLAIN
        if "kernels" not in parts.features:
            raise UserError(f"all_reduce is {way!r}, but must be 'nccl' or 'auto' without kernels")
        from parallel.symmetric import OtherRanks, symmetric

        try:
            return symmetric(self.ranks, parts.model, way)
        except OtherRanks as error:
            if way != "auto":
                raise
            if self.crew is not None:
                print(f"note: {error}: sums are NCCL's", file=sys.stderr, flush=True)
            return PLAIN

    def _agree(self, ledger: Ledger) -> Ledger:
        """As many blocks as there are on the rank that has room for the fewest."""
        blocks = self.ranks.smallest(ledger.blocks)
        return replace(ledger, blocks=blocks, cache=ledger.cache // ledger.blocks * blocks)

    @staticmethod
    def _rehearse(play: Any, crew: Crew) -> Any:
        def rehearse(engine: Any) -> float:
            seconds: float = play(engine)
            crew.tell(Rehearsed())
            return seconds

        return rehearse
