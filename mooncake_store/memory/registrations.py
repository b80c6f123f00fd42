"""Registers memory of this process with the transports, and tracks how long it is needed.

Memory that is used repeatedly (an engine's KV pool) is registered once, by its owner. Other memory
is registered for one call. Registration is cheap over CMA and TCP, which pin no memory. RDMA pins
the memory, which costs more than the transfer of a header. Therefore small buffers for headers and
digests stay registered and are reused.

After a call has timed out, NIXL may still read or write the call's memory. This memory therefore
stays registered and alive until the process ends, and small buffers in it are never reused. But an
abandoned write (WriteGivenUp) no longer reads its memory, which is therefore freed as usual.

Not here: making flat views (buffers.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from mooncake_store.errors import TransferTimeout, WriteGivenUp
from mooncake_store.memory.buffers import ByteArray, address_of

SCRATCH_BYTES = 128 * 1024  # size of a small buffer: 2,048 headers
SCRATCH_KEPT_MAX = 8  # maximum number of unused small buffers


class MemoryUser(Protocol):
    """The transports of a process (KnownNodes), which move bytes into and out of its memory."""

    @property
    def needs_registration(self) -> bool:
        """True if memory must be registered before bytes move to or from it."""

    def register(self, buffer: ByteArray) -> None: ...

    def unregister(self, buffer: ByteArray) -> None: ...

    def pending_targets(self) -> Sequence[tuple[ByteArray, object]]:
        """(memory, span in this memory) of each part that a timed-out read may still write."""


class Registrations:
    """Registrations of callers' memory. Thread-safe."""

    def __init__(self, transports: MemoryUser) -> None:
        self._transports = transports
        self._lock = threading.Lock()
        self._known: dict[int, ByteArray] = {}  # address -> buffer that `add` has registered
        self._users: dict[tuple[int, int], int] = {}  # (address, bytes) -> number of calls using it

    def add(self, buffer: ByteArray) -> None:
        """Register `buffer` until `drop`, or until the transports are closed."""
        with self._lock:
            known = self._known.get(address_of(buffer))
            if known is not None and known.nbytes >= buffer.nbytes:
                return
            self._known[address_of(buffer)] = buffer
        self._transports.register(buffer)

    def drop(self, buffer: ByteArray) -> None:
        with self._lock:
            known = self._known.pop(address_of(buffer), None)
        if known is not None:
            self._transports.unregister(known)

    def _covers_all(self, buffers: Sequence[ByteArray]) -> bool:
        """True if all `buffers` are views of registered buffers, or if one registered buffer covers
        them. This is a fast test for the common case; after False, `_covers` tests each buffer."""
        with self._lock:
            wholes = set(map(id, self._known.values()))
        if all(id(buffer.base) in wholes for buffer in buffers):
            return True  # comparing addresses takes ten times as long as numpy's `base`
        spans = [(address_of(buffer), buffer.nbytes) for buffer in buffers]
        return self._covers(min(spans)[0], max(start + length for start, length in spans))

    def _covers(self, low: int, high: int) -> bool:
        with self._lock:
            return any(
                address <= low and high <= address + whole.nbytes
                for address, whole in self._known.items()
            )

    @contextlib.contextmanager
    def covering(self, buffers: Sequence[ByteArray]) -> Iterator[None]:
        """Keep all of these buffers registered until the context exits."""
        if not self._transports.needs_registration or not buffers or self._covers_all(buffers):
            yield
            return
        spans = [(buffer, address_of(buffer)) for buffer in buffers if buffer.nbytes]
        new = [each for each, low in spans if not self._covers(low, low + each.nbytes)]
        for buffer in new:
            self._borrow(buffer)
        is_certain = True
        try:
            yield
        except WriteGivenUp:  # the abandoned write no longer reads the memory
            raise
        except TransferTimeout:
            is_certain = False
            raise
        finally:
            late = [target for target, _ in self._transports.pending_targets()] if new else []
            for buffer in new:
                is_late = any(np.may_share_memory(buffer, target) for target in late)
                self._give_back(buffer, is_certain and not is_late)

    def _borrow(self, buffer: ByteArray) -> None:
        """Register `buffer` for one call, unless another call has registered it already."""
        span = address_of(buffer), buffer.nbytes
        with self._lock:
            self._users[span] = users = self._users.get(span, 0) + 1
            if users == 1:
                self._transports.register(buffer)

    def _give_back(self, buffer: ByteArray, is_certain: bool) -> None:
        """End a call's use of `buffer`. The last call unregisters it. `is_certain`: no transfer
        can use the memory any more; if False, the memory stays registered."""
        address = address_of(buffer)
        with self._lock:
            users = self._users[address, buffer.nbytes] - 1
            if users or not is_certain:  # if not certain, the count never returns to 0
                self._users[address, buffer.nbytes] = max(users, not is_certain)
                return
            del self._users[address, buffer.nbytes]
            is_shared = address in self._known or any(start == address for start, _ in self._users)
            if not is_shared:
                self._transports.unregister(buffer)


class Scratch:
    """Small registered buffers for headers and digests, reused between calls. Thread-safe."""

    def __init__(self, transports: MemoryUser) -> None:
        self._transports = transports
        self._lock = threading.Lock()
        self._free: list[ByteArray] = []

    @contextlib.contextmanager
    def take(self, size_bytes: int) -> Iterator[ByteArray]:
        """A buffer of at least `size_bytes` until the context exits. Its content is undefined."""
        buffer = None
        with self._lock:
            if self._free and size_bytes <= SCRATCH_BYTES:
                buffer = self._free.pop()
        if buffer is None:
            buffer = np.zeros(max(size_bytes, SCRATCH_BYTES), np.uint8)
            self._transports.register(buffer)
        is_safe = True
        try:
            yield buffer
        except WriteGivenUp:
            raise
        except TransferTimeout:
            is_safe = False
            raise
        finally:
            with self._lock:
                is_usual = buffer.nbytes == SCRATCH_BYTES
                is_kept = is_safe and is_usual and len(self._free) < SCRATCH_KEPT_MAX
                if is_kept:
                    self._free.append(buffer)
            if is_safe and not is_kept:
                self._transports.unregister(buffer)
