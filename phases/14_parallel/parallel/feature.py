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
from continuous.seams import NO_DRAFTS, NO_GRAMMAR_MANAGER
from cuda_graphs import Graphs
from forward.loading import config_of
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedEngine, PagedRunner, Recipe, build, find
from paged_cache.memory import MemoryPlan
from parallel import engine as engines
from parallel import worker_group
from parallel.launch import part, rendezvous
from parallel.loading import load_part
from parallel.messages import BroadcastChannel, Build, Rehearsed
from parallel.ranks import Ranks
from parallel.replicated import (
    BroadcastProposer,
    RankZeroGrammarManager,
    ReplicatedProposer,
    WorkerGrammarManager,
)
from parallel.sampler import RankSamplerBackend
from parallel.shard import Shard
from parallel.worker_group import WorkerGroup
from speculative import Speculate

MOST_RANKS = 64


@dataclass(frozen=True)
class Parallel(Feature):
    """The model is split over GPUs of one host, or over processes of a CPU."""

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    tensor_parallel: int = option(
        1, "GPUs (or processes) that share the model's heads, MLP and vocabulary"
    )
    rank_check: int = option(
        100, "steps from one comparison of what the ranks have done to the next"
    )

    def __post_init__(self) -> None:
        """Check the options."""
        integer("tensor_parallel", self.tensor_parallel, low=1, high=MOST_RANKS)
        integer("rank_check", self.rank_check, low=1)

    def configure_load(self, builder: EngineBuilder) -> None:
        """With several ranks, each builds an engine of its own."""
        if self.tensor_parallel > 1:
            builder.assemble.replace(self, self._lead)

    def _lead(self, builder: EngineBuilder) -> PagedEngine:
        """Make the engine of rank 0, with the other ranks behind it."""
        device = self.check(builder.recipe)
        workers = worker_group.take(self.tensor_parallel)
        try:
            with workers.awaited():
                return lead(builder.recipe, device, workers)
        except BaseException:
            workers.kill()
            raise

    def check(self, recipe: Recipe) -> torch.device:
        """Rank 0's device. Raises `UserError` for what cannot be done, before anything is started."""
        size = self.tensor_parallel
        if isinstance(recipe.model, Model):
            raise UserError(
                f"tensor_parallel is {size}, so model must be a name: every rank loads its part"
            )
        config = config_of(str(recipe.model))
        if config.family == "gpt2":
            raise UserError(
                f"tensor_parallel is {size}, but gpt2 is not cut: q, k and v are one matrix"
            )
        speculate = find(recipe.features, Speculate)
        if speculate is not None and speculate.drafter == "head":
            raise UserError(
                f"tensor_parallel is {size}, but drafter 'head' reads a whole vocabulary: take another"
            )
        Shard(0, size).config(config)
        device = pick_device(recipe.device)
        if device.type == "mps":
            raise UserError(
                f"tensor_parallel is {size}, but device 'mps' is one GPU: take 'cpu' or 'cuda'"
            )
        first = device.index or 0
        if device.type == "cuda" and torch.cuda.device_count() < first + size:
            raise UserError(
                f"tensor_parallel is {size}, but PyTorch finds {torch.cuda.device_count()} CUDA devices here"
            )
        return torch.device("cuda", first) if device.type == "cuda" else device

    def install(self, builder: EngineBuilder) -> None:
        """One rank is an engine as it was."""


def lead(recipe: Recipe, device: torch.device, workers: WorkerGroup) -> PagedEngine:
    """Rank 0's engine; the others make theirs meanwhile."""
    ranks = rendezvous(workers, device)
    tokenizer = None if recipe.tokenizer is None else str(recipe.tokenizer.folder)
    workers.tell(Build(replace(recipe, tokenizer=None, device=str(device)), tokenizer))
    try:
        engine = own_engine(recipe, ranks, recipe.tokenizer, workers=workers)
    except RuntimeError:
        workers.check(patient=True)
        raise
    assert isinstance(engine.loop, engines.RankZeroLoop)
    assert isinstance(engine.runner, PagedRunner)
    engine.loop.close_with(
        weakref.finalize(engine, part, workers, ranks, engine.runner.release)
    )
    workers.check()
    return engine


def own_engine(
    recipe: Recipe,
    ranks: Ranks,
    tokenizer: Any,
    workers: WorkerGroup | None = None,
    line: BroadcastChannel | None = None,
) -> PagedEngine:
    """Make a rank's own engine. workers: on rank 0; line: on all others."""
    own: list[Feature] = []
    for feature in recipe.features:
        if isinstance(feature, Parallel):
            own.append(Split(feature, ranks, workers, line))
        elif isinstance(feature, Speculate) and feature.drafter == "model" and ranks.rank:
            # The draft model is rank 0's alone; here no drafter is asked.
            length = feature.length
            own.append(
                replace(feature, drafter="ngram", draft_model=None, draft_length=length)
            )
        else:
            own.append(feature)
    return build(
        replace(recipe, features=tuple(own), device=str(ranks.device), tokenizer=tokenizer)
    )


@dataclass(frozen=True)
class Split(Feature):
    """`Parallel` inside a rank's own engine; it is no option.

    workers: the others, on rank 0. line: to rank 0, on all others.
    """

    name: ClassVar[str] = "parallel"
    phase: ClassVar[int] = 14

    options: Parallel
    ranks: Ranks
    workers: WorkerGroup | None = None
    line: BroadcastChannel | None = None

    def configure_load(self, builder: EngineBuilder) -> None:
        """Every rank loads its part, and has as many blocks as the one with the least room."""
        builder.load.replace(self, self._load)
        builder.memory_plan.decorate(self, lambda plan: lambda each: self._agree(plan(each)))

    def _load(self, builder: EngineBuilder) -> Model:
        asked = builder.recipe
        return load_part(
            asked.model,
            device=asked.device,
            dtype=asked.dtype,
            weight_loader=builder.weight_loader.part,
            ranks=self.ranks,
        )

    def _agree(self, memory_plan: MemoryPlan) -> MemoryPlan:
        """Take as many blocks as there are on the rank that has room for the fewest."""
        blocks = self.ranks.smallest(memory_plan.blocks)
        cache = memory_plan.cache // memory_plan.blocks * blocks
        return replace(memory_plan, blocks=blocks, cache=cache)

    def install(self, builder: EngineBuilder) -> None:
        """Layers that add up, tokens chosen over ranks, and a loop that leads or follows."""
        self._choose_tokens(builder)
        workers, line = self.workers, self.line
        drafter, masked = builder.drafter, builder.grammar_manager
        about = (builder.model.config.vocab_size, builder.model.device)
        loop: engines.RankZeroLoop | engines.WorkerLoop
        if workers is not None:
            proposer = None
            if drafter.part is not NO_DRAFTS:
                proposer = BroadcastProposer(drafter.part)
                drafter.decorate(self, lambda own: proposer)
            if masked.part is not NO_GRAMMAR_MANAGER:
                masked.decorate(self, lambda own: RankZeroGrammarManager(own, workers, *about))
            if builder.warmups:
                builder.warmups.append(lambda engine: workers.tell(Rehearsed()))
            loop = engines.RankZeroLoop(
                builder.loop.part, workers, self.options.rank_check, proposer
            )
        else:
            assert line is not None
            if drafter.part is not NO_DRAFTS:
                drafter.decorate(self, lambda own: ReplicatedProposer(line))
            if masked.part is not NO_GRAMMAR_MANAGER:
                masked.decorate(self, lambda own: WorkerGrammarManager(line, *about))
            builder.warmups.clear()  # it follows what rank 0 plays when it is made
            loop = engines.WorkerLoop(builder.loop.part, line, self.options.rank_check)
        builder.loop.decorate(self, lambda inner: loop)
        builder.observer.replace(self, loop)

    def _choose_tokens(self, builder: EngineBuilder) -> None:
        """Choose tokens over ranks, each of which has the logits of a part of the vocabulary."""
        graphs, vocab_size = builder.feature(Graphs), builder.model.config.vocab_size
        kind: type[RankSamplerBackend] = RankSamplerBackend
        if graphs is not None and graphs.sampling == "triton":
            from parallel.reduce_argmax import TritonRankSamplerBackend  # Triton comes with it

            kind = TritonRankSamplerBackend
        builder.sampler_backend.decorate(
            self, lambda inner: kind(self.ranks, inner, vocab_size)
        )
        if graphs is not None:
            from cuda_graphs.executors import ChunkGraphExecutor

            # Graphs of full steps have not been tried in ranks: NCCL's sums would be in them.
            builder.executors[ChunkGraphExecutor] = partial(
                ChunkGraphExecutor, most_tokens=graphs.graph_tokens, step_tokens=0
            )
