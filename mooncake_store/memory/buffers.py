"""Flat views of memory without copies, and checksums of their bytes.

numpy arrays, torch tensors and objects with the buffer protocol are used by address. Memory that is
not contiguous is rejected, because numpy would copy it and a read would then fill only the copy.

xxh3-64 hashes some 45 GB/s of bytes in the CPU's cache, and a third of that from memory. So hashing
a piece that fits the cache is nearly free right after its copy. Hashing it from memory later takes
half as long as the copy.

Not here: registering memory with a transport (registrations.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_store.errors import RequestInvalid

ByteArray = npt.NDArray[np.uint8]
PIECE_BYTES = 256 * 1024  # size of a piece; 128 and 512 KiB were not faster (bench/RESULTS.md)


def address_of(view: ByteArray) -> int:
    """The address of contiguous memory, three times as fast as by `ctypes.data` if writable."""
    if view.flags.writeable and view.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(view.data))
    address: int = view.__array_interface__["data"][0]
    return address


def checksum(view: ByteArray) -> int:
    """xxh3_64 of a C-contiguous uint8 array."""
    return xxhash.xxh3_64_intdigest(view.data)


def copy_and_sum(target: ByteArray, source: ByteArray, *, is_read: bool) -> int:
    """Copy `source` to `target` (1-D uint8 of equal length); returns a checksum. One side is in a
    segment, where late bytes of an abandoned transfer may arrive at any time. The other side
    belongs to this process and is hashed: the target of a read, the source of a write. Late bytes
    in a block therefore always fail its verification."""
    hashed = target if is_read else source
    length_bytes = source.nbytes
    if length_bytes <= PIECE_BYTES:
        target[:] = source
        return xxhash.xxh3_64_intdigest(hashed.data)
    running = xxhash.xxh3_64()
    for start in range(0, length_bytes, PIECE_BYTES):
        piece = slice(start, start + PIECE_BYTES)
        target[piece] = source[piece]
        running.update(hashed[piece].data)
    return running.intdigest()


def as_bytes(buffer: Any, is_target: bool = False) -> ByteArray:
    """The memory of `buffer` as a 1-D uint8 array. `is_target`: the memory must be writable.
    RequestInvalid: the buffer has no such memory."""
    if isinstance(buffer, np.ndarray):
        if buffer.ndim == 1 and buffer.dtype == np.uint8 and buffer.flags.c_contiguous:
            flat = buffer  # needs no new view
        elif not buffer.flags.c_contiguous:
            raise RequestInvalid(
                f"an array of shape {buffer.shape} and strides {buffer.strides} is not contiguous: "
                "pass numpy.ascontiguousarray of it, or a view of whole rows"
            )
        else:
            flat = buffer.reshape(-1).view(np.uint8)
    elif hasattr(buffer, "data_ptr"):
        flat = _tensor_bytes(buffer)
    else:
        try:
            flat = np.frombuffer(buffer, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise RequestInvalid(
                f"{type(buffer).__name__} has no memory that can be used ({error}): use numpy "
                "arrays, torch tensors on the CPU, bytearray, memoryview or mmap"
            ) from error
    if is_target and not flat.flags.writeable:
        raise RequestInvalid("the buffer is read-only: a block cannot be read into it")
    return flat


def _tensor_bytes(tensor: Any) -> ByteArray:
    """The memory of a torch tensor, without importing torch."""
    if not tensor.is_contiguous():
        raise RequestInvalid(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pass tensor.contiguous()"
        )
    if tensor.device.type != "cpu":
        raise RequestInvalid(
            f"a tensor on {tensor.device} is not in host memory: pass pinned memory "
            "(torch.empty(..., pin_memory=True)) and copy between the two"
        )
    length_bytes = tensor.numel() * tensor.element_size()
    if length_bytes == 0:
        return np.zeros(0, np.uint8)
    array = (ctypes.c_uint8 * length_bytes).from_address(tensor.data_ptr())
    array._tensor = tensor  # keeps the tensor's memory alive as long as the view
    return np.frombuffer(array, np.uint8)
