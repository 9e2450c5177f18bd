"""A bound on what the body of a request is made of, before it is decoded."""

from __future__ import annotations

import asyncio

import numpy as np

from serving.app import Extension
from serving.http.errors import wrong
from serving.http.exchange import Exchange
from serving.http.limits import Limits

LARGE_BODY = 64 << 10
"""Bytes of a body whose parts are counted; a smaller one has no more than are allowed."""
_QUOTE = ord('"')
_PARTS = np.isin(np.arange(256), list(b"{[:"))


class BodyParts(Extension):
    """Refuses bodies of too many objects, lists and keys; in a thread, as it takes a while."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    async def read(self, exchange: Exchange, kind: type, body: bytes) -> None:
        """See `Extension`."""
        if len(body) > LARGE_BODY:
            await asyncio.to_thread(check_parts, body, self.limits.max_parts)


def check_parts(body: bytes, most: int) -> None:
    """Raise `ApiError` for a body of too many parts: each costs a microsecond in which no stream goes on.

    What stands in strings does not count. Other threads run on while a large body is looked through.
    """
    if sum(map(body.count, (b"{", b"[", b":"))) <= most:
        return
    text = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    inside = np.bitwise_xor.accumulate(text == _QUOTE)
    if np.count_nonzero(_PARTS[text] & ~inside) > most:
        raise wrong(
            None,
            f"the body has more than {most:,} objects, lists and keys, which is the limit",
        )
