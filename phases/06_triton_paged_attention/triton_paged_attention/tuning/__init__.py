"""Which configuration a kernel runs in: tables of defaults, and a search for better ones.

This is tooling. A kernel is understood without it: a configuration says how large tiles are and how many
programs share the work, never what is computed.
"""
