"""Drafting inside the graph that verifies: positions and drafts that only the device knows."""
