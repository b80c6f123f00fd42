"""Memory of the caller's as the store sees it: a flat run of bytes, never copied.

numpy arrays, torch tensors and everything with the buffer protocol are taken by address. What is
not contiguous is refused: a silent copy would be filled instead of the caller's memory.

Not here: registering memory with a transport (known_nodes.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from mooncake_store.errors import RequestInvalid
from mooncake_store.memory.checksum import ByteArray


def as_bytes(buffer: Any, is_target: bool = False) -> ByteArray:
    """The memory of `buffer` as a 1-D uint8 array. RequestInvalid when it cannot be had so.

    `is_target`: bytes will be written into it, so it must be writable.
    """
    if isinstance(buffer, np.ndarray):
        if buffer.ndim == 1 and buffer.dtype == np.uint8 and buffer.flags.c_contiguous:
            flat = buffer  # as it should be: nothing to make
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
                f"{type(buffer).__name__} is no memory that can be moved ({error}): use numpy "
                "arrays, torch tensors on the CPU, bytearray, memoryview or mmap"
            ) from error
    if is_target and not flat.flags.writeable:
        raise RequestInvalid("the buffer is read-only: a block cannot be read into it")
    return flat


def _tensor_bytes(tensor: Any) -> ByteArray:
    """A torch tensor by its address; torch itself is not imported for that."""
    if not tensor.is_contiguous():
        raise RequestInvalid(
            f"a tensor of shape {tuple(tensor.shape)} is not contiguous: pass tensor.contiguous()"
        )
    if tensor.device.type != "cpu":
        raise RequestInvalid(
            f"a tensor on {tensor.device} is not reached from here: copy through pinned memory "
            "(torch.empty(..., pin_memory=True)) and pass that"
        )
    length_bytes = tensor.numel() * tensor.element_size()
    if length_bytes == 0:
        return np.zeros(0, np.uint8)
    array = (ctypes.c_uint8 * length_bytes).from_address(tensor.data_ptr())
    array._tensor = tensor  # the memory lives as long as the view
    return np.frombuffer(array, np.uint8)
