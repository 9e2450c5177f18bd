"""Appendix to phase 13: limits for clients that are slow on purpose, or send more than they should."""
