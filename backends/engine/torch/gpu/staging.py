"""What a step brings to the device and takes from it: pinned memory, and one copy each way.

A tensor made on the host and moved with `.to(device)` is a copy of its own from memory that the
driver has to pin first, and the CPU waits for it. Here the index arrays of a step go into one
pinned buffer and over with one copy that nobody waits for; logits come back into pinned memory,
behind an event. Pinned memory is torch's: what nobody holds any more is used again, when the copy
that read it is over.

On a CPU both are no copies at all. Not here: the pages (kv_memory.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SLAB_INTEGERS = 64 * 1024  # a step of most sizes in one copy


class Staging:
    """The index arrays of one step. What `put` gives is there for kernels that follow `send`."""

    def __init__(self, device: torch.device, is_direct: bool | None = None) -> None:
        self._device = device
        self._is_direct = device.type == "cpu" if is_direct is None else is_direct
        self._slabs: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the host, on the device
        self._used = 0  # of the last slab

    def put(self, array: NDArray[np.int64]) -> torch.Tensor:
        """int64, of the array's shape, on the device."""
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
    """On the host, in memory of its own; all that the stream had to do before is done then."""
    if not tensor.is_cuda:
        array: NDArray[Any] = tensor.numpy()
        return array
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(tensor.device))
    arrived.synchronize()
    array = host.numpy()
    return array
