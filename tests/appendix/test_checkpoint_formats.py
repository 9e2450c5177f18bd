"""Checkpoint formats: tensors and configurations of other tools, read and refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import cuda_graphs
import forward
import paged_cache
import quant
from benchmarks.calibration import quantize_model
from common.errors import UserError
from forward.loading import load_model
from forward.model import Model
from forward.shapes import SHAPES
from parallel.loading import Part
from parallel.shard import Shard
from phases import phase_named
from phases.appendix.checkpoint_formats.configs import stored
from phases.appendix.checkpoint_formats.feature import ReadFormats
from phases.appendix.checkpoint_formats.layouts import AWQ_ORDER, TensorLayout
from phases.registry import load_engine
from quant.formats import FP8, INT4, SCHEMES, Scheme
from quant.linear import QuantLinear
from tests.compressed_checkpoints import export, pack_words
from tests.quant_kit import IDS, PARAMS, PROMPTS, SMALL, checked, exactly, logits
from tests.quant_kit import folders as folders

load: Any = partial(load_engine, phase_named("10"))
"""Phase 10 with what the appendix adds to it, as the command line loads it."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# Every layout, written here by hand and read.


def laid_out(
    kind: str,
    numbers: Tensor,
    scale: Tensor,
    zero: Tensor,
    groups: Tensor | None = None,
    less: int = 0,
) -> dict[str, Tensor]:
    """`numbers [N, K]`, `scale` and `zero [N, K / g]` as the three tools lay them out."""
    if kind == "gptq":
        groups = (
            torch.arange(numbers.shape[1]) * scale.shape[1] // numbers.shape[1]
            if groups is None
            else groups
        )
        return {
            "qweight": pack_words(numbers, 4).t().contiguous(),
            "qzeros": pack_words((zero - less).to(torch.uint8).t().contiguous() & 15, 4),
            "scales": scale.t().contiguous(),
            "g_idx": groups.to(torch.int32),
        }
    if kind == "awq":
        return {
            "qweight": awq_words(numbers.t().contiguous()),
            "qzeros": awq_words(zero.t().contiguous()),
            "scales": scale.t().contiguous(),
        }
    return {
        "weight_packed": pack_words(numbers, 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(numbers.shape),
        "weight_zero_point": pack_words(zero.t().contiguous(), 4).t().contiguous(),
    }


def awq_words(numbers: Tensor) -> Tensor:
    shuffled = torch.empty_like(numbers.view(len(numbers), -1, 8))
    shuffled[..., list(AWQ_ORDER)] = numbers.view(len(numbers), -1, 8)
    return pack_words(shuffled.flatten(1), 4)


def parts_of(seed: int = 0, zeros: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (16, 64), generator=generator, dtype=torch.uint8)
    scale = torch.rand(16, 2, generator=generator).to(torch.float16)
    zero = torch.randint(0, 16, (16, 2), generator=generator, dtype=torch.uint8)
    return numbers, scale, zero if zeros else torch.full_like(zero, 8)


def by_hand(numbers: Tensor, scale: Tensor, zero: Tensor, groups: Tensor) -> Tensor:
    """Each weight by the definition, one group index at a time."""
    groups = groups.long()
    return (numbers.float() - zero.float()[:, groups]) * scale.float()[:, groups]


LAYOUTS: dict[
    str, tuple[str, bool, bool, int]
] = {  # kind, zero points, act-order, stored less
    "gptq": ("gptq", False, False, 1),
    "gptq, zeros": ("gptq", True, False, 1),
    "gptq v2, zeros": ("gptq", True, False, 0),
    "gptq, by activation": ("gptq", False, True, 1),
    "gptq v2, zeros, by activation": ("gptq", True, True, 0),
    "awq": ("awq", True, False, 0),
    "packed": ("packed", False, False, 0),
    "packed, zeros": ("packed", True, False, 0),
}


@pytest.mark.parametrize(("kind", "zeros", "shuffled", "less"), LAYOUTS.values(), ids=LAYOUTS)
def test_four_bits(kind: Any, zeros: bool, shuffled: bool, less: int) -> None:
    """Each weight is (number - zero) * scale of its input's group, wherever the file has them."""
    numbers, scale, zero = parts_of(zeros=zeros)
    groups = torch.arange(64) // 32
    if shuffled:
        groups = groups[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    scheme = Scheme(kind, "int4", "group", group=32, zeros=zeros)
    layout = TensorLayout(
        kind, scheme, "weight_scale" if kind == "packed" else "scales", one_less=bool(less)
    )
    found = laid_out(kind, numbers, scale, zero, groups, less)
    if not zeros:
        found.pop("weight_zero_point", None)
    expect(layout, found)
    weight = checked(layout.read(found, (16, 64), "w"))
    assert (weight.order is not None) == shuffled and (weight.zero is not None) == zeros
    assert torch.equal(weight.dequantize(), by_hand(numbers, scale, zero, groups))
    x, layer = torch.randn(3, 64), QuantLinear(weight)
    assert torch.allclose(layer(x), layer.exact(x), atol=1e-4), (
        "the inputs were not put in order"
    )


def expect(
    layout: TensorLayout, found: Mapping[str, Tensor], n: int = 16, k: int = 64
) -> None:
    """The layout asks for just the tensors that there are; any float may stand for float32."""
    wanted = layout.tensors(n, k, "w")
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: shape for name, (shape, _) in wanted.items()
    }
    for name, (_, dtype) in wanted.items():
        assert found[name].dtype == dtype or dtype == torch.float32, name


DAMAGE: dict[str, tuple[str, str, Any, str]] = {
    "nan scales": ("awq", "scales", float("nan"), r"w\.scales holds NaN or infinity"),
    "infinite scales": ("awq", "scales", float("inf"), r"w\.scales holds NaN or infinity"),
    "negative scales": ("awq", "scales", -1.0, r"w\.scales holds negative scales"),
    "no such group": ("gptq", "g_idx", 2, r"w\.g_idx names groups outside of 0 to 1"),
    "a group below 0": ("gptq", "g_idx", -1, r"w\.g_idx names groups outside of 0 to 1"),
    "uneven groups": ("gptq", "g_idx", 0, r"w\.g_idx has groups that are not 32 inputs each"),
    "another shape": (
        "packed",
        "weight_shape",
        60,
        r"w\.weight_shape says \[60, 64\], but the weight is",
    ),
}


@pytest.mark.parametrize(("kind", "name", "value", "says"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused_by_the_tensors_name(
    kind: Any, name: str, value: Any, says: str
) -> None:
    numbers, scale, zero = parts_of()
    scheme = Scheme(kind, "int4", "group", group=32, zeros=True)
    layout = TensorLayout(kind, scheme, "weight_scale" if kind == "packed" else "scales")
    found = laid_out(kind, numbers, scale, zero)
    layout.read(found, (16, 64), "w")  # or the refusal would say nothing
    found[name].view(-1)[40 if name == "g_idx" else 0] = value
    with pytest.raises(UserError, match=says):
        layout.read(found, (16, 64), "w")


def test_what_a_layout_cannot_be() -> None:
    numbers, scale, zero = parts_of()
    layout = TensorLayout("gptq", Scheme("gptq", "int4", "group", group=32), "scales")
    with pytest.raises(
        UserError, match=r"w\.qzeros holds zero points, but the configuration says"
    ):
        layout.read(laid_out("gptq", numbers, scale, zero), (16, 64), "w")
    data = torch.zeros(4, 16).to(torch.float8_e4m3fn)
    data.view(torch.uint8)[1, 2] = 0x7F
    with pytest.raises(UserError, match=r"w\.weight holds NaN"):
        TensorLayout("plain", FP8).read(
            {"weight": data, "weight_scale": torch.ones(4, 1)}, (4, 16), "w"
        )
    layout = TensorLayout(
        "awq", Scheme("awq", "int4", "group", group=128, zeros=True), "scales"
    )
    with pytest.raises(
        UserError, match="w has rows of 576 weights, which groups of 128 do not divide"
    ):
        layout.tensors(8, 576, "w")


WEIGHTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
F8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKENS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}


def compressed(
    form: str = "pack-quantized", weights: Any = None, more: Any = None, **top: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **(weights or {})}, **(more or {})}
    raw = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**raw, "config_groups": {"group_0": group}, **top}


QWEN = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "GEMM",
}

KNOWN: dict[str, tuple[dict[str, Any], str, str, int, bool, str | None]] = {
    "Qwen3-8B-FP8": (QWEN, "fp8", "block", 0, False, "fp8"),
    "fp8 per tensor": ({**QWEN, "weight_block_size": None}, "fp8", "channel", 0, False, "fp8"),
    "gptq": (GPTQ, "int4", "group", 128, False, None),
    "gptq, zeros": ({**GPTQ, "sym": False, "group_size": 32}, "int4", "group", 32, True, None),
    "awq": (AWQ, "int4", "group", 128, True, None),
    "packed": (compressed(), "int4", "group", 128, False, None),
    "packed, zeros": (compressed(weights={"symmetric": False}), "int4", "group", 128, True, None),
    "packed w8a16": (compressed(weights={**W8, "group_size": None}), "int8", "channel", 0, False, None),
    "w8a8": (compressed("int-quantized", {**W8, "group_size": None}, {"input_activations": TOKENS}), "int8",
        "channel", 0, False, "int8"),
    "fp8 channels": (compressed("float-quantized", F8, {"input_activations": {**TOKENS, "type": "float"}}),
        "fp8", "channel", 0, False, "fp8"),
    "naive fp8": (compressed("naive-quantized", {**F8, "strategy": "tensor"}), "fp8", "channel", 0, False,
        None),
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "weights", "scales", "group", "zeros", "activations"), KNOWN.values(), ids=KNOWN
)
def test_known_configurations(
    raw: dict[str, Any],
    weights: str,
    scales: str,
    group: int,
    zeros: bool,
    activations: str | None,
) -> None:
    found = stored(raw)
    assert found.layout("lm_head") is None, "the head is plain in all of these"
    layout = found.layout("layers.3.mlp.down_proj")
    assert layout is not None
    scheme = layout.scheme
    assert (scheme.weights, scheme.scales, scheme.group) == (weights, scales, group)
    assert scheme.zeros == zeros, (
        f"the file says zero points: {zeros}, but it is read with {scheme.zeros}"
    )
    assert scheme.activations == activations, (
        f"inputs are {activations}, not {scheme.activations}"
    )


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "a method": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported, only fp8"),
    "static": ({**QWEN, "activation_scheme": "static"}, "activation_scheme is 'static', but only 'dynamic'"),
    "other blocks": ({**QWEN, "weight_block_size": [64, 128]}, r"weight_block_size is \[64, 128\]"),
    "rotated": ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard', but is not supported"),
    "rules": ({**GPTQ, "dynamic": {"-:.*q_proj": {}}}, "dynamic is .*, but is not supported"),
    "inputs by activation": (compressed(weights={"actorder": "group"}), "actorder is 'group', but must be"),
    "scales of powers": (compressed(weights={"scale_dtype": "float8_e8m0fnu"}), "scale_dtype 'float8_e8m0"),
    "a field of weights": (compressed(weights={"num_bitz": 3}), "weights.'num_bitz' is not known, only num"),
    "a field of a group": (compressed(more={"hadamard": True}), "'hadamard' is not known, only targets"),
    "a field of inputs": (compressed("int-quantized", W8, {"input_activations": {**TOKENS, "clip": 3}}),
        "input_activations.'clip' is not known"),
    "gptq of 3 bits": ({**GPTQ, "bits": 3}, "gptq: bits is 3, but only 4 is supported"),
    "another group": ({**GPTQ, "group_size": 100}, "group_size is 100, but must be one of 16"),
    "two groups": ({**GPTQ, "q_group_size": 64}, "group_size is 128, but q_group_size 64 means the same"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version is 'gemv', but only 'gemm'"),
    "awq without zeros": ({**AWQ, "zero_point": False}, "zero_point is False, but only True"),
    "sparse": (compressed(sparsity_config={"format": "sparse-24"}), "sparsity_config is .* not supported"),
    "nvfp4": (compressed("nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not supported"),
    "4-bit floats": (compressed(weights={"type": "float"}), "weights of 4 bits and type float"),
    "8 bits by group": (compressed(weights={"num_bits": 8}), "int8 weights with a scale for each group"),
    "static activations": (compressed("int-quantized", W8,
        {"input_activations": {**TOKENS, "dynamic": False}}), "but only 8 dynamic bits for each token"),
    "activations by tensor": (compressed("int-quantized", W8,
        {"input_activations": {**TOKENS, "strategy": "tensor"}}), "but only 8 dynamic bits for each token"),
    "scales of keys": (compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}),
        "kv_cache_scheme is .* not supported"),
    "a wrong pattern": (compressed(ignore=["re:["]), "ignore 're:.*' is too involved, or no regular"),
    "a slow pattern": (compressed(ignore=["re:(a+)+$"]), "ignore .* is too involved"),
    "many repeats": (compressed(ignore=["re:.*a.*a.*a.*a.*b"]), "ignore .* is too involved"),
    "a pattern that is none": (compressed(ignore=[3]), "ignore is 3, but must be a string"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "says"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_refused_by_name(raw: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        stored(raw)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


NAMED: dict[str, tuple[dict[str, Any], str, str]] = {  # a layer that is left out, and one that is not
    "a name": (compressed(ignore=["model.layers.0.mlp.up_proj", "model.layers.1"]),
        "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"),
    "an expression": (compressed(ignore=["re:model\\.layers\\.1\\..*"]),
        "layers.1.mlp.down_proj", "layers.11.mlp.down_proj"),
    **{f"awq, {part}": ({**AWQ, "modules_to_not_convert": [part]},
        "layers.0.self_attn.q_proj", "layers.10.mlp.up_proj") for part in ("self_attn", "model.layers.0.")},
    **{f"fp8, {part}": ({**QWEN, "modules_to_not_convert": [part]},
        "layers.0.self_attn.q_proj", "layers.10.mlp.up_proj") for part in ("model.layers.0", ".q_proj")},
}  # fmt: skip


@pytest.mark.parametrize(("raw", "plain", "other"), NAMED.values(), ids=NAMED)
def test_layers_are_left_out_by_their_names(
    raw: dict[str, Any], plain: str, other: str
) -> None:
    assert stored(raw).layout(plain) is None and stored(raw).layout(other) is not None


def test_named_layers_come_before_all_layers() -> None:
    raw = compressed()
    few = {**WEIGHTS, "group_size": 32}
    raw["config_groups"]["group_1"] = {"targets": ["re:.*q_proj$"], "weights": few}
    layouts = [
        stored(raw).layout(f"layers.0.self_attn.{name}") for name in ("q_proj", "k_proj")
    ]
    assert [layout and layout.scheme.group for layout in layouts] == [32, 128]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_checkpoint_is_the_model_that_was_written(
    folders: dict[str, Path], tmp_path: Path, scheme: str, family: str
) -> None:
    model = quantized(folders[family], SCHEMES[scheme])
    export(model, folders[family], tmp_path / "out")
    again = load_model(
        str(tmp_path / "out"), device="cpu", dtype="float32", weight_loader=ReadFormats()
    )
    assert torch.equal(logits(model), logits(again)), (
        f"{family} in {scheme} is another model when read again"
    )
    first, wanted = (
        next(x.scheme for x in again.modules() if isinstance(x, QuantLinear)),
        SCHEMES[scheme],
    )
    assert (first.weights, first.activations) == (wanted.weights, wanted.activations)


def quantized(folder: Path, scheme: Scheme) -> Model:
    model = load_model(folder, device="cpu", dtype="float32")
    quantize_model(model, scheme)
    return model


@pytest.fixture(scope="module")
def packed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = quantized(folders["llama"], INT4)
    folder = tmp_path_factory.mktemp("packed") / "int4"
    export(model, folders["llama"], folder)
    return folder


def test_only_engines_with_the_formats_take_a_quantized_checkpoint(
    packed: Path, tmp_path: Path
) -> None:
    says = "names the method 'compressed-tensors', but plain weights are all that phases before 10 read"
    for early in (forward.load, paged_cache.load, cuda_graphs.load):
        with pytest.raises(UserError, match=says):
            early(str(packed), device="cpu")
    engine = load(str(packed), device="cpu", **SMALL)
    assert [len(c.token_ids) for c in engine.generate(PROMPTS, PARAMS)] == [6, 5, 4]
    with pytest.raises(UserError, match=says):
        load(str(packed), device="cpu", quant=False, **SMALL)
    with pytest.raises(
        UserError, match="checkpoint_formats is on, but needs quant, which is off"
    ):
        load(str(packed), device="cpu", quant=False, checkpoint_formats=True, **SMALL)
    with pytest.raises(UserError, match="which only checkpoint_formats reads: it is off"):
        quant.load(str(packed), device="cpu", **SMALL)
    with pytest.raises(
        UserError, match="quantization is 'int8', but the checkpoint is quantized already"
    ):
        load(str(packed), device="cpu", quantization="int8", **SMALL)
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"] *= float("nan")
    save_file(tensors, shutil.copytree(packed, tmp_path / "bad") / "model.safetensors")
    with pytest.raises(UserError, match=r"up_proj.weight_scale holds NaN or infinity"):
        load(str(tmp_path / "bad"), device="cpu", **SMALL)


@pytest.mark.parametrize("form", ["scalar", "vector"])
def test_fp8_by_tensor(folders: dict[str, Path], tmp_path: Path, form: str) -> None:
    """As other tools write it: a scale that is a number by itself."""
    tensors = load_file(folders["llama"] / "model.safetensors")
    names = [name for name in tensors if name.endswith("_proj.weight")]
    weights = {}
    for name in names:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale if form == "scalar" else scale.reshape(1)
        weights[name] = tensors[name].float() * scale
    raw = json.loads((folders["llama"] / "config.json").read_text())
    eight = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    raw["quantization_config"] = compressed("float-quantized", {**eight, "group_size": None})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(
        str(tmp_path), device="cpu", dtype="float32", weight_loader=ReadFormats()
    )
    for name, found in weights.items():
        read = model.get_submodule(name.removeprefix("model.").removesuffix(".weight"))
        assert isinstance(read, QuantLinear) and torch.equal(read.weight.dequantize(), found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_same_model(
    folders: dict[str, Path], tmp_path: Path, scheme: str, family: str
) -> None:
    """`compressed-tensors` finds our logits. It rounds inputs to int8 in 127.5 steps, we in 127."""
    pytest.importorskip("compressed_tensors")
    import transformers as hf

    model = quantized(folders[family], SCHEMES[scheme])
    export(model, folders[family], tmp_path / "out")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        want = theirs(IDS[None]).logits[0]
    got = logits(exactly(model))
    worst = float((got - want).abs().max() / want.abs().max())
    limit = 0.05 if scheme == "w8a8" else 1e-4
    assert worst < limit, f"{family} in {scheme}: logits differ by {worst:.1e} of the largest"


def gptq_checkpoint(source: Path, plain: Path, packed: Path) -> None:
    """Write a GPTQ checkpoint in groups of 32, biases of zeros too, and the plain one that it stands for."""
    found = load_file(source / "model.safetensors")
    same, tensors = dict(found), dict(found)
    for name, weight in found.items():
        owner, _, leaf = name.rpartition(".")
        if owner.endswith("_proj") and leaf == "weight":
            n, k = weight.shape
            groups = weight.view(n, -1, 32)
            scale = groups.abs().amax(-1) / 7
            numbers = (groups / scale[..., None]).round().clamp(-8, 7)
            same[name] = (numbers * scale[..., None]).view(n, k)
            words, zero = (numbers + 8).to(torch.uint8).view(n, k), torch.full_like(scale, 8)
            del tensors[name]
            parts = laid_out("gptq", words, scale, zero, less=1) | {"bias": torch.zeros(n)}
            tensors |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}
    raw = json.loads((source / "config.json").read_text())
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    for folder, kept, config in (
        (plain, same, raw),
        (packed, tensors, {**raw, "quantization_config": method}),
    ):
        folder.mkdir()
        save_file(kept, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))


def test_a_gptq_checkpoint(folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers as hf

    gptq_checkpoint(folders["llama"], tmp_path / "plain", tmp_path / "packed")
    reference = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32
    )
    with torch.no_grad():
        want = reference(IDS[None]).logits[0]
    model = load_model(
        tmp_path / "packed", device="cpu", dtype="float32", weight_loader=ReadFormats()
    )
    torch.testing.assert_close(logits(exactly(model)), want, atol=1e-4, rtol=0)
    engine = load(str(tmp_path / "packed"), device="cpu", dtype="float32", **SMALL)
    assert [len(done.token_ids) for done in engine.generate(PROMPTS, PARAMS)] == [6, 5, 4]


class SecondOfTwo(Part):
    """Of a GPTQ weight that is cut along its inputs, and of one that is cut along its outputs."""

    def __init__(self) -> None:
        down, up = "layers.0.mlp.down_proj", "layers.0.mlp.up_proj"
        self.shard = Shard(1, 2)
        self.config = SHAPES["tiny"]
        self.weight_loader = None
        self.whole_shapes = {f"{name}.scales": (4, 16) for name in (down, up)}
        self.whole_shapes |= {f"{name}.g_idx": (128,) for name in (down, up)}
        self.shapes = {f"{down}.scales": (2, 16), f"{down}.g_idx": (64,)}
        self.shapes |= {f"{up}.scales": (4, 8), f"{up}.g_idx": (128,)}


def test_a_rank_counts_groups_from_its_own_first() -> None:
    part, groups = SecondOfTwo(), torch.arange(128) // 32
    assert part.cut("layers.0.mlp.down_proj.g_idx", groups).tolist() == [0] * 32 + [1] * 32
    assert torch.equal(part.cut("layers.0.mlp.up_proj.g_idx", groups), groups)
    layout = TensorLayout(
        "gptq", Scheme("gptq", "int4", "group", group=32, zeros=True), "scales"
    )
    found = laid_out("gptq", *parts_of())
    found["g_idx"] = part.cut("layers.0.mlp.down_proj.g_idx", groups.flip(0))
    with pytest.raises(UserError, match="outside of 0 to 1, or of other ranks"):
        layout.read(found, (16, 64), "w")
