"""The kernels that choose tokens, under the interpreter on the CPU and natively on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from common.sampling.ops import NAN_TOKEN
from common.sampling.params import SamplingParams
from common.sampling.rows import KEY, TEMPERATURE
from common.sampling.sampler import TORCH, Sampler
from cuda_graphs.sampling import DrawSettings, TritonSamplerBackend, draw_rows
from tests.equivalence.compare import perturbed
from tests.paged_batches import CUDA, DEVICE

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.filterwarnings(
    "ignore:invalid value:RuntimeWarning"
)  # NaN in the interpreter's numpy
@pytest.mark.parametrize(
    "vocab", [16, 300, 9000, pytest.param(151_936, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.slow
def test_drawn_tokens_are_the_samplers(vocab: int, dtype: torch.dtype) -> None:
    """Greedy, hot and cold rows, in another order than the table's, with ties, NaN and infinities."""
    sampler = Sampler(9, vocab, DEVICE)
    for row, heat in enumerate((0.0, 0.7, 1.0, 1.3, 1e-5, 0.9, 2.0, 1.0)):
        sampler.set_row(row, SamplingParams(temperature=heat, seed=row))
    order = [0, 3, 2, 7, 4, 6, 1, 5]
    rows, steps = torch.tensor(order, device=DEVICE), torch.arange(8, device=DEVICE) * 5
    wide = torch.randn(8, 2 * vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    logits = wide.to(DEVICE, dtype)[:, :vocab]  # rows that do not follow one another
    logits[0, 3] = logits[0, 7] = logits[0].max() + 1
    logits[5, 2], logits[4, 5] = float("nan"), float("inf")
    logits[7, : vocab - 3] = float("-inf")  # whole chunks
    logits[3, ::2] = float("-inf")
    for step in range(20 if CUDA else 3):
        want = sampler.sample(logits.float(), rows, steps + step, sampler.plan(order)).tokens
        got = draw_rows(logits, DrawSettings(rows, steps + step, sampler.floats, sampler.ints))
        assert_same_draw(logits, sampler, order, steps + step, want, got)
    best = logits.argmax(1).tolist()
    assert draw_rows(logits).tolist() == best, "not the first of the largest logits"
    assert draw_rows(logits.t().contiguous().t()).tolist() == best, (
        "not the first, columns apart"
    )
    told = [NAN_TOKEN if row == 5 else token for row, token in enumerate(best)]
    for same in (logits, logits.t().contiguous().t()):
        assert TritonSamplerBackend().report(same, logits.argmax(1)).tolist() == told, (
            "NaN is not told"
        )
    assert TritonSamplerBackend().report(logits[:0], logits[:0].argmax(1)).tolist() == []


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("alone", [False, True])
def test_the_kernels_sampler_is_torchs_with_every_setting(alone: bool) -> None:
    """Truncation by torch, the draw by the kernel; rows of bad logits get their argmax all the same."""
    settings: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {
            "top_k": 30,
            "top_p": 0.9,
            "min_p": 0.01,
            "presence_penalty": 1.0,
            "logit_bias": {4: 2.0},
        },
        {"temperature": 0.0},
        {},
    ]
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 3
    logits[1, 7] = float("nan")
    tokens = []
    for sampler_backend in (TORCH, TritonSamplerBackend()):
        sampler = Sampler(6, 300, DEVICE)
        sampler.sampler_backend = sampler_backend
        for row, one in enumerate(settings):
            sampler.set_row(
                row, SamplingParams(**{"temperature": 0.9, "seed": row, **one}), prompt_ids=[1]
            )
        for part in [[row] for row in range(6)] if alone else [list(range(6))]:
            rows = torch.tensor(part, device=DEVICE)
            for step in range(4):
                steps = torch.full_like(rows, step)
                plan = sampler.plan(part)
                tokens.append(sampler.sample(logits[rows], rows, steps, plan).tokens.tolist())
    assert tokens[: len(tokens) // 2] == tokens[len(tokens) // 2 :]


def assert_same_draw(
    logits: Tensor,
    sampler: Sampler,
    order: list[int],
    steps: Tensor,
    want: Tensor,
    got: Tensor,
) -> None:
    """Where two draws differ, the two tokens' perturbed logits have to be a near tie."""
    for place in (want != got).nonzero().flatten().tolist():
        temperature = float(sampler.floats[order[place], TEMPERATURE])
        key = sampler.ints[order[place], KEY]
        assert temperature > 0, "greedy tokens are exact"
        values = perturbed(logits[place], temperature, int(key), int(steps[place]))
        gap = float((values[want[place]] - values[got[place]]).abs())
        assert gap < 1e-5, (
            f"place {place}: {int(got[place])}, not {int(want[place])}; {gap:.1e} apart"
        )
