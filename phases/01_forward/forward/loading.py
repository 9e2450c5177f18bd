"""Load a model by its name, or make one of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from common.device import pick_device, pick_dtype
from common.errors import UserError, shown
from common.models.checkpoint import assign, load_weights, stores_once
from common.models.config import ModelConfig
from common.models.hub import RANDOM, model_folder
from forward.cpu_linear import flip_linears, flipping_is_faster
from forward.model import Model
from forward.models import family_of
from forward.shapes import SHAPES
from forward.surgery import clone


class WeightLoader(Protocol):
    """Interface of a loader that may replace layers, such as by quantized ones, while a model is loaded."""

    def expect(self, model: Model) -> None:
        """Replace layers of a model on `meta`, in place, by layers with a quantized checkpoint's tensors."""

    def place(self, model: nn.Module, name: str, tensor: Tensor) -> None:
        """Store a tensor of a checkpoint, or a quantized form of it, at `name` in `model`."""

    def finish(self, model: Model) -> Model:
        """Return the model after all weights are loaded, with every layer ready to compute."""

    def changes(self, model: Model) -> bool:
        """Return True if `finish` would replace layers of a model that was loaded before."""


def load_model(
    name: str | Path | Model,
    *,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    weight_loader: WeightLoader | None = None,
) -> Model:
    """Return a model loaded for inference.

    name: a bundled model (``smollm2``, ``gemma3-270m``), a folder with a Hugging Face checkpoint, a hub id,
        or ``random:SHAPE`` for random weights of a published shape (`SHAPES`). A loaded model is returned as
        it is, unless `weight_loader` changes it: then a copy that shares all other layers.
    device: ``auto``, ``cpu``, ``cuda`` or ``mps``. dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
    seed: of random weights. The same seed gives other weights on another kind of device.
    weight_loader: None: every layer is phase 01's, and a quantized checkpoint is refused.

    Raises:
        UserError: there is no such model, or its files do not fit its configuration.
    """
    if isinstance(name, Model):
        return (
            weight_loader.finish(clone(name))
            if weight_loader is not None and weight_loader.changes(name)
            else name
        )
    where = pick_device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)  # Triton's kernels and CUDA graphs run on the current one
    kind = pick_dtype(dtype, where)
    config = config_of(name)
    if str(name).startswith(RANDOM):
        model = random_model(config, device=where, dtype=kind, seed=seed)
        return model if weight_loader is None else weight_loader.finish(model)
    folder, model = model_folder(name), skeleton(config)
    if weight_loader is not None:
        weight_loader.expect(model)
    else:
        refuse_quantized(model.config, folder)
    load_weights(
        model,
        folder,
        device=where,
        dtype=kind,
        rename=model.rename,
        transform=model.transform,
        tied=model.TIED if model.config.tie_word_embeddings else {},
        place=None if weight_loader is None else weight_loader.place,
    )
    return finish(model if weight_loader is None else weight_loader.finish(model), where)


def facts_of(model: str | Path | Model) -> ModelConfig:
    """Return the configuration of a model, given the loaded model or its name (from its `config.json`).

    Raises:
        UserError: there is no such model, or its `config.json` describes none that we have.
    """
    if isinstance(model, Model):
        return model.config
    shape = str(model).removeprefix(RANDOM)
    if shape == str(model):
        return ModelConfig.from_folder(model_folder(model))
    if shape not in SHAPES:
        raise UserError(f"model {str(model)!r}: the random shapes are {', '.join(SHAPES)}")
    return SHAPES[shape]


def config_of(name: str | Path) -> ModelConfig:
    """Return the configuration of a model by its name.

    Its embeddings are tied if the checkpoint stores one matrix for input embedding and output head.

    Raises:
        UserError: there is no such model, or its configuration or weights cannot be used.
    """
    config = facts_of(name)
    if str(name).startswith(RANDOM):
        return config
    family = family_of(config.family)
    return replace(
        config, tie_word_embeddings=stores_once(model_folder(name), family.TIED, family.rename)
    )


def refuse_quantized(config: ModelConfig, folder: Path) -> None:
    """Raise `UserError` if `config`, of the checkpoint in `folder`, says that the weights are quantized.

    It is called where no `WeightLoader` reads quantized weights.
    """
    if config.quantization is not None:
        method = shown(config.quantization["quant_method"])
        raise UserError(
            f"{folder}/config.json: quantization_config names the method {method}, but plain weights are all "
            "that phases before 10 read"
        )


def random_model(
    config: ModelConfig, *, device: str | torch.device, dtype: torch.dtype, seed: int = 0
) -> Model:
    """Return a model with random weights: matrices of variance 1 / inputs keep activations near size 1."""
    where = torch.device(device)
    model = skeleton(config)
    for name, value in random_tensors(model, where, dtype, seed):
        assign(model, name, value)
    model.tie_weights()
    return finish(model, where)


def random_tensors(
    model: Model, device: torch.device, dtype: torch.dtype, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and a random value for it, one at a time; `model` is not changed."""
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = parameter.shape
            value = torch.empty(shape, device=device, dtype=dtype)
            if isinstance(module, nn.Linear) or len(shape) > 1:
                scale = 0.02 if isinstance(module, nn.Embedding) else shape[-1] ** -0.5
                value.normal_(0.0, scale, generator=generator)
            else:  # a norm: no change, which Gemma stores as 0
                value.fill_(float(name == "weight" and model.config.family != "gemma3"))
            yield f"{path}.{name}", value


def skeleton(config: ModelConfig) -> Model:
    """Return a model on the device `meta`: its parameters have shapes and no memory.

    So each weight is allocated once, when it is loaded.
    """
    with torch.device("meta"):
        return family_of(config.family)(config)


def finish(model: Model, device: torch.device) -> Model:
    """Return `model`, of which all weights are loaded, ready for inference on `device`.

    Its parameters need no gradients, its computed tables move to the device, and on some CPUs its linears
    become `FlippedLinear`.
    """
    if device.type == "cpu" and model.dtype == torch.float32 and flipping_is_faster():
        flip_linears(model)
    # The weights are in place: this moves only the small tables that are computed, not loaded.
    return model.to(device=device).requires_grad_(False).eval()
