"""Write a quantized model as a checkpoint of the format compressed-tensors, which other engines read as well.

Format: https://github.com/vllm-project/compressed-tensors, its `pack-quantized`, `int-quantized` and
`float-quantized`.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from common.device import pick_dtype
from common.errors import UserError
from common.files import read_bytes
from common.models.fields import read_object
from common.text.tokenizer_files import MOST_TOKENIZER_BYTES
from forward.model import Model
from phases.appendix.checkpoint_formats.layouts import pack_words
from quant.formats import BLOCK, Scheme
from quant.linear import QuantLinear
from quant.weights import QuantizedWeight, unpack_nibbles

_KEPT = (
    "generation_config.json",
    "tokenizer*.*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.j*",
    "additional_chat_templates/*.jinja",
)


def check_source(folder: Path) -> None:
    """Raise `UserError` unless the checkpoint in `folder` is one text model that is not quantized yet."""
    raw = read_object(folder / "config.json")
    if "text_config" in raw or raw.get("model_type") == "gpt2":
        kind = "gpt2" if raw.get("model_type") == "gpt2" else "a multimodal model"
        raise UserError(f"{folder} holds {kind}, which `quantize` cannot write")
    if raw.get("quantization_config") is not None:
        raise UserError(
            f"{folder} is quantized already: its config.json has a quantization_config"
        )


def check_target(folder: Path) -> Path:
    """Return `folder` as an absolute path. Raises `UserError` unless it is empty or does not exist."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there already: name a folder that is not")
        return folder.resolve()
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None


def export(model: Model, source: Path, folder: Path) -> None:
    """Write a quantized model as a compressed-tensors checkpoint; all its layers share one scheme.

    Args:
        model: its layers are those of `quantize_model`.
        source: the checkpoint that it was loaded from, whose configuration and tokenizer are copied.
        folder: must not exist or be empty. It appears when all of it is written.

    Raises:
        UserError: the folder or a file cannot be written.
    """
    folder = check_target(folder)
    work = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        for path in (path for name in _KEPT for path in source.glob(name)):
            kept = work / path.relative_to(source)
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(read_bytes(path, MOST_TOKENIZER_BYTES))
        raw = read_object(source / "config.json")
        dtype = pick_dtype(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"))
        config = raw | {"quantization_config": configuration(model)}
        found = tensors(model, dtype)
        config["tie_word_embeddings"] = not any(name.startswith("lm_head.") for name in found)
        (work / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        found = {name: tensor.cpu().contiguous() for name, tensor in found.items()}
        save_file(found, work / "model.safetensors", {"format": "pt"})
        work.rename(folder)
    except (OSError, SafetensorError) as error:
        # The latter is what a full disk is, for the weights.
        said = getattr(error, "strerror", None) or error
        raise UserError(f"{folder} cannot be written: {said}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


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
    if len({scheme.weights for scheme in kinds}) != 1:
        raise UserError("a checkpoint is written with layers of one kind only")
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
