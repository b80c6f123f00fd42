"""Checksums of KV blocks: a digest per layer, and a checksum over all digests of a block.

The digest of a layer is xxh3_64 of its bytes. So each layer can be written and verified on its own,
also by different workers. The checksum of the block is xxh3_64 over its digests in the order of the
layers, each as 8 bytes, big-endian. The digests are stored in the segment (slot_memory.py), and the
block's checksum verifies them. A block of a client's bytes instead of KV has 0 layers and no
digests. Its checksum is xxh3_64 of its bytes.

`copy_blocks` copies and hashes bytes in one pass of native.c. Where native.c cannot be used, Python
copies piece by piece and hashes each piece while it is in the CPU's cache (buffers.py).
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterator, Sequence

import xxhash

from mooncake_store.layout import DIGEST_BYTES
from mooncake_store.memory.buffers import PIECE_BYTES, ByteArray, address_of, checksum, copy_and_sum
from mooncake_store.native import library

Place = tuple[ByteArray, int]  # buffer, offset in it
HASHED_BYTES_MIN = 241  # shortest layer that native.c can hash
STREAMED_BYTES_MIN = 1024**2  # copies of at least this total size bypass the core's cache
SHARED_BYTES_MIN = 1024**2  # smaller copies use one thread, because other threads wake up slowly


def pack_digests(digests: Sequence[int]) -> bytes:
    """The digests in the byte order in which they are stored beside a header."""
    return struct.pack(f">{len(digests)}Q", *digests)


def unpack_digests(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(raw) // DIGEST_BYTES}Q", raw)


def block_checksum(packed: bytes) -> int:
    """The checksum of the block whose layers have these digests."""
    return xxhash.xxh3_64_intdigest(packed)


def layer_digests(view: ByteArray, layers: int) -> bytes:
    """The packed digests of `layers` equal consecutive layers in `view`."""
    layer_bytes, rest_bytes = divmod(view.nbytes, layers)
    assert layer_bytes and not rest_bytes, f"{view.nbytes} bytes are not {layers} equal layers"
    memory, digest = view.data, xxhash.xxh3_64_digest
    return b"".join([digest(memory[span]) for span in _spans(layers, layer_bytes)])


@functools.lru_cache(64)
def _spans(layers: int, layer_bytes: int) -> tuple[slice, ...]:
    """The slices of the layers; cached, because making them takes as long as hashing a KiB."""
    return tuple(slice(at * layer_bytes, (at + 1) * layer_bytes) for at in range(layers))


def checksum_of(view: ByteArray, layers: int) -> int:
    """The checksum of the block in `view`; 0 layers: a block without layers."""
    return block_checksum(layer_digests(view, layers)) if layers else checksum(view)


def copy_and_digest(target: ByteArray, source: ByteArray, layers: int, *, is_read: bool) -> bytes:
    """Copy `layers` equal layers (1-D uint8 of equal length); returns their packed digests.
    `is_read` selects the side to hash, as in `copy_and_sum`."""
    hashed = target if is_read else source
    if source.nbytes <= PIECE_BYTES:
        target[:] = source
        return layer_digests(hashed, layers)
    layer_bytes = source.nbytes // layers
    if layer_bytes > PIECE_BYTES:
        parts = _parts(source, layer_bytes)
        return pack_digests(
            [copy_and_sum(target[part], source[part], is_read=is_read) for part in parts]
        )
    found = []
    for part in _parts(source, PIECE_BYTES // layer_bytes * layer_bytes):
        target[part] = source[part]
        piece = hashed[part]
        found.append(layer_digests(piece, piece.nbytes // layer_bytes))
    return b"".join(found)


def _parts(source: ByteArray, part_bytes: int) -> Iterator[slice]:
    return (slice(at, at + part_bytes) for at in range(0, source.nbytes, part_bytes))


def copy_blocks(
    targets: Sequence[Place],
    sources: Sequence[Place],
    block_bytes: int,
    layers: int = 0,
    is_hashed: bool = True,
    threads: int = 1,
    *,
    is_read: bool,
) -> list[bytes]:
    """Copy blocks of one size between buffers of 1-D uint8. Returns the packed digests of each
    block, or b"" if not `is_hashed`. A block with 0 layers is hashed as one layer. `threads`: upper
    limit of the threads for a large copy, including the caller's. `is_read`: the sources are in a
    segment (see copy_and_sum); native.c ignores this, because it hashes the bytes that it loads."""
    parts = layers or 1
    part_bytes = block_bytes // parts
    assert part_bytes * parts == block_bytes, f"{block_bytes} bytes are not {parts} equal layers"
    native = _native_copy()
    if native is None or (is_hashed and part_bytes < HASHED_BYTES_MIN):
        return [
            _copy_block(target, source, parts, is_hashed, is_read)
            for target, source in zip(
                _slices(targets, block_bytes), _slices(sources, block_bytes), strict=True
            )
        ]
    count = len(targets)
    if len(sources) != count:
        raise ValueError(f"{count} targets and {len(sources)} sources")
    packed = bytearray(count * parts * DIGEST_BYTES if is_hashed else 0)
    total_bytes = count * block_bytes
    native(
        count,
        _addresses(targets, block_bytes),
        _addresses(sources, block_bytes),
        part_bytes,
        parts,
        (ctypes.c_char * len(packed)).from_buffer(packed) if is_hashed else None,
        total_bytes >= STREAMED_BYTES_MIN,
        threads if total_bytes >= SHARED_BYTES_MIN else 1,
    )
    each_bytes = parts * DIGEST_BYTES
    return [bytes(packed[at * each_bytes : (at + 1) * each_bytes]) for at in range(count)]


@functools.cache
def _native_copy() -> library.NativeFunction | None:
    word, pointer = ctypes.c_uint64, ctypes.c_void_p
    arguments = [word, pointer, pointer, word, word, pointer, ctypes.c_int, word]
    return library.function("copy_blocks", None, arguments)


def _addresses(places: Sequence[Place], block_bytes: int) -> bytes:
    """The addresses of the places as an array of uint64 for native.c. Usually many places are in
    one buffer, so each buffer's address is computed only once."""
    bases: dict[int, int] = {}
    found = []
    for buffer, start in places:
        base = bases.get(id(buffer))
        if base is None:
            base = bases[id(buffer)] = address_of(buffer)
        if not 0 <= start <= buffer.nbytes - block_bytes:  # native.c checks no bounds
            raise ValueError(f"{block_bytes} bytes at {start} exceed a buffer of {buffer.nbytes}")
        found.append(base + start)
    return struct.pack(f"{len(found)}Q", *found)


def _slices(places: Sequence[Place], block_bytes: int) -> Iterator[ByteArray]:
    return (buffer[start : start + block_bytes] for buffer, start in places)


def _copy_block(
    target: ByteArray, source: ByteArray, parts: int, is_hashed: bool, is_read: bool
) -> bytes:
    if not is_hashed:
        target[:] = source
        return b""
    return copy_and_digest(target, source, parts, is_read=is_read)
