"""The inputs of a model's layers over a text, block by block, so that methods can ask which weights matter.

A method needs of a layer's inputs `X [tokens, K]` no more than `X^T X / tokens [K, K]`: the mean error that a
change `D [N, K]` of the weight makes in the output is the trace of `D H D^T`. One block's matrices are in
memory at a time, made with what the blocks below, quantized already, let through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UserError
from forward.attention import RecomputeAttention
from forward.model import Model

TEXT = Path(__file__).with_name("news_from_nowhere.txt")
"""The calibration text by default: the first 185,000 characters of William Morris, "News from Nowhere", 1890.

It is in the public domain: the author died in 1896. The transcription is Project Gutenberg's eBook 3261, of
the edition of 1908, with each paragraph on one line and without Project Gutenberg's own words.
"""
Hessians = dict[str, Tensor]
"""Of each linear layer of a block, under its name within it: `[K, K]` float32."""


def blocks_of(model: Model) -> list[tuple[str, nn.Module]]:
    """The model's blocks in order, by name."""
    return [
        (f"layers.{name}", block)
        for name, block in model.get_submodule("layers").named_children()
    ]


def samples(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """The last `count` pieces of `length` tokens of a text; it must hold one."""
    pieces = [
        list(tokens[at : at + length]) for at in range(0, len(tokens) - length + 1, length)
    ]
    if not pieces:
        raise UserError(
            f"the calibration text has {len(tokens)} tokens, but must have {length} at least"
        )
    return pieces[-count:]


@torch.no_grad()
def sweep(
    model: Model,
    texts: Sequence[Sequence[int]],
    change: Callable[[str, nn.Module, Hessians], None],
) -> None:
    """Call `change(name, block, hessians)` for each block from the first to the last.

    What `change` makes of a block is what the blocks above it see.
    """
    blocks = blocks_of(model)
    calls = [_arguments(model, text, [block for _, block in blocks]) for text in texts]
    inputs = [first for first, _ in calls]
    for place, (name, block) in enumerate(blocks):
        with watch(block) as hessians:
            for x, (_, rest) in zip(inputs, calls, strict=True):
                block(x, *rest[place])
        change(name, block, hessians)
        inputs = [block(x, *rest[place]) for x, (_, rest) in zip(inputs, calls, strict=True)]


def _arguments(
    model: Model, text: Sequence[int], blocks: Sequence[nn.Module]
) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """Return the first block's input, and the other arguments of every block."""
    seen: list[tuple[Any, ...]] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: seen.append(given))
        for block in blocks
    ]
    ids = torch.tensor(list(text), device=model.device)
    model(ids, torch.arange(len(ids), device=model.device), RecomputeAttention())
    for hook in hooks:
        hook.remove()
    return seen[0][0], [given[1:] for given in seen]


@contextmanager
def watch(block: nn.Module) -> Iterator[Hessians]:
    """Gather the linear layers' matrices from whatever the block computes meanwhile."""
    found: Hessians = {}
    counts: Counter[str] = Counter()

    def add(name: str, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1]).float()
        found[name] = found[name].addmm_(flat.t(), flat) if name in found else flat.t() @ flat
        counts[name] += len(flat)

    hooks = [
        layer.register_forward_pre_hook(lambda _, given, name=name: add(name, given[0]))
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    yield found
    for hook in hooks:
        hook.remove()
    for name in found:
        found[name] /= counts[name]
