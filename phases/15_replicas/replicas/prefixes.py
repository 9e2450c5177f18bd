"""A request's beginning as a chain of hashes, by which a router recognizes it.

The chain is phase 08's: each number covers a block and the number before it, so it names everything up to
there. But its blocks are bytes of the request, not tokens. Equal texts make equal tokens, so a router needs
neither tokenizer nor template, and a request costs it microseconds.
"""

from __future__ import annotations

import re

import msgspec
import xxhash
from msgspec import Raw, Struct

BLOCK = 128
"""Bytes of a block: some 30 tokens of English text, or 20 tokens that come as numbers."""
LONGEST = 512
"""Most blocks of a chain: 64 KB distinguish any two prompts in practice, and bound the time of hashing."""


class PromptFields(Struct):
    """The fields of a request that its first tokens are made of, undecoded; all other fields are skipped."""

    tools: Raw = Raw(b"")
    messages: list[Raw] = []
    prompt: Raw = Raw(b"")
    cache_salt: Raw = Raw(b"")


_decoder = msgspec.json.Decoder(PromptFields)
_KEEPER = re.compile(rb'"previous_response_id"\s*:\s*"resp_([^_"]+)_')
"""Finds the field of a request that goes on from a stored conversation; quotes inside a text are escaped."""


def keeper_of(body: bytes) -> str:
    """Return the name of the replica that stores the conversation which a request continues; empty for
    none.

    body: of the request, JSON. The id of a previous response begins with the name of the replica that has
        made it.
    """
    found = _KEEPER.search(body)
    return found[1].decode(errors="replace") if found else ""


def chain_of(body: bytes) -> list[int]:
    """Return 64-bit hashes of longer and longer beginnings of a request's prompt; empty if it has no prompt.

    body: of the request, JSON. A conversation that continues repeats its messages and adds some, so its chain
        is continued as well.
    The salt is in every number: requests that must not share a cache do not share a chain (phase 08).
    """
    try:
        found = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        # No JSON, or too deep: its replica refuses it.
        return []
    parts = [bytes(found.tools), *map(bytes, found.messages), bytes(found.prompt)]
    text = b"".join(parts)[: BLOCK * LONGEST]
    blocks = [text[at : at + BLOCK] for at in range(0, len(text) - BLOCK + 1, BLOCK)]
    return chain(blocks, bytes(found.cache_salt))


def chain(blocks: list[bytes], salt: bytes) -> list[int]:
    """Return a number below 2^64 for each beginning that ends with one of `blocks`, by a 64-bit hash of
    `xxhash`.

    The hash of the salt begins; each number is the hash of the one before (8 bytes) and the block. Any good
    hash will do that is the same in every process, which `hash` of bytes is not. Keys of
    `prefix_cache.index` do as blocks, too.
    """
    digest, found = xxhash.xxh3_64_intdigest(salt), []
    for block in blocks:
        digest = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + block)
        found.append(digest)
    return found
