"""Checkpoints of the format compressed-tensors, as other tools write them.

Format: https://github.com/vllm-project/compressed-tensors, its `pack-quantized`, `int-quantized` and
`float-quantized`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from common.device import pick_dtype
from common.models.fields import read_object
from forward.model import Model
from quant.formats import BLOCK, Scheme
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight, pack_nibbles, unpack_nibbles


def export(model: Model, source: Path, folder: Path) -> None:
    """Write a quantized model as a compressed-tensors checkpoint; all its layers share one scheme.

    model: its layers are those of `quantize_model`. source: the checkpoint that it was loaded from.
    """
    raw = read_object(source / "config.json")
    dtype = pick_dtype(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"))
    config = raw | {"quantization_config": configuration(model)}
    found = {name: tensor.cpu().contiguous() for name, tensor in tensors(model, dtype).items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def tensors(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return all tensors of a quantized model by their names in a checkpoint.

    dtype: of the tensors that are not quantized.
    """
    found: dict[str, Tensor] = {}
    tied = model.TIED if model.config.tie_word_embeddings else {}
    for owner, module in model.named_modules():
        parts: dict[str, Tensor] = {}
        if isinstance(module, QuantLinear):
            parts = layer_tensors(module.weight)
            if module.bias is not None:
                parts["bias"] = module.bias.data.to(dtype)
        else:
            parts = {
                name: tensor.data.to(dtype)
                for name, tensor in module.named_parameters(recurse=False)
            }
        for name, tensor in parts.items():
            whole = f"{owner}.{name}"
            if whole not in tied:
                found[whole if whole.startswith("lm_head.") else f"model.{whole}"] = tensor
    return found


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack unsigned numbers `[R, C]` of `bits` bits into int32 words `[R, ceil(C * bits / 32)]`, padded
    with zeros.
    """
    numbers = torch.nn.functional.pad(
        numbers.to(torch.uint8), (0, -numbers.shape[1] % (32 // bits))
    )
    packed = numbers if bits == 8 else pack_nibbles(numbers)
    # A single row may have any strides.
    return packed.flatten().view(torch.int32).view(len(numbers), -1)


def layer_tensors(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Return the tensors to store for one quantized layer, by the last part of their names
    (`weight_packed`).
    """
    scheme, (n, k) = weight.scheme, weight.shape
    assert weight.order is None and weight.zero is None, "not what is made here"
    if scheme.weights == "int4" or (scheme.weights == "int8" and scheme.activations is None):
        four = scheme.weights == "int4"
        numbers = unpack_nibbles(weight.data) if four else weight.data.view(torch.uint8) ^ 128
        return {
            "weight_packed": pack_words(numbers, scheme.bits),
            "weight_scale": weight.scale if four else weight.scale[:, None],
            "weight_shape": torch.tensor([n, k]),
        }
    scale = weight.scale[:, None] if scheme.scales == "channel" else weight.scale
    return {"weight": weight.data, "weight_scale": scale}


def configuration(model: Model) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model: a group for each scheme, with the names of
    its layers.
    """
    layers = {
        name: part for name, part in model.named_modules() if isinstance(part, QuantLinear)
    }
    kinds: dict[Scheme, list[str]] = defaultdict(list)
    for name, layer in layers.items():
        kinds[layer.scheme].append(name)
    groups = {}
    for number, (scheme, names) in enumerate(kinds.items()):
        ends = sorted({name.rpartition(".")[2] for name in names})
        targets = ["Linear"] if len(kinds) == 1 else [f"re:.*{end}$" for end in ends]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _arguments(
                scheme.weights,
                scheme.scales,
                group_size=scheme.group or None,
                block_structure=[BLOCK, BLOCK] if scheme.scales == "block" else None,
            ),
            "input_activations": scheme.activations
            and _arguments(scheme.activations, "token", dynamic=True),
            "output_activations": None,
            "format": _format(scheme),
        }
    plain = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": groups["group_0"]["format"],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": [name if name == "lm_head" else f"model.{name}" for name in plain],
        "kv_cache_scheme": None,
        "config_groups": groups,
    }


def _format(scheme: Scheme) -> str:
    if scheme.weights == "fp8":
        return "float-quantized"
    return "int-quantized" if scheme.activations else "pack-quantized"


def _arguments(numbers: str, strategy: str, **more: Any) -> dict[str, Any]:
    kind = "float" if numbers == "fp8" else "int"
    made = {"num_bits": 4 if numbers == "int4" else 8, "type": kind, "symmetric": True}
    return {**made, "strategy": strategy, "dynamic": False, **more}
