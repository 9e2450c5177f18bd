"""Engines with the default backend of grammars, and a vocabulary for it, that tests of the appendix share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.grammars import BACKENDS
from common.sampling.grammar import Grammar
from continuous.engine import Engine
from forward.model import Model
from phases import phase_named
from phases.appendix.guidance.drafter import GrammarDrafter
from phases.appendix.guidance.spelling import Spelling
from phases.registry import load_engine
from structured.matcher import Backend, Words
from tests import structured_kit
from tests.structured_kit import EOS, SIZE, SMALL, tokenizer

if TYPE_CHECKING:  # it may not be installed
    from phases.appendix.guidance.backend import GuidanceBackend
    from phases.appendix.guidance.matcher import GuidanceMatcher

SCHEMAS: dict[str, Any] = structured_kit.SCHEMAS | {
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "number": {"type": "number", "minimum": -1, "maximum": 2},
}
"""With bounds, which the automata do not know."""
GRAMMARS = {name: Grammar.json_schema(schema) for name, schema in SCHEMAS.items()}
must_obey = partial(structured_kit.must_obey, schemas=SCHEMAS)


def backend_named(name: str) -> Callable[[Spelling], Backend]:
    return BACKENDS[name]()


def fill(backend: GuidanceBackend, matchers: Sequence[GuidanceMatcher], words: Words) -> None:
    """Fill a row of masks for each matcher, and wait for them."""
    done = backend.begin([(matcher, row, ()) for row, matcher in enumerate(matchers)], words)
    if done is not None:
        done.result()


def byte_vocabulary() -> Spelling:
    """A token for every byte; token 0 ends a text."""
    tokens = (b"", *(bytes([byte]) for byte in range(256)))
    return Spelling(tokens, (0,), lambda text: [byte + 1 for byte in text.encode()])


@cache
def vocabulary() -> Spelling:
    return Spelling.of(tokenizer(), SIZE, (EOS,))


def served(model: str | Path | Model, phase: str = "13", **options: Any) -> Engine:
    """An engine as users have it."""
    made = load_engine(phase_named(phase), model, **options)
    assert isinstance(made, Engine)
    return made


def loaded(model: str | Path | Model, **options: Any) -> Engine:
    """One of phase 12, with the tokenizer of the tiny models, which other tests may slow down."""
    return served(
        model, "12", **{"tokenizer": tokenizer(), "grammar_seconds": 60.0, **SMALL, **options}
    )


def engine_of(model: Model, **options: Any) -> Engine:
    """One whose steps overlap under grammars, too, as on a GPU, unless it is told otherwise."""
    engine = loaded(model, **options)
    if isinstance(engine.scheduler.drafter, GrammarDrafter) and model.device.type == "cpu":
        assert engine.scheduler.drafter.in_turn, "on a CPU there is nothing to overlap with"
        engine.scheduler.drafter.in_turn = False
    return engine
