"""Errors of an HTTP API in OpenAI's form, and limits on what a client may send."""
