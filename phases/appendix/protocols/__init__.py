"""Appendix to phase 13: what other clients speak, each a translation to a chat and back."""
