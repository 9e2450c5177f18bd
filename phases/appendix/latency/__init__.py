"""Kernels for decode steps of one token in all: one launch for each weight matrix, and little more.

They are faster inside a CUDA graph only. Launched from Python, a step of one token takes as long as its
launches.
"""
