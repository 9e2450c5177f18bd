"""Appendix to phase 13: tools, functions that a model may call by writing JSON."""
