"""Tuning: block sizes found by timing, and kernels compiled before a request waits."""
