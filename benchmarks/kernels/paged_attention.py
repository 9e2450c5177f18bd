"""Paged attention by itself: every version of the decode kernel, the prefill kernel, and what others reach.

Workload `paged-decode-attention`: one new token for each request; `bandwidth_fraction` is the share of the
read ceiling at which keys and values are read. Workload `paged-prefill-attention`: whole prompts;
`flop_fraction` is the share of the matrix product ceiling. Times are of graph replays over blocks that no
cache holds.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import benchmarks.bench
from benchmarks.bench import evidence_of
from benchmarks.evidence import BenchOptions, Evidence, Metric, Roofline, Run
from benchmarks.kernels.harness import Case, eager_seconds, graph_seconds, make_case
from benchmarks.measure import say
from benchmarks.plotting import Panel, figure
from common.errors import UserError
from continuous.batch import HostBatch
from cuda_graphs.batch import fixed_batch
from paged_cache import LayerBlocks, TorchPagedAttention
from paged_cache.reference import gather
from triton_paged_attention.decode import Workspace, paged_decode
from triton_paged_attention.decode_v1 import paged_decode_v1
from triton_paged_attention.decode_v2 import paged_decode_v2
from triton_paged_attention.decode_v3 import paged_decode_v3
from triton_paged_attention.prefill import paged_prefill, query_tiles
from triton_paged_attention.tables import for_keys, prefill_default

NAME, PREFILL_KERNEL = "paged_attention", "06_triton_paged_attention"
BLOCKS = (16, 64, 256)
MODEL = "qwen3-0.6b"
Call = Callable[[Tensor], Tensor]
"""One attention over one of a case's block tables."""


SHAPES = (
    (1, 512),
    (1, 4096),
    (1, 16384),
    (4, 2048),
    (32, 512),
    (32, 1024),
    (32, 2048),
    (128, 1024),
)
DECODE_CASES = {f"{count}x{context}": [context] * count for count, context in SHAPES}
"""Contexts by name. The last is of requests in the middle of `offline-256`: 100 to 1,800 keys."""
DRAWN = random.Random(0)
DECODE_CASES["256x100-1800"] = [DRAWN.randint(100, 1800) for _ in range(256)]
LAUNCHED = ("decode_v4", "05_paged_cache", "loop over requests")
"""Variants that are timed outside a graph as well: a loop in Python is slow because it launches so much."""
SHARES = {"decode": "bandwidth_fraction", "prefill": "flop_fraction"}
PREFILL_CASES = {"2x8192": [8192] * 2, "16x1024": [1024] * 16}


def run(options: BenchOptions) -> Evidence:
    """Every kernel on every case; correctness against float32 first."""
    if options.device.type != "cuda":
        raise UserError(
            f"device is {options.device.type!r}, but kernels are timed on 'cuda' only"
        )
    bench = Bench(options)
    return evidence_of(NAME, [*bench.decode(), *bench.prefill()], options)


class Bench(benchmarks.bench.Bench):
    """The cases and how they are measured."""

    def decode(self) -> Iterator[Run]:
        """All versions at block size 16; the last one at 64 and 256 too."""
        names = ("1x4096", "32x1024") if self.quick else DECODE_CASES
        for name, block in product(names, BLOCKS):
            case = self.case(DECODE_CASES[name], block)
            for variant, call in decode_variants(case, name, block).items():
                what = case, call, variant, name, block
                yield self.measure(*what)
                if name == "4x2048" and variant in LAUNCHED:
                    yield self.measure(*what, graph=False)
            del case

    def prefill(self) -> Iterator[Run]:
        """The kernel at three block sizes, and torch's kernels on contiguous tensors."""
        for (name, contexts), block in product(PREFILL_CASES.items(), BLOCKS):
            case = self.case(contexts, block, query_lens=contexts, sets=2)
            variants: dict[str, Call] = {PREFILL_KERNEL: prefill_call(case)}
            if block == 16:
                variants |= contiguous_calls(case)
            for variant, call in variants.items():
                yield self.measure(case, call, variant, name, block)
            del case

    def case(self, contexts: list[int], block: int, **more: Any) -> Case:
        """Blocks of this size with the heads of the model."""
        return make_case(contexts, block, **more, dtype=self.dtype, device=self.device)

    def measure(
        self,
        case: Case,
        call: Call,
        variant: str,
        name: str,
        block: int | None,
        graph: bool = True,
    ) -> Run:
        """Check, then time: in a graph, or launched from Python one after the other."""
        out = call(case.tables[0])
        if out.dim() == 4:  # torch's kernels on whole prompts: [B, H, S, D]
            out = out.transpose(1, 2).flatten(0, 1)
        wanted = oracle(case)
        error = float((out.float() - wanted).norm() / wanted.norm())
        limit = 1e-4 if self.dtype == torch.float32 else 1e-2
        if not error < limit:
            raise UserError(
                f"{variant} on {name} has a relative error of {error:.1e}, but {limit} is allowed"
            )
        calls = [partial(call, table) for table in case.tables]
        if graph:
            samples = graph_seconds(calls)
        else:
            count = 20 if "loop" in variant else 200
            samples = eager_seconds(calls, case.q.device, count, 3 if self.quick else 9)
        if max(case.query_lens) == 1:
            kind, least = "decode", case.kv_bytes / self.top.read_bytes_per_s
        else:
            kind, least = "prefill", case.flop / self.top.matmul_flop_per_s
        if kind == "prefill" and variant != PREFILL_KERNEL:  # without blocks
            block = None
        seconds = Metric(tuple(samples))
        said = f"{kind} {name} block {block} {variant}: {seconds.median * 1e6:.1f} us"
        say(f"{said}, error {error:.1e}")
        lengths = json.dumps([case.contexts, case.query_lens])
        return Run(
            variant=variant,
            workload=f"paged-{kind}-attention",
            workload_sha256=hashlib.sha256(lengths.encode()).hexdigest(),
            model=MODEL,
            weights="random",
            dtype=self.dtype_name,
            options={"case": name, "block_size": block, "graph": graph},
            metrics={
                "seconds": seconds,
                SHARES[kind]: Metric(tuple(least / s for s in samples)),
                "relative_error": Metric((error,)),
            },
            roofline=Roofline(least, least / seconds.median),
        )


def gathered(case: Case, table: Tensor, request: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a request, each `[S, KH, D]`."""
    where = table[request], case.contexts[request]
    return gather(case.k_cache, *where), gather(case.v_cache, *where)


attend = partial(F.scaled_dot_product_attention, enable_gqa=True)
"""Torch's attention, `[B, H, S, D]`, with its default scale, 1 / sqrt(D)."""


def oracle(case: Case) -> Tensor:
    """Request by request: gather, then torch's attention in float32 (for prompts, in the case's dtype)."""
    outs = []
    for b, q in enumerate(torch.split(case.q, case.query_lens)):
        kind = torch.float32 if len(q) == 1 else q.dtype
        every = (q, *gathered(case, case.tables[0], b))
        query, k, v = (part.transpose(0, 1)[None].to(kind) for part in every)
        out = attend(query, k, v, is_causal=len(q) > 1)
        outs.append(out[0].transpose(0, 1).float())
    return torch.cat(outs)


def decode_variants(case: Case, name: str, block: int) -> dict[str, Call]:
    """The kernels; at block size 16 their ancestors, and for one case the two gathers in torch."""
    kv_heads, d = case.k_cache.shape[2:]
    workspace = Workspace(2**14, d, case.q.device)
    q = case.q
    lens = case.context_lens
    layer = case.layer
    cache = LayerBlocks(case.k_cache, case.v_cache)

    def latest(table: Tensor) -> Tensor:
        return paged_decode(layer, q, cache, table, lens, workspace=workspace)

    if block != 16:
        return {"decode_v4": latest}
    splits = max(1, min(32, 264 // (len(case.contexts) * kv_heads)))
    variants: dict[str, Call] = {
        "decode_v1": lambda table: paged_decode_v1(layer, q, cache, table, lens),
        "decode_v2": lambda table: paged_decode_v2(layer, q, cache, table, lens),
        "decode_v3": lambda table: paged_decode_v3(
            layer, q, cache, table, lens, splits=splits
        ),
        "decode_v4": latest,
    }
    if name == "4x2048":
        variants["05_paged_cache"] = gather_call(case)
        variants["loop over requests"] = loop_call(case)
    return variants


def gather_call(case: Case) -> Call:
    """Phase 05's attention: gather all blocks of the batch, then one masked attention."""
    count = len(case.contexts)
    lens, ones = np.array(case.contexts), np.ones(count, np.int64)
    zeros, starts = np.zeros(count, np.int64), np.arange(count + 1)
    host = HostBatch(
        zeros, ones, starts, lens, zeros, lens - 1, starts[:-1], zeros, lens, zeros
    )
    layer = case.layer
    cache = LayerBlocks(case.k_cache, case.v_cache)
    pool: Any = SimpleNamespace(data=case.k_cache[None, None], layers=[cache], exact=True)
    attentions = {}
    for table in case.tables:
        batch = replace(
            fixed_batch(count, table.shape[1], table.device),
            host=host,
            query_starts=case.query_starts,
            context_lens=case.context_lens,
            block_tables=table,
        )
        attention = TorchPagedAttention(pool)
        attention.begin(batch)
        attentions[table.data_ptr()] = attention

    def call(table: Tensor) -> Tensor:
        return attentions[table.data_ptr()].attend(layer, case.q, cache.k, cache.v, cache)

    return call


def loop_call(case: Case) -> Call:
    """One gather and one attention for each request."""

    def call(table: Tensor) -> Tensor:
        outs = []
        for b, q in enumerate(case.q):
            k, v = (part.transpose(0, 1)[None] for part in gathered(case, table, b))
            outs.append(attend(q[None, :, None], k, v)[0, :, 0])
        return torch.stack(outs)

    return call


def prefill_call(case: Case) -> Call:
    """The prefill kernel with its defaults."""
    _, block_size, kv_heads, d = case.k_cache.shape
    config = prefill_default(d, case.q.element_size(), case.q.device)
    config = for_keys(config, max(case.contexts), block_size)
    tokens = config.block_m // (case.q.shape[1] // kv_heads)
    tiles = torch.from_numpy(query_tiles(case.query_lens, case.contexts, tokens)).to(
        case.q.device
    )
    cache = LayerBlocks(case.k_cache, case.v_cache)
    return lambda table: paged_prefill(case.layer, case.q, cache, table, tiles, config)


def contiguous_calls(case: Case) -> dict[str, Call]:
    """Torch's own kernels on keys and values in one piece; the gather is done before the clock runs."""
    every = [gathered(case, case.tables[0], b) for b in range(len(case.contexts))]
    queries = torch.split(case.q, case.query_lens)
    q, k, v = (
        torch.stack(part).transpose(1, 2).contiguous()
        for part in (queries, *zip(*every, strict=True))
    )  # [B, H or KH, S, D]

    def sdpa(backend: SDPBackend) -> Call:
        def call(table: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(q, k, v, is_causal=True)

        return call

    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        f"cuDNN {cudnn}": sdpa(SDPBackend.CUDNN_ATTENTION),
        f"FlashAttention-2 in torch {torch.__version__}": sdpa(SDPBackend.FLASH_ATTENTION),
    }


draw = figure(
    Panel(
        "Decode by version, a token a request",
        "bandwidth_fraction",
        {"variant": "decode_v*", "model": MODEL, "block_size": "16", "graph": "True"},
        rows="{case}",
        by="{variant}",
    ),
    Panel(
        "Prefill of 2 x 8,192 by block size, and others without blocks",
        "flop_fraction",
        {"model": MODEL, "case": "2x8192"},
        label="{variant:.20} {block_size}",
    ),
    phase=PREFILL_KERNEL,
)
