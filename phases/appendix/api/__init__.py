"""Appendix to phase 13: request fields and routes of OpenAI's and vLLM's APIs that phase 13 lacks."""
