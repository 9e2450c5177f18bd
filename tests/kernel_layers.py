"""Engines whose only kernels are those of attention: in the interpreter the others take most of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def only_attention() -> Iterator[None]:
    """Let engines that are made within keep phase 01's layers beside the attention kernels."""
    with mock.patch("triton_paged_attention.layers.optimize", lambda model: model):
        yield
