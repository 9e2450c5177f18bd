"""Other engines under the same measurement: what `transformers` needs for a workload."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Sample, memory
from benchmarks.workloads import Workload
from common.device import synchronize


def transformers_version() -> str:
    """How `transformers` is called as a variant, or an empty string where it is not installed."""
    try:
        import transformers
    except ImportError:
        return ""
    return f"transformers {transformers.__version__}"


class Transformers:
    """`transformers`' own `generate`, greedy, with its KV cache, all requests in a batch."""

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained  # its types are no help with `to`
        self.model = load(folder, dtype=dtype).to(device).eval()
        self.device = device

    @torch.inference_mode()
    def measure(self, work: Workload) -> Sample:
        """Seconds and rates of the whole workload, whose prompts and outputs must have one length each."""
        (output,) = set(work.output_lens)
        ids = torch.tensor(work.prompts, device=self.device)
        with memory(self.device) as used:
            start = time.perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output,
                min_new_tokens=output,
                pad_token_id=0,
            )
            synchronize(self.device)
            seconds = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + output
        sample = {
            "seconds": seconds,
            "output_tokens_per_s": work.output_tokens / seconds,
            "prompt_tokens_per_s": work.prompt_tokens / seconds,
        }
        return (
            sample if used.peak is None else {**sample, "peak_memory_bytes": float(used.peak)}
        )
