"""Kernels for steps of one token: one launch for each matrix, and little more.

They are faster inside a CUDA graph only. Launched from Python, a step of one token takes as long as its
launches.
"""
