"""Block keys: a key identifies a block's tokens and its whole prefix.

key[i] = blake2b-128(tokens of block i, keyed with key[i-1]); key[-1] is the chain's seed. Equal
keys therefore mean equal prefixes. The seed separates everything that must not be shared: another
model, dtype or block size (the fingerprint), another LoRA adapter, another tenant (the cache salt).
A client may add a salt of its own to that of its tenant.

The hash is cryptographic and has 128 bits, because a collision would give a request the KV of
another request. All tokens of a block are hashed, because hashing only some of them caused wrong
reuse in Mooncake (its issue 4153). Only full blocks have keys. blake2b is in the standard library
and hashes about 1 GB/s. Python's own hash() differs between processes.

Not here: the holders of a block (prefix_index.py, directory.py).
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_store.errors import RequestInvalid

KEY_BYTES = 16
SALT_SEPARATOR = "\0"  # between the tenant's salt and the client's in a cache salt
TOKEN_BYTES = 4  # tokens are hashed as little-endian unsigned 32-bit integers

Tokens = Sequence[int] | np.ndarray[Any, Any]


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise RequestInvalid for the first key that does not have 16 bytes."""
    if isinstance(keys, bytes | str):
        raise RequestInvalid("keys come in a list, even a single key: [key]")
    if set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}:
        return  # the common case; without a Python loop it takes 30 us for 1,000 keys
    for key in keys:
        if not isinstance(key, bytes):
            raise RequestInvalid(
                f"a key is {KEY_BYTES} bytes, not {type(key).__name__} {key!r:.40}: key_of(name) "
                "makes a key of a name"
            )
        if len(key) != KEY_BYTES:
            raise RequestInvalid(
                f"a key has {KEY_BYTES} bytes, {key.hex()[:64]} has {len(key)}; key_of(name) makes "
                "a key of a name"
            )


def split_keys(packed: bytes) -> tuple[bytes, ...]:
    """Split joined keys; RequestInvalid unless all have 16 bytes."""
    count, rest_bytes = divmod(len(packed), KEY_BYTES)
    if rest_bytes:
        raise RequestInvalid(f"{len(packed)} bytes are no whole number of keys of {KEY_BYTES}")
    return struct.unpack(f"{KEY_BYTES}s" * count, packed)


def tenant_of(cache_salt: str) -> str:
    """The salt of the tenant, whose quota counts. The client's own salt is after the separator."""
    return cache_salt.partition(SALT_SEPARATOR)[0]


def chain_seed(fingerprint: str, lora: str = "", cache_salt: str = "") -> bytes:
    """The 16 bytes that key the hash of the first block, instead of a previous block's key."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"mooncake.seed")
    for part in (fingerprint, lora, cache_salt):
        raw = part.encode()
        # The length comes first, or else ("a", "bc") and ("ab", "c") would have one seed.
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


def block_keys(token_ids: Tokens, block_tokens: int, seed: bytes) -> list[bytes]:
    """Keys of the full blocks of `token_ids`. A partial last block has no key."""
    return extend_keys(seed, token_ids, block_tokens)


def extend_keys(last_key_or_seed: bytes, token_ids: Tokens, block_tokens: int) -> list[bytes]:
    """Keys of the full blocks of `token_ids`, which follow the block `last_key_or_seed`."""
    assert block_tokens > 0, f"block_tokens is {block_tokens}"
    assert len(last_key_or_seed) == KEY_BYTES, f"a key has {len(last_key_or_seed)} bytes"
    blocks = len(token_ids) // block_tokens
    packed = packed_tokens(token_ids[: blocks * block_tokens])
    step_bytes = block_tokens * TOKEN_BYTES
    key, keys, blake2b = last_key_or_seed, [], hashlib.blake2b
    for start in range(0, blocks * step_bytes, step_bytes):
        block = packed[start : start + step_bytes]
        key = blake2b(block, digest_size=KEY_BYTES, key=key).digest()
        keys.append(key)
    return keys


def tail_key(request_id: str) -> bytes:
    """The key of a request's ephemeral object: its partial last block, which decode reads."""
    raw = request_id.encode()
    return hashlib.blake2b(raw, digest_size=KEY_BYTES, person=b"mooncake.tail").digest()


def packed_tokens(token_ids: Tokens) -> memoryview:
    """The tokens as little-endian uint32 bytes; ValueError for values that are no token ids."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise ValueError(f"token ids are {token_ids.dtype}{token_ids.shape}; expected 1-D ints")
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < 2**32:
            raise ValueError("token ids must lie in 0 .. 2**32 - 1")
        return np.ascontiguousarray(token_ids, dtype="<u4").data.cast("B")
    try:
        packed = array("I", token_ids)  # twice as fast as numpy on a list, and checks the range
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in 0 .. 2**32 - 1: {error}") from error
    assert packed.itemsize == TOKEN_BYTES, f"array('I') has {packed.itemsize} bytes here"
    if not _IS_LITTLE_ENDIAN:
        packed.byteswap()
    return memoryview(packed).cast("B")


def unpacked_tokens(packed: bytes) -> np.ndarray[Any, Any]:
    """The token ids of the bytes from packed_tokens, without a copy."""
    return np.frombuffer(packed, dtype="<u4")


_IS_LITTLE_ENDIAN = array("I", [1]).tobytes()[0] == 1
