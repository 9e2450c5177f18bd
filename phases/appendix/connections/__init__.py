"""Appendix to phase 13: connections of clients that are slow on purpose, or send more than they should."""
