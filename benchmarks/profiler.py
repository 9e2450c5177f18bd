"""Write a trace of an engine's steps with PyTorch's profiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile as torch_profile
from torch.profiler import record_function

from benchmarks.trace import INTERPRETED
from benchmarks.workloads import Workload
from common.device import synchronize
from common.files import whole
from continuous.engine import Engine
from forward.model import Model


def record(engine: Engine, work: Workload, model: Model, path: Path, decodes: int) -> None:
    """Serve `work` under the profiler until so many decode steps are done, and write the trace.

    Before that the work is done twice with other tokens: once to compile kernels and fill caches, once for
    the profiler itself, whose first events cost extra.
    """
    with interpreted_kernels():
        for repeat in (1, 2, 0):
            with torch_profile() as profiler:
                serve_steps(engine, work.cold(repeat), decodes)
                synchronize(model.device)
    with whole(path) as scratch:
        profiler.export_chrome_trace(str(scratch))


def serve_steps(engine: Engine, work: Workload, decodes: int) -> None:
    """Run a workload's prompts and so many decode steps after them, and drop the rest.

    The engine itself makes each step a range of the trace.
    """
    requests = [
        request
        for prompt, params in zip(work.prompts, work.params, strict=True)
        for request in engine.add(prompt, params)
    ]
    before = engine.stats.decode_steps
    while engine.stats.decode_steps - before < decodes and not engine.idle:
        for output in engine.step():
            if output.finish_reason == "error":
                raise RuntimeError("a step failed while it was profiled; its log says why")
    for request in requests:
        engine.abort(request)
    while not engine.idle:
        engine.step()


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Put a range around each kernel that Triton's interpreter runs: the profiler knows only operators."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        yield
        return
    function = interpreter.InterpretedFunction
    inner = function.run

    def run_kernel(self: Any, *arguments: Any, **options: Any) -> Any:
        with record_function(INTERPRETED + self.fn.__name__):
            return inner(self, *arguments, **options)

    function.run = run_kernel
    try:
        yield
    finally:
        function.run = inner
