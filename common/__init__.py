"""Shared code that no phase teaches: models on disk, text, sampling, events and their rules.

Nothing in this package imports a phase.
"""
