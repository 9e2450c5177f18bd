"""The grammar backend llguidance as a feature of an engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.errors import UserError
from common.options import option
from common.text.tokenizer import Tokenizer
from continuous.seams import NO_DRAFTS
from paged_cache import EngineBuilder, Feature
from phases.appendix.guidance.drafter import GrammarDrafter
from phases.appendix.guidance.masks import LibraryGrammarManager
from phases.appendix.guidance.spelling import Spelling
from speculative.speculation import Verifier
from structured import Structured
from structured.masks import AutomataGrammarManager
from structured.matcher import Backend
from structured.pool import GrammarPool


@dataclass(frozen=True)
class Guidance(Feature):
    """Makes masks in the threads of llguidance, and drafts the tokens that a grammar forces."""

    name = "guidance"
    phase = 12
    needs = on_with = (Structured,)

    jump_forward: bool = option(True, "tokens that a grammar forces are drafted")

    def install(self, builder: EngineBuilder) -> None:
        """Make masks by llguidance, not phase 12's grammar manager, and let grammars draft forced tokens.

        To draft them, the engine's drafter becomes a `GrammarDrafter`. The library is imported, and the
        tokenizer prepared, when the first grammar comes.
        """
        plain = builder.grammar_manager.part
        assert isinstance(plain, AutomataGrammarManager)
        config, on_cpu = builder.model.config, builder.model.device.type == "cpu"
        pool = GrammarPool(
            partial(
                guidance,
                builder.recipe.tokenizer,
                config.vocab_size,
                tuple(config.eos_token_ids),
            ),
            cache_bytes=plain.pool.cache_bytes,
            seconds=plain.pool.seconds,
            threads=2 if (os.cpu_count() or 1) < 8 else 4,
        )
        builder.grammar_manager.decorate(
            self,
            lambda inner: LibraryGrammarManager(plain, pool, self.jump_forward),
        )
        if builder.drafter.part is NO_DRAFTS:
            if not self.jump_forward:
                return
            builder.verifier.replace(self, lambda rows: Verifier(rows.tokens))
        forced = partial(GrammarDrafter, jump_forward=self.jump_forward, in_turn=on_cpu)
        builder.drafter.decorate(self, forced)


def guidance(tokenizer: Tokenizer | None, size: int, eos: tuple[int, ...]) -> Backend:
    """Return llguidance's grammar backend for a model's vocabulary.

    tokenizer: the model's. size: number of logits. eos: ids of the tokens that end an output.

    Raises:
        UserError: the library is not installed.
    """
    assert tokenizer is not None, "grammars of an engine without a tokenizer are refused"
    return library()(Spelling.of(tokenizer, size, eos))


def library() -> Callable[[Spelling], Backend]:
    """Import llguidance, and return the class `GuidanceBackend`, which needs it.

    Raises:
        UserError: the library is not installed.
    """
    try:
        from phases.appendix.guidance.backend import GuidanceBackend
    except ModuleNotFoundError as error:
        raise UserError(
            f"grammars need {error.name}, which is not installed: "
            "python -m pip install -c constraints.txt -e '.[structured]'"
        ) from None
    return GuidanceBackend
