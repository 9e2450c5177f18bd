"""Device and number format."""

from __future__ import annotations

import pytest
import torch

from common.device import pick_device, pick_dtype
from common.errors import UserError


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="no Apple GPU"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("mps")


def test_with_two_gpus(two_gpus):
    last = torch.device("cuda", 1)
    assert {pick_device(name) for name in ("auto", "cuda", "cuda:1", last)} == {last}
    with pytest.raises(UserError, match="'cuda:2', but PyTorch finds 2 CUDA devices"):
        pick_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:-1", "meta"])
def test_unknown_devices_are_named(name):
    with pytest.raises(UserError, match=f"device is '{name}', but it must be"):
        pick_device(name)


@pytest.mark.parametrize(
    ("capability", "dtype"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_auto_dtype_knows_which_gpus_compute_in_bfloat16(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pick_dtype("auto", "cuda") is dtype


def test_dtypes_by_name():
    assert pick_dtype("auto", "cpu") is torch.float32
    assert pick_dtype("auto", torch.device("mps")) is torch.float16
    assert pick_dtype("bfloat16", "cpu") is torch.bfloat16
    with pytest.raises(
        UserError,
        match="dtype is 'int8', but it must be one of auto, float32, bfloat16, float16",
    ):
        pick_dtype("int8", "cpu")
