"""What a block of KV is verified by: a digest of each of its layers, and one of all these.

The digest of a layer is xxh3_64 of its bytes, so a layer is written and verified singly, whoever
computed it. The checksum of the block is xxh3_64 over the digests, each 8 bytes as xxHash writes
them (the highest first), in the order of the layers; it names the digests of all layers, and they
are kept beside the block's header (slot_memory.py). A block without layers (0 of them: the bytes of
some client) has none, and its checksum is xxh3_64 of its bytes.

A copy is hashed piece by piece while each piece lies in the CPU's cache (buffers.py).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence

import xxhash

from mooncake_store.layout import DIGEST_BYTES
from mooncake_store.memory.buffers import PIECE_BYTES, ByteArray, checksum, copy_and_sum


def pack_digests(digests: Sequence[int]) -> bytes:
    """As they lie beside a header."""
    return struct.pack(f">{len(digests)}Q", *digests)


def unpack_digests(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(raw) // DIGEST_BYTES}Q", raw)


def block_checksum(packed: bytes) -> int:
    """Of the block whose layers have these digests."""
    return xxhash.xxh3_64_intdigest(packed)


def layer_digests(view: ByteArray, layers: int) -> bytes:
    """Of so many equal layers that follow each other in `view`, packed."""
    layer_bytes, rest_bytes = divmod(view.nbytes, layers)
    assert layer_bytes and not rest_bytes, f"{view.nbytes} bytes are not {layers} equal layers"
    memory, digest = view.data, xxhash.xxh3_64_digest
    return b"".join([digest(memory[span]) for span in _spans(layers, layer_bytes)])


@functools.lru_cache(64)
def _spans(layers: int, layer_bytes: int) -> tuple[slice, ...]:
    """Made once: to slice anew takes as long as to hash a KiB."""
    return tuple(slice(at * layer_bytes, (at + 1) * layer_bytes) for at in range(layers))


def checksum_of(view: ByteArray, layers: int) -> int:
    """The checksum of the block that lies in `view`; 0 layers: it has none."""
    return block_checksum(layer_digests(view, layers)) if layers else checksum(view)


def copy_and_digest(target: ByteArray, source: ByteArray, layers: int) -> bytes:
    """Copy so many layers (1-D uint8 of equal length); the packed digests of what arrived."""
    if source.nbytes <= PIECE_BYTES:
        target[:] = source
        return layer_digests(target, layers)
    layer_bytes = source.nbytes // layers
    if layer_bytes > PIECE_BYTES:
        return pack_digests(
            [copy_and_sum(target[part], source[part]) for part in _parts(source, layer_bytes)]
        )
    found = []
    for part in _parts(source, PIECE_BYTES // layer_bytes * layer_bytes):
        piece = target[part]
        piece[:] = source[part]
        found.append(layer_digests(piece, piece.nbytes // layer_bytes))
    return b"".join(found)


def _parts(source: ByteArray, part_bytes: int) -> Iterator[slice]:
    return (slice(at, at + part_bytes) for at in range(0, source.nbytes, part_bytes))
