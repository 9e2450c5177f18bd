"""A request's beginning as a chain of hashes, by which a router recognizes it.

The chain is that of a prefix cache (phase 08): each hash covers a block and the hash before it, so it stands
for everything up to there. But a block here is bytes of the request, not tokens. Equal texts make equal
tokens, so a router needs neither tokenizer nor chat template, and a request costs it microseconds.
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
    """The JSON fields that a chat's first tokens are made of, undecoded; others are skipped."""

    tools: Raw = Raw(b"")
    messages: list[Raw] = []
    prompt: Raw = Raw(b"")
    cache_salt: Raw = Raw(b"")


_decoder = msgspec.json.Decoder(PromptFields)
_KEEPER = re.compile(rb'"previous_response_id"\s*:\s*"resp_([^_"]+)_')
"""Finds the field of a request that goes on from a stored conversation; quotes inside a text are escaped."""


def keeper_of(body: bytes) -> str:
    """Return the name of the replica that stores the conversation which a request continues.

    It is read from `previous_response_id`, since a response's id begins with the name of its replica. Empty:
    the request continues no stored conversation.

    body: of the request, JSON.
    """
    found = _KEEPER.search(body)
    return found[1].decode(errors="replace") if found else ""


def chain_of(body: bytes) -> list[int]:
    """Return 64-bit hashes of longer and longer beginnings of a request's prompt; empty: less than a block.

    A conversation that continues repeats its messages and adds some, so its chain is continued as well. Every
    hash depends on the request's `cache_salt`: requests that must not share a cache have different chains.

    body: of the request, JSON.
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
    """Return a 64-bit hash for each block, which covers this block, all blocks before it, and the salt.

    The first hash is that of the salt and is not returned; each other one is the hash of the one before (8
    bytes) and the block. Blocks may be text or the keys of a prefix cache. The hash is `xxhash`'s because it
    must be the same in every process, which Python's `hash` of bytes is not.
    """
    digest, found = xxhash.xxh3_64_intdigest(salt), []
    for block in blocks:
        digest = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + block)
        found.append(digest)
    return found
