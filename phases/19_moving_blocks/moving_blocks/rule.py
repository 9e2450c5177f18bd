"""Load or recompute: do blocks arrive sooner than they are computed?

Two rates decide: how fast this engine computes a prompt, and how fast blocks are loaded. Both are measured
when the engine starts; reads of files correct the disk's rate. The lesson draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from chunked_prefill import ChunkedScheduler
from common.models.config import ModelConfig
from common.sampling.params import SamplingParams
from continuous.stats import Stats
from moving_blocks.connector import ConnectorWorker
from paged_cache import PagedEngine

PROBES = {"cpu": (64, 1 << 25), "cuda": (4096, 1 << 28)}
"""Tokens of the prompt, and bytes of the copy, that are timed at the start, where they may be so many."""
DISK_RATE = 1e9
"""Bytes a second that a disk is taken to give until it has been read."""
KEEP = 0.9
"""Share of an old rate in the new one, at each measurement."""
GENTLE = 0.5
"""Share of the rate of copies that is left to them while steps of other requests run."""
WAIT_SECONDS = 2e-4
"""What a load costs the host besides the copy."""
MARGIN = 1.5
"""A load must be this many times as fast as what it saves: both times are estimates, and the load's leaves
out how long the step of the last block reads what was loaded."""


@dataclass(frozen=True)
class PrefillCost:
    """Floating-point operations that a prompt takes.

    per_token: of the products with weights, for a token. per_pair: of attention, for each key that a query
        sees, over all layers.
    """

    per_token: float
    per_pair: float

    @staticmethod
    def of(config: ModelConfig) -> PrefillCost:
        """Return the operations that tokens cost a model with this configuration.

        Of a mixture's experts only those count that a token goes through.
        """
        heads = config.num_heads + 2 * config.num_kv_heads
        attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
        inner = config.intermediate_size
        if config.experts is not None:
            inner = config.experts.top_k * config.experts.intermediate_size
        weights = config.num_layers * (attention + 3 * config.hidden_size * inner)
        return PrefillCost(
            2.0 * weights, 4.0 * config.num_layers * config.num_heads * config.head_dim
        )

    def between(self, start: int, end: int) -> float:
        """Return the floating-point operations of tokens `start .. end - 1`, which see all before them."""
        return self.per_token * (end - start) + self.per_pair * (end**2 - start**2) / 2


@dataclass
class LoadRule:
    """The rule that decides whether to load blocks or to compute their tokens.

    cost: operations of a prompt. block_bytes: bytes of a block's keys and values.
    compute_rate: operations a second. host_rate, disk_rate: bytes a second, from host memory and from files.
    step_seconds: what a step takes at least, also if it computes one token.
    """

    cost: PrefillCost
    block_bytes: int
    compute_rate: float
    host_rate: float
    disk_rate: float = DISK_RATE
    step_seconds: float = 0.0

    def compute_seconds(self, start: int, end: int) -> float:
        """Return how many seconds the tokens `start .. end - 1` of a prompt take to compute."""
        return max(self.step_seconds, self.cost.between(start, end) / self.compute_rate)

    def load_seconds(self, blocks: int, from_disk: int = 0, gently: bool = False) -> float:
        """Return how many seconds `blocks` blocks take to load, `from_disk` of them from files.

        gently: True: slower, at a part (`GENTLE`) of the rate, because other requests run beside it.
        """
        each = self.block_bytes
        rate = GENTLE * self.host_rate if gently else self.host_rate
        return WAIT_SECONDS + blocks * each / rate + from_disk * each / self.disk_rate

    def should_load(
        self,
        start: int,
        loaded: int,
        end: int,
        blocks: int,
        from_disk: int = 0,
        gently: bool = False,
    ) -> bool:
        """Return True if loading blocks of a prompt is clearly faster than computing their tokens.

        Args:
            start: tokens of the prompt in the cache. loaded: tokens in the cache after the load. end: all
                tokens.
            blocks: number of blocks to load. from_disk: how many of them come from files.
            gently: other requests run, so the load must be slow.
        """
        saved = self.compute_seconds(start, end) - self.compute_seconds(loaded, end)
        return MARGIN * self.load_seconds(blocks, from_disk, gently) < saved

    def on_read(self, blocks: int, seconds: float) -> None:
        """Correct `disk_rate` by a measurement: `blocks` blocks were read from files in `seconds`."""
        measured = blocks * self.block_bytes / max(seconds, 1e-9)
        self.disk_rate = KEEP * self.disk_rate + (1 - KEEP) * measured


def measure_rule(engine: PagedEngine, worker: ConnectorWorker, memory: Tensor) -> LoadRule:
    """Return a rule (load blocks or compute them again) with rates that are measured now, on an idle engine.

    A prompt and a copy are timed. worker: copies blocks. memory: `[slots, bytes of a block]`, host memory.
    The disk's rate is not measured; reads of files correct its default.
    """
    cost = PrefillCost.of(engine.config)
    slots, block_bytes = memory.shape
    device = engine.runner.model.device.type
    most_tokens, most_bytes = PROBES.get(device, PROBES["cpu"])
    tokens = max(1, min(most_tokens, engine.max_len - 2))
    if not isinstance(engine.scheduler, ChunkedScheduler):
        tokens = min(tokens, engine.scheduler.step_tokens)
    while tokens > 1 and not engine.cache.holds(tokens + 1):
        tokens //= 2
    blocks = min(slots, engine.cache.allocator.count, max(1, most_bytes // block_bytes))
    step_seconds = time_of(prefill, engine, 1)
    seconds = time_of(prefill, engine, tokens)
    vars(engine.stats).update(vars(Stats()))  # from zero
    engine.cache.forget()
    return LoadRule(
        cost,
        block_bytes,
        compute_rate=cost.between(0, tokens) / seconds,
        host_rate=blocks * block_bytes / time_of(load, worker, blocks),
        step_seconds=step_seconds,
    )


def prefill(engine: PagedEngine, tokens: int) -> None:
    """Run an engine until it has computed a new prompt of `tokens` tokens and sampled one token."""
    prompt = [(3 * token) % engine.config.vocab_size for token in range(tokens)]
    salt = str(perf_counter())  # a second prompt must not find the first one's blocks
    engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True), salt=salt)
    while not engine.idle:
        engine.step()


def load(worker: ConnectorWorker, blocks: int) -> None:
    """Let `worker` copy `blocks` blocks from host memory into the pool; wait until they have arrived."""
    transfer = worker.start_copy(range(blocks), range(blocks), to_host=False)
    while not transfer.done():
        continue


def time_of(action: Callable[..., None], *arguments: object) -> float:
    """Return the seconds that `action(*arguments)` takes, the shorter of two runs."""
    times = []
    for _ in range(2):
        started = perf_counter()
        action(*arguments)
        times.append(perf_counter() - started)
    return min(times)
