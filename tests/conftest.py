"""Fixtures that every test may use, and markers that follow from them."""

from __future__ import annotations

import inspect
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy
import pytest
import torch
from hypothesis import settings

if (
    not torch.cuda.is_available()
):  # before anything imports triton: its kernels then run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

from common.errors import UserError
from common.models.hub import model_folder
from tests.coroutines import asynchronously
from tests.interpreting import patch_once
from tests.masks import masks_of_booleans as masks_of_booleans
from tests.poison import poison as poison

if TYPE_CHECKING:
    from collections.abc import Callable

    from forward.model import Model

# Sums in one order on every machine, and no fight over cores between the workers of pytest-xdist.
torch.set_num_threads(1)

# The same draws in every run: a change does not fail by what another draw would have found before it.
# `make test-long` draws anew. No example has a deadline: one during which the machine did something else
# would fail, and Hypothesis would call that unreliable.
settings.register_profile("default", deadline=None)
settings.register_profile("same draws", derandomize=True, deadline=None)
settings.load_profile("same draws")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_REAL_MODELS = {"smollm2_folder", "gemma3_folder"}


@pytest.fixture
def rng() -> torch.Generator:
    """Random numbers for the inputs of kernels, on the device that runs them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.Generator(device=device).manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that asks for a real model, so that `-m "not weights"` leaves it out.

    Tests that need a GPU are skipped where there is none.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if _REAL_MODELS & set(getattr(item, "fixturenames", ())):
            item.add_marker("weights")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what a test draws; the course's proof runs them under other seeds, too."""
    patch_once()
    seed = int(os.environ.get("LADDER_TEST_SEED", "0"))
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine; one that hangs for a minute fails, or for four if it is slow."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    seconds = 240.0 if pyfuncitem.get_closest_marker("slow") else 60.0
    asynchronously(lambda: test(**given), seconds)
    return True


def _folder(name: str) -> Path:
    try:
        return model_folder(name)
    except UserError as error:
        if os.environ.get(
            "LADDER_REQUIRE_WEIGHTS"
        ):  # `make test` has fetched them: a skip would hide a fault
            pytest.fail(f"the weights of {name} cannot be had: {error}")
        pytest.skip(f"the weights of {name} cannot be had: {error}")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, fetched on the first use ever."""
    return _folder("smollm2")


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    """Gemma-3-270M, fetched on the first use ever."""
    return _folder("gemma3-270m")


@pytest.fixture(scope="module")
def model() -> Model:
    """Random weights of a size that any test can afford, in float32 on the CPU."""
    from forward.loading import load_model  # an exercise may have left it without a beginning

    return load_model("random:tiny", device="cpu", dtype="float32")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`ladder` inside this process: exit code, standard output and standard error of a call."""
    from phases.cli import main

    def called(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return called
