"""Appendix to phase 13: keys, and what web pages may ask of a server, by its name and by their origin."""
