"""Phase 09: CUDA graphs and overlap. A step is one launch, and the next is scheduled meanwhile."""

from __future__ import annotations

from chunked_prefill import Chunked
from cuda_graphs.feature import Graphs, Overlap
from cuda_graphs.overlap import OverlappedLoop
from paged_cache import Preset
from prefix_cache import Prefix
from triton_paged_attention import Kernels

__all__ = ["LLM", "PRESET", "Graphs", "Overlap", "OverlappedLoop", "load"]

PRESET = Preset(
    on=[Chunked, Prefix, Overlap],
    fitting=[Kernels, Graphs],
    defaults={"cuda": {"max_rows": 256, "step_tokens": 8192}},
)
"""On a GPU there is one to fill."""

load = PRESET.load
"""Make this phase's engine for a model's name or a loaded model.

Args:
    model: see `forward.load_model`.
    options: those of `prefix_cache.load`, the fields of `Kernels` and `Graphs`, and all features
        themselves, to be switched off: `graphs=False`. Kernels and graphs are on by default on
        CUDA only; there `max_rows` is 256 and `step_tokens` 8,192 by default.

Raises:
    UserError: an option is unknown or out of its limits, or features do not go together.
"""

LLM = PRESET.llm
"""Text in, text out; see `common.text.llm.LLM`. Options are those of this phase's `load`."""
