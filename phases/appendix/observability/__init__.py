"""Appendix to phase 13: the access log, traces for a collector, and a page that shows the engine at work."""
