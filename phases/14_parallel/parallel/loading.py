"""Every rank loads its part of a model, and no rank ever holds the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.device import pick_device, pick_dtype
from common.errors import UserError
from common.models.checkpoint import assign, load_weights
from common.models.config import ModelConfig
from common.models.hub import RANDOM, model_folder
from forward.loading import (
    WeightLoader,
    config_of,
    finish,
    random_tensors,
    refuse_quantized,
    skeleton,
)
from forward.model import Model
from parallel.layers import RowLinear, VocabularyEmbedding
from parallel.ranks import Ranks
from parallel.shard import ROWS, VOCABULARY, Shard, Slice
from quant.formats import BLOCK, Scheme
from quant.linear import QuantLinear, quantized
from quant.loading import Quantize
from quant.weights import QuantizedWeight


def load_part(
    name: str | Path | Model,
    *,
    device: str,
    dtype: str,
    weight_loader: WeightLoader | None,
    ranks: Ranks,
) -> Model:
    """Return this rank's shard of a model, loaded; its layers sum partial results over `ranks`.

    name: folder, hub name or random model. device, dtype: as text; "auto" chooses. weight_loader: quantizes;
        None: weights stay as they are. Random and quantized weights, too, are those that one GPU would have.
    """
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    config = config_of(str(name))
    part = Part(config, ranks, weight_loader)
    if str(name).startswith(RANDOM):
        for tensor, value in random_tensors(part.whole, where, kind, 0):
            part.place(tensor, part.cut(tensor, value))
    else:
        folder = model_folder(str(name))
        if weight_loader is None:
            refuse_quantized(config, folder)
        load_weights(
            part.whole,
            folder,
            device=where,
            dtype=kind,
            rename=part.own.rename,
            transform=part.own.transform,
            tied=part.own.TIED if config.tie_word_embeddings else {},
            place=lambda _, tensor, value: part.place(tensor, value),
            read=part.read,
        )
    part.own.tie_weights()
    model = finish(
        part.own if weight_loader is None else weight_loader.finish(part.own), where
    )
    for path in [path for path, _ in model.named_modules() if path.endswith(ROWS)]:
        model.set_submodule(path, RowLinear(model.get_submodule(path), ranks))
    return model


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class Part:
    """A rank's shard of a model that is being loaded.

    config: of the whole model. weight_loader: quantizes weights; None: they stay as they are.
    whole: the whole model on the device `meta`, for its tensors' names and shapes. own: this rank's model.
    """

    def __init__(
        self, config: ModelConfig, ranks: Ranks, weight_loader: WeightLoader | None
    ) -> None:
        self.shard = Shard(ranks.rank, ranks.size)
        self.config = config
        self.weight_loader = weight_loader
        self.whole, self.own = skeleton(config), skeleton(self.shard.config(config))
        # The one size that its configuration does not hold is the vocabulary's.
        hidden = config.hidden_size
        first, count, room = self.shard.vocabulary(config.vocab_size)
        with torch.device("meta"):
            self.own.embed_tokens = VocabularyEmbedding(room, hidden, first, count, ranks)
            self.own.lm_head = nn.Linear(hidden, room, bias=False)
        self.own.tie_weights()
        if weight_loader is not None:
            weight_loader.expect(self.whole)
            weight_loader.expect(self.own)
        self.whole_shapes, self.shapes = _shapes(self.whole), _shapes(self.own)

    def whole_first(self, name: str) -> Scheme | None:
        """Return the quantization scheme of the weight `name` if it is quantized before it is cut, else None.

        That is necessary if its scales are over all inputs, and the ranks divide the inputs.
        """
        owner, _, leaf = name.rpartition(".")
        rows, loader = leaf == "weight" and owner.endswith(ROWS), self.weight_loader
        return loader.scheme if rows and isinstance(loader, Quantize) else None

    def slice(self, name: str) -> Slice | None:
        """Return the `Slice` (dim, start, length) of the tensor `name` that this rank reads; None: all."""
        if self.whole_first(name) is not None:
            return None
        return self.shard.cut(
            name, self.whole_shapes[name], self.shapes[name], self.config.num_kv_heads
        )

    def read(self, name: str, file: Any, stored: str) -> Tensor:
        """Return this rank's part of the tensor `name`, from an open checkpoint, where its name is `stored`.

        With a `slice`, only the part is read: indexing the result of `file.get_slice(stored)` reads it, and
        `_finish` completes it. Without one, `file.get_tensor(stored)` reads the whole tensor; it goes through
        the model family's `transform` and then through `cut`.
        """
        found = self.slice(name)
        if found is None:
            return self.cut(name, self.own.transform(name, file.get_tensor(stored)))
        view, stop = file.get_slice(stored), found.start + found.length
        part = view[found.start : stop] if found.dim == 0 else view[:, found.start : stop]
        return self._finish(name, part)

    def cut(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of `value`, the whole tensor `name`, finished by `_finish`.

        The part is the tensor's `slice`, or all of it if that is None. Where a slice reaches beyond the
        tensor's end, the part is what there is.
        """
        found = self.slice(name)
        if found is not None:
            length = min(found.length, value.shape[found.dim] - found.start)
            value = value.narrow(found.dim, found.start, length)
        return self._finish(name, value)

    def _finish(self, name: str, value: Tensor) -> Tensor:
        """Return `value`, this rank's part of the tensor `name`, as the model stores it.

        A vocabulary is padded with zeros, a bias that only rank 0 has is zeroed on other ranks, and GPTQ's
        `g_idx` (the group of each input) is counted from the first group of this rank.
        """
        owner, _, leaf = name.rpartition(".")
        if self.shard.rank and self.shard.first_alone(name):
            return torch.zeros_like(value)
        if owner in VOCABULARY and leaf == "weight" and len(value) < self.shapes[name][0]:
            padding = value.new_zeros(self.shapes[name][0] - len(value), *value.shape[1:])
            return torch.cat([value, padding])
        # GPTQ's: each input's group, counted from the first whose scales are here.
        if leaf == "g_idx":
            scales = self.slice(f"{owner}.scales")
            return value if scales is None or scales.dim else value - scales.start
        return value

    def place(self, name: str, value: Tensor) -> None:
        """Store `value`, a finished part, in this rank's model as the tensor `name`.

        The value is quantized if the engine's options say so.
        """
        if value.is_meta:  # tied: the other one is enough
            return
        owner = name.rpartition(".")[0]
        layer = self.own.get_submodule(owner)
        scheme = self.whole_first(name)
        if scheme is not None and isinstance(layer, nn.Linear):
            weight = cut_inputs(quantized(value, scheme, owner), self.shard, name)
            self.own.set_submodule(owner, QuantLinear(weight, layer.bias))
        elif self.weight_loader is not None:
            self.weight_loader.place(self.own, name, value.contiguous().clone())
        else:
            assign(self.own, name, value.contiguous().clone())


def cut_inputs(weight: QuantizedWeight, shard: Shard, name: str) -> QuantizedWeight:
    """Return a rank's part of a quantized weight that is cut along its inputs, the last dimension.

    Quantized numbers, and scales and zero points of blocks and groups, are cut in `shard.size` equal parts,
    in the order of ranks, and copied. Scales of output channels are whole on every rank.

    shard: of the rank. name: of the weight, for errors.

    Raises:
        UserError: a scale belongs to inputs of two ranks.
    """
    inputs, scheme = weight.shape[1] // shard.size, weight.scheme
    together = {"group": scheme.group, "block": BLOCK}.get(scheme.scales, 1)
    if inputs % together:
        raise UserError(
            f"tensor_parallel is {shard.size}, which leaves {inputs} inputs of {name} to a rank, but "
            f"{together} of them share a scale: choose another quantization or a smaller group_size"
        )

    def part(tensor: Tensor) -> Tensor:
        length = tensor.shape[1] // shard.size
        return tensor.narrow(1, shard.rank * length, length).contiguous()

    shared = scheme.scales == "channel"
    return replace(
        weight,
        data=part(weight.data),
        scale=weight.scale if shared else part(weight.scale),
        zero=None if weight.zero is None else part(weight.zero),
    )
