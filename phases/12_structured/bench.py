"""Phase 12 against phase 09: what masks cost, by automata and by a library, and what forced tokens save."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import benchmarks.bench
from benchmarks.engines import engine_of
from benchmarks.evidence import APPENDIX, BenchOptions, Run
from benchmarks.grammars import (
    BACKENDS,
    ORDERS,
    PEOPLE,
    RECORDS,
    SCHEMAS,
    STRINGS,
    along,
    made_up,
    most_at_once,
)
from benchmarks.measure import Sample, Samples, time_generation
from benchmarks.plotting import Panel, figure
from benchmarks.workloads import Workload, uniform, workload
from common.errors import UserError
from common.events import generate
from common.models.hub import model_folder
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from paged_cache import PagedEngine
from phases.appendix.guidance.spelling import Spelling
from structured.masks import AutomataGrammarManager

PHASE, BEFORE = "12_structured", "09_cuda_graphs"
ONE, FREE = f"{PHASE}+one", f"{PHASE}+no grammar"
"""One request among many has a grammar; or none has."""
FIELDS = f"{PHASE}+no strings"
LIMITS, SHORT = f"{PHASE}+limits", f"{PHASE}+short strings"
"""All rows have a grammar: without strings, with limits of lengths and numbers, or of nothing but short
strings. The automata know none of these three."""
MASKS_BY = {APPENDIX: "llguidance", "": "automata"}
"""Kind of an engine's masks by the ending of its name: only the appendix has the library."""


class Bench(benchmarks.bench.Bench):
    """One model, a vocabulary for its grammars, and the engines of phases 09 and 12."""

    phase = PHASE

    def __init__(self, options: BenchOptions) -> None:
        super().__init__(options)
        self.tokenizer: Tokenizer | None = None
        if self.name.startswith("random:"):
            self.vocabulary = made_up(self.model)
        else:
            self.tokenizer = Tokenizer(model_folder(self.name))
            config = self.model.config
            self.vocabulary = Spelling.of(
                self.tokenizer, config.vocab_size, config.eos_token_ids
            )

    def measured(self) -> list[Run]:
        """Measure throughput with masks, the time of a mask, and the steps that forced tokens save."""
        return self.throughput() + self.masks() + self.steps()

    # Throughput.

    def throughput(self) -> list[Run]:
        """Measure throughput with grammars for all requests, one or none, and of phase 09, at equal lengths.

        On a GPU twice: at the lengths that all phases are measured with, and at short ones, where a step of
        a small model takes no longer than its masks.
        """
        count, prompt, output = (16, 16, 24) if self.on_cpu else (256, 128, 256)
        few = uniform(f"constrained-{count}x{prompt}+{output}", count, prompt, output)
        runs = self.rates(few, (PHASE,), "")
        runs += self.rates(few, (FREE, ONE, FIELDS, PHASE, LIMITS, SHORT))
        if self.on_cpu or self.quick:
            return runs
        many = workload("offline-256")
        return self.rates(many, (PHASE,), "") + self.rates(many, (ONE, FIELDS, LIMITS)) + runs

    def rates(
        self, work: Workload, variants: Sequence[str], ending: str = APPENDIX
    ) -> list[Run]:
        """Measure the tokens a second of phase 09 and of `variants`, on one workload.

        ending: of the engines' names; without the appendix, masks are by this phase's automata.
        """
        work = self.short(work)
        count = len(work.items)
        free = [
            SamplingParams(max_tokens=n, temperature=0.8, seed=1, ignore_eos=True)
            for n in work.output_lens
        ]

        def bound(grammar: Grammar) -> list[SamplingParams]:
            return [replace(params, grammar=grammar) for params in free]

        asked = {
            BEFORE: free,
            FREE: free,
            ONE: [*bound(RECORDS)[:1], *free[1:]],
            FIELDS: bound(ORDERS),
            PHASE: bound(PEOPLE),
            LIMITS: bound(RECORDS),
            SHORT: bound(STRINGS),
        }
        longest = max(len(item.prompt) + item.max_tokens for item in work.items)
        sizes = self.sizes(count, 512 if longest <= 512 else 2048, most_at_once(work))
        engines = {BEFORE: engine_of(BEFORE + ending, self.model, **sizes)}
        engines |= dict.fromkeys(variants, self.engine(sizes, ending))

        def sample(name: str, most: int, repeat: int) -> Sample:
            params = [
                replace(one, max_tokens=min(one.max_tokens, most)) for one in asked[name]
            ]
            return time_generation(engines[name], work.cold(repeat), self.device, params)

        for name in engines:  # instead of a whole run
            sample(name, 2, -1)
        by: dict[str, Any] = {"masks by": MASKS_BY[ending]}
        output = max(work.output_lens)
        timed = {name + ending: partial(sample, name, output) for name in engines}
        return self.compare(timed, work, warm={}, batch=count, **by)

    def sizes(self, count: int, max_len: int, tokens: int) -> dict[str, Any]:
        """Return the size options of an engine, small enough for two engines beside each other.

        count: most running requests. max_len: most tokens of a request. tokens: most tokens in the cache at a
            time.
        """
        return {
            "max_rows": count,
            "max_len": max_len,
            "prefix_cache": False,
            "cache_bytes": self.kv_bytes(max(2048, tokens)),
        }

    def engine(self, sizes: Mapping[str, Any], ending: str, **options: Any) -> PagedEngine:
        """Return phase 12's engine with this vocabulary, since a random model has no tokenizer.

        ending: of its name, see `rates`.
        """
        # Guesses would need a mask for each of their places, and phase 09 guesses nothing either.
        engine = engine_of(
            PHASE + ending, self.model, **{"speculate": False, **sizes, **options}
        )
        masks = engine.grammar_manager
        assert isinstance(masks, AutomataGrammarManager)
        masks.refusal = ""
        masks.pool.seconds = 60.0
        masks.pool.cache_bytes = 1 << 28
        masks.pool.make_backend = partial(BACKENDS[MASKS_BY[ending]](), self.vocabulary)
        return engine

    # One mask.

    def masks(self) -> list[Run]:
        """Measure the time of a mask, by schema and backend, along outputs drawn from masks."""
        runs = []
        for ending, name in MASKS_BY.items():
            try:
                backend = BACKENDS[name]()(self.vocabulary)
            except UserError:
                continue
            for schema in SCHEMAS:
                begun = time.perf_counter()
                try:
                    compiled = backend.compile(Grammar.json_schema(SCHEMAS[schema]))
                except UserError:
                    continue
                found = {"compile_ms": 1e3 * (time.perf_counter() - begun)}
                first, again = (along(compiled.matcher, self.vocabulary, 4) for _ in range(2))
                found |= {"first_us": median(first), "mask_us": median(again)}
                found |= {"mask_us_p99": float(np.percentile(again, 99))}
                variant = f"{PHASE}+{name}{ending}"
                runs.append(self.fact(variant, f"masks of {schema}", found, backend=name))
        return runs

    # Steps.

    def steps(self) -> list[Run]:
        """Count the steps of one output per schema, with and without drafts of tokens that grammars force.

        Requests run one at a time.
        """
        most = 16 if self.quick else 48
        params = [
            SamplingParams(
                max_tokens=most,
                temperature=0.8,
                seed=0,
                grammar=Grammar.json_schema(schema),
            )
            for schema in SCHEMAS.values()
        ]
        prompt = [1, 2, 3, 4]
        if self.tokenizer is not None:
            prompt = self.tokenizer.chat(
                [{"role": "user", "content": "Make up an example in compact JSON."}]
            )
        prompts = [prompt] * len(params)
        runs = []
        tokens: dict[bool, list[list[int]]] = {}
        for overlap, jump in ((True, False), (True, True), (False, True)):
            sizes = self.sizes(1, 512, 2048)
            engine = self.engine(sizes, APPENDIX, overlap=overlap, jump_forward=jump)
            done = generate(engine, prompts, params)
            tokens[jump] = [completion.token_ids for completion in done]
            found = {"steps": float(engine.stats.steps)}
            found["output_tokens"] = float(sum(map(len, tokens[jump])))
            found["forced_tokens"] = float(getattr(engine.scheduler.drafter, "forced", 0))
            name = f"{PHASE}+{'jump' if jump else 'no jump'}{'' if overlap else ', in turn'}"
            runs.append(self.fact(name + APPENDIX, "schema sample", found))
        if tokens[False] != tokens[True] and self.on_cpu:
            raise AssertionError("jumping forward has changed the text")
        return runs

    def fact(self, variant: str, work: str, found: Mapping[str, float], **options: Any) -> Run:
        """Return a run of the values `found`, which were measured once."""
        sha = hashlib.sha256(json.dumps([work, SCHEMAS]).encode()).hexdigest()
        made = self.run_of(variant, uniform(work, 1, 1, 1), Samples([dict(found)]), **options)
        return replace(made, workload_sha256=sha, noise=None)


run = Bench.run
draw = figure(
    Panel(
        "A mask takes {least} to {most} µs",
        "mask_us",
        rows="{workload}",
        by="{backend}",
        log="x",
    ),
    Panel(
        "{model}, {workload}: what masks leave",
        where={
            "batch": "?*",
            "workload": ("offline-256", "constrained-16*"),
        },
    ),
)
