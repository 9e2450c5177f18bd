"""Copy a loaded model, so that later phases can replace its layers without flags in its code."""

from __future__ import annotations

import copy

from forward.model import Model


def clone(model: Model) -> Model:
    """Return a copy of a model's modules that shares every parameter and buffer with the original."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
