"""Speculation as a feature of an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from common.errors import UserError, boolean, choice, integer, number
from common.options import option
from cuda_graphs import Graphs
from forward.loading import load_model
from forward.model import Model
from paged_cache import Feature, PagedEngine, PagedSizes, Parts, build
from quant import Quant
from quant.loading import Quantize
from speculative.control import Control
from speculative.draft_model import DraftModel
from speculative.head import WEIGHTS, HeadSource, load
from speculative.loops import InGraph, Watcher, watched
from speculative.ngram import NGrams
from speculative.speculator import Source, Speculator
from speculative.suffix import Suffixes
from speculative.synthetic import Synthetic
from speculative.taps import Taps
from speculative.verify import verify

if TYPE_CHECKING:  # there is no Triton everywhere
    from speculative.chain_graph import Chains, Feed

Kind = Literal["ngram", "suffix", "model", "head", "synthetic", "none"]
MOST_DRAFTS = 32
STEP_TOKENS = 2048
"""Tokens that the draft model computes at once."""
MOST_CACHED = 1 << 17
"""Tokens in the draft model's cache, for all requests together."""
USUAL = {"ngram": 7, "suffix": 7, "model": 4, "head": 4, "synthetic": 3}
"""Drafts of a request in a step, at most, unless the caller says otherwise. Seven and the newest are eight,
up to which phase 09 has kernels for a few tokens."""
READ = ("model", "head")
"""Drafters whose weights `draft_model` may name."""

SHARED = ("kernels", "rehearsal", "graphs", "latency", "quant_kernels")
"""Features that a draft model takes over from the model it drafts for, where that has them."""


@dataclass(frozen=True)
class Speculate(Feature):
    """The next tokens are guessed, and checked in one step."""

    name: ClassVar[str] = "speculate"
    phase: ClassVar[int] = 11
    without: ClassVar[Mapping[str, Any]] = {"drafter": "none"}

    drafter: Kind = option("ngram", "who guesses: ngram, suffix, model, head, synthetic or none")
    draft_length: int | None = option(None, "most tokens to guess for a request in a step")
    draft_adaptive: bool = option(True, "guess only as many as pay; without it always the most")
    draft_model: str | None = option(None, "model or weights that guess, for model and head")
    draft_accept: float = option(3.0, "drafts that synthetic counts as right in a step, on average")
    draft_ahead: bool = option(True, "where there are graphs, models and n-grams draft inside them")
    suffix_bytes: int = option(64 << 20, "memory on the host for what suffix shares over requests")

    def __post_init__(self) -> None:
        """Check the options."""
        choice("drafter", self.drafter, get_args(Kind))
        if self.draft_length is not None:
            integer("draft_length", self.draft_length, low=1, high=MOST_DRAFTS)
        boolean("draft_adaptive", self.draft_adaptive)
        boolean("draft_ahead", self.draft_ahead)
        number("draft_accept", self.draft_accept, low=0.0, high=float(MOST_DRAFTS))
        integer("suffix_bytes", self.suffix_bytes, low=0, high=1 << 36)
        if self.drafter == "model" and self.draft_model is None:
            raise UserError("drafter is 'model', so draft_model must name a model with the same tokenizer")
        if self.draft_model is not None and self.drafter not in READ:
            raise UserError(
                f"draft_model is {str(self.draft_model)!r}, but drafter is {self.drafter!r}, "
                f"which reads none: only {', '.join(READ)} do"
            )

    @property
    def length(self) -> int:
        """Drafts of a request in a step, at most."""
        return self.draft_length or USUAL[self.drafter]

    def install(self, parts: Parts) -> None:
        """A drafter; graphs that verify, where there are graphs."""
        if self.drafter == "none":
            return
        source = self.source(parts)
        speculator = Speculator(source, Control(self.length, adaptive=self.draft_adaptive))
        parts.bring(self, drafter=speculator)
        parts.stages["connect"] += [
            lambda whole: verify(whole.engine),
            lambda whole: speculator.attach(whole.engine),
        ]
        parts.loops["waiting"] = watched
        SmallSteps(self.length).install(parts)
        if (
            self.draft_ahead
            and isinstance(source, (DraftModel, NGrams))
            and {"graphs", "overlap"} <= set(parts.features)
        ):
            self._go_ahead(parts, speculator)

    def _go_ahead(self, parts: Parts, speculator: Speculator) -> None:
        """Steps that verify and draft in one graph, around those that overlap."""
        from speculative.ahead import Ahead, ahead_bytes

        def in_graph(engine: PagedEngine) -> InGraph:
            speculator.ahead = ahead = Ahead(engine, speculator, self.length)
            drafter = engine.scheduler.drafter
            assert isinstance(drafter, Watcher)
            return InGraph(engine.loop, drafter, ahead)

        parts.loops["in graph"] = in_graph
        models = 2 if isinstance(speculator.source, DraftModel) else 1
        parts.reserve.append(
            lambda whole: ahead_bytes(whole.model, whole.size("max_rows"), self.length, models=models)
        )

    def source(self, parts: Parts) -> Source:
        """Who guesses, for an engine of these parts. Raises `UserError` if they do not go together."""
        if self.drafter == "ngram":
            return NGrams()
        if self.drafter == "suffix":
            return Suffixes(self.suffix_bytes)
        if self.drafter == "synthetic":
            return Synthetic(self.draft_accept)
        features = [parts.features[name] for name in SHARED if name in parts.features]
        features.append(SmallSteps(self.length, alone=True))
        if self.drafter == "model":
            assert self.draft_model is not None
            engine = draft_engine(parts, self.draft_model, features)
            return DraftModel(engine, self._chains(parts, engine))
        path = Path(self.draft_model) if self.draft_model else WEIGHTS / "smollm2-head.safetensors"
        head = load(path, parts.model)
        head.room(max(STEP_TOKENS, parts.size("max_rows")))
        taps = Taps(parts.own_model(), head.taps, step_tokens(parts))
        engine = draft_engine(parts, head, features)
        return HeadSource(engine, taps, self._chains(parts, engine, head.feed))

    def _chains(self, parts: Parts, engine: PagedEngine, feed: Feed | None = None) -> Chains | None:
        """All steps of a draft behind the first in one graph, where the draft model has graphs."""
        if self.length == 1 or "graphs" not in parts.features:
            return None
        from cuda_graphs.runner import GraphRunner
        from speculative.chain_graph import Chains

        assert isinstance(engine.runner, GraphRunner)
        return Chains(engine.runner, self.length - 1, feed)


def step_tokens(parts: Parts) -> int:
    """Tokens that a step will have at most, before all features are installed."""
    usual = parts.usual.get("step_tokens", 0)
    return max(parts.sizes.step_tokens or usual, 2048, parts.sizes.context(parts.model))


@dataclass(frozen=True)
class SmallSteps(Feature):
    """Where there are graphs, they also take steps of a few tokens a request: what has to be verified, and
    what a draft model has to catch up with. Some GPUs have kernels of their own for such steps.

    drafts: of a request in a step. alone: the engine is a draft model's.
    """

    name: ClassVar[str] = "small_steps"
    phase: ClassVar[int] = 11

    drafts: int
    alone: bool = False

    def install(self, parts: Parts) -> None:
        """More graphs, memory for them, and kernels."""
        if "graphs" in parts.features:
            from speculative.verify_graph import VerifyPlan, verify_bytes

            graphs = parts.features["graphs"]
            assert isinstance(graphs, Graphs)
            verify = partial(VerifyPlan, most_rows=graphs.graph_rows, most_drafts=self.drafts)
            decodes = parts.plans.pop("decodes")  # these are asked first, as nearly all steps are decodes
            parts.plans |= {"verify": verify, "decodes": decodes}
            parts.reserve.append(lambda whole: verify_bytes(whole.model, whole.size("max_rows"), self.drafts))
        if "latency" in parts.features:
            from speculative.cuda.columns import install

            install(parts.own_model(), fewest=1 if self.alone else 2)


def draft_engine(parts: Parts, model: str | Model, features: Iterable[Feature]) -> PagedEngine:
    """An engine for a draft model with these features, beside the engine that is being made.

    Raises:
        UserError: its vocabulary is another one.
    """
    large = parts.model
    few_bits = Quant(kv_cache="none")  # a checkpoint may have its weights in few bits; keys are not worth it
    small = load_model(
        model,
        device=str(large.device),
        dtype=str(large.dtype).removeprefix("torch."),
        linears=parts.linears.reading() if isinstance(parts.linears, Quantize) else None,
    )
    if small.config.vocab_size != large.config.vocab_size:
        raise UserError(
            f"draft_model has {small.config.vocab_size} token ids, but the model has "
            f"{large.config.vocab_size}: both must have the same tokenizer"
        )
    rows, length = parts.size("max_rows"), min(parts.sizes.context(large), small.max_len)
    tokens = min(MOST_CACHED, rows * length)
    block = parts.size("block_size")
    sizes = PagedSizes(
        max_rows=rows,
        max_len=length,
        step_tokens=max(STEP_TOKENS, rows),
        block_size=block,
        cache_bytes=(tokens + 2 * block) * small.config.kv_bytes_per_token(small.dtype),
    )
    return build(small, sizes, [few_bits, *features])
