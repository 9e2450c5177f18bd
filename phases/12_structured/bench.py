"""Phase 12 against phase 09: what masks cost, what forced tokens save, and what comes out without them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import cuda_graphs
import structured
from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.measure import Sample, alternate, request_metrics, summarize
from benchmarks.plotting import COLOURS, panels, save
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Workload, uniform
from common.device import synchronize
from common.errors import UserError
from common.events import generate
from common.models.hub import model_folder
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward.model import Model
from paged_cache import PagedEngine
from structured.feature import Name, backend_named
from structured.masks import GrammarMasks
from structured.pool import GrammarPool
from structured.vocabulary import Vocabulary

PHASE, BEFORE = "12_structured", "09_cuda_graphs"
ONE, FREE = f"{PHASE}+one", f"{PHASE}+no grammar"
"""One request among many has a grammar; or none has."""

ENDLESS = Grammar.json_schema(
    {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 500}
)
"""Its outputs end after more tokens than are asked for, so that all variants generate equally many."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "enum": {"enum": ["north", "east", "south", "west"]},
    "booking": {
        "type": "object",
        "properties": {
            "flight_number": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3,4}$"},
            "passengers": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 4},
            "travel_class": {"enum": ["economy", "premium economy", "business", "first"]},
            "checked_baggage_included": {"type": "boolean"},
        },
        "required": ["flight_number", "passengers", "travel_class", "checked_baggage_included"],
        "additionalProperties": False,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "anything": True,
}
"""The schema sample."""
PEOPLE = (
    ("Ada", 36, "London"), ("Boris", 51, "Sofia"), ("Chen", 19, "Chengdu"), ("Dara", 64, "Dublin"),
    ("Emil", 8, "Oslo"), ("Fatima", 27, "Rabat"), ("Goro", 73, "Osaka"), ("Hana", 45, "Prague"),
)  # fmt: skip


def run(options: BenchOptions) -> Evidence:
    """Throughput with masks, the cost of one, steps saved, and what parses."""
    runs = []
    for target in targets(options):
        bench = Bench(target)
        runs += bench.throughput() + bench.masks() + bench.steps()
        if bench.tokenizer is not None:
            runs += bench.validity()
    return collect(PHASE, runs, options.device, ceilings(options.device, options.dtype).to_json())


class Bench:
    """One model and how its engines are measured."""

    def __init__(self, options: BenchOptions) -> None:
        self.options, self.name, self.model = options, options.model or "", load_target(options)
        self.on_cpu = options.device.type != "cuda"
        self.tokenizer: Tokenizer | None = None
        self.backend: Name = "llguidance" if find_spec("llguidance") else "automata"
        if self.name.startswith("random:"):
            self.vocabulary = made_up(self.model)
        else:
            self.tokenizer = Tokenizer(model_folder(self.name))
            config = self.model.config
            self.vocabulary = Vocabulary.of(self.tokenizer, config.vocab_size, config.eos_token_ids)

    # Throughput.

    def throughput(self) -> list[Run]:
        """All rows constrained, one of them, none of them, and the phase before, at equal lengths."""
        count, prompt, output = (16, 16, 24) if self.on_cpu else (256, 128, 256)
        if self.options.quick:
            count, prompt, output = min(count, 4), 8, 8
        work = uniform(f"constrained-{count}x{prompt}+{output}", count, prompt, output)
        free = SamplingParams(max_tokens=output, temperature=0.8, seed=1, ignore_eos=True)
        bound = replace(free, grammar=ENDLESS)
        asked = {
            BEFORE: [free] * count,
            FREE: [free] * count,
            ONE: [bound, *[free] * (count - 1)],
            PHASE: [bound] * count,
        }
        engines: dict[str, PagedEngine] = {BEFORE: cuda_graphs.load(self.model, **self.sizes(count))}
        engines[FREE] = engines[ONE] = engines[PHASE] = self.engine(count)

        def timed(name: str) -> Callable[[int], Sample]:
            return lambda repeat: self.time(engines[name], work.cold(repeat), asked[name])

        for name, params in asked.items():  # a short warm-up of each instead of a whole run
            self.time(
                engines[name],
                uniform("warm-up", count, prompt, 2),
                [replace(p, max_tokens=2) for p in params],
            )
        idle = {name: lambda: None for name in asked}
        kept = alternate({name: timed(name) for name in asked}, self.options.repeats, warm=idle)
        facts = {"batch": count, "masks by": self.backend}
        return [
            summarize(name, work, samples, model=self.name, dtype=self.options.dtype, options=facts)
            for name, samples in kept.items()
        ]

    def sizes(self, count: int) -> dict[str, Any]:
        """Room for everybody, and for the other phase's engine beside this one."""
        tokens = 512 * self.model.config.kv_bytes_per_token(self.options.dtype)
        return {
            "max_rows": count,
            "max_len": 512,
            "prefix_cache": False,
            "cache_bytes": max(count, 4) * tokens,
        }

    def engine(self, count: int, **options: Any) -> PagedEngine:
        """This phase's engine with the vocabulary, which a random model has from nowhere else."""
        # Guesses would need a mask for each of their places, and phase 09 guesses nothing either.
        options = {"speculate": False, **options}
        engine = structured.load(self.model, **self.sizes(count), **options)
        config = self.model.config
        pool = GrammarPool(
            lambda: backend_named(self.backend)(self.vocabulary), cache_bytes=1 << 28, seconds=60.0
        )
        eos = self.vocabulary.eos
        engine.masks = GrammarMasks(pool, config.vocab_size, eos, self.model.device)
        return engine

    def time(self, engine: PagedEngine, work: Workload, params: list[SamplingParams]) -> Sample:
        """All requests at once."""
        begun = time.perf_counter()
        completions = generate(engine, work.prompts, params)
        synchronize(self.options.device)
        return request_metrics(completions, time.perf_counter() - begun)

    # One mask.

    def masks(self) -> list[Run]:
        """Microseconds of a mask, by schema and backend, along outputs that are drawn from the masks."""
        runs = []
        names: tuple[Name, ...] = ("llguidance", "automata", "xgrammar")
        for name in names:
            try:
                backend = backend_named(name)(self.vocabulary)
            except UserError:
                continue
            for schema in SCHEMAS:
                begun = time.perf_counter()
                try:
                    compiled = backend.compile(Grammar.json_schema(SCHEMAS[schema]))
                except UserError:
                    continue
                found = {"compile_ms": 1e3 * (time.perf_counter() - begun)}
                first, again = (self.along(compiled.matcher, 4) for _ in range(2))
                found |= {"first_us": median(first), "mask_us": median(again), "mask_us_p99": _p99(again)}
                runs.append(self.fact(f"{PHASE}+{name}", f"masks of {schema}", found, backend=name))
        return runs

    def along(self, make: Callable[[], Any], outputs: int) -> list[float]:
        """Microseconds of every mask of a few random outputs."""
        times = []
        words = np.zeros(self.vocabulary.words, np.int32)
        for seed in range(outputs):
            rng, matcher = random.Random(seed), make()
            for _ in range(40):
                begun = time.perf_counter()
                matcher.fill(words)
                times.append(1e6 * (time.perf_counter() - begun))
                allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
                token = int(rng.choice(allowed))
                if token in self.vocabulary.eos:
                    break
                matcher.advance((token,))
        return times

    # Steps.

    def steps(self) -> list[Run]:
        """Steps of the schema sample with and without drafts of what is forced, one request at a time."""
        most, each = (16, 1) if self.options.quick else (48, 1)
        params = [
            SamplingParams(max_tokens=most, temperature=0.8, seed=seed, grammar=Grammar.json_schema(schema))
            for schema in SCHEMAS.values()
            for seed in range(each)
        ]
        prompt = [1, 2, 3, 4]
        if self.tokenizer is not None:
            prompt = self.tokenizer.chat([{"role": "user", "content": "Make up an example in compact JSON."}])
        prompts = [prompt] * len(params)
        runs = []
        tokens: dict[bool, list[list[int]]] = {}
        for jump in (False, True):
            engine = self.engine(1, overlap=False, jump_forward=jump)
            done = generate(engine, prompts, params)
            tokens[jump] = [completion.token_ids for completion in done]
            found = {"steps": float(engine.stats.steps)}
            found["output_tokens"] = float(sum(map(len, tokens[jump])))
            found["forced_tokens"] = float(getattr(engine.scheduler.drafter, "forced", 0))
            name = f"{PHASE}+jump" if jump else f"{PHASE}+no jump"
            runs.append(self.fact(name, "schema sample", found))
        if tokens[False] != tokens[True] and self.on_cpu:
            raise AssertionError("jumping forward has changed the text")
        return runs

    # Validity.

    def validity(self) -> list[Run]:
        """The share of answers to an extraction prompt that are JSON of the schema, with and without it."""
        import jsonschema

        assert self.tokenizer is not None
        people = PEOPLE[:2] if self.options.quick else PEOPLE
        prompts = [self.tokenizer.chat([{"role": "user", "content": question(*person)}]) for person in people]
        engine = self.engine(len(prompts))
        validator = jsonschema.Draft202012Validator(PERSON)
        runs = []
        for label, grammar in (("without", None), ("with", Grammar.json_schema(PERSON))):
            params = SamplingParams(max_tokens=64, grammar=grammar)
            done = generate(engine, prompts, params, tokenizer=self.tokenizer)
            values = [_parsed(completion.text) for completion in done]
            valid = [value is not None and validator.is_valid(value) for value in values]
            right = [
                bool(ok and value == dict(zip(("name", "age", "city"), person, strict=True)))
                for ok, value, person in zip(valid, values, people, strict=True)
            ]
            found = {"valid_fraction": float(np.mean(valid)), "right_fraction": float(np.mean(right))}
            runs.append(self.fact(f"{PHASE}+{label} a grammar", "extraction", found))
        return runs

    def fact(self, variant: str, work: str, found: Mapping[str, float], **options: Any) -> Run:
        """Evidence of something that was done once."""
        metrics = {name: Metric((float(value),)) for name, value in found.items()}
        kind = "random" if self.name.startswith("random:") else "real"
        dtype = str(self.options.dtype).removeprefix("torch.")
        return Run(variant, work, "", self.name.removeprefix("random:"), kind, dtype, metrics, options)


def question(name: str, age: int, city: str) -> str:
    """An extraction prompt."""
    return (
        f'Extract the name, age and city from this text as JSON.\nText: "{name} is {age} years old and lives '
        f'in {city}."\nAnswer with a JSON object with the keys "name", "age" and "city", and nothing else.'
    )


def made_up(model: Model) -> Vocabulary:
    """A vocabulary for random weights: all bytes, and words as a real one has, some behind a space."""
    rng = random.Random(5)
    size, eos = model.config.vocab_size, tuple(model.config.eos_token_ids)
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [
        text.encode() for text in ('{"', '":', '": "', '",', '", "', '"}', "}}", "]]", "true", "false")
    ]
    seen = set(tokens)
    while len(tokens) < size:
        word = "".join(rng.choice("etaoinshrdlucmfwypvbgkjqxz") for _ in range(rng.randrange(2, 10)))
        token = rng.choice(("", " ", "", " ", '"')).encode() + word.encode()
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    hidden = tuple(b"" if number in eos else token for number, token in enumerate(tokens))
    return Vocabulary(hidden, eos, lambda text: list(text.encode()))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """What a mask costs, by schema; steps saved; what parses."""
    figure, (left, middle, right) = panels(3, height=3.2)
    _masks(evidence, left)
    steps = [evidence.one(f"{PHASE}+{name}", "schema sample").median("steps") for name in ("no jump", "jump")]
    middle.bar(["a token a step", "forced tokens\nas drafts"], steps, color=COLOURS[:2], width=0.6)
    middle.set_ylabel("steps of the schema sample")
    middle.set_title("Steps saved")
    middle.grid(visible=False, axis="x")
    checked = evidence.find(workload="extraction")
    if checked:
        names = [found.variant.removeprefix(f"{PHASE}+").replace(" a ", "\na ") for found in checked]
        shares = [100 * found.median("valid_fraction") for found in checked]
        right.bar(names, shares, color=(COLOURS[3], COLOURS[2]), width=0.6)
        right.set_ylabel("answers that are valid JSON (%)")
        right.set_title("What parses")
        right.grid(visible=False, axis="x")
    else:
        _throughput(evidence, right)
    save(figure, out, evidence)


def _masks(evidence: Evidence, axes: Any) -> None:
    kinds = list(
        dict.fromkeys(found.options["backend"] for found in evidence.runs if "backend" in found.options)
    )
    for place, kind in enumerate(kinds):
        for row, schema in enumerate(SCHEMAS):
            found = evidence.find(workload=f"masks of {schema}", backend=kind)
            if found:
                label = kind if row == 0 else None
                width = found[0].median("mask_us")
                axes.barh(row + 0.27 * (place - 1), width, height=0.25, color=COLOURS[place], label=label)
    axes.set_yticks(range(len(SCHEMAS)), list(SCHEMAS))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("one mask, median (µs)")
    axes.set_title("The cost of a mask")
    axes.grid(visible=False, axis="y")
    axes.legend()


def _throughput(evidence: Evidence, axes: Any) -> None:
    names = {BEFORE: "phase 09", FREE: "no grammar", ONE: "one row", PHASE: "all rows"}
    found = {label: next(r for r in evidence.runs if r.variant == name) for name, label in names.items()}
    values = [run.median("output_tokens_per_s") for run in found.values()]
    axes.bar(list(found), values, color=COLOURS[: len(values)], width=0.6)
    axes.set_ylabel("output tokens per second")
    axes.set_title("Throughput with masks")
    axes.grid(visible=False, axis="x")
