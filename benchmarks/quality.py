"""What fewer bits cost: every way of phase 10 beside the same model in float32, over a text.

    ladder bench quality                      both models
    ladder bench quality --model smollm2      one of them
    ladder bench quality --device cuda        the same numbers, sooner

Measured is on the first 20,480 tokens of `benchmarks.calibration.TEXT`; GPTQ and AWQ are
calibrated on its end. All layers are computed by their definition, in float32 (`fidelity.exactly`), so a
number says something about a format and a method, and nothing about a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from benchmarks.bench import Bench
from benchmarks.calibration import TEXT, quantize_model, samples
from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.fidelity import WINDOW, StoredAttention, compare
from benchmarks.measure import Samples
from benchmarks.plotting import Panel, figure
from benchmarks.workloads import Item, Workload
from common.models.hub import model_folder
from common.text.tokenizer import Tokenizer
from forward import Model, load_model
from forward.attention import Attention, RecomputeAttention
from forward.surgery import clone
from paged_cache.pool import KVFormat
from quant.feature import head_for
from quant.formats import SCHEMES
from quant.kv import KV_DTYPES, head_scales, sample
from quant.loading import Quantize

NAME, CPU = "quality", torch.device("cpu")
TOKENS = 20_480
"""That are measured on."""
PIECES, LENGTH = 16, 512
"""Of the text that methods are calibrated on."""


@dataclass(frozen=True)
class Way:
    """One way to fewer bits. The head is rounded to nearest, to what it is on a CPU unless `head` says so."""

    scheme: str
    method: Literal["rtn", "gptq", "awq"] = "rtn"
    group: int = 128
    head: str | None = None

    def make(self, reference: Model, texts: Sequence[Sequence[int]]) -> Model:
        """The reference in fewer bits."""
        model, scheme = clone(reference), SCHEMES[self.scheme]
        wanted = scheme.with_group(self.group) if scheme.group else scheme
        quantize_model(model, wanted, self.method, texts)
        return Quantize(None, SCHEMES[self.head or head_for(self.scheme, CPU)]).finish(model)


WAYS = {
    "int8": Way("int8"),
    "w8a8": Way("w8a8"),
    "fp8": Way("fp8"),
    "fp8, int8 head": Way("fp8", head="int8"),
    "fp8-weights, int8 head": Way("fp8-weights", head="int8"),
    "fp8 gptq, int8 head": Way("fp8", "gptq", head="int8"),
    "fp8-weights gptq, int8 head": Way("fp8-weights", "gptq", head="int8"),
    "fp8-block": Way("fp8-block"),
    "int4": Way("int4"),
    "int4 gptq": Way("int4", "gptq"),
    "int4 awq": Way("int4", "awq"),
    "int4/32": Way("int4", group=32),
}
"""By the name of a variant. Groups of 128, or the next smaller that divide a layer's rows."""
KEYS = {
    "keys fp8": ("fp8", False),
    "keys int8": ("int8", False),
    "keys fp8, scales of a text": ("fp8", True),
    "keys int8, scales of a text": ("int8", True),
}
"""Formats of keys and values; scales are of the sample that an engine takes, or of the calibration text."""
SMALL_BATCH = (
    "int8",
    "fp8",
    "fp8-weights gptq, int8 head",
    "int4",
    "int4 gptq",
    "int4 awq",
    "keys fp8",
    "keys int8",
)
MODELS = {"smollm2": (*WAYS, *KEYS), "gemma3-270m": SMALL_BATCH}
"""And what is measured of each: with Gemma's vocabulary it takes more than twice as long."""


def run(options: BenchOptions) -> Evidence:
    """Divergence, perplexity and agreement of every way."""
    names = [options.model] if options.model else [*MODELS]
    runs = [run for name in names for run in _one(replace(options, model=name), name)]
    return collect(NAME, runs, options.device)


def _one(options: BenchOptions, name: str) -> list[Run]:
    bench = Bench(replace(options, dtype=torch.float32))
    folder = model_folder(name)
    reference = load_model(str(folder), device=str(options.device), dtype="float32")
    tokens = Tokenizer(folder).encode(TEXT.read_text(encoding="utf-8"))
    most = 2 * WINDOW if options.quick else TOKENS
    texts = samples(tokens[most:], 2 if options.quick else PIECES, LENGTH)
    ways = SMALL_BATCH[:1] if options.quick else MODELS.get(name, SMALL_BATCH)
    runs = []
    work = Workload(f"news-from-nowhere-{most}", (Item(tuple(tokens[:most]), 1),))
    for way, found in compare(reference, _made(reference, ways, texts), tokens[:most]).items():
        sample = {name: value for name, value in vars(found).items() if name != "tokens"}
        made = bench.run_of(way, work, Samples([sample]), tokens=found.tokens)
        runs.append(replace(made, noise=None))
    return runs


def _made(
    reference: Model, ways: Sequence[str], texts: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Model, Attention]]:
    """One after the other: only one of them is in memory."""
    for way in ways:
        print(way, flush=True)
        if way in WAYS:
            yield way, WAYS[way].make(reference, texts), RecomputeAttention()
        else:
            kind, of_text = KEYS[way]
            shown = texts if of_text else [sample(reference)]
            kv = KVFormat(KV_DTYPES[kind], head_scales(reference, shown, kind))
            yield way, reference, StoredAttention(kv)


POINTS: dict[str, Any] = {
    "where": {"variant": "!reference"},
    "rows": "{variant}",
    "by": "{model}",
}
draw = figure(
    Panel("{model}: KL divergence to float32, nats a token", "kl", **POINTS, log="x"),
    Panel("{model}: share of {tokens} tokens that agree", "agreement", **POINTS),
    each=("model",),
    rows=2,
    phase="10_quant",
)
