"""The blocks of a GGUF file: bit for bit the float32 weights, in Python, in C++, and in what models say."""

from __future__ import annotations

import os
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.calibration import TEXT
from common.environment import PASSIVE, SHORT_SPIN, SPIN, limit_threads_and_noise, quota
from common.errors import UserError
from common.events import generate
from common.models.gguf_import import import_gguf
from common.sampling.params import SamplingParams
from common.text.tokenizer import Tokenizer
from forward.loading import load_model
from phases import ROOT, phase_named
from phases.appendix.cpu_step import feature
from phases.appendix.cpu_step.blocks import BlockProduct
from phases.registry import check_options, default_weights, load_engine
from quant.blocks import KINDS, BlockEmbedding, BlockLinear, BlockWeight
from quant.loading import Quantize
from tests.common import tiny_gguf
from tests.equivalence.compare import assert_all_same

CPU = torch.device("cpu")
QUANTIZATIONS = [kind.upper() for kind in KINDS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Llama by its type of blocks, written by the gguf package and imported."""
    found = {}
    for name in QUANTIZATIONS:
        folder = tmp_path_factory.mktemp(name)
        tiny_gguf.write(folder / "tiny.gguf", "llama", name, embedding=name)
        import_gguf(folder / "tiny.gguf", folder / "model")
        found[name] = folder / "model"
    return found


def random_block(kind: str, outputs: int, inputs: int) -> BlockLinear:
    layer = BlockLinear(kind, outputs, inputs)
    layer.data.random_(-128 if kind == "q8_0" else 0, 127)
    layer.scale.normal_(0, 0.01)
    if layer.minimum is not None:
        layer.minimum.normal_(0, 0.05)
    return layer


def compiled() -> CDLL:
    library = feature.library()
    if library is None:
        pytest.skip("needs a C++ compiler")
    return library


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_blocks_stand_for_the_float32_weights_bit_for_bit(
    folders: dict[str, Path], quantization: str
) -> None:
    floats = load_model(folders[quantization], device="cpu")
    model = load_model(
        folders[quantization] / "blocks", device="cpu", weight_loader=Quantize()
    )
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, BlockWeight)
    }
    assert len(layers) == 2 + 2 * 7 and {layer.kind for layer in layers.values()} == {
        quantization.lower()
    }
    for name, layer in layers.items():
        assert torch.equal(layer.dequantize(), floats.get_parameter(f"{name}.weight")), name
    ids = torch.tensor([[5, 299], [0, 5]])
    assert torch.equal(
        model.get_submodule("embed_tokens")(ids), floats.get_submodule("embed_tokens")(ids)
    )


def test_the_head_shares_the_memory_of_its_embedding(folders: dict[str, Path]) -> None:
    model = load_model(folders["Q4_1"] / "blocks", device="cpu", weight_loader=Quantize())
    head, embedding = model.lm_head, model.get_submodule("embed_tokens")
    assert isinstance(head, BlockLinear) and isinstance(embedding, BlockEmbedding)
    assert head.data.data_ptr() == embedding.data.data_ptr()


def test_weights_are_mapped_and_not_copied(folders: dict[str, Path]) -> None:
    model = load_model(folders["Q8_0"] / "blocks", device="cpu", weight_loader=Quantize())
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    ranges = [
        line.split()[0]
        for line in maps.read_text().splitlines()
        if str(folders["Q8_0"]) in line
    ]
    spans = [[int(end, 16) for end in found.split("-")] for found in ranges]
    for name, layer in model.named_modules():
        if isinstance(layer, BlockWeight):
            assert any(low <= layer.data.data_ptr() < high for low, high in spans), name


def test_another_scheme_on_top_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="quantized already"):
        load_engine(phase_named("10"), str(folders["Q4_1"] / "blocks"), quantization="int8")


@pytest.mark.parametrize("tokens", [1, 3, 4, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_the_product_in_cpp_reads_the_very_same_weights(kind: str, tokens: int) -> None:
    layer = random_block(
        kind, 148, 800
    )  # more inputs than a tile multiplies at a time; rows beyond a task
    product = BlockProduct(compiled(), layer)
    units = torch.eye(800)[torch.arange(tokens) * 19]
    assert torch.equal(
        product(layer, units), layer.dequantize().t()[torch.arange(tokens) * 19]
    )
    x = torch.randn(2, tokens, 800)
    torch.testing.assert_close(product(layer, x), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64"])
def test_processors_without_avx512_compute_the_same(flags: str) -> None:
    """AVX2, and what every x86-64 has, in a process of their own: a library is loaded once."""
    compiled()
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("needs an x86-64 processor with AVX2")
    test = f"{__file__}::test_the_product_in_cpp_reads_the_very_same_weights"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", test]
    environment = {**os.environ, "CXXFLAGS": flags}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "8 passed" in done.stdout


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("cpu_step", [True, False])
def test_greedy_tokens_are_those_of_float32(
    folders: dict[str, Path], quantization: str, cpu_step: bool
) -> None:
    folder, prompts = folders[quantization], [[7, 30 + i, 9 * i + 1] for i in range(4)]
    params = [SamplingParams(max_tokens=12, ignore_eos=True)] * len(prompts)
    sizes: dict[str, Any] = {"max_rows": 4, "max_len": 64, "cpu_step": cpu_step}
    plain = generate(load_engine(phase_named("10"), str(folder), **sizes), prompts, params)
    found = generate(
        load_engine(phase_named("10"), str(folder / "blocks"), **sizes), prompts, params
    )
    assert_all_same(load_model(folder, device="cpu"), plain, found)


@pytest.mark.long
@pytest.mark.weights
@pytest.mark.timeout(1800)
def test_two_hundred_prompts_say_what_float32_says(smollm2_folder: Path) -> None:
    """200 prompts of 8 to 39 tokens of a book, 64 greedy tokens each: equal, but for ties within 1e-3."""
    text = TEXT.read_text(encoding="utf-8")
    tokens = Tokenizer(smollm2_folder).encode(text[: 1 << 16])
    prompts = [tokens[50 * i : 50 * i + 8 + i % 32] for i in range(200)]
    params = [SamplingParams(max_tokens=64, ignore_eos=True)] * len(prompts)
    plain: Any = load_engine(
        phase_named("09"), str(smollm2_folder), cpu_step=False, max_rows=16
    )
    expected = generate(plain, prompts, params)
    weights = default_weights(
        check_options(phase_named("10"), {}, CPU), str(smollm2_folder), CPU, "auto"
    )
    assert weights.endswith("blocks")
    found = generate(load_engine(phase_named("10"), weights, max_rows=16), prompts, params)
    same = sum(
        one.token_ids == other.token_ids for one, other in zip(expected, found, strict=True)
    )
    print(f"{same} of {len(prompts)} prompts have the same {64} tokens")
    assert_all_same(plain.runner.model, expected, found)


def test_commands_take_blocks_on_a_cpu_unless_told_otherwise(folders: dict[str, Path]) -> None:
    compiled()
    folder = str(folders["Q4_1"])

    def taken(phase: str = "13", dtype: str = "auto", **options: object) -> bool:
        checked = check_options(phase_named(phase), options, CPU)
        return default_weights(checked, folder, CPU, dtype) != folder

    assert taken() and taken("10") and taken(max_rows=2) and taken(dtype="float32")
    assert not taken("09") and not taken(dtype="bfloat16") and not taken(cpu_step=False)
    assert (
        not taken(quantization="int8")
        and not taken(quantization="none")
        and not taken(quant=False)
        and not taken(drafter="head")
    )


def test_without_a_compiler_commands_take_floats(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "library", lambda: None)
    folder = str(folders["Q4_1"])
    checked = check_options(phase_named("13"), {}, CPU)
    assert default_weights(checked, folder, CPU, "auto") == folder


# How threads wait.


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.environment.quota", lambda: None)
    monkeypatch.setattr("common.environment.share", lambda before, after: 0.0)


def settled(given: dict[str, str], **options: bool) -> dict[str, str]:
    limit_threads_and_noise(given, **options)
    return given


def test_threads_spin_a_little_on_an_idle_machine(idle: None) -> None:
    assert settled({}).items() >= SHORT_SPIN.items()
    assert settled({}, measuring=True).items() >= SPIN.items()


def test_threads_sleep_at_once_beside_other_programs(
    idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.environment.share", lambda before, after: 0.5)
    assert settled({}).items() >= PASSIVE.items()
    assert settled({}, measuring=True).items() >= SPIN.items()
    assert "OMP_WAIT_POLICY" not in settled({"GOMP_SPINCOUNT": "7"}), (
        "what the user says counts"
    )


def test_more_threads_than_processors_sleep_at_once(
    idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.environment.processors", lambda: [0, 1])
    assert settled({"OMP_NUM_THREADS": "3"}).items() >= PASSIVE.items()
    assert settled({"OMP_NUM_THREADS": "2"}).items() >= SHORT_SPIN.items()


def test_a_containers_quota_limits_threads_and_their_spinning(
    idle: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.environment.processors", lambda: list(range(8)))
    monkeypatch.setattr("common.environment.quota", lambda: 1.5)
    assert settled({}).items() >= {**PASSIVE, "OMP_NUM_THREADS": "1"}.items()


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "max 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quotas_of_both_versions_of_control_groups(
    tmp_path: Path, files: dict[str, str], limit: float | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    assert quota(tmp_path, own) == limit
