"""The inputs of a model's layers over a text, block by block, for methods that choose numbers by them.

Of a layer's inputs `X [tokens, K]` a method needs `H = X^T X / tokens [K, K]`: the mean squared error that a
change `D [N, K]` of the weight causes is the trace of `D H D^T`. The matrices of one block are in memory at a
time; its inputs come from the blocks below, which are quantized already.
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
"""The default calibration text: 185,000 characters of a novel by William Morris, published in 1890.

It is in the public domain: the author died in 1896. The transcription is Project Gutenberg's eBook 3261, of
the edition of 1908, with each paragraph on one line and without Project Gutenberg's own words.
"""
Hessians = dict[str, Tensor]
"""`H [K, K]` float32 of each linear layer of a block, by the layer's name within the block."""


def blocks_of(model: Model) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each transformer block of a model, in the order in which they run."""
    return [
        (f"layers.{name}", block)
        for name, block in model.get_submodule("layers").named_children()
    ]


def samples(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Return the last `count` pieces of a text, each of `length` token ids; `tokens`: the whole text.

    Raises:
        UserError: the text is shorter than one piece.
    """
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
    """Call `change(name, block, hessians)` for each transformer block, from the first to the last.

    texts: token ids of the calibration texts. hessians: `X^T X` of each linear layer's inputs for these
        texts.
    A block's inputs are computed by the blocks before it, after `change` has quantized them.
    """
    blocks = blocks_of(model)
    calls = [_arguments(model, text, [block for _, block in blocks]) for text in texts]
    inputs = [first for first, _ in calls]
    for number, (name, block) in enumerate(blocks):
        with watch(block) as hessians:
            for x, (_, rest) in zip(inputs, calls, strict=True):
                block(x, *rest[number])
        change(name, block, hessians)
        inputs = [block(x, *rest[number]) for x, (_, rest) in zip(inputs, calls, strict=True)]


def _arguments(
    model: Model, text: Sequence[int], blocks: Sequence[nn.Module]
) -> tuple[Tensor, list[tuple[Any, ...]]]:
    """Return the first block's input for a text, and each block's further arguments (such as cos and sin).

    text: token ids. blocks: the model's blocks, in order.
    """
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
    """Yield an empty dictionary that gets the Hessian `X^T X` of each linear layer's input in `block`.

    Within the `with` block, every call of `block` adds its inputs.
    """
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
