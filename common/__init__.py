"""What every phase uses and no phase teaches: configuration, weights, tokenizer, sampling, devices, measuring.

Nothing in this package imports a phase.
"""
