"""Recipes of engines: a model, sizes, and features.

A feature is one optimization: a small frozen dataclass whose fields are its options, and whose `install`
puts its own parts into an engine that is being built. This phase has none. Every later phase adds one or two.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from common.errors import boolean
from common.options import check_options, option
from common.text.tokenizer import Tokenizer
from continuous.sizes import Sizes
from forward.model import Model

if TYPE_CHECKING:
    from paged_cache.builder import EngineBuilder


@dataclass(frozen=True)
class PagedSizes(Sizes):
    """Options of an engine with a paged KV cache that limit requests, tokens and memory.

    Those of `Sizes` (running requests, tokens of a request and of a step, policy, cache bytes), and the
    ones below. None: the phase's own default.
    """

    block_size: int | None = option(
        None, "tokens in a block of the cache", low=1, high=1 << 16
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of a GPU's memory to fill, unless cache_bytes is given",
        low=0.0,
        high=1.0,
        above_low=True,
    )


class Feature:
    """One optimization of an engine. Subclasses are frozen dataclasses of options; construction checks these.

    name: what it is called in options and files, such as `prefix_cache`.
    phase: the number of the phase that introduces it; features are installed in this order.
    without: options of this feature, with the values that mean the same as leaving the feature off. Only
        these values may be given while it is off.
    for_draft_models: True if a smaller model that drafts for an engine with this feature has it as well.
    needs: features without which it cannot be on.
    on_with, on_device: it is on by default if all of these features are on, and the device is of this type
        ("cpu" or "cuda"; None: any).
    """

    name: ClassVar[str]
    phase: ClassVar[int]
    without: ClassVar[Mapping[str, Any]] = {}
    for_draft_models: ClassVar[bool] = False
    needs: ClassVar[Sequence[type[Feature]]] = ()
    on_with: ClassVar[Sequence[type[Feature]]] = ()
    on_device: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        """Raise `UserError` for an option out of its limits."""
        check_options(self)

    def configure_load(self, builder: EngineBuilder) -> None:
        """Change how the model will be loaded; `builder.model` is not there yet. Default: no change."""

    def install(self, builder: EngineBuilder) -> None:
        """Replace or decorate parts of the engine that is being built, whose model is loaded.

        Raises:
            UserError: the feature makes no sense with these parts, or not on this device.
        """

    @classmethod
    def switched_on(cls, value: Any) -> bool:
        """Return True if this value of the option `name` turns the feature on, False if it turns it off.

        Raises:
            UserError: the value has the wrong type.
        """
        return boolean(cls.name, value)

    @classmethod
    def enabled_by_default(cls, device: torch.device, others: Sequence[Feature]) -> bool:
        """Return True if the feature is on by default on this device.

        others: the features that are on already; `on_with` must be among them.
        """
        here = cls.on_device in (None, device.type)
        return here and all(find(others, kind) is not None for kind in cls.on_with)


F = TypeVar("F", bound=Feature)


def find(features: Iterable[Feature], kind: type[F]) -> F | None:
    """Return the feature of the class `kind` among `features`, or None if there is none."""
    return next((feature for feature in features if isinstance(feature, kind)), None)


@dataclass(frozen=True)
class Recipe:
    """All that an engine is built from: model, sizes and features.

    model: a name or folder: the model that is loaded belongs to the engine, and features may replace its
        layers in place; or a loaded model, which stays as it is.
    features: in any order; `EngineBuilder` sorts them by phase.
    device, dtype: where and how to load the model. tokenizer: needed for stop strings only.
    """

    model: str | Path | Model
    sizes: PagedSizes = PagedSizes()
    features: tuple[Feature, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    tokenizer: Tokenizer | None = None
