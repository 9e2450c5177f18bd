"""Phase 13: serving. An engine behind OpenAI's HTTP API.

`PRESET`, `load` and `LLM` are those of phase 12, since a server changes nothing about an engine. They are
imported when they are first used: the API process imports this package, but not PyTorch.
"""

from __future__ import annotations

from common.lazy import members_of

__all__ = ["LLM", "PRESET", "load"]

__getattr__ = members_of("structured", __all__)
