"""Blocks from local memory into slots of a node: header, payload, header.

The header says "writing" before the first byte of the payload changes and "ready" after the last,
so whoever reads a slot without asking (a reader without checksums, a directory that restarts) knows
whose bytes it saw. On this host the payload is copied into the mapped segment and its checksum is
computed on the way; elsewhere it goes through the transport of the node.

Not here: who may write where (directory.py), which node (client.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, Geometry, geometry
from mooncake_store.memory.buffers import ByteArray, checksum, copy_and_sum
from mooncake_store.memory.registrations import Scratch
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import Movers, parts_of
from mooncake_store.transports.transport import LocalSpan, Span, Transport

PART_BYTES = 4 * 1024**2


class Write(NamedTuple):
    """One block and where it goes."""

    key: bytes
    slot: int
    generation: int
    source: ByteArray

    def header(self, state: int, digest: int) -> SlotHeader:
        return SlotHeader(state, self.generation, self.key, digest, self.source.nbytes)


class BlockWriter:
    """Thread-safe."""

    def __init__(
        self, nodes: KnownNodes, scratch: Scratch, is_verified: bool, movers: Movers
    ) -> None:
        self._nodes = nodes
        self._movers = movers
        self._scratch = scratch
        self._is_verified = is_verified

    def write(self, info: NodeInfo, writes: Sequence[Write], deadline_s: float) -> list[int]:
        """The checksum of each block written (0 when this store computes none).

        TransferFailed: nothing of it may be committed. TransferTimeout: bytes may still arrive.
        """
        transport = self._nodes.transport(info)
        if transport is None:
            raise TransferFailed(
                f"node {info.node_id} cannot be written from this host in this mode"
            )
        shape = geometry(info.segment_bytes, info.unit_bytes)
        if isinstance(transport, MappedTransport):
            return self._write_mapped(transport, info, shape, writes, deadline_s)
        return self._write_remote(transport, info, shape, writes, deadline_s)

    def _write_mapped(
        self,
        transport: MappedTransport,
        info: NodeInfo,
        shape: Geometry,
        writes: Sequence[Write],
        deadline_s: float,
    ) -> list[int]:
        until_s = time.monotonic() + deadline_s
        started_s = time.monotonic()
        digests, moved_bytes = [], 0
        with transport.owned(info) as view:
            slots = SlotMemory(view, shape)
            for write in writes:  # all at once: the code for it is in the CPU's cache then
                slots.write_header(write.slot, write.header(STATE_WRITING, 0))
            for write in writes:
                start, length = shape.slot_offset_bytes(write.slot), write.source.nbytes
                target = view[start : start + length]
                if self._is_verified:
                    digest = copy_and_sum(target, write.source)
                else:
                    digest, target[:] = 0, write.source
                digests.append(digest)
                moved_bytes += length
                if time.monotonic() > until_s:
                    raise TransferFailed(
                        f"node {info.node_id}: {len(digests)} of {len(writes)} blocks were copied "
                        f"within {deadline_s:g} s: this host is short of CPU; allow more time"
                    )
            for write, digest in zip(writes, digests, strict=True):
                slots.write_header(write.slot, write.header(STATE_READY, digest))
        transport.note(is_read=False, moved_bytes=moved_bytes, started_s=started_s)
        return digests

    def _write_remote(
        self,
        transport: Transport,
        info: NodeInfo,
        shape: Geometry,
        writes: Sequence[Write],
        deadline_s: float,
    ) -> list[int]:
        until_s = time.monotonic() + deadline_s
        slices = [shape.headers(write.slot, write.source.nbytes) for write in writes]
        places = [Span(each.start, HEADER_BYTES) for each in slices]
        others = [Span(each.start + HEADER_BYTES, length) for each in slices
                  if (length := each.stop - each.start - HEADER_BYTES)]  # fmt: skip
        zeros = max((other.length_bytes for other in others), default=0)

        def put_headers(state: int, digests: Sequence[int]) -> None:
            pairs = zip(writes, digests, strict=True)
            raw = b"".join(write.header(state, digest).pack() for write, digest in pairs)
            with self._scratch.take(len(raw) + zeros) as heads:
                heads[: len(raw)] = np.frombuffer(raw, np.uint8)
                heads[len(raw) : len(raw) + zeros] = 0
                starts = range(0, len(raw), HEADER_BYTES)
                sources = [(heads, Span(start, HEADER_BYTES)) for start in starts]
                emptied = others if state == STATE_WRITING else []
                sources += [(heads, Span(len(raw), other.length_bytes)) for other in emptied]
                transport.write(info, sources, [*places, *emptied], _left(until_s))

        def put_part(part: Sequence[Write]) -> list[int]:
            # Hashed just before they are sent: the transfer finds them in the CPU's cache.
            digests = [checksum(write.source) if self._is_verified else 0 for write in part]
            payloads: list[LocalSpan] = [
                (write.source, Span(0, write.source.nbytes)) for write in part
            ]
            targets = [
                Span(shape.slot_offset_bytes(write.slot), write.source.nbytes) for write in part
            ]
            transport.write(info, payloads, targets, _left(until_s))
            return digests

        put_headers(STATE_WRITING, [0] * len(writes))
        found = self._movers.each(
            put_part, parts_of(writes, lambda write: write.source.nbytes, PART_BYTES)
        )
        digests = [digest for part in found for digest in part]
        put_headers(STATE_READY, digests)
        return digests


def _left(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TransferTimeout("the deadline passed before everything was written")
    return left_s
