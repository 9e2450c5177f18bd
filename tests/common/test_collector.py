"""Python's collector is kept out of steps, and let in again."""

from __future__ import annotations

import gc

import pytest

from common.collector import collector_paused


def test_nothing_is_collected_in_a_pause() -> None:
    with pytest.raises(KeyError), collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled(), "a pause inside a pause ends the outer one"
        raise KeyError
    assert gc.isenabled()
