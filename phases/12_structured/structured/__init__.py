"""Phase 12: structured output. Tokens that would leave a grammar are masked.

`PRESET`, `load`, `LLM` and `Structured` are imported when they are used: a server reads patterns without
PyTorch.
"""

from __future__ import annotations

from common.lazy import members_of
from common.sampling.grammar import Grammar

__all__ = ["LLM", "PRESET", "Grammar", "Structured", "load"]

__getattr__ = members_of("structured.feature", __all__)
