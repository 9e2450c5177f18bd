"""Moving KV blocks to host memory and files, as an engine feature with its options."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from itertools import product

import torch
from torch import Tensor

from common.device import free_memory
from common.errors import UserError, text
from common.options import option
from common.paths import expand
from hybrid_cache import Hybrid, LayerGroups
from moving_blocks.admission import AdmissionGate, ConnectorLoop
from moving_blocks.cache import OffloadingCache
from moving_blocks.connector import ConnectorWorker
from moving_blocks.disk import BlockFiles
from moving_blocks.disk_tier import DiskTier
from moving_blocks.host import HostTier
from moving_blocks.mover import CopyWorker, StreamWorker
from moving_blocks.names import namespace_of
from moving_blocks.rule import GENTLE, LoadRule, PrefillCost, measure_rule
from moving_blocks.tiers import TieredConnector
from paged_cache import EngineBuilder, Feature, PagedAttention, PagedEngine
from parallel import Parallel
from prefix_cache import INDEXES, Prefix

HOST_BYTES = {"cuda": 4 << 30, "cpu": 1 << 28, "mps": 1 << 28}
"""The second tier, unless the caller says otherwise, or a quarter of the free memory is less."""

RATE = {"low": 0.0, "high": 1e12, "above_low": True}


@dataclass(frozen=True)
class MovingBlocks(Feature):
    """Blocks that leave the cache go to host memory and to files, and come back when they are wanted."""

    name = "moving_blocks"
    phase = 19

    host_bytes: int | None = option(
        None, "bytes of host memory for blocks of the cache", low=1
    )
    disk_folder: str | None = option(
        None, "folder of files with blocks, which a restarted server finds; none by default"
    )
    disk_bytes: int = option(4 << 30, "most bytes of these files; the oldest go first", low=1)
    offload: str = option(
        "auto",
        "when a block goes to host memory: evicted, computed, or auto (computed if there is a disk_folder, "
        "or if host memory is as large as a GPU's cache)",
        choices=("auto", "evicted", "computed"),
    )
    prefill_rate: float | None = option(
        None,
        "tokens a second of a short prompt, to choose load or recompute; measured by default",
        **RATE,
    )
    load_rate: float | None = option(
        None, "gigabytes a second from host memory; measured by default", **RATE
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UserError: a value is out of its limits, or `disk_folder` is empty.
        """
        super().__post_init__()
        if self.disk_folder is not None and not text("disk_folder", self.disk_folder):
            raise UserError("disk_folder is '', but must name a folder")

    def install(self, builder: EngineBuilder) -> None:
        """Replace the builder's cache, grammar manager and loop by versions that save and load blocks.

        Host memory and files are attached at warm-up, when the engine is complete. Where blocks cannot be
        moved, nothing is replaced.

        Raises:
            UserError: blocks cannot be moved in this engine, but an option is not at its default.
        """
        if why := self.why_not(builder):
            for item in fields(self):
                value = vars(self)[item.name]
                if value != item.default:
                    raise UserError(
                        f"{item.name} is {value!r}, but blocks cannot be moved: {why}"
                    )
            return
        prefix = builder.feature(Prefix)
        assert prefix is not None
        index = INDEXES[prefix.index]()
        builder.cache.decorate(self, lambda plain: partial(OffloadingCache, index))
        gate = AdmissionGate(builder.grammar_manager.part)
        builder.grammar_manager.decorate(self, lambda inner: gate)
        builder.loop.decorate(self, lambda inner: ConnectorLoop(inner, gate))
        builder.warmups.append(partial(self._attach, gate))

    @staticmethod
    def why_not(builder: EngineBuilder) -> str:
        """Return the reason why this engine's blocks cannot be moved, as text; empty if they can be moved."""
        if builder.feature(Prefix) is None:
            return "prefix_cache is off"
        hybrid = builder.feature(Hybrid) is not None
        if hybrid and not LayerGroups.of(builder.model.config).full_attention_only:
            return "the model has layers with windows or states (hybrid_cache)"
        for each in builder.recipe.features:
            if each.name == Parallel.name and each != Parallel():
                return "the model is split over ranks (tensor_parallel)"
        return ""

    def _attach(self, gate: AdmissionGate, engine: PagedEngine) -> None:
        """Make the connector (what saves and loads blocks) of a complete engine; set it in cache and `gate`.

        gate: holds requests back until their blocks are loaded.
        """
        cache, attention = engine.cache, engine.runner.attention
        assert isinstance(cache, OffloadingCache)
        assert isinstance(attention, PagedAttention)
        pool = attention.pool
        block_bytes = pool.data[:, :, 0].numel() * pool.data.element_size()
        device = pool.data.device
        disk = None
        if self.disk_folder is not None:
            folder = expand("disk_folder", self.disk_folder)
            files = BlockFiles(folder, self.disk_bytes, block_bytes)
            disk = DiskTier(files)
        host = HostTier(self.slots(block_bytes, device), block_bytes, device)
        make = StreamWorker if device.type == "cuda" else CopyWorker
        worker = make(pool, host.memory)
        rule = self._rule(engine, worker, host.memory)
        computed = self.offload == "computed"
        if self.offload == "auto":
            # At an eviction, a step of a GPU would wait for the copy.
            larger = device.type == "cuda" and len(host.memory) >= cache.allocator.count
            computed = larger or disk is not None
        connector = TieredConnector(
            cache, engine.scheduler, worker, host, disk, rule, save_computed=computed
        )
        if disk is not None:  # host memory ends with this process, which has one model
            kind = type(attention).__name__
            cache.namespace = namespace_of(engine.runner.model, pool, kind)
        cache.connector = gate.connector = connector

    def slots(self, block_bytes: int, device: torch.device) -> int:
        """Return how many blocks of `block_bytes` bytes host memory has room for.

        device: of the GPU pool, whose type decides the default of `host_bytes`.

        Raises:
            UserError: there is no room for one block, or `host_bytes` is more than is free.
        """
        free = free_memory("cpu")[0]
        wanted = self.host_bytes or min(HOST_BYTES[device.type], free // 4)
        if not block_bytes <= wanted <= free:
            raise UserError(
                f"host_bytes is {wanted}, but must be at least {block_bytes}, which one block takes, and at "
                f"most {free}, which are free"
            )
        return wanted // block_bytes

    def _rule(self, engine: PagedEngine, worker: ConnectorWorker, memory: Tensor) -> LoadRule:
        """Return the rule for loading or computing, with the options' rates, or else measured ones.

        worker: copies blocks; its gentle rate is set. memory: `[slots, bytes of a block]`, host memory.
        """
        if self.prefill_rate is None or self.load_rate is None:
            rule = measure_rule(engine, worker, memory)
        else:
            rule = LoadRule(PrefillCost.of(engine.config), memory.shape[1], 1.0, 1.0)
        if self.prefill_rate is not None:
            rule.compute_rate = self.prefill_rate * rule.cost.per_token
        if self.load_rate is not None:
            rule.host_rate = self.load_rate * 1e9
        worker.gentle_rate = GENTLE * rule.host_rate
        for to_host, gently in product((True, False), repeat=2):  # compiles the kernels
            worker.wait_for(worker.start_copy([0], [0], to_host=to_host, gently=gently))
        return rule
