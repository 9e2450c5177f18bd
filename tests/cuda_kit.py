"""What tests of kernels in CUDA C++ share: a GPU from Hopper on runs them, everybody else skips them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phases.appendix.drafting_in_graphs.columns import available
from tests.paged_batches import DEVICE

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not available(torch.device(DEVICE)),
        reason="no GPU from Hopper on, or no compiler for it",
    ),
]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def replayed(step: Callable[[], Tensor]) -> Tensor:
    """What a step has made when it has been captured, and replayed 20 times."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    return out
