"""Appendix to phase 13: metrics, the access log, and a web page that shows the engine at work."""
