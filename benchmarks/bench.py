"""What the benches of phases share: one model with its ceilings, and variants that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.evidence import BenchOptions, Evidence, Roofline, Run, collect, sample_metrics
from benchmarks.measure import (
    ENOUGH_SECONDS,
    Sample,
    Samples,
    alternate,
    release_memory,
    time_generation,
    timer,
)
from benchmarks.model_work import Ceilings, generation_work, ideal_seconds
from benchmarks.published import PUBLISHED
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target, targets
from benchmarks.workloads import SMALL, Workload, uniform, workload
from common.events import Streams, generate
from common.models.config import ModelConfig
from forward.model import Model

if TYPE_CHECKING:
    from paged_cache import PagedEngine


def evidence_of(phase: str, runs: Sequence[Run], options: BenchOptions) -> Evidence:
    """Put a bench's runs together with the machine's ceilings."""
    top = ceilings(options.device, options.dtype).to_json()
    return collect(phase, runs, options.device, top)


class Bench:
    """One model and how its engines are measured. A phase's subclass says `phase` and `measured`.

    name: of the model. on_cpu: or on a GPU. small: the end of a workload's name on a CPU. top: the machine's
    ceilings in the dtype that is measured. published: on a GPU also with GPT-2, see `targets`. ending: of all
    variants' names.
    """

    phase = ""
    published = False
    ending = ""

    def __init__(self, options: BenchOptions, model: Model | None = None) -> None:
        self.options = options
        self.name = options.model or ""
        if model is not None:
            self.model = model
        self.dtype = options.dtype
        self.dtype_name = str(options.dtype).removeprefix("torch.")
        self.device = options.device
        self.quick = options.quick
        self.on_cpu = options.device.type == "cpu"
        self.small = SMALL if self.on_cpu else ""

    @classmethod
    def run(cls, options: BenchOptions) -> Evidence:
        """Measure each model that is asked for; a bench's `run`."""
        runs: list[Run] = []
        for target in targets(options, published=cls.published):
            runs += cls(target).measured()
            release_memory(options.device)
        return evidence_of(cls.phase, runs, options)

    def measured(self) -> list[Run]:
        """Return what is measured of one model: first what the headline is of."""
        raise NotImplementedError

    @cached_property
    def model(self) -> Model:
        """The model, loaded when an engine asks for it."""
        return load_target(self.options)

    @cached_property
    def top(self) -> Ceilings:
        """The machine's ceilings."""
        return ceilings(self.device, self.dtype)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.model.config

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of so many tokens' keys and values."""
        return tokens * self.config.kv_bytes_per_token(self.dtype)

    def short(self, work: Workload) -> Workload:
        """The workload, or with `--quick` a hurried beginning of it."""
        return work.hurried() if self.quick else work

    def timer(self, engine: Streams, work: Workload) -> Callable[[int], Sample]:
        """Time a workload in an engine, with other tokens each time."""
        return timer(engine, work, self.device)

    def warm_up(self, engines: Mapping[str, Streams], work: Workload | None = None) -> None:
        """Run a few tokens through each engine."""
        short = work or uniform("warm-up", 2, 16, 4)
        for engine in engines.values():
            generate(engine, short.prompts, short.params)

    def race(
        self,
        engines: Mapping[str, PagedEngine],
        work: Workload,
        *,
        beside: bool = False,
        **facts: Any,
    ) -> list[Run]:
        """Time engines on a workload, each sample after a few tokens of its first requests; fewer long ones.

        No run has tokens that one before had, so prefix caches find nothing. Quantized weights have no
        roofline, and neither has what guesses tokens or runs beside busy programs.
        """
        from continuous.seams import NO_DRAFTS  # not for the benches of 01 to 03

        work = self.short(work)
        few, shift = work.first(32, tokens=4), count(1)

        def warm(engine: PagedEngine) -> Sample:
            return time_generation(engine, few.cold(-next(shift)), self.device)

        timed = {name: self.timer(engine, work) for name, engine in engines.items()}
        before = {name: partial(warm, engine) for name, engine in engines.items()}
        kept = alternate(
            timed, self.options.repeats, warm=before, enough=ENOUGH_SECONDS, beside=beside
        )
        runs = []
        for name, engine in engines.items():
            rows = min(len(work.items), engine.scheduler.rows.count)
            guesses = engine.scheduler.drafter is not NO_DRAFTS
            batch = 0 if beside or guesses or name.startswith("10_quant") else rows
            config = engine.runner.model.config
            runs.append(self.run_of(name, work, kept[name], batch, config=config, **facts))
        return runs

    def one_by_one(
        self, made: Mapping[str, Callable[[], PagedEngine]], works: Sequence[str] = PUBLISHED
    ) -> list[Run]:
        """Time each engine on published workloads, one engine after the other: each fills a good part of the
        memory.
        """
        runs = []
        for variant, make in made.items():
            engines = {variant: make()}
            for name in works:
                runs += self.race(engines, workload(name))
            del engines
            release_memory(self.device)
        return runs

    def compare(
        self,
        variants: Mapping[str, Callable[[int], Sample]],
        work: Workload,
        roofline_batch: int | Mapping[str, int] = 0,
        *,
        repeats: int = 0,
        warm: Mapping[str, Callable[[], object]] | None = None,
        tries: int | None = None,
        enough: float = inf,
        **facts: Any,
    ) -> list[Run]:
        """Evidence of variants that take turns on one workload; see `alternate` and `run_of`.

        roofline_batch, facts: a mapping has a value for each variant.
        """
        taken = repeats or self.options.repeats
        kept = alternate(variants, taken, warm=warm, tries=tries, enough=enough)

        def of(value: Any, name: str) -> Any:
            return value[name] if isinstance(value, Mapping) else value

        return [
            self.run_of(
                name,
                work,
                found,
                of(roofline_batch, name),
                **{fact: of(value, name) for fact, value in facts.items()},
            )
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
        config: ModelConfig | None = None,
        **facts: Any,
    ) -> Run:
        """Evidence of one variant; with a `roofline_batch`, that of a batch which is always full.

        Weights are random when the model's name says so.
        """
        roofline = None
        if roofline_batch:
            lengths = work.prompt_lens, work.output_lens
            shape = config or self.config
            works = generation_work(shape, self.dtype, *lengths, roofline_batch, cached)
            ideal = ideal_seconds(works, self.top)
            seconds = median(sample["seconds"] for sample in samples.kept)
            roofline = Roofline(ideal, ideal / seconds)
        return Run(
            variant=variant + self.ending,
            workload=work.name,
            workload_sha256=work.sha256,
            model=self.name.removeprefix("random:"),
            weights="random" if self.name.startswith("random:") else "real",
            dtype=self.dtype_name,
            metrics=sample_metrics(samples.kept),
            options=facts,
            roofline=roofline,
            noise=samples.noise(),
        )
