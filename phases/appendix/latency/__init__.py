"""Steps of one token, and of a few: as few kernels as there are matrices to read, and little besides.

These ways pay inside a graph only. Launched from Python, a step of one token takes as long as its launches.
"""
