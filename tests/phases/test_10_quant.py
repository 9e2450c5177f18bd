"""Phase 10 as a whole: loading, checkpoints, engines, keys and values, methods, and the files written."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cuda_graphs
import forward
import paged_cache
import quant
from benchmarks.defined import DefinedLinear, defined, defined_layer
from benchmarks.fidelity import StoredAttention, compare, difference
from common.errors import UserError
from common.models.checkpoint import assign
from common.sampling.params import SamplingParams
from forward.attention import RecomputeAttention
from forward.loading import load_model
from forward.model import Model
from forward.surgery import clone
from paged_cache.pool import encode
from phases import find_phase, registry
from phases.cli import main
from quant import awq, gptq, rtn
from quant.calibrate import blocks_of, samples, sweep, watch
from quant.export import configuration, export
from quant.formats import INT4, SCHEMES
from quant.kv import KV_DTYPES, StoredKV, head_scales, kv_format, sample
from quant.layouts import pack_words
from quant.linear import QuantLinear
from quant.loading import Quantize
from quant.methods import quantize_model

SMALL = {"max_rows": 4, "max_len": 64, "step_tokens": 64, "block_size": 4, "cache_bytes": 1 << 20}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41, 42], [3]]
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=4, ignore_eos=True),
]
IDS = torch.arange(1, 40)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def logits(model: Model, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(len(ids)), RecomputeAttention()))


def exactly(model: Model) -> Model:
    """The same model, every quantized layer multiplied by its definition."""

    class Exact(nn.Module):
        def __init__(self, layer: QuantLinear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer.exact(x)

    model = clone(model)
    for name in [name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)]:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, Exact(model.get_submodule(name)))  # type: ignore[arg-type]
    return model


def families() -> dict[str, Any]:
    import transformers as hf

    shape = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
    }
    return {
        "llama": hf.LlamaConfig(**shape, tie_word_embeddings=False),
        "qwen2": hf.Qwen2Config(**shape, tie_word_embeddings=True),
        "qwen3": hf.Qwen3Config(**shape, head_dim=16, tie_word_embeddings=False),
        "gemma3": hf.Gemma3TextConfig(**shape, head_dim=16, tie_word_embeddings=True, sliding_window=16),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of each family, with outliers among its inputs."""
    import transformers as hf

    found = {}
    for name, config in families().items():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config)
        for parameter, weight in model.named_parameters():
            if parameter.endswith("layernorm.weight"):
                weight.data[::16] += 3  # a few inputs are larger than the others, as in real models
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def tiny() -> Model:
    return load_model("random:tiny", device="cpu", dtype="float32")


# Made while loading.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loading_gives_what_rounding_a_loaded_model_gives(folders: dict[str, Path], scheme: str) -> None:
    made = Quantize(SCHEMES[scheme], SCHEMES["int8"])
    loaded = load_model(str(folders["qwen2"]), device="cpu", dtype="float32", linears=made)
    plain = load_model(str(folders["qwen2"]), device="cpu", dtype="float32")
    after = load_model(plain, linears=made)
    assert after is not plain and not any(isinstance(layer, QuantLinear) for layer in plain.modules())
    layers = {name: layer for name, layer in loaded.named_modules() if isinstance(layer, QuantLinear)}
    assert len(layers) == 2 * 7 + 1, "every linear layer, and the head"
    for name, layer in layers.items():
        other = after.get_submodule(name)
        assert isinstance(other, QuantLinear)
        assert torch.equal(layer.weight.dequantize(), other.weight.dequantize()), name
        assert not any(tensor.is_meta for tensor in (*layer.buffers(), *layer.parameters())), name
    assert torch.equal(logits(loaded), logits(after))


def test_never_two_copies_of_the_layers(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer's weight is quantized, none of those before it is alive as it was."""
    import quant.loading

    plain: list[int] = []
    real = quant.loading.quantized

    def watched(weight: Tensor, scheme: Any, name: str) -> Any:
        model = models[0]
        alive = [
            other
            for other, layer in model.named_modules()
            if isinstance(layer, nn.Linear) and not layer.weight.is_meta and other != name
        ]
        plain.append(len(alive))
        return real(weight, scheme, name)

    models: list[Any] = []

    class Watching(Quantize):
        def expect(self, model: Model) -> None:
            models.append(model)
            super().expect(model)

    monkeypatch.setattr(quant.loading, "quantized", watched)
    both = Watching(SCHEMES["int8"], SCHEMES["int8"])
    load_model(str(folders["llama"]), device="cpu", dtype="float32", linears=both)
    assert plain == [0] * 15, f"plain layers alive while each layer was quantized: {plain}"


def test_the_callers_model_stays_as_it_is(tiny: Model) -> None:
    before = {name: id(part) for name, part in tiny.named_modules()}
    engine = quant.load(tiny, quantization="int4", **SMALL)
    assert {name: id(part) for name, part in tiny.named_modules()} == before
    assert engine.ledger.weights < tiny.weight_bytes / 2
    assert quant.load(tiny, **SMALL).runner.model is tiny, "nothing to do, so nothing is copied"


def test_weights_take_the_bytes_that_they_should() -> None:
    """Of Qwen3-8B, from its shape alone."""
    from forward.shapes import SHAPES

    with torch.device("meta"):
        from forward.models import FAMILIES

        config = SHAPES["qwen3-8b"]
        model = FAMILIES[config.family](config)
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    rest = sum(2 * p.numel() for p in model.parameters()) - sum(
        2 * x.weight.numel() for x in linears.values()
    )

    def total(scheme: str, head: str | None) -> float:
        size = rest
        for name, layer in linears.items():
            n, k = layer.weight.shape
            kind = SCHEMES[head] if name == "lm_head" and head else SCHEMES[scheme]
            if name == "lm_head" and not head:
                size += 2 * n * k
                continue
            scales = torch.Size(kind.scale_shape(n, k)).numel()
            size += n * k * kind.bits // 8 + scales * (2 if kind.weights == "int4" else 4)
        return size / 1e9

    assert total("fp8-block", None) <= 9.5 and total("fp8", "fp8") <= 8.9
    assert total("int4", None) <= 6.2 and total("int4", "int8") <= 5.6


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a scheme": (
        {"quantization": "int3"},
        "quantization is 'int3', but must be one of fp8.*did you mean 'int",
    ),
    "a head": ({"head": "int5"}, "head is 'int5', but must be one of auto, none"),
    "a group": ({"group_size": 100}, "group_size is 100, but must be one of 16, 32"),
    "no number": ({"group_size": "many"}, "group_size is 'many', but must be an integer"),
    "keys": ({"kv_cache": "fp4"}, "kv_cache is 'fp4', but must be one of auto, none, fp8"),
    "off": ({"quant": False, "quantization": "int8"}, "quantization is 'int8', but quant is off on cpu"),
}


@pytest.mark.parametrize(("options", "says"), OPTIONS.values(), ids=OPTIONS)
def test_wrong_options(tiny: Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        quant.load(tiny, **options, **SMALL)


def test_rows_that_no_group_divides(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\w+ has rows of 40 weights, which no group of 16 or more divides"):
        rtn_of = Quantize(INT4)
        layer = nn.Linear(40, 8)
        QuantLinear.of(layer, rtn_of.scheme, "some_layer")  # type: ignore[arg-type]


# Checkpoints.


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_checkpoint_goes_out_and_in(
    folders: dict[str, Path], tmp_path: Path, scheme: str, family: str
) -> None:
    model = load_model(str(folders[family]), device="cpu", dtype="float32")
    quantize_model(model, SCHEMES[scheme])
    export(model, folders[family], tmp_path / "out")
    again = load_model(str(tmp_path / "out"), device="cpu", dtype="float32", linears=Quantize())
    assert torch.equal(logits(model), logits(again)), f"{family} in {scheme} is another model when read again"
    first = next(layer for layer in again.modules() if isinstance(layer, QuantLinear))
    assert (
        first.scheme.weights == SCHEMES[scheme].weights
        and first.scheme.activations == SCHEMES[scheme].activations
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("flag", [True, False])
def test_a_written_file_says_whether_the_head_is_stored(
    folders: dict[str, Path], tmp_path: Path, family: str, flag: bool
) -> None:
    """Other engines believe the flag, whatever the flag of the source was."""
    source = shutil.copytree(folders[family], tmp_path / "source")
    raw = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": flag}
    (source / "config.json").write_text(json.dumps(raw))
    model = load_model(source, device="cpu", dtype="float32")
    quantize_model(model, INT4)
    export(model, source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert written["tie_word_embeddings"] == ("lm_head.weight" not in stored) == (family == "qwen2")


@pytest.fixture(scope="module")
def packed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    quantize_model(model, INT4)
    folder = tmp_path_factory.mktemp("packed") / "int4"
    export(model, folders["llama"], folder)
    return folder


def test_phases_before_refuse_a_quantized_checkpoint_and_this_one_takes_it(packed: Path) -> None:
    says = "names the method 'compressed-tensors', but plain weights are all that phases before 10 read"
    for load in (forward.load, paged_cache.load, cuda_graphs.load):
        with pytest.raises(UserError, match=says):
            load(str(packed), device="cpu")
    engine = quant.load(str(packed), device="cpu", **SMALL)
    assert [len(c.token_ids) for c in engine.generate(PROMPTS, PARAMS)] == [6, 5, 4]
    with pytest.raises(UserError, match=says):
        quant.load(str(packed), device="cpu", quant=False, **SMALL)
    with pytest.raises(UserError, match="quantization is 'int8', but the checkpoint is quantized already"):
        quant.load(str(packed), device="cpu", quantization="int8", **SMALL)


def test_the_head_of_a_quantized_checkpoint_may_be_quantized_as_well(packed: Path) -> None:
    small = quant.load(str(packed), device="cpu", head="int8", **SMALL)
    assert isinstance(small.runner.model.lm_head, QuantLinear), "the head was to be int8, but is plain"
    assert isinstance(quant.load(str(packed), device="cpu", **SMALL).runner.model.lm_head, nn.Linear)


FILES: dict[str, tuple[str, Any, str]] = {
    "truncated scales": (
        "weight_scale",
        lambda x: x[:, :-1].contiguous(),
        r"misshapen: layers.0.mlp.up_proj.weight_scale \[128, 0\] instead of \[128, 1\]",
    ),
    "nan scales": ("weight_scale", lambda x: x * float("nan"), r"up_proj.weight_scale holds NaN or infinity"),
    "another group": (
        "weight_scale",
        lambda x: x.repeat(1, 2),
        r"up_proj.weight_scale \[128, 2\] instead of \[128, 1\]",
    ),
    "other integers": (
        "weight_packed",
        lambda x: x.to(torch.int64),
        "weight_packed of type I64 instead of torch.int32",
    ),
    "a lie": ("weight_shape", lambda x: x * 2, r"up_proj.weight_shape says \[256, 128\], but the weight is"),
    "nothing": ("weight_scale", None, "1 missing: layers.0.mlp.up_proj.weight_scale"),
}


@pytest.mark.parametrize(("leaf", "change", "says"), FILES.values(), ids=FILES)
def test_damaged_files_are_refused_by_the_tensors_name(
    packed: Path, tmp_path: Path, leaf: str, change: Any, says: str
) -> None:
    shutil.copytree(packed, tmp_path / "bad")
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{leaf}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    with pytest.raises(UserError, match=says) as caught:
        quant.load(str(tmp_path / "bad"), device="cpu", **SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["scalar", "vector"])
def test_fp8_by_tensor_with_scales_of_keys_and_values(
    folders: dict[str, Path], tmp_path: Path, form: str
) -> None:
    """As other tools write it: a scale that is a number by itself, and scales of keys and values."""
    tensors = load_file(folders["llama"] / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        found = rtn.quantize(tensors[name], quant.Scheme("x", "fp8", "tensor"))
        tensors[name] = found.data
        tensors[f"{name}_scale"] = found.scale.reshape(()) if form == "scalar" else found.scale
    for layer in range(2):
        for side, value in (("k_scale", 0.02), ("v_scale", 0.01)):
            tensors[f"model.layers.{layer}.self_attn.{side}"] = torch.tensor([value])
    raw = json.loads((folders["llama"] / "config.json").read_text())
    eight = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    raw["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": eight,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": eight}},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    engine = quant.load(str(tmp_path), device="cpu", **SMALL)
    pool = engine.runner.attention.pool
    assert pool.data.dtype == torch.float8_e4m3fn
    assert pool.layers[1].k_scale.tolist() == pytest.approx([0.02] * 2)
    assert pool.layers[1].v_scale.tolist() == pytest.approx([0.01] * 2)
    assert (
        not quant.load(str(tmp_path), device="cpu", kv_cache="none", **SMALL)
        .runner.attention.pool.layers[0]
        .scaled
    )
    for value, says in ((float("nan"), "holds NaN"), (0.0, "is 0, but must be above 0")):
        tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([value])
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=rf"layers\.1\.self_attn\.v_scale {says}"):
            quant.load(str(tmp_path), device="cpu", **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_what_is_written(
    folders: dict[str, Path], tmp_path: Path, scheme: str, family: str
) -> None:
    """`compressed-tensors` finds our logits. It rounds inputs to int8 in 127.5 steps, we in 127."""
    pytest.importorskip("compressed_tensors")
    import transformers as hf

    model = load_model(str(folders[family]), device="cpu", dtype="float32")
    quantize_model(model, SCHEMES[scheme])
    export(model, folders[family], tmp_path / "out")
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        want = theirs(IDS[None]).logits[0]
    got = logits(exactly(model))
    worst = float((got - want).abs().max() / want.abs().max())
    limit = 0.05 if scheme == "w8a8" else 1e-4
    assert worst < limit, f"{family} in {scheme}: logits differ by {worst:.1e} of the largest"


WRITTEN: dict[str, dict[str, Any]] = {
    "W4A16": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    "W4A16_ASYM": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
    "W8A16": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "W4A16_CHANNEL": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "channel"},
    "W8A16_GROUP": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    "FP8": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "FP8_TENSOR": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_what_compressed_tensors_writes_is_read(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    ct = pytest.importorskip("compressed_tensors")
    import transformers as hf
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = hf.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.float32)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**WRITTEN[name]))
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            args, weight = scheme.weights, layer.weight.data
            rows = weight.view(1, -1) if args.strategy == "tensor" else weight
            groups = rows.view(len(rows), -1, args.group_size) if args.group_size else rows[:, None]
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            layer.weight_scale.data = scale.view_as(layer.weight_scale).to(layer.weight_scale.dtype)
            if hasattr(layer, "weight_zero_point"):
                layer.weight_zero_point.data = zero.view_as(layer.weight_zero_point).to(
                    layer.weight_zero_point.dtype
                )
    with torch.no_grad():
        want = model(IDS[None]).logits[0]
    compressor = ct.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    again = load_model(str(tmp_path), device="cpu", dtype="float32", linears=Quantize())
    got = logits(exactly(again))
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst < 1e-3, f"{name}: logits differ by {worst:.1e} of the largest"


def gptq_layer(weight: Tensor, bits: int, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """A layer as AutoGPTQ writes it, its bias of zeros too, and the weight that it stands for."""
    n, k = weight.shape
    half, size = 1 << (bits - 1), k if size == -1 else size
    groups = weight.view(n, -1, size)
    scale = groups.abs().amax(-1, keepdim=True) / (half - 1)
    numbers = (groups / scale).round().clamp(-half, half - 1)
    middle = torch.full((k // size, n), half - 1, dtype=torch.uint8)  # stored less one
    words = pack_words((numbers + half).to(torch.uint8).view(n, k), bits)
    tensors = {
        "qweight": words.t().contiguous(),
        "qzeros": pack_words(middle, bits),
        "scales": scale[..., 0].t().contiguous(),
        "g_idx": (torch.arange(k) // size).to(torch.int32),
        "bias": torch.zeros(n),
    }
    return tensors, (numbers * scale).view(n, k)


def mixed_gptq(source: Path, plain: Path, packed: Path) -> None:
    """Write a GPTQ checkpoint of layers of 4 and 8 bits and plain ones, and the plain one it stands for."""
    rules = {r"-:.*\.1\..*o_proj": {}, r"+:.*down_proj": {"bits": 8}, r".*q_proj": {"group_size": -1}}
    found = load_file(source / "model.safetensors")
    same, tensors = dict(found), dict(found)
    for name, weight in found.items():
        owner, _, leaf = name.rpartition(".")
        if not owner.endswith("_proj") or leaf != "weight" or owner.endswith("1.self_attn.o_proj"):
            continue
        size = -1 if owner.endswith("q_proj") else 32
        parts, same[name] = gptq_layer(weight, 8 if owner.endswith("down_proj") else 4, size)
        del tensors[name]
        tensors |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}
    raw = json.loads((source / "config.json").read_text())
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "dynamic": rules}
    for folder, stored, config in (
        (plain, same, raw),
        (packed, tensors, {**raw, "quantization_config": method}),
    ):
        folder.mkdir()
        save_file(stored, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))


def test_a_gptq_checkpoint_of_mixed_layers(folders: dict[str, Path], tmp_path: Path) -> None:
    import transformers as hf

    mixed_gptq(folders["llama"], tmp_path / "plain", tmp_path / "packed")
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    with torch.no_grad():
        want = reference(IDS[None]).logits[0]
    model = load_model(tmp_path / "packed", device="cpu", dtype="float32", linears=Quantize())
    torch.testing.assert_close(logits(exactly(model)), want, atol=1e-4, rtol=0)
    engine = quant.load(str(tmp_path / "packed"), device="cpu", dtype="float32", **SMALL)
    assert [len(done.token_ids) for done in engine.generate(PROMPTS, PARAMS)] == [6, 5, 4]


# Engines: all ways give the same tokens.

SUBSETS: list[dict[str, Any]] = [
    {},
    {"prefix_cache": False},
    {"chunked_prefill": False},
    {"overlap": False},
    {"chunk_tokens": 5, "step_tokens": 9},
    {"kernels": True, "graphs": False},
]


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "fp8", "int8"])
@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "w8a8", "int4"])
def test_every_way_gives_the_same_tokens(
    tiny: Model, scheme: str | None, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for subset in SUBSETS:
        if subset.get("kernels") and (kv != "none" or not interpreted()):
            continue
        if subset.get("kernels"):  # they multiply in float32, a CPU's own routines in bfloat16
            with monkeypatch.context() as exact:
                exact.setattr(QuantLinear, "_on_cpu", lambda layer, *given: None)
                exact.setattr("quant.cpu.tiles_fit", lambda *about: False)
                oracle = quant.load(tiny, quantization=scheme, kv_cache=kv, **SMALL)
                found = [[done.token_ids for done in oracle.generate(PROMPTS, PARAMS)]]
        options = {**SMALL, **subset}
        engine = quant.load(tiny, quantization=scheme, kv_cache=kv, **options)
        found.append([completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)])
        assert found[-1] == found[0], f"{scheme} with {kv} keys: {subset} gives other tokens"
        engine.check_integrity()
        assert engine.cache.free == engine.cache.allocator.count, f"blocks leak with {subset}"


def interpreted() -> bool:
    try:
        from triton_paged_attention.feature import interpreted as asked

        return asked()
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_kernels_first_or_not_the_layers_are_quantized_and_joined(tiny: Model, scheme: str) -> None:
    if not interpreted():
        pytest.skip("needs triton's interpreter")
    from quant.kernel_layers import KernelLinear

    engine = quant.load(tiny, quantization=scheme, kernels=True, graphs=False, **SMALL)
    model = engine.runner.model
    # Groups of 16, which rows of 48 leave, have no kernels.
    joined = [part for part in model.modules() if isinstance(part, (KernelLinear, QuantLinear))]
    assert len(joined) == 2 * 4 + 1, "qkv, out, gate and up, down of two layers, and the head"
    assert not any(isinstance(part, nn.Linear) for part in model.modules()), "a plain layer is left"


def test_a_cpu_reads_fewer_larger_weights(tiny: Model) -> None:
    model = quant.load(tiny, quantization="int8", **SMALL).runner.model
    assert sum(isinstance(part, QuantLinear) for part in model.modules()) == 2 * 4 + 1


# Keys and values.


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_scales_hold_what_was_seen(tiny: Model, kind: str) -> None:
    scales = head_scales(tiny, [sample(tiny)], kind)
    assert scales.shape == (2, 2, 3) and bool((scales > 0).all())
    seen: dict[tuple[int, int], Tensor] = {}

    class Spy(RecomputeAttention):
        def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen[layer.index, 0], seen[layer.index, 1] = k, v
            return super().__call__(layer, q, k, v)

    ids = torch.tensor(sample(tiny))
    with torch.no_grad():
        tiny(ids, torch.arange(len(ids)), Spy())
    for (layer, side), x in seen.items():
        stored = encode(x, scales[layer, side], KV_DTYPES[kind]).float() * scales[layer, side][:, None]
        worst = float(((x - stored).abs() / x.abs().amax((0, 2))[:, None]).max())
        assert worst < (1 / 16 if kind == "fp8" else 1 / 200), (
            f"layer {layer}, side {side}: off by {worst:.3f}"
        )


def test_half_the_bytes_are_twice_the_tokens(tiny: Model) -> None:
    plain = quant.load(tiny, **SMALL)
    for kind in KV_DTYPES:
        engine = quant.load(tiny, kv_cache=kind, **SMALL)
        assert engine.ledger.blocks >= min(4 * plain.ledger.blocks, 4 * 16), kind


def test_the_cache_and_the_measurement_of_quality_round_alike(tiny: Model) -> None:
    kv = kv_format(tiny, "int8")
    engine = quant.load(tiny, kv_cache="int8", **SMALL)
    params = [SamplingParams(max_tokens=8, ignore_eos=True)]
    (completion,) = engine.generate([PROMPTS[0]], params)
    tokens = list(PROMPTS[0])
    for _ in range(8):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            hidden = tiny(ids, torch.arange(len(ids)), StoredAttention(kv))
            tokens.append(int(tiny.logits(hidden[-1]).argmax()))
    assert completion.token_ids == tokens[len(PROMPTS[0]) :]
    assert not any(isinstance(part, StoredKV) for part in tiny.modules())


# Methods.


def problem(n: int = 32, k: int = 128, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, inputs with outliers that move together, and the inputs' matrix."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(k, k, generator=generator) / k**0.5 + torch.eye(k)
    x = torch.randn(1024, k, generator=generator) @ mix
    x[:, ::17] *= 12
    return torch.randn(n, k, generator=generator), x, x.t() @ x / len(x)


def loss(weight: Tensor, found: Tensor, x: Tensor) -> float:
    return float(((x @ (found - weight).t()) ** 2).mean())


@pytest.mark.parametrize(("zeros", "k"), [(False, 128), (True, 128), (False, 384)])
def test_gptq_loses_less_than_rounding_to_nearest(zeros: bool, k: int) -> None:
    weight, x, hessian = problem(k=k)
    scheme = quant.Scheme("x", "int4", "group", group=32, zeros=zeros)
    nearest = loss(weight, rtn.quantize(weight, scheme).dequantize(), x)
    kept = weight.clone(), hessian.clone()
    found = gptq.quantize(weight, hessian, scheme).check("w")
    assert torch.equal(weight, kept[0]) and torch.equal(hessian, kept[1]), "its inputs were changed"
    got = loss(weight, found.dequantize(), x)
    assert got < nearest / 2, f"GPTQ loses {got:.4f}, rounding to nearest {nearest:.4f}"
    if k > gptq.COLUMNS:
        within = loss(weight, blockwise(weight, hessian, scheme), x)
        assert got < within, f"errors beyond a block of columns are not passed on: {got:.4f}, {within:.4f}"


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_gptq_of_eight_bits(name: str) -> None:
    weight, x, hessian = problem(k=256)
    scheme = SCHEMES[name]
    nearest = loss(weight, rtn.quantize(weight, scheme).dequantize(), x)
    found = gptq.quantize(weight, hessian, scheme).check("w")
    got = loss(weight, found.dequantize(), x)
    assert got < nearest / 2, f"{name}: GPTQ loses {got:.5f}, rounding to nearest {nearest:.5f}"


def blockwise(weight: Tensor, hessian: Tensor, scheme: Any) -> Tensor:
    """GPTQ whose blocks of columns know nothing of each other."""
    order = hessian.diagonal().argsort(descending=True)
    apart = torch.zeros_like(hessian)
    for members in order.split(gptq.COLUMNS):
        apart[members[:, None], members] = hessian[members[:, None], members]
    return gptq.quantize(weight, apart, scheme).dequantize()


def test_gptq_is_what_its_definition_says() -> None:
    """Round an input, let the others change by what makes up best for it, leave it out; and so on."""
    weight, _, hessian = problem(8, 64)
    scheme = quant.Scheme("x", "int4", "group", group=32)
    scale, _ = gptq.search_scales(weight, hessian.diagonal(), scheme, torch.float32)
    damped = hessian.double() + gptq.DAMPING * hessian.double().diagonal().mean() * torch.eye(64)
    columns, want = weight.double(), torch.zeros(8, 64)
    left = hessian.diagonal().argsort(descending=True)
    while len(left):
        inverse, first = damped[left][:, left].inverse(), int(left[0])
        step = scale[:, first // 32]
        want[:, first] = (rtn.to_nibbles(columns[:, first].float(), step, None).float() - 8) * step
        error = (columns[:, first] - want[:, first]) / inverse[0, 0]
        columns[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    found = gptq.quantize(weight, hessian, scheme).dequantize()
    others = float(((found - want).abs() > 1e-4).float().mean())
    assert others < 0.03, f"{others:.0%} of the weights are not those of the definition: errors go elsewhere"


def test_gptq_without_correlations_is_rounding() -> None:
    """Inputs that never move together cannot make up for each other."""
    weight, _, _ = problem()
    scheme = quant.Scheme("x", "int4", "group", group=32)
    scale, _ = gptq.search_scales(weight, torch.ones(128), scheme, torch.float32)
    want = rtn.to_nibbles(weight.view(32, -1, 32), scale[..., None], None).flatten(1)
    found = gptq.quantize(weight, torch.eye(128), scheme)
    assert torch.equal(quant.weights.unpack_nibbles(found.data), want)


def test_gptq_of_inputs_that_were_never_seen() -> None:
    weight, _, hessian = problem()
    hessian[:, 5] = hessian[5] = 0
    found = gptq.quantize(weight, hessian, INT4.with_group(32)).dequantize()
    assert torch.isfinite(found).all()
    assert bool((found[:, 5] == 0).all()), "input 5 was always 0, but its weights are kept"


def test_awq_loses_less_than_rounding_to_nearest() -> None:
    weight, x, hessian = problem()
    scheme = INT4.with_group(32)
    scales = awq.input_scales([weight], hessian, scheme)
    assert scales[::17].min() > scales[1:17].max(), "large inputs' weights are made larger"
    found = awq.quantize(weight * scales, hessian.diagonal() / scales**2, scheme).dequantize() / scales
    nearest = loss(weight, rtn.quantize(weight, scheme).dequantize(), x)
    got = loss(weight, found, x)
    assert got < nearest / 1.5, f"AWQ loses {got:.4f}, rounding to nearest {nearest:.4f}"


def test_layers_of_one_input_share_a_matrix(tiny: Model) -> None:
    _, block = blocks_of(tiny)[0]
    x, cos_sin = torch.randn(20, 48), None
    cos_sin = tiny.rope(torch.arange(20))  # type: ignore[operator]
    with watch(block) as found, torch.no_grad():
        block(x, cos_sin, RecomputeAttention())
    assert found["self_attn.q_proj"] is not found["self_attn.o_proj"]
    normed = block.input_layernorm(x)  # type: ignore[operator]
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.allclose(found[f"self_attn.{name}"], normed.t() @ normed / 20, atol=1e-5), name
    assert set(found) == {name for name, part in block.named_modules() if isinstance(part, nn.Linear)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_awq_moves_scales_without_changing_the_model(
    folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that are not rounded, only the scales move: from a layer into what is before it."""
    model = load_model(str(folders[family]), device="cpu", dtype="float32")
    want = logits(model)
    changed = clone(model)
    monkeypatch.setattr("quant.methods._each", lambda *given: None)
    quantize_model(changed, INT4, "awq", [list(range(1, 60))])
    moved = changed.layers[0].mlp.up_proj.weight  # type: ignore[union-attr,index]
    assert not torch.equal(moved, model.layers[0].mlp.up_proj.weight)  # type: ignore[union-attr,index,arg-type]
    assert torch.allclose(logits(changed), want, atol=1e-4 * float(want.abs().max())), (
        f"{family}: scales were moved into a layer, but not out of what is before it"
    )


def test_awq_divides_biases_too(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    for block in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = block.get_submodule(f"mlp.{name}")
            layer.bias = nn.Parameter(torch.randn(layer.out_features), requires_grad=False)  # type: ignore[arg-type]
    want, changed = logits(model), clone(model)
    monkeypatch.setattr("quant.methods._each", lambda *given: None)
    quantize_model(changed, INT4, "awq", [list(range(1, 60))])
    assert torch.allclose(logits(changed), want, atol=1e-4 * float(want.abs().max())), (
        "up_proj's outputs were made smaller without its bias"
    )


@pytest.mark.parametrize(("family", "method"), [("llama", "gptq"), ("llama", "awq"), ("gemma3", "gptq")])
def test_methods_are_better_than_nearest(folders: dict[str, Path], family: str, method: Any) -> None:
    model = load_model(str(folders[family]), device="cpu", dtype="float32")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(97, (1200,), generator=generator).tolist()
    texts = samples(tokens, 16, 64)
    nearest, better = clone(model), clone(model)
    quantize_model(nearest, INT4.with_group(64))
    seen: list[str] = []
    quantize_model(better, INT4.with_group(64), method, texts, seen.append)
    assert seen == ["layers.0", "layers.1"]
    ways = [("rtn", nearest, RecomputeAttention()), (method, better, RecomputeAttention())]
    found = compare(model, ways, tokens[:512], window=64)
    assert found[method].kl < found["rtn"].kl, f"{method} on {family}: {found}"


def test_a_block_sees_what_the_quantized_blocks_below_let_through(tiny: Model) -> None:
    model, inputs = clone(tiny), []

    def change(name: str, block: nn.Module, hessians: Any) -> None:
        inputs.append(hessians["self_attn.q_proj"])
        block.mlp.down_proj.weight = nn.Parameter(torch.zeros(48, 80))  # type: ignore[union-attr]

    sweep(model, [[1, 2, 3, 4]], change)
    again: list[Tensor] = []
    sweep(tiny, [[1, 2, 3, 4]], lambda name, block, hessians: again.append(hessians["self_attn.q_proj"]))
    assert torch.equal(inputs[0], again[0])
    assert not torch.allclose(inputs[1], again[1]), "layers.1 saw what layers.0 made before it was changed"


WRONG: dict[str, tuple[str, str, list[list[int]], str]] = {
    "nothing to choose": ("fp8-block", "gptq", [[1]], "method is 'gptq', which does not go with fp8-block"),
    "eight bits": ("fp8", "awq", [[1]], "method is 'awq', which does not go with fp8"),
    "no text": ("int4", "awq", [], "method is 'awq', which needs a calibration text"),
}


@pytest.mark.parametrize(("scheme", "method", "texts", "says"), WRONG.values(), ids=WRONG)
def test_methods_that_make_no_sense(tiny: Model, scheme: str, method: Any, texts: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        quantize_model(clone(tiny), SCHEMES[scheme], method, texts)


def test_a_text_that_is_too_short() -> None:
    assert samples(list(range(10)), 2, 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    last = samples(list(range(10)), 1, 4)
    assert last == [[4, 5, 6, 7]], f"calibration takes the end of the text, not {last}"
    with pytest.raises(UserError, match="the calibration text has 3 tokens, but must have 4 at least"):
        samples([1, 2, 3], 2, 4)


def test_divergence_by_hand() -> None:
    true = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    found = torch.tensor([[0.25, 0.75], [0.2, 0.8]]).log()
    kl, nll, same = difference(true, found, torch.tensor([1, 0])).tolist()
    assert kl == pytest.approx(0.1438 + 1.1457, abs=1e-3), "the divergence is weighed by the true model"
    assert nll == pytest.approx(-torch.tensor([0.75, 0.2]).log().sum().item(), abs=1e-6)
    assert same == 0 or same == 1
    assert difference(true, true, torch.tensor([1, 0])).tolist()[0] == 0


# The command.


def test_the_command_writes_a_checkpoint(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folders["llama"]), str(out), "--scheme", "w8a8", "--device", "cpu"])
    assert ended.value.code == 0 and capsys.readouterr().out.strip().endswith(out.name)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized" and config["ignore"] == ["lm_head"]
    engine = registry.load_engine(find_phase("10"), str(out), device="cpu", **SMALL)  # type: ignore[arg-type]
    assert len(list(engine.stream([[1, 2]], PARAMS[:1]))) == 6


def test_the_command_writes_scales_of_keys_and_values(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    scales = head_scales(model, [list(range(1, 60))], "int8")
    quantize_model(model, SCHEMES["int8"])
    export(model, folders["llama"], tmp_path / "out", ("int8", scales))
    engine = quant.load(str(tmp_path / "out"), device="cpu", **SMALL)
    for layer, cache in enumerate(engine.runner.attention.pool.layers):
        assert cache.k.dtype == torch.int8 and cache.k_scale is not None and cache.v_scale is not None
        largest = scales[layer].amax(-1)
        assert cache.k_scale.tolist() == pytest.approx([float(largest[0])] * 2), (
            f"layer {layer}: a file has one scale for all heads, the largest, or keys of another do not fit"
        )
        assert cache.v_scale.tolist() == pytest.approx([float(largest[1])] * 2)
    fresh = quant.load(str(tmp_path / "out"), device="cpu", kv_cache="fp8", **SMALL)
    assert fresh.runner.attention.pool.data.dtype == torch.float8_e4m3fn, (
        "another kind than the file's is made"
    )


COMMANDS: dict[str, tuple[list[str], str]] = {
    "a scheme": (["--scheme", "int3"], "scheme is 'int3', but must be one of"),
    "a method": (["--method", "hqq"], "method is 'hqq', but must be one of rtn, gptq, awq"),
    "a group": (["--group-size", "7"], "group_size is 7, but must be one of 16"),
    "no text": (
        ["--method", "gptq", "--calibration", "nowhere.txt"],
        "--calibration nowhere.txt cannot be read",
    ),
    "keys": (["--kv-cache", "int4"], "kv_cache is 'int4', but must be one of none, fp8, int8"),
    "no pieces": (["--method", "gptq", "--pieces", "0"], "pieces is 0, but must be between 1 and"),
}


@pytest.mark.parametrize(("flags", "says"), COMMANDS.values(), ids=COMMANDS)
def test_wrong_commands(
    folders: dict[str, Path], tmp_path: Path, flags: list[str], says: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folders["llama"]), str(tmp_path / "out"), "--device", "cpu", *flags])
    assert ended.value.code == 2 and says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_the_folder_one_stands_in_is_filled(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / ".partial").mkdir(parents=True)  # of a command that was killed
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(folders["llama"]), ".", "--scheme", "int8", "--device", "cpu"])
    assert ended.value.code == 0
    assert (
        Path("config.json").is_file() and not Path(".partial").exists() and len(list(tmp_path.iterdir())) == 1
    )


def test_a_folder_that_is_taken_is_refused_before_the_work(
    folders: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phases.commands import quantize

    monkeypatch.setattr(quantize, "load_model", lambda *_, **__: pytest.fail("loaded"))
    (tmp_path / "mine").write_text("kept")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(SystemExit) as ended:
            main(["quantize", str(folders["llama"]), str(out), "--device", "cpu"])
        assert ended.value.code == 2 and "is there already" in capsys.readouterr().err


def test_a_full_disk_is_an_error_with_a_name(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant import export as module

    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(module, "save_file", full)
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    quantize_model(model, SCHEMES["int8"])
    with pytest.raises(UserError, match=r"out cannot be written: .*No space left on device"):
        export(model, folders["llama"], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_all_chat_templates_go_along(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    quantize_model(model, SCHEMES["int8"])
    source = tmp_path / "source"
    shutil.copytree(folders["llama"], source)
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja")
    for name in names:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    for out in (tmp_path / "new", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        export(model, source, out)
        assert [(out / name).read_text() for name in names] == [*names]


def test_what_is_there_is_not_written_over(folders: dict[str, Path], packed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    model = load_model(str(folders["llama"]), device="cpu", dtype="float32")
    quantize_model(model, SCHEMES["int8"])
    with pytest.raises(UserError, match="is there already: name a folder that is not"):
        export(model, folders["llama"], tmp_path)
    from quant.export import check_source

    with pytest.raises(UserError, match="is quantized already"):
        check_source(packed)


def test_groups_of_several_sizes_are_written_by_name() -> None:
    model = nn.Sequential()
    for name, k in (("down_proj", 256), ("up_proj", 64)):
        layer = nn.Linear(k, 16, bias=False)
        model.add_module(name, QuantLinear.of(layer, INT4, name))
    found = configuration(model)["config_groups"]  # type: ignore[arg-type]
    assert {tuple(g["targets"]): g["weights"]["group_size"] for g in found.values()} == {
        ("re:.*down_proj$",): 128,
        ("re:.*up_proj$",): 64,
    }


def test_a_tensor_may_be_put_where_a_buffer_was() -> None:
    layer = QuantLinear.of(nn.Linear(32, 8), SCHEMES["int8"], "w")
    assign(layer, "scale", torch.ones(8))
    assert layer.scale.tolist() == [1] * 8


# Quality by definition.


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_by_definition_are_dequantized_and_multiplied_in_float32(scheme: str) -> None:
    """In parts of bfloat16 or not: what is left out is below a hundred thousandth."""
    layer = QuantLinear.of(nn.Linear(256, 130), SCHEMES[scheme], "w")
    x = torch.randn(2, 9, 256) * 3
    want, found = layer.exact(x), defined_layer(layer)(x)
    worst = float((found - want).abs().max() / want.abs().max())
    assert worst < 2e-5, f"{scheme}: an output by definition differs by {worst:.1e} of the largest"


def test_no_layer_of_a_model_by_definition_is_left_as_it_was(tiny: Model) -> None:
    model = Quantize(SCHEMES["int8"], None).finish(clone(tiny))
    layers = [part for part in defined(model).modules() if isinstance(part, QuantLinear | nn.Linear)]
    assert not layers, f"{layers} would be multiplied by a device's own routine"
    assert isinstance(model.lm_head, nn.Linear), "the model that is measured was changed"


def test_a_product_in_parts_loses_nothing_that_matters() -> None:
    layer = nn.Linear(512, 64).requires_grad_(False)
    parts = DefinedLinear(layer.weight.data, torch.ones(1), layer.bias, None)
    x = torch.randn(16, 512) * 3
    want = (x.double() @ layer.weight.double().t() + layer.bias.double()).float()
    worst = float((parts(x) - want).abs().max() / want.abs().max())
    assert worst < 2e-5, f"a product in three parts is off by {worst:.1e}: a part was left out"


def test_models_are_asked_for_one_after_the_other(tiny: Model) -> None:
    """A way that is measured may be forgotten before the next is made; heads of one scheme are kept once."""
    alive: list[weakref.ref[Model]] = []

    def ways() -> Iterator[tuple[str, Model, RecomputeAttention]]:
        for number in range(3):
            gc.collect()
            assert sum(ref() is not None for ref in alive) <= 1, f"way {number} is made beside all before it"
            model = Quantize(SCHEMES["int8"], SCHEMES["int8"]).finish(clone(tiny))
            alive.append(weakref.ref(model))
            yield str(number), model, RecomputeAttention()

    found = compare(tiny, ways(), list(range(64)), window=16)
    assert found["reference"].kl == 0 and found["reference"].agreement == 1 and found["0"].tokens == 60
    assert found["0"] == found["1"] == found["2"] and found["0"].kl > 0


def test_quality_is_of_the_whole_text(tiny: Model) -> None:
    """Against the definition: every window from nothing, every token but a window's first."""
    tokens = torch.randint(1, 200, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    other = Quantize(SCHEMES["int4"]).finish(clone(tiny))
    sums = torch.zeros(3, dtype=torch.float64)
    for at in (0, 32):
        ids = torch.tensor(tokens[at : at + 32])
        true, guess = (logits(exactly(model), ids)[:-1].log_softmax(-1) for model in (tiny, other))
        sums += difference(true, guess, ids[1:])
    found = compare(tiny, [("int4", other, RecomputeAttention())], tokens, window=32)["int4"]
    assert found.kl == pytest.approx(float(sums[0]) / 62, rel=1e-3), "the divergence is of other tokens"
    assert found.perplexity == pytest.approx(float((sums[1] / 62).exp()), rel=1e-4)
    assert found.agreement == pytest.approx(float(sums[2]) / 62) and found.tokens == 62
