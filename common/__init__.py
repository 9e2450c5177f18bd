"""What every phase uses and no phase teaches: configuration, weights, text, sampling, measuring.

Nothing in this package imports a phase.
"""
