"""Structured output as a feature of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from common.options import option
from common.text.tokenizer import Tokenizer
from paged_cache import EngineBuilder, Feature
from speculative import PRESET as BELOW
from structured.automata.backend import AutomataBackend
from structured.masks import AutomataGrammarManager
from structured.pool import GrammarPool
from structured.vocabulary import Vocabulary


@dataclass(frozen=True)
class Structured(Feature):
    """Mask the tokens of every request that has a grammar, so that its output follows the grammar."""

    name = "structured"
    phase = 12

    grammar_seconds: float = option(
        2.0,
        "most seconds of processor time that a grammar may take to compile",
        low=0.0,
        high=600.0,
        above_low=True,
    )
    grammar_cache_bytes: int = option(
        256 << 20, "bytes of compiled grammars that are kept while no request uses them", low=0
    )

    def install(self, builder: EngineBuilder) -> None:
        """Replace the engine's grammar manager, which masks nothing, by one that follows grammars.

        The grammar backend is made when the first grammar comes, since only then is the tokenizer needed.
        """
        config, tokenizer = builder.model.config, builder.recipe.tokenizer
        size, eos = config.vocab_size, config.eos_token_ids
        refusal = ""
        if tokenizer is None:
            refusal = "grammar is set, but must be None for an engine that has no tokenizer"
        elif not eos:
            refusal = (
                "grammar is set, but must be None for a model without an end-of-sequence token"
            )
        pool = GrammarPool(
            lambda: AutomataBackend(Vocabulary.of(cast(Tokenizer, tokenizer), size, eos)),
            cache_bytes=self.grammar_cache_bytes,
            seconds=self.grammar_seconds,
        )
        builder.grammar_manager.replace(
            self,
            AutomataGrammarManager(pool, size, eos, builder.model.device, refusal=refusal),
        )


PRESET = BELOW.plus(on=[Structured])

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of the phase before, and the fields of `Structured`. Requests may have a
        `SamplingParams.grammar` if the engine has a `tokenizer`.

Raises:
    UserError: an option is unknown or out of its limits, or features do not go together.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
