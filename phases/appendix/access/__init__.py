"""Appendix to phase 13, the HTTP server: API keys, and allowed host names and web pages."""
