"""Python's collector is kept out of steps, and let in again."""

from __future__ import annotations

import gc

import pytest

from common.collector import SELDOM, kept_out, paused


def test_the_collector_is_kept_out_for_a_while_and_no_longer() -> None:
    gc.unfreeze()
    before = gc.get_threshold()
    with pytest.raises(KeyError), kept_out():
        assert gc.get_freeze_count() > 1000, "what is there is looked at again"
        assert gc.get_threshold() == (*before[:2], SELDOM), "everything is looked through as often as ever"
        raise KeyError
    assert gc.get_freeze_count() == 0, "objects stay out of the collector's sight for ever"
    assert gc.get_threshold() == before


def test_nothing_is_collected_in_a_pause() -> None:
    with pytest.raises(KeyError), paused():
        assert not gc.isenabled()
        with paused():
            pass
        assert not gc.isenabled(), "a pause inside a pause ends the outer one"
        raise KeyError
    assert gc.isenabled()
