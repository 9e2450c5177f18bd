"""Appendix to phase 13: other clients' HTTP APIs, each translated to a chat of OpenAI's API and back."""
