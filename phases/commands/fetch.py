"""`ladder fetch`: download a model."""

from __future__ import annotations

from common.console import out
from common.models.hub import model_folder


def run(model: str) -> int:
    """Fetch a model, or see whether what is there is whole; then say where it is."""
    out.out(str(model_folder(model, contents=True)), highlight=False)
    return 0
