"""Appendix to phase 13: the rest of the API that clients of OpenAI and vLLM know."""
