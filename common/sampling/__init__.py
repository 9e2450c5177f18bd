"""Sampling: the settings of requests, their rows in arrays on the device, and the choice of the
next token.
"""
