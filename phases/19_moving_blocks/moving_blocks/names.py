"""Names of blocks: a digest of everything that decides which keys and values a block holds.

Another process, or this one after a restart, finds a block by its name. So a name depends on bytes alone: not
on the seed of Python's `hash`, on the order in which models were loaded, or on an address.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from forward.model import Model
from paged_cache import BlockPool
from prefix_cache.index import Key

DIGEST_BYTES = 16
"""128 bits: two of a billion blocks have the same name with a chance of about 1 in 10**21."""
CHUNK_BYTES = 1 << 26
"""Bytes of a weight that are copied from the device at a time."""


class BlockName(NamedTuple):
    """The name of a full block of a sequence, the same in every engine with the same namespace.

    The namespace is a digest of the model and the block format.

    digest: of the namespace, the salt and all tokens up to the block's end.
    parent: the digest of the block before, or of the namespace and the salt.
    key: the block's own tokens. position: number of blocks before it.
    """

    digest: bytes
    parent: bytes
    key: Key
    position: int


def digest_of(*parts: bytes) -> bytes:
    """Return a digest, as bytes, of byte strings: `(b"ab", b"c")` and `(b"a", b"bc")` have different ones."""
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def chain(
    namespace: bytes, salt: str, keys: Sequence[Key], known: Sequence[BlockName] = ()
) -> Iterator[BlockName]:
    """Yield the names of consecutive full blocks, in order.

    Args:
        namespace: the digest of what all blocks of an engine share, such as the weights.
        salt: text of the request: blocks of another salt have other names.
        keys: tokens of each block, from the first one after `known`.
        known: names of the blocks before.
    """
    parent = known[-1].digest if known else digest_of(namespace, salt.encode())
    for position, key in enumerate(keys, start=len(known)):
        digest = digest_of(parent, key)
        yield BlockName(digest, parent, key, position)
        parent = digest


def namespace_of(model: Model, pool: BlockPool, attention: str = "") -> bytes:
    """Return the digest of all that must be equal for a block of one engine to serve another.

    That is the model's configuration and weights, and how the pool stores keys and values: their dtype, their
    scales, the layout and size of a block.

    attention: name of what computes attention; another kind, such as phase 18's, rounds differently.
    """
    parts = [
        b"moving_blocks 2",
        repr(model.config).encode(),
        attention.encode(),
        str((pool.data.dtype, pool.data.shape[:2], pool.data.shape[3:])).encode(),
    ]
    for name, tensor in tensors_of(model):
        parts.append(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        parts.append(hash_tensor(tensor))
    for layer in pool.layers:
        parts.append(repr(layer.layout).encode())
        parts += [hash_tensor(scale) for scale in layer[2:4] if scale is not None]
    return digest_of(*parts)


def tensors_of(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each tensor that a module of the model has, and the tensor; not only parameters."""
    for name, module in sorted(model.named_modules()):
        own = {**module.__dict__, **module._parameters, **module._buffers}
        for attribute, value in sorted(own.items()):
            if isinstance(value, Tensor):
                yield f"{name}.{attribute}", value


def hash_tensor(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bytes, as bytes; the tensor may be on any device."""
    state = xxhash.xxh3_128()
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    for start in range(0, len(flat), CHUNK_BYTES):
        state.update(flat[start : start + CHUNK_BYTES].cpu().numpy().data)
    return bytes(state.digest())
