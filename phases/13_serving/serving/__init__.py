"""Phase 13: serving. The engine behind the API that every client speaks.

`PRESET`, `load` and `LLM` are the phase below's, since a server changes nothing about an engine. They are
imported when they are used: the API process imports this package, but not PyTorch.
"""

from __future__ import annotations

from common.lazy import members_of

__all__ = ["LLM", "PRESET", "load"]

__getattr__ = members_of("structured", __all__)
