"""Layers that keep a state: Gated DeltaNet, and the slots that states lie in."""
