"""Blocks from local memory onto one node: slots, bytes (header, payload, header), commit.

The header says "writing" before the first byte of the payload changes and "ready" after the last,
so whoever reads a slot without asking (a reader without checksums, a directory that restarts) knows
whose bytes it saw. On this host the payload is copied into the mapped segment and its checksum is
computed on the way; elsewhere it goes through the transport of the node.

What follows a failure is what may still happen: after a failed transfer nothing is in flight, and
the slots go back at once; after a timeout bytes may still arrive, so the slots rest until the lease
ends. Where one of several network paths got stuck (WriteGivenUp) they begin to rest at once, and
the blocks are written once more, into other slots.

Not here: the caller's arguments and which node (client.py), who may write where (the directory).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mooncake_store.client.restorer import LEASE_MARGIN_S
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import (
    EpochPassed,
    NodeUnknown,
    TransferFailed,
    TransferTimeout,
    WriteGivenUp,
)
from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, Geometry
from mooncake_store.memory.buffers import ByteArray, checksum
from mooncake_store.memory.digests import copy_blocks
from mooncake_store.memory.registrations import Registrations, Scratch
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.blocks import Allocation
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes, NodeAccess
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import Movers, parts_of
from mooncake_store.transports.transport import ByteSpan, LocalSpan, left_to_write_s

log = logging.getLogger("mooncake_store.client")
PART_BYTES = 4 * 1024**2
COPIED_BYTES = 16 * 1024**2  # into a mapped segment between two looks at the clock
ATTEMPTS_MAX = 3  # each but the last has found a network path stuck


class Write(NamedTuple):
    """One block and where it goes."""

    key: bytes
    slot: int
    generation: int
    source: ByteArray

    def header(self, state: int, digest: int) -> SlotHeader:
        return SlotHeader(state, self.generation, self.key, digest, self.source.nbytes)

    def header_writing(self, lease_s: float) -> SlotHeader:
        return SlotHeader.writing(self.generation, self.key, self.source.nbytes, lease_s)


class Putter:
    """Thread-safe."""

    def __init__(
        self,
        directory: DirectoryClient,
        nodes: KnownNodes,
        registrations: Registrations,
        scratch: Scratch,
        movers: Movers,
        is_verified: bool,
        tenant: str,
    ) -> None:
        self._directory = directory
        self._nodes = nodes
        self._registrations = registrations
        self._scratch = scratch
        self._movers = movers
        self._is_verified = is_verified
        self._tenant = tenant
        self._attached: dict[str, str] = {}  # node_id -> the incarnation that was attached

    def put(
        self,
        node_id: str,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
    ) -> list[bool]:
        """`sources` have one size. True: it is in the store, by now or from before."""
        until_s = time.monotonic() + deadline_s
        for attempt in range(ATTEMPTS_MAX):
            name = f"{owner}+{attempt}" if attempt else owner
            try:
                return self._put(node_id, keys, sources, name, left_to_write_s(until_s))
            except WriteGivenUp as error:
                log.warning("put on node_id=%s: %s", node_id, error)
                self._directory.release(name)
            except TransferTimeout:  # no time was left for another attempt
                break
        return [False] * len(keys)

    def _put(
        self,
        node_id: str,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
    ) -> list[bool]:
        info, given = self._allocate(node_id, keys, sources[0].nbytes, owner, deadline_s)
        done = [slot is None and at < given.covered for at, slot in enumerate(given.slots)]
        try:
            return self._fill(info, given, keys, sources, owner, deadline_s, done)
        finally:
            if None in given.slots:  # blocks that were there already are leased to `owner` now
                self._directory.release_later(owner)

    def _fill(
        self,
        info: NodeInfo,
        given: Allocation,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
        done: list[bool],
    ) -> list[bool]:
        node_id = info.node_id
        taken = [(at, slot) for at, slot in enumerate(given.slots) if slot is not None]
        writes = [Write(keys[at], slot.slot, slot.generation, sources[at]) for at, slot in taken]
        if not writes:
            return done
        try:
            with self._registrations.covering([write.source for write in writes]):
                digests = self._write(info, writes, given, owner, deadline_s)
        except WriteGivenUp:
            raise
        except (EpochPassed, TransferTimeout) as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            return done
        except TransferFailed as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            self._nodes.mark_bad(info)
            self._directory.abandon([slot for _, slot in taken], owner)
            return done
        rows = [
            (write.key, write.slot, write.generation, digest)
            for write, digest in zip(writes, digests, strict=True)
        ]
        stored = self._directory.commit(node_id, rows, owner, 0.0, epoch=taken[0][1].epoch)
        for (at, _), is_stored in zip(taken, stored, strict=True):
            done[at] = is_stored
        return done

    def _allocate(
        self, node_id: str, keys: Sequence[bytes], size_bytes: int, owner: str, deadline_s: float
    ) -> tuple[NodeInfo, Allocation]:
        lease_s = deadline_s + LEASE_MARGIN_S
        for is_last in (False, True):
            info = self._attach(node_id, size_bytes)
            try:
                return info, self._directory.allocate(
                    node_id, keys, owner, lease_s, size_bytes=size_bytes, tenant=self._tenant
                )
            except NodeUnknown:  # it began anew a moment ago
                self._attached.pop(node_id, None)
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def _attach(self, node_id: str, size_bytes: int) -> NodeInfo:
        info = self._nodes.find(node_id)
        if info is not None and self._attached.get(node_id) == info.incarnation:
            return info
        self._nodes.refresh()
        info = self._nodes.find(node_id)
        if info is None:
            known = ", ".join(sorted(node.node_id for node in self._nodes.all()))
            raise NodeUnknown(f"storage node {node_id} is not registered; known: {known or 'none'}")
        self._directory.attach(node_id, "store", size_bytes)
        self._attached[node_id] = info.incarnation
        return info

    # ---- bytes

    def _write(
        self,
        info: NodeInfo,
        writes: Sequence[Write],
        given: Allocation,
        owner: str,
        deadline_s: float,
    ) -> list[int]:
        """The checksum of each block written (0 when this store computes none).

        TransferFailed: nothing of it may be committed. TransferTimeout: bytes may still arrive.
        EpochPassed: the slots may be somebody else's; no byte of a payload was written, nor, where
        that was seen in time, of a header.
        """
        node = self._nodes.access_to(info)
        if node is None:
            raise TransferFailed(
                f"node {info.node_id} cannot be written from this host in this mode"
            )
        lease_s = deadline_s + LEASE_MARGIN_S

        def confirm() -> None:
            if not self._directory.may_write(given, owner, lease_s):
                raise EpochPassed("the slots were granted by a directory that leads no more")

        confirm()  # and again when the headers are written, which keep the next one off these slots
        if isinstance(node.transport, MappedTransport):
            return self._write_mapped(node.transport, node, writes, confirm, deadline_s)
        return self._write_remote(node, writes, confirm, time.monotonic() + deadline_s)

    def _write_mapped(
        self,
        transport: MappedTransport,
        node: NodeAccess,
        writes: Sequence[Write],
        confirm: Callable[[], None],
        deadline_s: float,
    ) -> list[int]:
        info, _, shape = node
        started_s = time.monotonic()
        until_s = started_s + deadline_s
        digests: list[int] = []
        with transport.owned(info) as view:
            slots = SlotMemory(view, shape)
            if any(slots.is_newer(write.slot, write.generation) for write in writes):
                raise EpochPassed("the slots have been given away since: this comes too late")
            for write in writes:  # all at once: the code for it is in the CPU's cache then
                slots.write_header(write.slot, write.header_writing(deadline_s + LEASE_MARGIN_S))
            confirm()
            for part in parts_of(writes, lambda write: write.source.nbytes, COPIED_BYTES):
                digests += self._copied(view, shape, part)
                if time.monotonic() > until_s:
                    raise TransferFailed(
                        f"node {node.info.node_id}: {len(digests)} of {len(writes)} blocks were "
                        f"copied within {deadline_s:g} s: this host is short of CPU; allow more "
                        "time"
                    )
            for write, digest in zip(writes, digests, strict=True):
                slots.write_header(write.slot, write.header(STATE_READY, digest))
        moved_bytes = sum(write.source.nbytes for write in writes)
        transport.note(is_read=False, moved_bytes=moved_bytes, started_s=started_s)
        return digests

    def _copied(self, view: ByteArray, shape: Geometry, part: Sequence[Write]) -> list[int]:
        """Into their slots in mapped memory: the checksum of each (0 where none is computed)."""
        packed = copy_blocks(
            [(view, shape.slot_offset_bytes(write.slot)) for write in part],
            [(write.source, 0) for write in part],
            part[0].source.nbytes,
            is_hashed=self._is_verified,
        )
        return [int.from_bytes(each, "big") for each in packed]

    def _write_remote(
        self,
        node: NodeAccess,
        writes: Sequence[Write],
        confirm: Callable[[], None],
        until_s: float,
    ) -> list[int]:
        info, transport, shape = node
        slices = [shape.headers(write.slot, write.source.nbytes) for write in writes]
        positions = [ByteSpan(each.start, HEADER_BYTES) for each in slices]
        others = [ByteSpan(each.start + HEADER_BYTES, length) for each in slices
                  if (length := each.stop - each.start - HEADER_BYTES)]  # fmt: skip
        zeros = max((other.length_bytes for other in others), default=0)

        def put_headers(headers: Sequence[SlotHeader]) -> None:
            state = headers[0].state
            raw = b"".join(header.pack() for header in headers)
            with self._scratch.take(len(raw) + zeros) as heads:
                heads[: len(raw)] = np.frombuffer(raw, np.uint8)
                heads[len(raw) : len(raw) + zeros] = 0
                starts = range(0, len(raw), HEADER_BYTES)
                sources = [(heads, ByteSpan(start, HEADER_BYTES)) for start in starts]
                emptied = others if state == STATE_WRITING else []
                sources += [(heads, ByteSpan(len(raw), other.length_bytes)) for other in emptied]
                transport.write(info, sources, [*positions, *emptied], left_to_write_s(until_s))

        def put_part(part: Sequence[Write]) -> list[int]:
            # Hashed just before they are sent: the transfer finds them in the CPU's cache.
            digests = [checksum(write.source) if self._is_verified else 0 for write in part]
            payloads: list[LocalSpan] = [
                (write.source, ByteSpan(0, write.source.nbytes)) for write in part
            ]
            targets = [
                ByteSpan(shape.slot_offset_bytes(write.slot), write.source.nbytes) for write in part
            ]
            transport.write(info, payloads, targets, left_to_write_s(until_s))
            return digests

        lease_s = until_s - time.monotonic() + LEASE_MARGIN_S
        put_headers([write.header_writing(lease_s) for write in writes])
        confirm()
        found = self._movers.each(
            put_part, parts_of(writes, lambda write: write.source.nbytes, PART_BYTES)
        )
        digests = [digest for part in found for digest in part]
        pairs = zip(writes, digests, strict=True)
        put_headers([write.header(STATE_READY, digest) for write, digest in pairs])
        return digests
