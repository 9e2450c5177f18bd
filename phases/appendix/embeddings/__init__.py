"""Appendix to phase 13: embeddings, the mean of a prompt's hidden states."""
