"""Presets: a phase's choice of features, and the sizes and features that a caller's options make of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.device import pick_device
from common.errors import UserError, shown
from common.options import route
from common.text.llm import LLM
from common.text.tokenizer import Tokenizer
from forward.model import Model
from paged_cache.builder import PagedEngine, build
from paged_cache.recipe import Feature, PagedSizes, Recipe


class Chosen(NamedTuple):
    """The sizes and the features (each: one optimization) that a caller's options ask for."""

    sizes: PagedSizes
    features: tuple[Feature, ...]


class Preset:
    """A phase's engine: its features, and which of them are on unless the caller says otherwise.

    Args:
        on: features that are on by default.
        fitting: features that are on by default where they are faster (`Feature.enabled_by_default`); each
            is asked with the features that are on already.
        defaults: values of `PagedSizes` options by device type, such as "cuda".

    Each feature is an option that switches it on or off, such as `prefix_cache=False`. Each of its fields
    is an option, too, such as `index="hash"`, which may be given while the feature is on.
    """

    def __init__(
        self,
        on: Sequence[type[Feature]] = (),
        fitting: Sequence[type[Feature]] = (),
        defaults: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self.on, self.fitting = tuple(on), tuple(fitting)
        self.defaults = defaults or {}

    def plus(
        self, on: Sequence[type[Feature]] = (), fitting: Sequence[type[Feature]] = ()
    ) -> Preset:
        """Return a preset with more features, as the next phase needs it; this one stays as it is.

        on: features that are on by default. fitting: features that are on by default where they are faster.
        """
        return Preset([*self.on, *on], [*self.fitting, *fitting], self.defaults)

    def load(
        self,
        model: str | Path | Model,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> PagedEngine:
        """Return an engine for a model's name, its folder or a loaded model, with these options.

        device, dtype: where and how to load the model; "auto" chooses.
        tokenizer: needed for stop strings only. options: sizes, switches of features, and their fields.

        Raises:
            UserError: an option is unknown, out of its limits, or of a feature that is off.
        """
        where = model.device if isinstance(model, Model) else pick_device(device)
        chosen = self.choose(options, where)
        return build(Recipe(model, chosen.sizes, chosen.features, device, dtype, tokenizer))

    @property
    def llm(self) -> partial[LLM]:
        """Return `LLM`, text in and text out, with this phase's engine; its options are those of `load`."""
        return partial(LLM, load=self.load)

    def choose(
        self,
        options: Mapping[str, Any],
        device: torch.device,
        more: Sequence[type[Feature]] = (),
    ) -> Chosen:
        """Return the sizes and features that `options` (values by name) ask for on a device.

        more: features that this preset does not have; they are off unless an option switches them on.

        Raises:
            UserError: an option is unknown, out of its limits, or of a feature that is off.
        """
        kinds = [*self.on, *self.fitting]
        kinds += [kind for kind in more if kind not in kinds]
        sizes, *own = route(options, [PagedSizes, *kinds], [kind.name for kind in kinds])
        features: list[Feature] = []
        for kind, given in zip(kinds, own, strict=True):
            switch = options.get(kind.name)
            default = kind in self.on or (
                kind in self.fitting and kind.enabled_by_default(device, features)
            )
            on = default if switch is None else kind.switched_on(switch)
            made = kind(**given)  # which refuses wrong values, whether it is on or not
            if on:
                features.append(made)
            else:
                _refuse_options_of(kind, given, device)
        sizes = {**self.defaults.get(device.type, {}), **sizes}
        return Chosen(PagedSizes(**sizes), tuple(features))


def _refuse_options_of(
    kind: type[Feature], given: Mapping[str, Any], device: torch.device
) -> None:
    """Raise `UserError` for an option of the feature `kind`, which is off, unless its value means "off", too.

    given: the feature's options that the caller has set, by name. device: the engine's, for the message.
    """
    for name, value in given.items():
        if name not in kind.without or kind.without[name] != value:
            raise UserError(
                f"{name} is {shown(value)}, but {kind.name} is off on {device.type}: "
                f"switch it on with {kind.name}=True"
            )
