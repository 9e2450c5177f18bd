"""Phase 12 against phase 09: what masks cost, what forced tokens save, and what comes out without them."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import WordPiece

from benchmarks import hostile_grammars
from benchmarks.engines import engine_of
from benchmarks.evidence import BenchOptions, Evidence, Metric, Run, collect
from benchmarks.measure import Sample, alternate, request_metrics, summarize
from benchmarks.plotting import bars, colours, log_axis, panels, save
from benchmarks.roofline import ceilings
from benchmarks.targets import load_target, targets
from benchmarks.workloads import Workload, uniform, workload
from common.device import synchronize
from common.errors import UserError
from common.events import generate
from common.models.hub import model_folder
from common.sampling.grammar import Grammar
from common.sampling.params import SamplingParams
from common.text.detokenizer import _BYTE_OF
from common.text.tokenizer import Tokenizer
from forward.model import Model
from paged_cache import PagedEngine
from structured.feature import Name, backend_named
from structured.masks import GrammarMasks
from structured.matcher import Job, Words
from structured.pool import GrammarPool
from structured.vocabulary import Vocabulary

PHASE, BEFORE = "12_structured", "09_cuda_graphs"
ONE, FREE = f"{PHASE}+one", f"{PHASE}+no grammar"
"""One request among many has a grammar; or none has."""
FIELDS, SHORT, JUMP = f"{PHASE}+no strings", f"{PHASE}+short strings", f"{PHASE}+jump"
"""All rows have a grammar without strings, or of nothing but short ones; or what is forced is drafted however
many run."""
LARGE = "random:qwen3-8b"
"""A model whose steps take a GPU longer than their masks take the host; measured beside the usual one."""

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
RECORDS = Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 500})
ORDER = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 1, "maximum": 999_999},
        "status": {"enum": ["new", "paid", "shipped", "delivered", "returned"]},
        "gift": {"type": "boolean"},
        "amounts": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["number", "status", "gift", "amounts"],
    "additionalProperties": False,
}
ORDERS = Grammar.json_schema({"type": "array", "items": ORDER, "minItems": 500})
STRINGS = Grammar.json_schema(
    {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 500}
)
"""Their outputs end after more tokens than are asked for, so that all variants generate equally many. The end
of a string that may not grow much longer is what costs most: most of the vocabulary has to be looked at. And
random weights hardly ever end a string earlier. What has no strings shows the rest."""

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
        runs += bench.throughput() + bench.masks() + bench.fills() + bench.steps() + bench.hostile(32)
        if bench.tokenizer is not None:
            runs += bench.validity()
    if options.device.type == "cuda" and options.model is None and not options.quick:
        del bench  # memory
        large = Bench(replace(options, model=LARGE))
        runs += large.rates(workload("offline-256"), (ONE, PHASE)) + large.hostile(8)
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
        """All rows constrained, one of them, none of them, and the phase before, at equal lengths.

        On a GPU twice: at the lengths that all phases are measured with, and at short ones, where a step of
        a small model takes no longer than its masks.
        """
        count, prompt, output = (16, 16, 24) if self.on_cpu else (256, 128, 256)
        if self.options.quick:
            count, prompt, output = min(count, 4), 8, 8
        short = uniform(f"constrained-{count}x{prompt}+{output}", count, prompt, output)
        if self.on_cpu or self.options.quick:
            return self.rates(short, (FREE, ONE, FIELDS, PHASE, SHORT))
        return self.rates(workload("offline-256"), (ONE, FIELDS, PHASE)) + self.rates(
            short, (FREE, ONE, FIELDS, PHASE, SHORT, JUMP)
        )

    def rates(self, work: Workload, variants: Sequence[str]) -> list[Run]:
        """Tokens a second of the phase before and of these variants."""
        count = len(work.items)
        free = [
            SamplingParams(max_tokens=n, temperature=0.8, seed=1, ignore_eos=True) for n in work.output_lens
        ]
        bound = [replace(params, grammar=RECORDS) for params in free]
        asked = {
            BEFORE: free,
            FREE: free,
            ONE: [bound[0], *free[1:]],
            FIELDS: [replace(params, grammar=ORDERS) for params in free],
            PHASE: bound,
            SHORT: [replace(params, grammar=STRINGS) for params in free],
            JUMP: bound,
        }
        lengths = [len(item.prompt) + item.max_tokens for item in work.items]
        sizes = self.sizes(count, 512 if max(lengths) <= 512 else 2048, max(2048, most_at_once(work)))
        engines: dict[str, PagedEngine] = {BEFORE: engine_of("09", self.model, **sizes)}
        engine = self.engine(sizes)
        for name in variants:
            engines[name] = self.engine(sizes, jump_rows=count) if name == JUMP else engine

        def timed(name: str) -> Callable[[int], Sample]:
            return lambda repeat: self.time(engines[name], work.cold(repeat), asked[name])

        for name in engines:  # a short warm-up of each instead of a whole run
            warm = [replace(params, max_tokens=2) for params in asked[name]]
            self.time(engines[name], uniform("warm-up", count, min(work.prompt_lens), 2), warm)
        idle: dict[str, Callable[[], None]] = {name: lambda: None for name in engines}
        kept = alternate({name: timed(name) for name in engines}, self.options.repeats, warm=idle)
        facts = {"batch": count, "masks by": self.backend}
        return [
            summarize(name, work, samples, model=self.name, dtype=self.options.dtype, options=facts)
            for name, samples in kept.items()
        ]

    def sizes(self, count: int, max_len: int = 512, tokens: int | None = None) -> dict[str, Any]:
        """Room for everybody, and for the other phase's engine beside this one."""
        tokens = max(count, 4) * max_len if tokens is None else tokens
        return {
            "max_rows": count,
            "max_len": max_len,
            "prefix_cache": False,
            "cache_bytes": tokens * self.model.config.kv_bytes_per_token(self.options.dtype),
        }

    def engine(self, sizes: Mapping[str, Any], **options: Any) -> PagedEngine:
        """This phase's engine with the vocabulary, which a random model has from nowhere else."""
        # Guesses would need a mask for each of their places, and phase 09 guesses nothing either.
        engine = engine_of("12", self.model, **{"speculate": False, **sizes, **options})
        config = self.model.config
        pool = GrammarPool(
            lambda: backend_named(self.backend)(self.vocabulary), cache_bytes=1 << 28, seconds=60.0
        )
        eos, made = self.vocabulary.eos, engine.masks
        assert isinstance(made, GrammarMasks)
        engine.masks = GrammarMasks(
            pool, config.vocab_size, eos, self.model.device, most_forced=made.most_forced
        )
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
                token = _pick(words, rng)
                if token in self.vocabulary.eos:
                    break
                matcher.advance((token,))
        return times

    # The masks of a step, without a model.

    def fills(self) -> list[Run]:
        """Milliseconds of a step's masks, and of moving all matchers, for as many rows as a GPU serves."""
        rows, steps = (256, 12) if not self.options.quick else (16, 3)
        backend = backend_named(self.backend)(self.vocabulary)
        runs = []
        for name, grammar in (("orders", ORDERS), ("records", RECORDS), ("short strings", STRINGS)):
            compiled = backend.compile(grammar)
            matchers = sorted((compiled.matcher() for _ in range(rows)), key=lambda matcher: matcher.group)
            words = np.zeros((rows, self.vocabulary.words), np.int32)
            rng, fills, moves = random.Random(1), list[float](), list[float]()
            for _ in range(steps):
                begun = time.perf_counter()
                backend.fill([Job(matcher, row, ()) for row, matcher in enumerate(matchers)], words)
                fills.append(1e3 * (time.perf_counter() - begun))
                chosen = [(matcher, [_pick(row, rng)]) for matcher, row in zip(matchers, words, strict=True)]
                begun = time.perf_counter()
                taken = backend.advance(chosen)
                moves.append(1e3 * (time.perf_counter() - begun))
                assert sum(taken) == rows, "a mask has allowed what its grammar does not take"
            found = {"fill_ms": median(fills), "fill_ms_max": max(fills), "advance_ms": median(moves)}
            runs.append(self.fact(f"{PHASE}+{self.backend}", f"{rows} masks of {name}", found, masks=rows))
        return runs

    # Hostile grammars.

    def hostile(self, turns: int) -> list[Run]:
        """What others notice of grammars that are sent to stop an engine."""
        engine = self.engine(self.sizes(32))
        tokens, turns = (4, 1) if self.options.quick else (200, 1 if self.on_cpu else turns)
        found = hostile_grammars.measure(engine, tokens, turns)
        return [self.fact(f"{PHASE}+{name}", "gaps of others", facts) for name, facts in found.items()]

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
        for overlap, jump in ((True, False), (True, True), (False, True)):
            engine = self.engine(self.sizes(1), overlap=overlap, jump_forward=jump)
            done = generate(engine, prompts, params)
            tokens[jump] = [completion.token_ids for completion in done]
            found = {"steps": float(engine.stats.steps)}
            found["output_tokens"] = float(sum(map(len, tokens[jump])))
            found["forced_tokens"] = float(getattr(engine.scheduler.drafter, "forced", 0))
            name = f"{PHASE}+{'jump' if jump else 'no jump'}{'' if overlap else ', in turn'}"
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
        engine = self.engine(self.sizes(len(prompts)))
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

    def fact(
        self, variant: str, work: str, found: Mapping[str, float | Sequence[float]], **options: Any
    ) -> Run:
        """Evidence of something that was done once, or of which there are some samples."""
        samples = {name: value if isinstance(value, Sequence) else [value] for name, value in found.items()}
        metrics = {name: Metric(tuple(map(float, values))) for name, values in samples.items()}
        kind = "random" if self.name.startswith("random:") else "real"
        dtype = str(self.options.dtype).removeprefix("torch.")
        sha = hashlib.sha256(json.dumps([work, SCHEMAS, PEOPLE]).encode()).hexdigest()  # what it was made of
        return Run(variant, work, sha, self.name.removeprefix("random:"), kind, dtype, metrics, options)


def most_at_once(work: Workload) -> int:
    """Tokens that a cache must have room for, if all requests begin at once and each gives back its own."""
    sizes = [(len(item.prompt), item.max_tokens) for item in work.items]
    steps = range(0, max(work.output_lens), 16)
    peak = max(sum(prompt + step for prompt, most in sizes if most > step) for step in steps)
    return peak + 96 * len(sizes)


def question(name: str, age: int, city: str) -> str:
    """An extraction prompt."""
    return (
        f'Extract the name, age and city from this text as JSON.\nText: "{name} is {age} years old and lives '
        f'in {city}."\nAnswer with a JSON object with the keys "name", "age" and "city", and nothing else.'
    )


SYLLABLES = (
    "the", "ing", "er", "tion", "an", "re", "on", "in", "es", "en", "al", "or", "at", "con", "ver",
    "men", "com", "pro", "per", "un", "ex", "ma", "li", "ne", "ra", "to", "de", "ri", "sta", "ble",
    "tra", "pre", "sion", "ous", "ful", "ness", "ism", "graph", "log", "net", "data", "form", "type", "list",
    "name", "code", "test", "user", "file", "time",
)  # fmt: skip
LETTERS = "абвгдежзиклмнопрстухцчшэюяאבגדהוזחטיकखगघचजटडणत中国人大学生文化日本語한국사람"


def made_up(model: Model) -> Vocabulary:
    """A vocabulary for random weights, of the kind that byte pairs lead to.

    All bytes, digits, spaces and what stands between the parts of JSON and of code; words of a few syllables,
    most behind a space, some with a capital; and an eighth in other alphabets.
    """
    rng = random.Random(5)
    size, eos = model.config.vocab_size, tuple(model.config.eos_token_ids)
    signs = ['{"', '":', '": "', '": ', '",', '", "', '"}', '"},', '[{"', "}}", "]]", "],", "},", "()", "();"]
    numbers = [str(number) for number in range(10, 1000)]
    spaces = [" " * count for count in range(2, 17)] + ["\n" * count for count in range(2, 5)]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [text.encode() for text in (*signs, *numbers, *spaces, "true", "false", "null")]
    seen = set(tokens)
    while len(tokens) < size:
        if rng.random() < 1 / 8:
            word = "".join(rng.choices(LETTERS, k=rng.choice((1, 2, 2, 3, 4))))
        else:
            word = "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2, 3, 3, 4))))[: rng.randrange(2, 15)]
        word = word.capitalize() if rng.random() < 0.2 else word
        token = (rng.choice(("", " ", " ")) + word).encode()
        if token not in seen:
            seen.add(token)
            tokens.append(token)
    hidden = tuple(b"" if number in eos else token for number, token in enumerate(tokens[:size]))
    found = longest_first(hidden)
    return Vocabulary(hidden, eos, lambda text: found.encode(text).ids, found.to_str())


def longest_first(tokens: Sequence[bytes]) -> tokenizers.Tokenizer:
    """A tokenizer that takes of all tokens that a text begins with the longest, again and again."""
    letters = {byte: letter for letter, byte in _BYTE_OF.items()}
    ids = {"".join(letters[byte] for byte in token): n for n, token in enumerate(tokens) if token}
    special = {f"<|{n}|>": n for n, token in enumerate(tokens) if not token}
    model = WordPiece(
        ids | special, unk_token=letters[0], continuing_subword_prefix="", max_input_chars_per_word=1 << 20
    )
    found = tokenizers.Tokenizer(model)
    found.add_special_tokens(list(special))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found


def _pick(mask: Words, rng: random.Random) -> int:
    """Some token that a mask allows."""
    return int(rng.choice(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


# The figure.


def draw(evidence: Evidence, out: Path) -> None:
    """What a mask costs, by schema; steps saved; what is left of the throughput."""
    figure, (left, middle, right) = panels(3, height=3.2)
    _masks(evidence, left)
    kinds = {"no jump": "a token a step", "jump": "forced tokens\nas drafts", "jump, in turn": "no overlap"}
    found = {kind: evidence.one(f"{PHASE}+{kind}", "schema sample") for kind in kinds}
    bars(list(found.values()), "steps", axes=middle, label=lambda run: kinds[run.variant.split("+")[1]])
    saved = 1 - found["jump"].median("steps") / found["no jump"].median("steps")
    middle.set_title(f"Forced tokens as drafts save {saved:.0%} of the steps")
    names = {
        BEFORE: "phase 09",
        FREE: "no grammar",
        ONE: "one row of them",
        FIELDS: "all, no strings",
        PHASE: "all rows",
    }
    first = next(run for run in evidence.runs if run.variant == PHASE)
    rates = [run for name in names for run in evidence.find(name, workload=first.workload, model=first.model)]
    metric = "output_tokens_per_s"
    bars(rates, metric, axes=right, gain=False, label=lambda run: names[run.variant])
    kept = rates[-1].median(metric) / rates[0].median(metric)
    right.set_title(f"With a grammar in every row {kept:.0%} of the tokens")
    save(figure, out, evidence)


def _masks(evidence: Evidence, axes: Any) -> None:
    kinds = list(
        dict.fromkeys(found.options["backend"] for found in evidence.runs if "backend" in found.options)
    )
    shown = colours(kinds, PHASE)
    for place, kind in enumerate(kinds):
        for row, schema in enumerate(SCHEMAS):
            found = evidence.find(workload=f"masks of {schema}", backend=kind)
            if found:
                label = kind if row == 0 else None
                width = found[0].median("mask_us")
                axes.barh(row + 0.27 * (place - 1), width, height=0.25, color=shown[kind], label=label)
    axes.set_yticks(range(len(SCHEMAS)), list(SCHEMAS))
    axes.invert_yaxis()
    axes.set_xlim(left=1)
    log_axis(axes, vertical=False)
    axes.set_xlabel("one mask, median (µs)")
    times = [found.median("mask_us") for found in evidence.runs if "backend" in found.options]
    axes.set_title(f"A mask takes {min(times):.0f} to {max(times):.0f} µs")
    axes.grid(visible=False, axis="y")
    axes.legend()
