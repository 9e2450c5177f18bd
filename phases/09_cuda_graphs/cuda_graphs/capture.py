"""Capture: record the kernels of a function once, then launch them all with one call.

Replaying does exactly what was recorded: the same kernels, grids and addresses. So whatever may differ
between two steps has to be the contents of tensors that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from common.collector import collector_paused

Replay = Callable[[], None]


class Capturer:
    """Captures functions as CUDA graphs, one after the other, into one pool of device memory.

    Graphs that share a pool reuse each other's memory: the results of a replay are valid only until the
    next replay of any of them. Capture the largest first, so that the others fit into its memory.

    On a device without CUDA graphs, `capture` returns the function itself. That is slow, and exactly what
    tests on a CPU need.

    count: number of functions captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.count = device, 0
        self._graphs: list[torch.cuda.CUDAGraph] = []
        cuda = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if cuda else None
        # PyTorch's own capture stream is of the GPU that was the current one at the process's first capture.
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], None]) -> Replay:
        """Capture `function` as a CUDA graph, and return a function that replays it.

        `function` reads its inputs from tensors at fixed addresses, and stores its results as attributes.
        It runs once before it is captured: compiling kernels and setting up libraries cannot be recorded.
        """
        self.count += 1
        function()
        if self.device.type != "cuda":
            return function
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on meanwhile: that of a process group looks at its events all the time. And no
        # graph of an engine that is garbage may be freed: CUDA ends the capture at that.
        with (
            collector_paused(),
            torch.cuda.graph(graph, self._pool, self._stream, "thread_local"),
        ):
            function()
        self._graphs.append(graph)
        return graph.replay

    def release(self) -> None:
        """Destroy the captured CUDA graphs; the NCCL communicators in them can be destroyed only then."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
