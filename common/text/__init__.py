"""Convert between text and tokens."""
