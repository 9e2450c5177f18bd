"""Phase 06: attention over the paged KV cache, and the small operators around it, as Triton kernels.

Without a CUDA GPU the kernels run in Triton's interpreter: the same programs, one after the other, in
numpy. It is slow and good for lessons and tests. The choice is made when Triton is first imported.
"""

from __future__ import annotations

import os

import torch

# Fused multiply-adds are part of the kernels' speed, and of the bits that tests compare. From version 3.10
# on, Triton makes none unless it is told to.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from paged_cache import Preset
from triton_paged_attention.feature import Backend, Kernels

__all__ = ["LLM", "PRESET", "Backend", "Kernels", "load"]

PRESET = Preset(on=[Kernels])

load = PRESET.load
"""Make phase 05's engine with this phase's kernels, for a model's name or a loaded model.

Args:
    model: see `forward.load_model`. A loaded model keeps its layers; the engine's copy shares its weights
        except those of joined projections.
    options: those of `paged_cache.load` and the fields of `Kernels`. `block_size` is 64 on a GPU.

Raises:
    UserError: an option is unknown or out of its limits, or the device has no Triton.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
