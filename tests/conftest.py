"""Fixtures that every test may use, and markers that follow from them."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

from common.errors import UserError
from common.hub import model_folder

# Sums in one order on every machine, and no fight over cores between the workers of pytest-xdist.
torch.set_num_threads(1)

_REAL_MODELS = {"smollm2_folder", "gemma3_folder"}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for a real model, so that `-m "not weights"` leaves it out."""
    for item in items:
        if _REAL_MODELS & set(getattr(item, "fixturenames", ())):
            item.add_marker("weights")


def _folder(name: str) -> Path:
    try:
        return model_folder(name)
    except UserError as error:
        pytest.skip(f"the weights of {name} cannot be had: {error}")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, fetched on the first use ever."""
    return _folder("smollm2")


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma-3-270M, fetched on the first use ever."""
    return _folder("gemma3-270m")
