"""What the benches of phases share: one model with its ceilings, and variants that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.evidence import BenchOptions, Evidence, Run, collect
from benchmarks.measure import Sample, Samples, alternate, summarize, timer
from benchmarks.roofline import ceilings, summarize_generation
from benchmarks.targets import load_target
from benchmarks.workloads import SMALL, Workload, uniform
from common.events import Streams, generate
from forward.model import Model


def evidence_of(
    phase: str, runs: Sequence[Run], options: BenchOptions, appendix: str = "named"
) -> Evidence:
    """Put a bench's runs together with the machine's ceilings. appendix: see `Evidence.appendix`."""
    top = ceilings(options.device, options.dtype).to_json()
    return collect(phase, runs, options.device, top, appendix)


class Bench:
    """One model and how its engines are measured.

    name: of the model. on_cpu: or on a GPU. small: the end of a workload's name on a CPU. top: the machine's
    ceilings in the dtype that is measured.
    """

    def __init__(self, options: BenchOptions, model: Model | None = None) -> None:
        self.options = options
        self.name = options.model or ""
        self.model = load_target(options) if model is None else model
        self.config = self.model.config
        self.dtype = options.dtype
        self.device = options.device
        self.quick = options.quick
        self.on_cpu = options.device.type == "cpu"
        self.small = SMALL if self.on_cpu else ""
        self.top = ceilings(options.device, options.dtype)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens' keys and values."""
        return tokens * self.config.kv_bytes_per_token(self.dtype)

    def timer(self, engine: Streams, work: Workload) -> Callable[[int], Sample]:
        """Time a workload in an engine, with other tokens each time."""
        return timer(engine, work, self.device)

    def warm_up(self, engines: Mapping[str, Streams], work: Workload | None = None) -> None:
        """Run a few tokens through each engine."""
        short = work or uniform("warm-up", 2, 16, 4)
        for engine in engines.values():
            generate(engine, short.prompts, short.params)

    def compare(
        self,
        variants: Mapping[str, Callable[[int], Sample]],
        work: Workload,
        roofline_batch: int = 0,
        *,
        repeats: int = 0,
        warm: Mapping[str, Callable[[], object]] | None = None,
        **facts: Any,
    ) -> list[Run]:
        """Evidence of variants that take turns on one workload; see `alternate` and `run_of`."""
        kept = alternate(variants, repeats or self.options.repeats, warm=warm)
        return [
            self.run_of(name, work, found, roofline_batch, **facts)
            for name, found in kept.items()
        ]

    def run_of(
        self,
        variant: str,
        work: Workload,
        samples: Samples,
        roofline_batch: int = 0,
        *,
        cached: bool = True,
        **facts: Any,
    ) -> Run:
        """Evidence of one variant; with a `roofline_batch`, that of a batch which is always full."""
        about: dict[str, Any] = {"model": self.name, "dtype": self.dtype, "options": facts}
        if not roofline_batch:
            return summarize(variant, work, samples, **about)
        shape: dict[str, Any] = {
            "config": self.config,
            "top": self.top,
            "batch": roofline_batch,
            "cached": cached,
        }
        return summarize_generation(variant, work, samples, **about, **shape)
