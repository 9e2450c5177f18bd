"""Appendix to phase 13: metrics, the access log, and a page that shows the engine at work."""
