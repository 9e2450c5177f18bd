"""Text in, text out, over blocks; prints the ledger at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import continuous.llm
from paged_cache.engine import PagedEngine


class LLM(continuous.llm.LLM):
    """See `continuous.LLM`.

    Args:
        model: a bundled model, a folder, or a hub id.
        show_ledger: print where the memory goes.
        options: those of `load`.
    """

    load: ClassVar[Callable[..., PagedEngine]]
    engine: PagedEngine

    def __init__(self, model: str | Path, *, show_ledger: bool = True, **options: Any) -> None:
        super().__init__(model, **options)
        if show_ledger:
            print(self.engine.ledger)
