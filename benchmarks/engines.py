"""Engines as they are measured: a phase's, with what the appendix adds on this device."""

from __future__ import annotations

from typing import Any

from paged_cache import PagedEngine
from phases import phase_named
from phases.registry import load_engine


def engine_of(phase: str, model: Any, **options: Any) -> PagedEngine:
    """Return a phase's engine for a model's name or a loaded model; `phase` is its number, from 05 on."""
    made = load_engine(phase_named(phase), model, **options)
    assert isinstance(made, PagedEngine)
    return made
