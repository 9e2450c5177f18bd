"""Shared by every phase and taught by none: models on disk, text, sampling, events and their rules.

Nothing in this package imports a phase.
"""
