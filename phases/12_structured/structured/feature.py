"""Grammars as a feature of an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, cast, get_args

from common.errors import UserError, boolean, choice, integer, number
from common.options import option
from common.text.tokenizer import Tokenizer
from continuous.seams import NO_DRAFTS, Drafter
from cuda_graphs.feature import Graphs
from paged_cache import Feature, PagedEngine, Parts
from speculative.loops import NO_GUESSES, Watcher, watched
from speculative.speculation import verify
from structured.drafter import GrammarDrafter
from structured.late import let_late_ones_wait
from structured.loop import EarlyMasks, TwoHalves
from structured.masks import GrammarMasks
from structured.matcher import Backend
from structured.pool import GrammarPool
from structured.vocabulary import Vocabulary

Name = Literal["llguidance", "automata", "xgrammar"]


@dataclass(frozen=True)
class Structured(Feature):
    """Outputs follow a grammar where a request has one."""

    name: ClassVar[str] = "structured"
    phase: ClassVar[int] = 12

    backend: Name = option("llguidance", "who makes the masks: llguidance, automata (by hand) or xgrammar")
    jump_forward: bool = option(True, "tokens that a grammar forces are drafted")
    jump_rows: int = option(4, "running requests, at most, for which steps that overlap draft what is forced")
    grammar_seconds: float = option(2.0, "most seconds that a grammar may take to compile")
    grammar_cache_bytes: int = option(256 << 20, "memory for compiled grammars that nobody uses")

    def __post_init__(self) -> None:
        """Check the options."""
        choice("backend", self.backend, get_args(Name))
        boolean("jump_forward", self.jump_forward)
        integer("jump_rows", self.jump_rows, low=0)
        number("grammar_seconds", self.grammar_seconds, low=0.0, high=600.0, above_low=True)
        integer("grammar_cache_bytes", self.grammar_cache_bytes, low=0)

    def install(self, parts: Parts) -> None:
        """Masks, a kernel that applies them, and a drafter that knows what is forced.

        Nothing is imported and no tokenizer prepared before the first grammar comes.
        """
        config, tokenizer = parts.model.config, parts.recipe.tokenizer
        refusal = ""
        if tokenizer is None:
            refusal = "grammar is set, but must be None for an engine that has no tokenizer"
        elif not config.eos_token_ids:
            refusal = "grammar is set, but must be None for a model without an end-of-sequence token"
        pool = GrammarPool(
            partial(make_backend, self.backend, tokenizer, config.vocab_size, tuple(config.eos_token_ids)),
            cache_bytes=self.grammar_cache_bytes,
            seconds=self.grammar_seconds,
            threads=2 if (os.cpu_count() or 1) < 8 else 4,
        )
        masks = GrammarMasks(
            pool,
            config.vocab_size,
            config.eos_token_ids,
            parts.model.device,
            refusal=refusal,
            most_forced=self.jump_rows if self.jump_forward else 0,
        )
        parts.bring(self, masks=masks)
        if "overlap" in parts.features:
            parts.loops["overlap"] = partial(two_halves, parts)
        if "kernels" in parts.features:
            from structured.kernel import rehearse, with_kernel

            parts.wrap(self, sampler=with_kernel)
            if parts.stages["rehearse"]:
                parts.stages["connect"].append(lambda whole: rehearse(whole.engine.runner.sampler))
            graphs = parts.features.get("graphs")
            if isinstance(graphs, Graphs):
                from structured.masked_plan import MaskedPlan, masked_bytes

                parts.plans["masked"] = MaskedPlan
                most = graphs.graph_rows
                parts.reserve.append(
                    lambda whole: masked_bytes(whole.model, min(most, whole.size("max_rows")))
                )
        if parts.model.device.type != "cpu":  # there a step takes longer than any mask
            parts.stages["connect"].append(lambda whole: let_late_ones_wait(whole.engine))
        if parts.drafter is not NO_DRAFTS or self.jump_forward:
            parts.loops.setdefault("waiting", watched)
            parts.stages["connect"].append(lambda whole: verify(whole.engine))
            parts.wrap(self, drafter=partial(self._forced, in_turn=parts.model.device.type == "cpu"))

    def _forced(self, drafter: Drafter, *, in_turn: bool) -> GrammarDrafter:
        """Return a drafter of what grammars force, around one that guesses."""
        return GrammarDrafter(
            drafter if isinstance(drafter, Watcher) else NO_GUESSES,
            jump_forward=self.jump_forward,
            most_ahead=self.jump_rows,
            in_turn=in_turn,
        )


def two_halves(parts: Parts, engine: PagedEngine) -> TwoHalves:
    """Overlap with masks; with their graphs, what a step reads is sent before the second half of the last."""
    if "masked" not in parts.plans:
        return TwoHalves(cast(EarlyMasks, engine.masks))
    from cuda_graphs.runner import GraphRunner
    from structured.masked_plan import MaskedPlan

    assert isinstance(engine.runner, GraphRunner)
    return TwoHalves(cast(EarlyMasks, engine.masks), engine.runner.plan(MaskedPlan).stage)


def make_backend(name: Name, tokenizer: Tokenizer | None, size: int, eos: tuple[int, ...]) -> Backend:
    """A backend for a model's vocabulary. Raises `UserError` if it is not installed."""
    assert tokenizer is not None, "grammars of an engine without a tokenizer are refused"
    return backend_named(name)(Vocabulary.of(tokenizer, size, eos))


def backend_named(name: Name) -> type[Backend]:
    """A kind of backend. Raises `UserError` if it is not installed."""
    try:
        if name == "automata":
            from structured.automata.backend import AutomataBackend

            return AutomataBackend
        if name == "xgrammar":
            from structured.backends.xgrammar import XGrammarBackend

            return XGrammarBackend
        from structured.backends.llguidance import GuidanceBackend

        return GuidanceBackend
    except ModuleNotFoundError as error:
        raise UserError(
            f"grammars need {error.name}, which is not installed: "
            "python -m pip install -c constraints.txt -e '.[structured]'"
        ) from None
