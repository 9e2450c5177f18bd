"""Phase 10 against phase 09."""

from __future__ import annotations
