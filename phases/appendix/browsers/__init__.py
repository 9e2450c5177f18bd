"""Appendix to phase 13: what web pages may ask of a server, by the server's name and by their origin."""
