"""Tensor parallel as a feature of an engine."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from common.device import pick_device
from common.errors import UserError, integer
from common.options import option
from continuous.seams import NO_DRAFTS, NO_MASKS
from forward.loading import config_of
from forward.model import Model
from paged_cache import Feature, PagedEngine, Parts, Recipe, build
from parallel import crew as crews
from parallel import engine as engines
from parallel.crew import Crew
from parallel.launch import meet, part
from parallel.loading import load_part
from parallel.messages import Build, Line, Rehearsed
from parallel.ranks import Ranks, graphs_of
from parallel.sampler import RanksChooser
from parallel.shard import Shard
from parallel.told import FirstMasks, OtherMasks, Teller, Told
from speculative import Speculate

MOST_RANKS = 64


@dataclass(frozen=True)
class Parallel(Feature):
    """The model is split over GPUs of one host, or over processes of a CPU."""

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    tensor_parallel: int = option(1, "GPUs (or processes) that share the model's heads, MLP and vocabulary")
    rank_check: int = option(100, "steps from one comparison of what the ranks have done to the next")

    def __post_init__(self) -> None:
        """Check the options."""
        integer("tensor_parallel", self.tensor_parallel, low=1, high=MOST_RANKS)
        integer("rank_check", self.rank_check, low=1)

    def prepare(self, parts: Parts) -> None:
        """With several ranks, one stage makes all of them: each goes through the usual stages by itself."""
        if self.tensor_parallel > 1:
            parts.stages = {"lead": [self._lead]}

    def _lead(self, parts: Parts) -> None:
        """Make the engine of rank 0, with the other ranks behind it."""
        device = self.check(parts.recipe)
        crew = crews.take(self.tensor_parallel)
        try:
            with crew.awaited():
                parts.engine = lead(parts.recipe, device, crew)
        except BaseException:
            crew.kill()
            raise

    def check(self, recipe: Recipe) -> torch.device:
        """Rank 0's device. Raises `UserError` for what cannot be done, before anything is started."""
        size = self.tensor_parallel
        if isinstance(recipe.model, Model):
            raise UserError(f"tensor_parallel is {size}, so model must be a name: every rank loads its part")
        config = config_of(str(recipe.model))
        if config.family == "gpt2":
            raise UserError(f"tensor_parallel is {size}, but gpt2 is not cut: q, k and v are one matrix")
        if any(isinstance(one, Speculate) and one.drafter == "head" for one in recipe.features):
            raise UserError(
                f"tensor_parallel is {size}, but drafter 'head' reads a whole vocabulary: take another"
            )
        Shard(0, size).config(config)
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


def lead(recipe: Recipe, device: torch.device, crew: Crew) -> PagedEngine:
    """Rank 0's engine; the others make theirs meanwhile."""
    ranks = meet(crew, device)
    tokenizer = None if recipe.tokenizer is None else str(recipe.tokenizer.folder)
    crew.tell(Build(replace(recipe, tokenizer=None, device=str(device)), tokenizer))
    try:
        engine = own_engine(recipe, ranks, recipe.tokenizer, crew=crew)
    except RuntimeError:
        crew.check(patient=True)
        raise
    assert isinstance(engine.loop, engines.Leader)
    engine.loop.release = weakref.finalize(engine, part, crew, ranks, graphs_of(engine))
    crew.check()
    return engine


def own_engine(
    recipe: Recipe, ranks: Ranks, tokenizer: Any, crew: Crew | None = None, line: Line | None = None
) -> PagedEngine:
    """Make a rank's own engine. crew: on rank 0; line: on all others."""
    own: list[Feature] = []
    for feature in recipe.features:
        if isinstance(feature, Parallel):
            own.append(Split(feature, ranks, crew, line))
        elif isinstance(feature, Speculate):
            guesses = SplitSpeculate(**vars(feature))
            if ranks.rank and feature.drafter == "model":  # which is rank 0's alone; here no drafter is asked
                guesses = replace(guesses, drafter="ngram", draft_model=None, draft_length=feature.length)
            own.append(guesses)
        else:
            own.append(feature)
    return build(replace(recipe, features=tuple(own), device=str(ranks.device), tokenizer=tokenizer))


@dataclass(frozen=True)
class SplitSpeculate(Speculate):
    """`Speculate` inside a rank's own engine: rank 0 guesses, on the host; a graph would on all ranks."""

    whole: ClassVar[bool] = False


@dataclass(frozen=True)
class Split(Feature):
    """`Parallel` inside a rank's own engine; it is no option.

    crew: the others, on rank 0. line: to rank 0, on all others.
    """

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    options: Parallel
    ranks: Ranks
    crew: Crew | None = None
    line: Line | None = None

    def prepare(self, parts: Parts) -> None:
        """Every rank loads its part, and has as many blocks as the one with the least room."""
        parts.stages["load"] = [self._load]
        parts.stages["plan"].append(self._agree)

    def _load(self, parts: Parts) -> None:
        asked = parts.recipe
        parts.model = load_part(
            asked.model, device=asked.device, dtype=asked.dtype, linears=parts.linears, ranks=self.ranks
        )

    def install(self, parts: Parts) -> None:
        """Layers that add up, tokens chosen over ranks, and a loop that leads or follows."""
        ranks, model = self.ranks, parts.model
        kind: type[RanksChooser] = RanksChooser
        if getattr(parts.features.get("graphs"), "sampling", "") == "triton":
            from parallel.winners import KernelRanksChooser  # Triton comes with it

            kind = KernelRanksChooser
        parts.wrap(self, chooser=lambda inner: kind(ranks, inner, model.config.vocab_size))
        if "graphs" in parts.features:  # where a step is masked, rank 0 tells the others what it has chosen
            parts.plans.pop("masked", None)
            # Graphs of full steps have not been tried in ranks: NCCL's sums would be in them.
            parts.plans["chunks"] = partial(parts.plans["chunks"], step_tokens=lambda: 0)
        about, crew, line = (model.config.vocab_size, model.device), self.crew, self.line
        parts.loops["ranks"] = self._loop
        if parts.drafter is not NO_DRAFTS:
            parts.wrap(self, drafter=lambda own: Teller(own) if line is None else Told(line))
        if parts.masks is not NO_MASKS and crew is not None:
            parts.wrap(self, masks=lambda own: FirstMasks(own, crew, *about))
        elif parts.masks is not NO_MASKS and line is not None:
            parts.wrap(self, masks=lambda own: OtherMasks(line, *about))
        if crew is None:  # it follows what rank 0 plays when it is made
            parts.stages["rehearse"] = []
        elif parts.stages["rehearse"]:
            parts.stages["rehearse"].append(lambda whole: crew.tell(Rehearsed()))

    def _loop(self, engine: PagedEngine) -> engines.Leader | engines.Follower:
        """Rank 0's loop, or another's, around what it has without ranks."""
        made: engines.Leader | engines.Follower
        drafter = engine.scheduler.drafter
        if self.crew is not None:
            teller = drafter if isinstance(drafter, Teller) else None
            made = engines.Leader(engine.loop, self.crew, self.options.rank_check, teller)
        else:
            assert self.line is not None
            made = engines.Follower(engine.loop, self.line, self.options.rank_check)
        engine.journal = made
        return made

    def _agree(self, parts: Parts) -> None:
        """Take as many blocks as there are on the rank that has room for the fewest."""
        ledger = parts.ledger
        blocks = self.ranks.smallest(ledger.blocks)
        parts.ledger = replace(ledger, blocks=blocks, cache=ledger.cache // ledger.blocks * blocks)
