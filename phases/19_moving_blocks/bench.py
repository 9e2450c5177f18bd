"""Phase 19 against phase 17, which it is built on: first tokens after an eviction and after a restart, and
sessions of agents.

Then `ladder serve` with one engine, whose prefill is chunked, against two engines, one for prompts and one
that decodes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import benchmarks.bench
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Evidence, Run
from benchmarks.measure import ENOUGH_SECONDS, Sample, release_memory
from benchmarks.plotting import Panel, figure
from benchmarks.server import Server
from benchmarks.workloads import VOCAB, Item, Workload, agent, uniform
from common.device import synchronize
from common.events import generate
from common.sampling.params import SamplingParams
from moving_blocks.cache import OffloadingCache
from moving_blocks.tiers import TieredConnector
from paged_cache import PagedEngine

PHASE = "19_moving_blocks"
BEFORE = "17_hybrid_cache"
CPU_LENGTHS = (128, 512)
GPU_LENGTHS = (512, 2048, 8192, 32_768)
RESTART = 2000
"""Tokens of the conversation that a restarted server answers."""
BLOCKS = 2.5
"""Room of the cache and of host memory, in prompts of the longest length."""
CHUNKED = f"{PHASE}, one engine{APPENDIX}"
APART = f"{PHASE}, prefill apart{APPENDIX}"
SHARED = Path("/dev/shm")
SHARED_BYTES = 1 << 30
"""Least room in shared memory; with less, blocks go through the folder for temporary files."""


def run(options: BenchOptions) -> Evidence:
    """Measure phases 17 and 19 with one model; on a GPU a large one, whose prompts take long to compute."""
    usual = "random:qwen3-8b" if options.device.type == "cuda" else "smollm2"
    return Bench.run(replace(options, model=options.model or usual))


class Bench(benchmarks.bench.Bench):
    """Engines of phases 17 and 19 over one model, and the lengths of the prompts that they serve."""

    phase = PHASE

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options)
        longest = self.config.max_position_embeddings - 16
        lengths = (CPU_LENGTHS if self.on_cpu else GPU_LENGTHS)[: 1 if self.quick else None]
        self.lengths = [length for length in lengths if length <= longest]
        self.restart = min(RESTART, longest) if not self.quick else self.lengths[0]
        self.longest = max(*self.lengths, self.restart)

    def measured(self) -> list[Run]:
        """Return the runs of evicted prompts, agents' sessions, (on a CPU) a restart, and of prefill and
        decodes in engines of their own.
        """
        restarted = self.restarted if self.on_cpu else list
        return [*self.evicted(), *self.sessions(), *restarted(), *self.apart()]

    def engine(self, variant: str, **more: Any) -> PagedEngine:
        """Make the engine of phase 17 or 19 (`variant`), with room for the longest prompt.

        more: options of the engine.
        """
        room = int(BLOCKS * self.kv_bytes(self.longest))
        sizes: dict[str, Any] = {
            "max_rows": 8,
            "max_len": self.longest + 16,
            "cache_bytes": room,
            "host_bytes": room,
            **({} if self.on_cpu else {"step_tokens": 8192}),
            **more,
        }
        if variant == BEFORE:
            del sizes["host_bytes"]
        return engine_of(variant, self.model, **sizes)

    # A prompt whose blocks had to leave the cache.

    def evicted(self) -> list[Run]:
        """Return runs: the time to first token of prompts that were computed, evicted, and are asked for
        again.
        """
        engines = {name: self.engine(name) for name in (BEFORE, PHASE)}
        runs: list[Run] = []
        for length in self.lengths:
            work = uniform(f"evicted-{length}", 1, length, 1)
            again = {
                name: partial(self.again, engine, work) for name, engine in engines.items()
            }
            runs += self.compare(again, work, tokens=length, after="eviction")
        return runs

    def again(self, engine: PagedEngine, work: Workload, repeat: int) -> Sample:
        """Return the time to the first token, in ms, of a prompt that was evicted just before.

        repeat: number of the sample, which gives the prompt in `work` other tokens.
        """
        prompt = work.cold(repeat).prompts[0]
        first_token(engine, prompt)
        engine.cache.forget()
        finish_copies(engine)
        synchronize(self.options.device)
        return first_token(engine, prompt)

    # Sessions whose prompts grow.

    def sessions(self) -> list[Run]:
        """Serve agents' sessions in turn, with a cache of a quarter of what they need, and with enough.

        Returns:
            A run for each size of the cache and each engine.
        """
        count, system, step = (6, 48, 48) if self.on_cpu else (8, 2048, 1500)
        turns = 4 if self.on_cpu or self.quick else 16
        work = agent(
            f"agent-session-{count}x{turns}", VOCAB, count, turns, system, step, output=4
        )
        longest = max(work.prompt_lens)
        distinct = system + count * turns * step
        runs: list[Run] = []
        for share in (0.25, 1.25):
            sizes = {
                "max_len": longest + 32,
                "cache_bytes": self.kv_bytes(int(share * distinct)),
                "host_bytes": self.kv_bytes(int(1.25 * distinct)),
            }
            engines = {name: self.engine(name, **sizes) for name in (BEFORE, PHASE)}
            for engine in engines.values():
                self.turns(engine, work.first(2 * count), -1)
            variants = {name: partial(self.turns, engines[name], work) for name in engines}
            runs += self.compare(
                variants,
                work,
                warm={},
                enough=ENOUGH_SECONDS,
                after="agents",
                cache_share=share,
            )
            del engines, variants, engine
            release_memory(self.device)
        return runs

    def turns(self, engine: PagedEngine, work: Workload, repeat: int) -> Sample:
        """Return the requests a second of all sessions; a turn begins when the turn before has ended.

        repeat: number of the sample, which gives the prompts in `work` other tokens.
        """
        cold = work.cold(repeat)
        requests = sorted(zip(cold.prompts, cold.params, strict=True), key=prompt_length)
        engine.cache.forget()
        started = time.perf_counter()
        for _, turn in groupby(requests, key=prompt_length):
            prompts, params = zip(*turn, strict=True)
            generate(engine, prompts, params)
        seconds = time.perf_counter() - started
        return {"requests_per_s": len(requests) / seconds, "seconds": seconds}

    # Long prompts beside chats.

    def apart(self) -> list[Run]:
        """Serve chats and long prompts by one engine with chunked prefill, and by two engines.

        One of the two computes prompts, the other decodes. On a CPU each gets half of the processors; of
        several GPUs each gets its own. Return the runs of both ways.
        """
        work = mixed(self.on_cpu, self.quick)
        cores = os.cpu_count() or 1
        half, device = max(1, cores // 2), self.options.device.type
        sizes = {
            "phase": 19,
            "device": device,
            "dtype": self.dtype_name,
            "max_len": 2 * max(work.prompt_lens),
            "max_rows": 64,
            "step_tokens": 64 if self.on_cpu else 2048,
            "cache_bytes": self.kv_bytes(8 * max(work.prompt_lens)),
        }
        with ExitStack() as stack:
            folder = stack.enter_context(shared_folder())
            shared = sizes | {
                "disk_folder": f"{folder}/blocks",
                "disk_bytes": shutil.disk_usage(folder).free // 4,
                "prefill_device": "cuda:1" if torch.cuda.device_count() > 1 else device,
            }
            start = partial(Server, self.name)
            made = {
                CHUNKED: partial(start, env=threads(cores), moving_blocks=False, **sizes),
                APART: partial(start, env=threads(half), **shared),
            }
            # The engines of both servers do not fit on one GPU.
            groups = [list(made)] if self.on_cpu else [[name] for name in made]
            runs: list[Run] = []
            for names in groups:
                with ExitStack() as servers:
                    started = {name: servers.enter_context(made[name]()) for name in names}
                    sample = {name: partial(served, started[name], work) for name in names}
                    for name in names:
                        served(started[name], work.first(4), -1)
                    runs += self.compare(sample, work, warm={}, after="apart")
            return runs

    # A conversation that an earlier process has had.

    def restarted(self) -> list[Run]:
        """Return runs: the time to a new engine's first token of a prompt whose blocks an earlier engine left
        in files.
        """
        length = self.restart
        work = uniform(f"restart-{length}", 1, length, 1)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "blocks")
            earlier = self.engine(PHASE, disk_folder=path)
            for prompt in work.prompts:
                first_token(earlier, prompt)
            finish_copies(earlier)
            made: dict[str, Callable[[], PagedEngine]] = {
                BEFORE: partial(self.engine, BEFORE),
                PHASE: partial(self.engine, PHASE, disk_folder=path),
            }
            start = {name: partial(self.start, make, work) for name, make in made.items()}
            return self.compare(start, work, tokens=length, after="restart")

    def start(self, make: Callable[[], PagedEngine], work: Workload, repeat: int) -> Sample:
        """Return the time to the first token of a new engine, and how long `make` took to start it, in ms.

        work: its first prompt is served. repeat: not used.
        """
        started = time.perf_counter()
        engine = make()
        seconds = time.perf_counter() - started
        return {**first_token(engine, work.prompts[0]), "start_ms_p50": 1e3 * seconds}


def first_token(engine: PagedEngine, prompt: list[int]) -> Sample:
    """Serve one prompt for one token.

    Returns:
        Its time to first token in ms, and the share (0 to 1) of its tokens that was found in the cache.
    """
    started = time.perf_counter()
    (request,) = engine.add(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while not engine.idle:
        engine.step()
    assert request.first_token is not None, request.error
    return {
        "ttft_ms_p50": 1e3 * (request.first_token - started),
        "cache_hit_fraction": request.cached_tokens / len(prompt),
    }


def prompt_length(request: tuple[list[int], SamplingParams]) -> int:
    """Return the number of tokens of a request's prompt; it is the same for all requests of one turn.

    request: (prompt, sampling settings).
    """
    return len(request[0])


def mixed(small: bool, quick: bool) -> Workload:
    """Return a workload of chats that arrive at equal intervals, with a long prompt after every three or
    four.

    small: fewer and shorter requests, for a CPU. quick: fewer chats still.
    """
    count, gap, short, long, output = (
        (12, 1.0, 24, 512, 48) if small else (48, 0.1, 128, 8192, 128)
    )
    every = 3 if small else 4
    count = 2 * every if quick else count
    chats = uniform("chats", count, short, output).prompts
    prompts = uniform("prompts", count // every, long, 8).prompts
    items = [Item(tuple(chat), output, gap * at) for at, chat in enumerate(chats)]
    for at, prompt in enumerate(prompts):
        items.append(Item(tuple(prompt), 8, gap * (every * at + every / 2)))
    items.sort(key=lambda item: item.arrival)
    return Workload(f"chats-{count}+{len(prompts)}x{long}", tuple(items), vocab=VOCAB)


def served(server: Server, work: Workload, repeat: int) -> Sample:
    """Return the metrics of a workload that a server serves at the requests' arrival times.

    repeat: number of the sample, which gives the prompts other tokens, so that none is cached.
    """
    return server.sample(work.cold(repeat), processes=1)


def shared_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder in shared memory, or where temporary files are if that has too little room."""
    room = shutil.disk_usage(SHARED).free if SHARED.is_dir() else 0
    return tempfile.TemporaryDirectory(dir=SHARED if room > SHARED_BYTES else None)


def threads(count: int) -> dict[str, str]:
    """Return environment variables for a server whose engines use `count` threads each."""
    return {"OMP_NUM_THREADS": str(count)}


def finish_copies(engine: PagedEngine) -> None:
    """Wait until an engine has saved all blocks that it is to save, to host memory and to files if any."""
    if not isinstance(engine.cache, OffloadingCache):
        return
    connector = engine.cache.connector
    assert isinstance(connector, TieredConnector)
    connector.poll()
    while connector.busy or (connector.disk is not None and connector.disk.pending):
        time.sleep(0.001)
        connector.poll()


draw = figure(
    Panel(
        "First token of an evicted prompt: {gain} as soon",
        "ttft_ms_p50",
        {"after": "eviction"},
        x="tokens",
        log="xy",
    ),
    Panel("First token after a restart: {gain} as soon", "ttft_ms_p50", {"after": "restart"}),
)
