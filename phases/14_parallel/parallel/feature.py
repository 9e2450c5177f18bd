"""Tensor parallelism as a feature (option) of an engine."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial

import torch

from common.device import pick_device
from common.errors import UserError
from common.options import option
from cuda_graphs import Graphs
from forward.loading import config_of
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedEngine, PagedRunner, Recipe, build, find
from paged_cache.memory import MemoryPlan
from parallel.broadcast import runner_in_ranks
from parallel.launch import borrowed_workers, leave, rendezvous
from parallel.loading import load_part
from parallel.messages import Build
from parallel.ranks import Ranks
from parallel.sampler import RankSamplerBackend
from parallel.shard import Shard
from parallel.watch import WatchedLoop
from parallel.worker_group import WorkerGroup
from speculative import Speculate

MOST_RANKS = 64


@dataclass(frozen=True)
class Parallel(Feature):
    """Tensor parallelism: shard a model over GPUs of one host, or over processes of a CPU."""

    name = "parallel"
    phase = 14

    tensor_parallel: int = option(
        1,
        "GPUs (or processes) that share the model's heads, MLP and vocabulary",
        low=1,
        high=MOST_RANKS,
    )

    def configure_load(self, builder: EngineBuilder) -> None:
        """Change `builder` so that each of several ranks builds an engine; do nothing for one rank."""
        if self.tensor_parallel > 1:
            builder.assemble.replace(self, self._assemble)

    def _assemble(self, builder: EngineBuilder) -> PagedEngine:
        """Return rank 0's engine, by the recipe of `builder`, while the other ranks build theirs.

        The steps of rank 0's engine run on all ranks.

        Raises:
            WorkerLostError: a rank has ended meanwhile.
        """
        recipe, device = builder.recipe, self.check(builder.recipe)
        with borrowed_workers(self.tensor_parallel) as workers:
            ranks = rendezvous(workers, device)
            workers.broadcast(Build(replace(recipe, tokenizer=None, device=str(device))))
            engine = rank_engine(recipe, ranks, workers)
            assert isinstance(engine.loop, WatchedLoop)
            assert isinstance(engine.runner, PagedRunner)
            release = engine.runner.release
            engine.loop.close_with(weakref.finalize(engine, leave, workers, ranks, release))
            workers.check()
            return engine

    def check(self, recipe: Recipe) -> torch.device:
        """Return rank 0's device, if the engine that `recipe` describes can run on several ranks.

        Raises:
            UserError: this model, drafter or device cannot be split over ranks. No process was started yet.
        """
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


def rank_engine(
    recipe: Recipe, ranks: Ranks, workers: WorkerGroup | None = None
) -> PagedEngine:
    """Return the engine of one rank. workers: the processes of the other ranks, on rank 0; else None.

    recipe: the model and options of the engine. ranks: this rank in its process group.

    The engine of another rank than 0 only serves as a runner: no request is ever added to it.
    """
    own: list[Feature] = []
    for feature in recipe.features:
        if isinstance(feature, Parallel):
            own.append(Split(ranks, workers))
        elif isinstance(feature, Speculate) and feature.drafter == "model" and ranks.rank:
            # Rank 0 alone has the draft model; this rank verifies as many drafts.
            length = feature.length
            own.append(
                replace(feature, drafter="ngram", draft_model=None, draft_length=length)
            )
        else:
            own.append(feature)
    return build(replace(recipe, features=tuple(own), device=str(ranks.device)))


@dataclass(frozen=True)
class Split(Feature):
    """The feature that stands for `Parallel` in the engine of each rank: loads a shard, sums over ranks.

    ranks: this rank in its process group. workers: the other ranks' processes, on rank 0; None on all others.
    """

    name = "parallel"
    phase = 14

    ranks: Ranks
    workers: WorkerGroup | None = None

    def configure_load(self, builder: EngineBuilder) -> None:
        """Let `builder` load this rank's shard, with as many KV blocks as the rank that has the least
        memory.
        """
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
        """Return a copy of `memory_plan` with as many KV blocks as the rank that has the fewest."""
        blocks = self.ranks.smallest(memory_plan.blocks)
        cache = memory_plan.cache // memory_plan.blocks * blocks
        return replace(memory_plan, blocks=blocks, cache=cache)

    def install(self, builder: EngineBuilder) -> None:
        """Let `builder`'s engine sample over ranks; on rank 0 also broadcast steps and watch other ranks."""
        self._choose_tokens(builder)
        workers = self.workers
        builder.runner.decorate(self, lambda make: partial(runner_in_ranks, make, workers))
        if workers is None:
            builder.warmups.clear()  # rank 0 broadcasts the steps of its own
            return
        loop = WatchedLoop(builder.loop.part, workers)
        builder.loop.decorate(self, lambda inner: loop)
        builder.on_step_failed.replace(self, loop.on_step_failed)

    def _choose_tokens(self, builder: EngineBuilder) -> None:
        """Give `builder` a sampler backend for ranks that each have a part of the vocabulary's logits."""
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
