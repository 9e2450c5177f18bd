"""Masked steps on a GPU: kernels that read masks where they choose, and second halves as graphs."""
