"""Layers in groups that have equally many, so that a block of the pool serves any group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.models.config import DeltaConfig, ModelConfig

Kind = int | None
"""Layers of a kind need the same pages: the window, or None for full attention."""
NEARLY = 1.25
"""Kinds whose numbers of layers differ by less make one group each, and the smaller is padded."""


@dataclass(frozen=True)
class LayerGroups:
    """Groups of layers, by kind.

    size: layers in a group, and so in a block: keys and values of `P` tokens of each. The last group of a
        kind may have fewer.
    kinds: for each kind its groups, and of each group its layers. Groups are numbered in this order.
    states: of the layers that keep a state instead, which are in no group; None: there are none.
    """

    size: int
    kinds: Mapping[Kind, Sequence[Sequence[int]]]
    states: DeltaConfig | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> LayerGroups:
        """Return the layout of a model's attention layers, as vLLM's cache manager has it.

        The kind with the fewest layers makes one group, and the others as many groups as they need of that
        size: 15 layers with a window and 3 without make five groups and one, of 3 layers each.
        """
        members: dict[Kind, list[int]] = {}
        for layer in config.attention_layers:
            members.setdefault(config.sliding_windows[layer], []).append(layer)
        counts = [len(layers) for layers in members.values()]
        size = max(counts) if max(counts) < NEARLY * min(counts) else min(counts)
        return cls(
            size,
            {
                kind: [layers[at : at + size] for at in range(0, len(layers), size)]
                for kind, layers in members.items()
            },
            config.delta,
        )

    @property
    def groups(self) -> list[Sequence[int]]:
        """All groups, in order."""
        return [layers for groups in self.kinds.values() for layers in groups]

    @property
    def plain(self) -> bool:
        """True if there is one kind, which keeps everything: then the paged cache has it all."""
        return set(self.kinds) == {None} and self.states is None

    def blocks(self, of_all_layers: int) -> int:
        """Return how many blocks of one group take the memory of so many blocks of all layers in groups."""
        return of_all_layers * sum(len(group) for group in self.groups) // self.size
