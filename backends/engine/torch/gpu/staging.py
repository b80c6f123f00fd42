"""Transfers a step's inputs and results through pinned memory, with one copy in each direction.

`.to(device)` would copy each tensor separately and synchronously, from memory that the driver has
to pin first. Here all index arrays of a step are in one pinned buffer, which one asynchronous copy
transfers. Logits are copied into pinned memory, and the calling thread waits for the copy. torch's
allocator reuses a pinned buffer only after the last copy from or to it.

On a CPU there are no copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SLAB_INTEGERS = 64 * 1024  # size of a buffer (int64); most steps need one buffer


class Staging:
    """The index arrays of one step. Tensors that `put` returns have values only after `send`."""

    def __init__(self, device: torch.device, is_direct: bool | None = None) -> None:
        self._device = device
        self._is_direct = device.type == "cpu" if is_direct is None else is_direct
        self._slabs: list[tuple[torch.Tensor, torch.Tensor]] = []  # (host, device) buffers
        self._used = 0  # integers that are used in the last buffer

    def put(self, array: NDArray[np.int64]) -> torch.Tensor:
        """The array as an int64 tensor on the device."""
        assert array.dtype == np.int64, array.dtype
        source = torch.from_numpy(np.ascontiguousarray(array))
        if self._is_direct:
            return source
        count = source.numel()
        if not self._slabs or self._used + count > len(self._slabs[-1][0]):
            self._send_last()
            self._slabs.append(self._slab(max(SLAB_INTEGERS, count)))
            self._used = 0
        host, there = self._slabs[-1]
        place = slice(self._used, self._used + count)
        host[place] = source.reshape(-1)
        self._used += count
        return there[place].view(source.shape)

    def send(self) -> None:
        self._send_last()
        self._slabs.clear()

    def _send_last(self) -> None:
        if self._slabs:
            host, there = self._slabs[-1]
            there[: self._used].copy_(host[: self._used], non_blocking=True)

    def _slab(self, integers: int) -> tuple[torch.Tensor, torch.Tensor]:
        is_pinned = self._device.type == "cuda"
        host = torch.empty(integers, dtype=torch.int64, pin_memory=is_pinned)
        return host, torch.empty(integers, dtype=torch.int64, device=self._device)


def fetched(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor in host memory. Waits for all earlier work on the current stream."""
    if not tensor.is_cuda:
        array: NDArray[Any] = tensor.numpy()
        return array
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    array = host.numpy()
    return array
