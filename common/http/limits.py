"""Limits on what a client may send and how long it may take. All are on by default."""

from __future__ import annotations

from dataclasses import dataclass, fields

from common.errors import integer, number
from common.options import option


@dataclass(frozen=True)
class Limits:
    """Limits of the HTTP server: sizes, counts and seconds. Raises `UserError` for a value out of range."""

    max_body_bytes: int = option(4 << 20, "bytes of a request's body")
    max_header_bytes: int = option(64 << 10, "bytes of a request's address and headers")
    max_connections: int = option(4096, "connections that are open at a time")
    max_parts: int = option(50_000, "objects, lists and keys in a request's body")
    max_choices: int = option(256, "completions of one request: prompts times n")
    max_schema_bytes: int = option(
        64 << 10, "bytes of a JSON schema, a grammar, or all tools together"
    )
    max_tools: int = option(128, "tools of one request")
    max_requests: int = option(2048, "completions in flight, of all requests together")
    max_queue: int = option(
        1024, "completions that wait for a place; beyond that requests are refused"
    )
    max_unsent: int = option(
        1024, "tokens that wait for a slow reader; beyond that it is dropped"
    )
    slow_seconds: float = option(30.0, "seconds that a reader may take for one write")
    body_seconds: float = option(
        30.0, "seconds that headers may take to arrive, and again the body"
    )
    max_seconds: float = option(1800.0, "seconds that a request may take in all")
    grace_seconds: float = option(30.0, "seconds that open streams get after SIGTERM")

    def __post_init__(self) -> None:
        """Raise `UserError` for a value out of its range; change nothing."""
        for item in fields(self):
            value = getattr(self, item.name)
            if item.type == "int":
                integer(item.name, value, low=1, high=1 << 40)
            else:
                number(item.name, value, low=0.0, high=1e9)
