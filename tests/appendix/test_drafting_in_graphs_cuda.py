"""The kernel in CUDA C++, on a GPU that can run it, against PyTorch, alone and in a model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from cuda_graphs.batch import fixed_batch
from forward.attention import LayerSpec
from forward.loading import random_model
from forward.shapes import SHAPES
from paged_cache import BlockPool
from phases.appendix.drafting_in_graphs import columns
from phases.appendix.latency.layers import LatencyAttention
from phases.appendix.latency.layers import install as latency
from phases.appendix.latency.single_request import SingleRequestSplits
from phases.appendix.latency.tables import SingleRequestConfig
from tests.cuda_kit import ON_A_GPU, random, replayed
from tests.paged_batches import DEVICE, assert_near, combined, walled
from triton_paged_attention.decode import Workspace
from triton_paged_attention.kernels.norms import NormWeights, rms_norm
from triton_paged_attention.layers import FusedBlock, optimize
from triton_paged_attention.linear import FusedLinear

CLOSE = 4e-3
"""Of the output's norm: both round to bfloat16, and sum up in another order."""


class TestOnAGPU:
    pytestmark = ON_A_GPU

    @pytest.mark.parametrize("tokens", [1, 2, 5, 8])
    @pytest.mark.parametrize(
        ("rows", "size", "gate", "normed", "adds"),
        [
            (960, 576, None, True, False),
            (576, 576, None, False, True),
            (3072, 576, "silu", True, False),
            (576, 1536, None, False, True),
            (8192, 576, None, False, False),
            (576, 1728, None, False, False),
            (6144, 1024, "silu", True, False),
            (1024, 3072, None, False, True),
            (1001, 1152, None, True, True),
            (2002, 768, "silu", False, True),
        ],
    )
    def test_products(
        self, rows: int, size: int, gate: str | None, normed: bool, adds: bool, tokens: int
    ) -> None:
        weight = random(rows, size) / size**0.5
        shape = columns.shape_of(rows, size, gate is not None, weight.device)
        assert shape is not None, "the kernel is for such a matrix"
        outputs = rows if gate is None else rows // 2
        norm = NormWeights(random(size), 1e-5, rows % 2 == 1) if normed else None
        x, residual = 3 * random(tokens, size), random(tokens, outputs) if adds else None
        around = {
            "norm": norm,
            "gate": gate,
            "residual": None if residual is None else walled(residual),
        }
        got = columns.columns(walled(x), walled(weight), shape, **around)
        normed_x = x if norm is None else rms_norm(x, *norm)
        wanted = normed_x.float() @ weight.float().t()
        if gate is not None:
            wanted = F.silu(wanted[:, :outputs]) * wanted[:, outputs:]
        if residual is not None:
            wanted = wanted + residual.float()
        assert_near(
            got, wanted, CLOSE, f"{tokens} tokens, {rows} x {size}, gate {gate}, norm {normed}"
        )

    @pytest.mark.parametrize("count", [0, 1, 3, 5])
    @pytest.mark.parametrize("context", [5, 64, 65, 129, 400, 1500])
    @pytest.mark.parametrize("window", [None, 100])
    def test_splits_are_combined(self, context: int, count: int, window: int | None) -> None:
        """What no split has written, and padding, is poison."""
        tokens = 5
        heads = 9
        d = 64
        config = SingleRequestConfig(splits=8)
        layer = LayerSpec(1, heads, 3, d, 0.1, sliding_window=window)
        cached = max(0, context - count)
        begin = max(cached - window + 1, 0) // config.block_n if window else 0
        tiles = max(1, -(-cached // config.block_n) - begin)
        used = -(-tiles // -(-tiles // 8))
        space = Workspace(3 * 8 * 24, d, torch.device(DEVICE))
        space.partial.fill_(float("nan"))
        space.lse.fill_(float("nan"))
        partial = (
            space.partial.view(torch.bfloat16)
            .flatten()[: 8 * 8 * heads * d]
            .view(8, 8, heads, d)
        )
        logs = space.lse.flatten()[: 8 * 8 * heads].view(8, 8, heads)
        partial[:used, :count] = random(used, count, heads, d)
        logs[:used, :count] = 4 * random(used, count, heads).float()
        whole = torch.tensor([context], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        parts = SingleRequestSplits(
            random(tokens, heads * d), layer, whole, space, config, starts
        )
        weight, residual = random(576, heads * d) / 24, random(tokens, 576)
        shape = columns.shape_of(576, heads * d, False, weight.device)
        assert shape is not None
        plain = nn.Linear(heads * d, 576, bias=False, device="meta")
        plain.weight = nn.Parameter(weight)
        got = columns.project_heads_in_columns(plain, shape, parts, residual)
        attended = torch.zeros(tokens, heads * d, device=DEVICE)
        attended[:count] = combined(partial[:, :count], logs[:, :count], used).flatten(1)
        wanted = residual.float() + attended @ weight.float().t()
        assert_near(got, wanted, CLOSE, f"{count} tokens of {context} keys in {used} splits")

    @pytest.mark.parametrize("context", [3, 130, 700])
    @pytest.mark.parametrize("tokens", [1, 2, 5, 8])
    def test_tokens_through_a_model(self, context: int, tokens: int) -> None:
        """Layers one behind the other, each of which begins before the last ends, and again in a graph."""
        config = replace(
            SHAPES["qwen3-0.6b"], num_layers=12, hidden_size=576, num_heads=9, num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536, vocab_size=512, sliding_windows=(None,) * 12,
        )  # fmt: skip
        device = torch.device(DEVICE)
        plain = random_model(config, device=device, dtype=torch.bfloat16)
        pool = BlockPool(config, 48, 16, device=device, dtype=torch.bfloat16)
        filled, hidden = torch.randn_like(pool.data), []
        for on in (False, True):
            model = latency(optimize(copy.deepcopy(plain)))
            if on:
                columns.install(model, fewest=1)
            attention = LatencyAttention(pool, config.num_heads)
            batch = fixed_batch(1, 1, device, tokens)
            batch = replace(
                batch, block_tables=torch.arange(48, dtype=torch.int32, device=device)[None]
            )
            batch.input_ids.copy_(torch.arange(tokens))
            batch.context_lens.fill_(context + tokens)
            batch.positions.copy_(torch.arange(context, context + tokens))
            batch.slots.copy_(batch.positions)

            @torch.inference_mode()
            def step(
                model: nn.Module = model,
                batch: object = batch,
                on: LatencyAttention = attention,
            ) -> Tensor:
                on.begin(batch)
                return model(batch.input_ids, batch.positions, on)

            pool.data.copy_(filled)
            hidden.append(step().clone())
        assert torch.equal(replayed(step), hidden[1]), "not the same in a graph"
        assert_near(
            hidden[1], hidden[0], 10 * CLOSE, f"12 layers, {tokens} tokens behind {context}"
        )


@pytest.mark.parametrize(("hidden", "columned"), [(576, True), (2048, False)])
def test_which_blocks_change(
    monkeypatch: pytest.MonkeyPatch, hidden: int, columned: bool
) -> None:
    """All matrices of a block or none; the head of a model, whose result is float32, never."""
    monkeypatch.setattr(columns, "available", lambda device: True)
    config = replace(
        SHAPES["qwen3-0.6b"], num_layers=1, hidden_size=hidden, num_heads=9, num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536, vocab_size=512, sliding_windows=(None,),
    )  # fmt: skip
    model = latency(optimize(random_model(config, device="cpu", dtype=torch.bfloat16)))
    columns.install(model, fewest=1)
    (block,) = (part for part in model.modules() if isinstance(part, FusedBlock))
    assert (
        block.kernels[0].few == columned
        and (block.kernels[0].few_heads is not None) == columned
    )
    kernels = [
        isinstance(part.kernels[0], columns.Columns)
        for part in block.modules()
        if isinstance(part, FusedLinear)
    ]
    assert kernels == [columned] * 4
    assert not isinstance(model.lm_head.kernels[0], columns.Columns)


@pytest.mark.parametrize(
    ("rows", "size", "gated", "wanted"),
    [
        (8192, 576, False, (64, 4)),  # 128 programs of 132 that run side by side
        (6144, 1024, True, (128, 2)),  # as many weights as a warp's registers hold
        (576, 700, False, None),  # no part divides it
        (4096, 4096, False, None),  # more warps than a program has
        (63, 576, True, None),  # no two matrices
    ],
)
def test_how_a_matrix_is_shared_out(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    size: int,
    gated: bool,
    wanted: tuple[int, int] | None,
) -> None:
    monkeypatch.setattr(columns, "multiprocessors", lambda device: 132)
    found = columns.shape_of.__wrapped__(rows, size, gated, torch.device("cpu"))
    assert found == wanted, (
        f"{rows} x {size}, gated {gated}: inputs of a warp and tiles of a program"
    )
