"""Schemas that benchmarks of grammars use, and a vocabulary for models of random weights."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import Workload
from common.sampling.grammar import Grammar
from forward.model import Model
from phases.appendix.guidance.feature import library
from phases.appendix.guidance.spelling import MOST_KEPT, Spelling
from structured.automata.backend import AutomataBackend
from structured.matcher import Backend, Matcher, Words
from structured.vocabulary import Vocabulary

_FILE = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
SCHEMAS: dict[str, Any] = _FILE["sample"]
"""The schema sample."""


def list_of(schema: Any) -> Grammar:
    """Return the grammar of a list of at least 500 such values."""
    return Grammar.json_schema({"type": "array", "items": schema, "minItems": 500})


RECORDS = list_of(SCHEMAS["person"])
PEOPLE = list_of(_FILE["people"])
ORDERS = list_of(_FILE["order"])
STRINGS = list_of({"type": "string", "maxLength": 20})
"""Their outputs end after more tokens than are asked for, so that all variants generate equally many. The end
of a string that may not grow much longer is what costs most: most of the vocabulary has to be looked at. And
random weights hardly ever end a string earlier. What has no strings shows the rest."""


class PatientAutomata(AutomataBackend):
    """The automata with a minute for a grammar, so that slow hosts measure them, too."""

    seconds = 60.0


BACKENDS: dict[str, Callable[[], Callable[[Spelling], Backend]]] = {
    "llguidance": library,
    "automata": lambda: PatientAutomata,
}
"""Kinds of backends, each found when it is asked for: a library may not be installed."""
ALPHABETS = ["aeiourstlnmdbpgkabcdefghijklmnopqrstuvwxyz"] * 7 + ["абвгдежзиклמשהखग中国人"]
SIGNS = '{" ": ", "} "}, [{" }} ]] ], }, () (); true false null'


def made_up(model: Model) -> Spelling:
    """A vocabulary for random weights, of the kind that byte pairs lead to.

    All bytes, numbers, spaces, what stands between the parts of JSON and of code, and words of all lengths,
    most behind a space, an eighth of other alphabets. With longer ones the slowest masks take longer.
    """
    rng = random.Random(5)
    size, eos = model.config.vocab_size, tuple(model.config.eos_token_ids)
    spaces = [" " * count for count in range(2, 17)] + ["\n" * count for count in range(2, 5)]
    tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
    tokens |= dict.fromkeys(
        text.encode() for text in (*SIGNS.split(), '": "', *map(str, range(10, 1000)), *spaces)
    )
    while len(tokens) < size:
        word = "".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(2, 9)))
        tokens[(rng.choice(("", " ", " ")) + word).encode()] = None
    hidden = tuple(b"" if n in eos else token for n, token in enumerate([*tokens][:size]))
    ids = {token: number for number, token in enumerate(hidden) if token}

    def encode(text: str) -> list[int]:
        """Take of all tokens that the rest begins with the longest."""
        rest, found = text.encode(), list[int]()
        while rest:
            count = next(n for n in range(len(rest), 0, -1) if rest[:n] in ids)
            found.append(ids[rest[:count]])
            rest = rest[count:]
        return found

    return Spelling(hidden, eos, lru_cache(MOST_KEPT)(encode))


def along(make: Callable[[], Matcher], vocabulary: Vocabulary, outputs: int) -> list[float]:
    """Measure every mask of a few random outputs, in microseconds."""
    times = []
    words = np.zeros(-(-len(vocabulary.tokens) // 32), np.int32)
    for seed in range(outputs):
        rng, matcher = random.Random(seed), make()
        for _ in range(40):
            begun = time.perf_counter()
            matcher.fill(words)
            times.append(1e6 * (time.perf_counter() - begun))
            token = _pick(words, rng)
            if token in vocabulary.eos:
                break
            matcher.advance((token,))
    return times


def _pick(mask: Words, rng: random.Random) -> int:
    """Some token that a mask allows."""
    return int(rng.choice(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]))


def most_at_once(work: Workload) -> int:
    """Tokens that a cache must have room for, if all requests begin at once and each gives back its own."""
    sizes = [(len(item.prompt), item.max_tokens) for item in work.items]
    steps = range(0, max(work.output_lens), 16)
    peak = max(sum(prompt + step for prompt, most in sizes if most > step) for step in steps)
    return peak + 96 * len(sizes)
