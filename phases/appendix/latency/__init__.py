"""Kernels for steps of one token, and of two to eight: as few launches as there are matrices to read.

They are faster inside a CUDA graph only. Launched from Python, a step of one token takes as long as its
launches.
"""
