"""KV cache groups: layers in groups of one size, so that a block of the pool serves any group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.models.config import DeltaConfig, ModelConfig

Window = int | None
"""Layers of one window (None: full attention) need the same pages."""
NEARLY_EQUAL = 1.25
"""Types whose numbers of layers differ by a smaller factor make one group each; the smaller is padded."""


@dataclass(frozen=True)
class LayerGroups:
    """A model's KV cache groups: layers with the same window that share block tables.

    size: layers of a group, and so of a block, which has keys and values of `P` tokens for each of them.
        The last group of a window may have fewer.
    by_window: for each window (None: full attention) its groups, each as the indices of its layers. Groups
        are numbered in this order.
    states: configuration of the Gated DeltaNet layers, which are in no group; None: there are none.
    """

    size: int
    by_window: Mapping[Window, Sequence[Sequence[int]]]
    states: DeltaConfig | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> LayerGroups:
        """Return the KV cache groups of a model's attention layers, equal to those that vLLM makes.

        The window with the fewest layers makes one group, and the others as many groups as they need of that
        size: 15 layers with a window and 3 with full attention make five groups and one, of 3 layers each.
        Numbers of layers within a factor of 1.25 make one group each, of the larger size.
        """
        members: dict[Window, list[int]] = {}
        for layer in config.attention_layers:
            members.setdefault(config.sliding_windows[layer], []).append(layer)
        counts = [len(layers) for layers in members.values()]
        size = max(counts) if max(counts) < NEARLY_EQUAL * min(counts) else min(counts)
        return cls(
            size,
            {
                window: [layers[at : at + size] for at in range(0, len(layers), size)]
                for window, layers in members.items()
            },
            config.delta,
        )

    @property
    def groups(self) -> list[Sequence[int]]:
        """Return all groups in order, each as the indices of its layers in the model."""
        return [layers for groups in self.by_window.values() for layers in groups]

    @property
    def full_attention_only(self) -> bool:
        """Return True if no layer has a sliding window or a state, so that plain paged attention suffices."""
        return set(self.by_window) == {None} and self.states is None

    def blocks(self, of_all_layers: int) -> int:
        """Return how many blocks of one group fit the memory of `of_all_layers` blocks of all layers."""
        return of_all_layers * sum(len(group) for group in self.groups) // self.size
