"""Drafting inside the graph that verifies: positions and drafts that only the device knows."""

from speculative.ahead.graph import AheadGraph
from speculative.ahead.steps import Ahead, ahead_bytes

__all__ = ["Ahead", "AheadGraph", "ahead_bytes"]
