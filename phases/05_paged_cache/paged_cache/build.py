"""From options to an engine: which features are on, what they change, and what is made of the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.device import pick_device
from common.errors import UserError, boolean, shown
from common.options import route
from common.text.tokenizer import Tokenizer
from continuous.policies import POLICIES
from continuous.rows import Rows
from forward.loading import load_model
from forward.model import Model
from paged_cache.memory import plan_cache
from paged_cache.parts import Feature, Loader, PagedEngine, PagedSizes, Parts, Recipe
from paged_cache.pool import BlockPool


def build(
    model: str | Path | Model,
    sizes: PagedSizes | None = None,
    features: Iterable[Feature] = (),
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
) -> PagedEngine:
    """Make an engine: install the features in the order of their phases, plan the memory, make the parts.

    Args:
        model: a name, whose model then belongs to the engine, so that a feature may replace layers in place;
            or a loaded model, which stays as it is.

    Raises:
        UserError: features that do not go together, or sizes that do not fit.
    """
    features = sorted(features, key=lambda feature: feature.phase)
    recipe = Recipe(model, sizes or PagedSizes(), tuple(features), device, dtype, tokenizer)
    for feature in features:
        if (engine := feature.make(recipe)) is not None:
            return engine
    load: Loader = next(
        (found for feature in features if (found := feature.loader()) is not None), load_model
    )
    linears = next((given for feature in features if (given := feature.linears()) is not None), None)
    loaded = load(model, device=device, dtype=dtype, linears=linears)
    parts = Parts(loaded, recipe.sizes, borrowed=loaded is model)
    parts.tokenizer = tokenizer
    del model, loaded, recipe  # or its old layers would live as long as this call
    for feature in features:
        if feature.name in parts.features:
            raise UserError(f"{feature.name} is given twice")
        parts.features[feature.name] = feature
        feature.install(parts)
    return make(parts)


def make(parts: Parts) -> PagedEngine:
    """The engine that these parts make."""
    sizes, loaded = parts.sizes, parts.model
    length = sizes.context(loaded)
    parts.usual.setdefault("step_tokens", max(2048, length))
    max_rows, block_size, step_tokens = (parts.size(n) for n in ("max_rows", "block_size", "step_tokens"))
    ledger = plan_cache(
        loaded,
        block_size=block_size,
        step_tokens=step_tokens,
        rows=max_rows,
        max_len=length,
        kv=parts.kv,
        cache_bytes=sizes.cache_bytes,
        gpu_memory_utilization=sizes.gpu_memory_utilization,
        reserved=sum(ask(parts) for ask in parts.reserve),
    )
    if parts.agree is not None:
        ledger = parts.agree(ledger)
    rows = Rows(max_rows, length, loaded.device)
    cache = parts.cache(max_rows, length, ledger.blocks, block_size)
    scheduler = parts.scheduler(rows, cache, step_tokens=step_tokens, policy=POLICIES[sizes.policy])
    scheduler.drafter = parts.drafter
    pool = BlockPool(
        loaded.config, ledger.blocks, block_size, device=loaded.device, dtype=loaded.dtype, kv=parts.kv
    )
    runner = parts.runner(loaded, parts.attention(pool), rows, cache, chooser=parts.chooser)
    engine = PagedEngine(scheduler, runner, parts.tokenizer, masks=parts.masks)
    engine.ledger = ledger
    for loop in parts.loops.values():
        engine.loop = loop(engine)
    for call in parts.finish:
        call(engine)
    if parts.rehearse is not None:  # what is rehearsed is complete
        engine.rehearsal_seconds = parts.rehearse(engine)
    return engine


@dataclass(frozen=True)
class Chosen:
    """What a set of options comes to: sizes, and each feature, None where it is off."""

    sizes: PagedSizes
    features: dict[str, Feature | None]

    @property
    def installed(self) -> list[Feature]:
        """The features that are on."""
        return [feature for feature in self.features.values() if feature is not None]


class Preset:
    """A phase's engine: which features it has, and which of them are on unless the caller says otherwise.

    Args:
        on: features that are on.
        fitting: features that are on where they pay (`Feature.pays`), decided in this order.
        usual: sizes that this phase prefers on a kind of device.

    As an option a feature is a switch, `prefix_cache=False`, and each of its fields an option by itself,
    `index="hash"`, which may be given while the feature is on.
    """

    def __init__(
        self,
        on: Sequence[type[Feature]] = (),
        fitting: Sequence[type[Feature]] = (),
        usual: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.on, self.fitting = tuple(on), tuple(fitting)
        self.usual = usual or {}

    def plus(self, on: Sequence[type[Feature]] = (), fitting: Sequence[type[Feature]] = ()) -> Preset:
        """The next phase's: this one with more features."""
        return Preset([*self.on, *on], [*self.fitting, *fitting], self.usual)

    def load(
        self,
        model: str | Path | Model,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> PagedEngine:
        """The engine for a model's name or a loaded model, with these options."""
        where = model.device if isinstance(model, Model) else pick_device(device)
        chosen = self.choose(options, where)
        return build(model, chosen.sizes, chosen.installed, device=device, dtype=dtype, tokenizer=tokenizer)

    def choose(
        self, options: Mapping[str, Any], device: torch.device, more: Sequence[type[Feature]] = ()
    ) -> Chosen:
        """What the options mean on a device.

        more: features beyond this preset's; they are off unless an option switches them on.

        Raises:
            UserError: an option is unknown, out of its limits, or of a feature that is off.
        """
        kinds = [*self.on, *self.fitting]
        kinds += [kind for kind in more if kind not in kinds]
        sizes, *own = route(options, [PagedSizes, *kinds], [kind.name for kind in kinds])
        features: dict[str, Feature | None] = {}
        for kind, given in zip(kinds, own, strict=True):
            switch = options.get(kind.name)
            if isinstance(switch, Feature):
                features[kind.name] = switch
                continue
            usual = kind in self.on or (kind in self.fitting and kind.pays(device, features))
            on = usual if switch is None else boolean(kind.name, switch)
            made = kind(**given)  # which refuses wrong values, whether it is on or not
            features[kind.name] = made if on else None
            if not on:
                _refuse_options_of(kind, given, device)
        return Chosen(PagedSizes(**{**self.usual.get(device.type, {}), **sizes}), features)


def _refuse_options_of(kind: type[Feature], given: Mapping[str, Any], device: torch.device) -> None:
    """Raise `UserError` for options of a feature that is off, unless they ask for just that."""
    for name, value in given.items():
        if name not in kind.without or kind.without[name] != value:
            raise UserError(
                f"{name} is {shown(value)}, but {kind.name} is off on {device.type}: "
                f"switch it on with {kind.name}=True"
            )
