"""Speculation as a feature of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from common.errors import UserError
from common.names import choice
from common.options import option
from cuda_graphs import Graphs
from forward.loading import load_model
from forward.model import Model
from paged_cache import EngineBuilder, Feature, PagedEngine, PagedSizes, Recipe, build
from quant import Quant
from quant.loading import Quantize
from speculative.draft_model import DraftModel
from speculative.head import WEIGHTS, HeadSource, load
from speculative.hidden_state_hooks import HiddenStateHooks
from speculative.ngram import NGrams
from speculative.proposer import Proposer
from speculative.speculation import SpeculativeRunner, Verifier

MOST_DRAFTS = 32
STEP_TOKENS = 2048
"""Tokens that the draft model computes at once."""
MOST_CACHED = 1 << 17
"""Tokens in the draft model's cache, for all requests together."""
READ = ("model", "head")
"""Drafters whose weights `draft_model` may name."""


@dataclass(frozen=True)
class Speculate(Feature):
    """Guess the next tokens by a drafter, and verify them all in one step."""

    name: ClassVar[str] = "speculate"
    phase: ClassVar[int] = 11
    without: ClassVar[Mapping[str, Any]] = {"drafter": "none"}

    drafter: str = option("ngram", "the drafter: ngram, model, head or none")
    draft_length: int | None = option(
        None, "most tokens to guess for a request in a step", low=1, high=MOST_DRAFTS
    )
    draft_adaptive: bool = option(
        True, "guess only as many as pay; without it always the most"
    )
    draft_model: str | None = option(None, "model or weights that guess, for model and head")

    def __post_init__(self) -> None:
        """Check the options; raise `UserError` for values out of range or that do not fit together."""
        super().__post_init__()
        choice("drafter", self.drafter, (*DRAFTERS, "none"))
        if self.drafter == "model" and self.draft_model is None:
            raise UserError(
                "drafter is 'model', so draft_model must name a model with the same tokenizer"
            )
        if self.draft_model is not None and self.drafter not in READ:
            raise UserError(
                f"draft_model is {str(self.draft_model)!r}, but drafter is {self.drafter!r}, "
                f"which reads none: only {', '.join(READ)} do"
            )

    @property
    def length(self) -> int:
        """Return the most drafts that a request may have in a step."""
        return self.draft_length or DRAFTERS[self.drafter].defaults

    def install(self, builder: EngineBuilder) -> None:
        """Add a drafter and a verifier of its drafts to the engine, and CUDA graphs for steps with drafts.

        Without the feature `Graphs` there are no such graphs. Nothing is added if `drafter` is "none".
        """
        if self.drafter == "none":
            return
        source = DRAFTERS[self.drafter].make(self, builder)
        drafter = SpeculativeRunner(source, self.length, adaptive=self.draft_adaptive)
        builder.drafter.replace(self, drafter)
        builder.warmups.insert(0, drafter.attach)  # before one that runs steps
        builder.verifier.replace(self, lambda rows: Verifier(rows.tokens, source.agree))
        SmallSteps(self.length).install(builder)

    def draft_model_source(self, builder: EngineBuilder) -> DraftModel:
        """Return a proposer that generates drafts with a smaller model."""
        assert self.draft_model is not None
        return DraftModel(draft_engine(builder, self.draft_model, self._shared(builder)))

    def head_source(self, builder: EngineBuilder) -> HeadSource:
        """Return a proposer that generates drafts with an EAGLE-3 head on the model's hidden states."""
        path = (
            Path(self.draft_model)
            if self.draft_model
            else WEIGHTS / "smollm2-head.safetensors"
        )
        head = load(path, builder.model)
        head.room(max(STEP_TOKENS, builder.max_rows))
        tokens = max(builder.step_tokens, 2048, builder.max_len)
        hooks = HiddenStateHooks(builder.own_model(), head.hooks, tokens)
        return HeadSource(draft_engine(builder, head, self._shared(builder)), hooks)

    def _shared(self, builder: EngineBuilder) -> list[Feature]:
        taken = [one for one in builder.recipe.features if one.for_draft_models]
        return [*taken, SmallSteps(self.length)]


class DrafterKind(NamedTuple):
    """A kind of drafter that the option `drafter` can name.

    defaults: most drafts of a request in a step if the option `draft_length` is not given.
    make: returns the proposer of drafts, given the options and the builder of the engine.
    """

    defaults: int
    make: Callable[[Speculate, EngineBuilder], Proposer]


DRAFTERS = {
    "ngram": DrafterKind(
        7, lambda options, builder: NGrams()
    ),  # and the newest: kernels for few take eight
    "model": DrafterKind(4, Speculate.draft_model_source),
    "head": DrafterKind(4, Speculate.head_source),
}
"""By name; an appendix entry may add one."""


@dataclass(frozen=True)
class SmallSteps(Feature):
    """A feature that adds CUDA graphs for steps of several tokens per request, if the engine has CUDA graphs.

    Such steps verify drafts, and compute in a draft model the tokens that it did not generate.
    drafts: most drafts of a request in a step.
    """

    name: ClassVar[str] = "small_steps"
    phase: ClassVar[int] = 11

    drafts: int

    def install(self, builder: EngineBuilder) -> None:
        """Add a `VerifyGraphExecutor`, which captures graphs for such small steps, and reserve their memory.

        Without the feature `Graphs`, nothing is added.
        """
        graphs = builder.feature(Graphs)
        if graphs is not None:
            from speculative.verify_graph import VerifyGraphExecutor, verify_bytes

            builder.executors[VerifyGraphExecutor] = partial(
                VerifyGraphExecutor, most_rows=graphs.graph_rows, most_drafts=self.drafts
            )
            builder.reservations.append(
                lambda builder: verify_bytes(builder.model, builder.max_rows, self.drafts)
            )


def draft_engine(
    builder: EngineBuilder, model: str | Model, features: Iterable[Feature]
) -> PagedEngine:
    """Return a second engine, for a draft model, with the sizes and the device of the engine being built.

    model: a name or path, or the loaded draft model. features: those of the draft model's engine.

    Raises:
        UserError: the vocabularies of the two models differ.
    """
    large, loader = builder.model, builder.weight_loader.part
    small = load_model(
        model,
        device=str(large.device),
        dtype=str(large.dtype).removeprefix("torch."),
        weight_loader=loader.reading() if isinstance(loader, Quantize) else None,
    )
    if small.config.vocab_size != large.config.vocab_size:
        raise UserError(
            f"draft_model has {small.config.vocab_size} token ids, but the model has "
            f"{large.config.vocab_size}: both must have the same tokenizer"
        )
    rows, length = builder.max_rows, min(builder.max_len, small.max_len)
    tokens = min(MOST_CACHED, rows * length)
    block = builder.block_size
    sizes = PagedSizes(
        max_rows=rows,
        max_len=length,
        step_tokens=max(STEP_TOKENS, rows),
        block_size=block,
        cache_bytes=(tokens + 2 * block) * small.config.kv_bytes_per_token(small.dtype),
    )
    # A checkpoint may have its weights in few bits.
    return build(Recipe(small, sizes, (Quant(), *features)))
