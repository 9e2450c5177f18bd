"""Processor time of other programs, and the settings that PyTorch's import reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common import neighbours
from common.environment import QUIET, SPIN, limit_threads_and_noise
from common.neighbours import Usage, processors, share, warn


def test_the_share_is_what_neither_we_nor_our_children_used(monkeypatch):
    monkeypatch.setattr(neighbours, "processors", lambda: [0, 1])
    before, after = Usage(10.0, 100.0, 20.0), Usage(12.0, 103.0, 21.5)
    assert share(before, after) == pytest.approx(1.5 / 4)
    assert share(before, Usage(12.0, 100.5, 21.0)) == 0.0, "never negative"


def test_niced_programs_are_busy_too(monkeypatch):
    times = SimpleNamespace(user=1.0, nice=2.0, idle=9.0)
    monkeypatch.setattr(neighbours, "processors", lambda: [0])
    monkeypatch.setattr(neighbours.psutil, "cpu_times", lambda percpu: [times])
    assert neighbours.usage().machine == 3.0, "a niced program takes a processor as well"


def test_a_warning_names_the_share_and_what_helps(monkeypatch, capsys):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(neighbours, "usage", lambda: Usage(11.0, 0.5 * len(processors()), 0.0))
    warn(Usage(10.0))
    said = capsys.readouterr().err
    assert (
        "Other programs take 50% of the processor" in said
        and "OMP_WAIT_POLICY=PASSIVE" in said
    )
    monkeypatch.setattr(neighbours, "usage", lambda: Usage(11.0, 0.3 * len(processors()), 0.0))
    warn(Usage(10.0))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(neighbours, "usage", lambda: Usage(10.1, 9.0, 0.0))
    warn(Usage(10.0))
    assert capsys.readouterr().err == "", "too short for the counters"


def test_a_warning_advises_nothing_that_is_done(monkeypatch, capsys):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(neighbours, "usage", lambda: Usage(11.0, 0.5 * len(processors()), 0.0))
    warn(Usage(10.0))
    assert "OMP_WAIT_POLICY" not in capsys.readouterr().err


def test_settings_are_made_and_the_users_own_win(monkeypatch):
    monkeypatch.setattr("common.environment.quota", lambda: None)
    empty: dict[str, str] = {}
    limit_threads_and_noise(empty, measuring=True)
    assert empty == QUIET | SPIN
    for own in (
        {"OMP_WAIT_POLICY": "PASSIVE"},
        {"GOMP_SPINCOUNT": "7"},
        {"KINETO_LOG_LEVEL": "0"},
    ):
        given = dict(own)
        limit_threads_and_noise(given, measuring=True)
        assert own.items() <= given.items()
        assert ("GOMP_SPINCOUNT" in given) == ("OMP_WAIT_POLICY" not in own)
