"""Writes blocks from local memory to one node: reserve slots, write bytes, commit.

Order of the bytes: a slot's header gets the state "writing" (the slot is *marked*) before its
payload changes, and "ready" afterwards. So a reader without checksums, and a restarted directory,
can determine which block a slot holds. A segment that is mapped here gets the payload by a copy
that also computes the checksum. Other segments get it through the node's transport.

Slots: a client that puts often has reserved and marked slots in advance (reserved_slots.py). Its
put marks slots for a later put, writes payloads and headers, and sends one message. Any other put
requests slots, marks them, checks that their grant is still valid (may_write), writes and commits.

Payloads and "ready" headers are one transfer only if the transport keeps the order of its spans.
NIXL guarantees no order. A header must not arrive before its payload, because a restarted directory
trusts the header (docs/decisions/0031).

Failures: after TransferFailed nothing is in flight, and slots from `allocate` are free at once.
After TransferTimeout bytes may still arrive, so the slots are quarantined (not granted for a time).
If a put into reserved slots fails, the whole reserve is quarantined. After WriteGivenUp (one of
several network paths is stuck, or the marks timed out) the blocks are written into other slots.

Not here: checking arguments and choosing the node (client.py), granting slots (the directory).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mooncake_store.block_keys import KEY_BYTES
from mooncake_store.client.reserved_slots import LEASE_S, ReservedSlots, Taken, Use
from mooncake_store.client.restorer import LEASE_MARGIN_S
from mooncake_store.directory.boot_clock import boot_s
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import (
    EpochPassed,
    NodeUnknown,
    StoreError,
    TransferFailed,
    TransferTimeout,
    WriteGivenUp,
)
from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, Geometry
from mooncake_store.memory.buffers import ByteArray, checksum
from mooncake_store.memory.digests import copy_blocks
from mooncake_store.memory.registrations import Registrations, Scratch
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory, write_headers
from mooncake_store.records.blocks import REFUSED, Allocation
from mooncake_store.records.membership import NodeInfo
from mooncake_store.transports.known_nodes import KnownNodes, NodeAccess
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import Movers, copied_parts, parts_of
from mooncake_store.transports.transport import ByteSpan, LocalSpan, left_to_write_s, side_by_side

log = logging.getLogger("mooncake_store.client")
PART_BYTES = 4 * 1024**2  # payload of one transfer, hashed directly before it
UNVERIFIED_PART_BYTES = 64 * 2**20  # payload of one transfer if blocks are not hashed
SHARE_BYTES_MIN = 1024**2  # payload per thread; a smaller share is not worth another thread
MARK_S_MIN, MARK_S_MAX = 0.01, 2.0  # bounds of the timeout of one transfer of marks
_NO_KEY = bytes(KEY_BYTES)  # in the header of a slot that is reserved for a block not known yet
ATTEMPTS_MAX = 3  # attempts to write a block; only WriteGivenUp leads to another one
ANOTHERS_POLL_S, ANOTHERS_POLL_S_MAX = 0.005, 0.1  # first, longest poll interval (_put_allocated)


class Write(NamedTuple):
    key: bytes
    slot: int
    generation: int
    source: ByteArray  # the payload; its size is the block size

    def header(self, state: int, digest: int) -> SlotHeader:
        return SlotHeader(state, self.generation, self.key, digest, self.source.nbytes)

    @property
    def use(self) -> Use:
        return self.slot, self.generation


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
        name: str,
    ) -> None:
        self._directory = directory
        self._nodes = nodes
        self._registrations = registrations
        self._scratch = scratch
        self._movers = movers
        self._is_verified = is_verified
        self._tenant = tenant
        self._numbers = itertools.count(1)
        self._attached: dict[str, str] = {}  # node_id -> incarnation attached by this client
        self._reserved = ReservedSlots(directory, tenant, name, self._mark)

    def close(self) -> None:
        self._reserved.close()

    def put(
        self,
        node_id: str,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
    ) -> list[bool]:
        """True: the block is complete in the store. False: no room, no time left, or not written.
        All `sources` have one size. If another client is writing a block, the put waits, and writes
        the block itself if that client fails. After a StoreError some blocks may be stored."""
        until_s = time.monotonic() + deadline_s
        done = self._put_reserved(node_id, keys, sources, deadline_s)
        left = [at for at, is_stored in enumerate(done) if is_stored is None]
        if left:
            chosen = [keys[at] for at in left], [sources[at] for at in left]
            for at, is_stored in zip(
                left, self._put_allocated(node_id, *chosen, owner, until_s), strict=True
            ):
                done[at] = is_stored
        return [bool(is_stored) for is_stored in done]

    def _put_reserved(
        self, node_id: str, keys: Sequence[bytes], sources: Sequence[ByteArray], deadline_s: float
    ) -> list[bool | None]:
        """Put into reserved slots. True: stored. False: the write failed. None: the block is not
        stored, and must be put with `allocate`."""
        info = self._nodes.find(node_id)
        if info is None or self._attached.get(node_id) != info.incarnation:
            return [None] * len(keys)
        taken = self._reserved.take(info, sources[0].nbytes, len(keys), deadline_s)
        if taken is None:
            return [None] * len(keys)
        writes = list(map(Write, keys, *zip(*taken.uses, strict=True), sources))
        try:
            with self._registrations.covering(sources):
                until_s = time.monotonic() + deadline_s
                self._mark_taken(info, sources[0].nbytes, taken)
                digests = self._fill(info, writes, until_s)
            rows = [
                (write.key, *write.use, digest)
                for write, digest in zip(writes, digests, strict=True)
            ]
            verdicts = self._reserved.commit(taken, rows)
        except (EpochPassed, WriteGivenUp) as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            self._reserved.drop_failed(taken)
            return [None] * len(keys)
        except TransferFailed as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            self._reserved.drop_failed(taken)
            if not isinstance(error, TransferTimeout):
                self._nodes.mark_bad(info)
            return [False] * len(keys)
        except BaseException:
            self._reserved.drop_failed(taken)
            raise
        return [None if verdict == REFUSED else True for verdict in verdicts]

    def _mark_taken(self, info: NodeInfo, size_bytes: int, taken: Taken) -> None:
        """Mark slots for a later put, before this put writes. A mark after `mark_until_s` could
        overwrite a finished block of another client. So `markable` is called directly before the
        transfer of the marks, and this transfer times out at `mark_until_s`."""
        if not (uses := taken.markable()):
            return
        try:
            self._mark(info, size_bytes, uses, LEASE_S, taken.mark_until_s)
        except (TransferTimeout, WriteGivenUp) as error:
            log.warning("marks on node_id=%s: %s", info.node_id, error)
            self._reserved.drop_late_marks(taken)

    def _mark(
        self, info: NodeInfo, size_bytes: int, uses: Sequence[Use], lease_s: float, until_s: float
    ) -> None:
        """Mark these slots. Times out at `until_s` (CLOCK_BOOTTIME), after MARK_S_MIN at least."""
        headers = _writing(uses, size_bytes, lease_s)
        left_s = max(MARK_S_MIN, until_s - boot_s())
        self._mark_headers(self._access(info), headers, time.monotonic() + left_s)

    def _mark_headers(
        self, node: NodeAccess, headers: Sequence[tuple[int, SlotHeader]], until_s: float
    ) -> None:
        if isinstance(node.transport, MappedTransport):
            with node.transport.owned(node.info) as view:
                _mark_mapped(SlotMemory(view, node.shape), headers)
        else:
            self._put_headers(node, headers, until_s)

    def _put_allocated(
        self,
        node_id: str,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        until_s: float,
    ) -> list[bool]:
        done = [False] * len(keys)
        left, attempts, wait_s = list(range(len(keys))), 0, ANOTHERS_POLL_S
        has_waited = False  # for a block that another owner is writing
        while left and attempts < ATTEMPTS_MAX:
            name = f"{owner}+{next(self._numbers)}"
            chosen = [keys[at] for at in left], [sources[at] for at in left]
            try:
                outcomes = self._put(node_id, *chosen, name, left_to_write_s(until_s))
            except WriteGivenUp as error:
                log.warning("put on node_id=%s: %s", node_id, error)
                self._directory.release(name)
                attempts += 1
                continue
            except TransferTimeout:  # no time is left for another attempt
                break
            except StoreError as error:
                if not has_waited:
                    raise
                # The node left during the wait. Blocks that were stored before count as stored.
                log.warning("put on node_id=%s: %s", node_id, error)
                break
            for at, outcome in zip(left, outcomes, strict=True):
                done[at] = outcome is True
            left = [at for at, outcome in zip(left, outcomes, strict=True) if outcome is None]
            if left:
                has_waited = True
                time.sleep(max(0.0, min(wait_s, until_s - time.monotonic())))
                wait_s = min(2 * wait_s, ANOTHERS_POLL_S_MAX)
        return done

    def _put(
        self,
        node_id: str,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
    ) -> list[bool | None]:
        """True: in the store. False: no room, or not written. None: another owner is writing the
        block. That owner may fail, so the caller retries a block whose result is None."""
        info, given = self._allocate(node_id, keys, sources[0].nbytes, owner, deadline_s)
        done: list[bool | None] = [False] * len(keys)
        try:
            if any(given.slots):
                self._reserved.note_allocate_put(info, sources[0].nbytes, len(keys))
                self._fill_allocated(info, given, keys, sources, owner, deadline_s, done)
        finally:
            # end the leases on blocks that were stored already
            if None in given.slots:
                self._directory.release_later(owner)
        unallocated = [at for at, slot in enumerate(given.slots[: given.covered]) if slot is None]
        found = self._directory.exist([keys[at] for at in unallocated]) if unallocated else []
        for at, is_stored in zip(unallocated, found, strict=True):
            done[at] = is_stored or None
        return done

    def _fill_allocated(
        self,
        info: NodeInfo,
        given: Allocation,
        keys: Sequence[bytes],
        sources: Sequence[ByteArray],
        owner: str,
        deadline_s: float,
        done: list[bool | None],
    ) -> None:
        node_id, lease_s = info.node_id, deadline_s + LEASE_MARGIN_S
        taken = [(at, slot) for at, slot in enumerate(given.slots) if slot is not None]
        writes = [Write(keys[at], slot.slot, slot.generation, sources[at]) for at, slot in taken]

        def confirm() -> None:
            if not self._directory.may_write(given, owner, lease_s):
                raise EpochPassed("slots granted by a directory that is no longer the leader")

        until_s = time.monotonic() + deadline_s
        try:
            with self._registrations.covering([write.source for write in writes]):
                self._begin(info, writes, given, confirm, lease_s, until_s)
                digests = self._fill(info, writes, until_s)
        except WriteGivenUp:
            raise
        except (EpochPassed, TransferTimeout) as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            with contextlib.suppress(StoreError):  # quarantines the slots, frees the block keys
                self._directory.release(owner)
            return
        except TransferFailed as error:
            log.warning("put on node_id=%s: %s", node_id, error)
            self._nodes.mark_bad(info)
            self._directory.abandon([slot for _, slot in taken], owner)
            return
        rows = [
            (write.key, *write.use, digest) for write, digest in zip(writes, digests, strict=True)
        ]
        stored = self._directory.commit(node_id, rows, owner, 0.0, epoch=taken[0][1].epoch)
        for (at, _), is_stored in zip(taken, stored, strict=True):
            done[at] = is_stored

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
            except NodeUnknown:  # the node restarted a moment ago
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

    def _access(self, info: NodeInfo) -> NodeAccess:
        node = self._nodes.access_to(info)
        if node is None:
            raise TransferFailed(
                f"node {info.node_id} cannot be written from this host in this transport mode"
            )
        return node

    def _begin(
        self,
        info: NodeInfo,
        writes: Sequence[Write],
        given: Allocation,
        confirm: Callable[[], None],
        lease_s: float,
        until_s: float,
    ) -> None:
        """Mark the slots. Raises EpochPassed if the slots may belong to another owner, so that no
        payload may be written. Raises WriteGivenUp if the marks timed out before the put did; they
        may still arrive."""
        node = self._access(info)
        now_s, mark_s_max = boot_s(), MARK_S_MAX
        confirm()  # and again after the marks, from which on a new directory quarantines the slots
        # From `begins_s` on, a new directory may grant these slots to others, so the marks must
        # not be late.
        if given.begin_s:
            is_in_time = now_s - given.asked_s <= given.begin_s
            begins_s = (given.asked_s if is_in_time else now_s) + given.begin_s
            mark_s_max = min(MARK_S_MAX, max(MARK_S_MIN, begins_s - boot_s()))
        size_bytes = writes[0].source.nbytes
        headers = [
            (slot, SlotHeader.writing(generation, key, size_bytes, lease_s))
            for key, slot, generation, _ in writes
        ]
        mark_until_s = min(until_s, time.monotonic() + mark_s_max)
        try:
            self._mark_headers(node, headers, mark_until_s)
        except TransferTimeout as error:
            if mark_until_s == until_s:
                raise
            raise WriteGivenUp(f"late marks may still reach these slots: {error}") from error
        confirm()

    def _fill(self, info: NodeInfo, writes: Sequence[Write], until_s: float) -> list[int]:
        """Write the blocks into marked slots. Returns the checksum of each; 0 if not computed.
        After EpochPassed or TransferFailed, no block may be committed. After TransferTimeout, bytes
        may also still arrive."""
        node = self._access(info)
        if isinstance(node.transport, MappedTransport):
            return self._fill_mapped(node.transport, node, writes, until_s)
        return self._fill_remote(node, writes, until_s)

    def _fill_mapped(
        self, transport: MappedTransport, node: NodeAccess, writes: Sequence[Write], until_s: float
    ) -> list[int]:
        info, _, shape = node
        started_s = time.monotonic()
        digests: list[int] = []
        with transport.owned(info) as view:
            slots = SlotMemory(view, shape)
            if not all(slots.is_being_written(*write.use) for write in writes):
                raise EpochPassed("the slots have another owner by now: this write is too late")
            for part in copied_parts(writes, writes[0].source.nbytes, self._movers.threads):
                digests += self._copied(view, shape, part)
                if time.monotonic() > until_s:
                    raise TransferFailed(
                        f"node {info.node_id}: the deadline passed after {len(digests)} of "
                        f"{len(writes)} blocks were copied: this host is short of CPU; allow more "
                        "time"
                    )
            pairs = zip(writes, digests, strict=True)
            headers = [write.header(STATE_READY, digest) for write, digest in pairs]
            slots.write_headers([write.slot for write in writes], headers)
        moved_bytes = sum(write.source.nbytes for write in writes)
        transport.note(is_read=False, moved_bytes=moved_bytes, started_s=started_s)
        return digests

    def _copied(self, view: ByteArray, shape: Geometry, part: Sequence[Write]) -> list[int]:
        """Copy into slots of mapped memory. Returns each block's checksum; 0 if not computed."""
        packed = copy_blocks(
            [(view, shape.slot_offset_bytes(write.slot)) for write in part],
            [(write.source, 0) for write in part],
            part[0].source.nbytes,
            is_hashed=self._is_verified,
            threads=self._movers.threads,
            is_read=False,
        )
        return [int.from_bytes(each, "big") for each in packed]

    def _fill_remote(self, node: NodeAccess, writes: Sequence[Write], until_s: float) -> list[int]:
        info, transport, shape = node
        size_bytes = writes[0].source.nbytes

        def put_part(part: Sequence[Write]) -> list[int]:
            # Hash directly before sending, so that the transfer finds the bytes in the CPU's cache.
            digests = [checksum(write.source) if self._is_verified else 0 for write in part]
            ready = [
                (write.slot, write.header(STATE_READY, digest))
                for write, digest in zip(part, digests, strict=True)
            ]
            span = ByteSpan(0, size_bytes)
            payloads: list[LocalSpan] = [(write.source, span) for write in part]
            targets = [ByteSpan(shape.slot_offset_bytes(write.slot), size_bytes) for write in part]
            if transport.keeps_order(info):
                self._put_headers(node, ready, until_s, payloads, targets)
            else:
                transport.write(info, payloads, targets, left_to_write_s(until_s))
                self._put_headers(node, ready, until_s)
            return digests

        part_bytes = PART_BYTES if self._is_verified else UNVERIFIED_PART_BYTES
        share_bytes = -(-len(writes) * size_bytes // self._movers.threads)
        part_bytes = min(part_bytes, max(share_bytes, SHARE_BYTES_MIN))
        parts = parts_of(writes, lambda write: size_bytes, part_bytes)
        return [digest for part in self._movers.each(put_part, parts) for digest in part]

    def _put_headers(
        self,
        node: NodeAccess,
        headers: Sequence[tuple[int, SlotHeader]],
        until_s: float,
        payloads: Sequence[LocalSpan] = (),
        slots: Sequence[ByteSpan] = (),
    ) -> None:
        """Write the payloads into `slots`, then the headers, in one transfer. All headers have one
        state and one block size. A "writing" header is followed by zeros over the headers of the
        block's other units (slot_memory.py)."""
        info, transport, shape = node
        headers = sorted(headers)
        first = headers[0][1]
        is_mark = first.state == STATE_WRITING
        each = shape.headers(0, first.length_bytes).stop if is_mark else HEADER_BYTES
        targets = [ByteSpan(slot * HEADER_BYTES, each) for slot, _ in headers]
        targets = _joined(targets) if is_mark else targets
        size_bytes = len(headers) * each
        with self._scratch.take(size_bytes) as buffer:
            starts = range(0, size_bytes, each)
            write_headers(buffer, starts, [header for _, header in headers], each - HEADER_BYTES)
            sources = side_by_side(buffer, targets)
            left_s = left_to_write_s(until_s)
            transport.write(info, [*payloads, *sources], [*slots, *targets], left_s)


def _joined(spans: Sequence[ByteSpan]) -> list[ByteSpan]:
    found: list[ByteSpan] = []
    for span in spans:
        if found and sum(found[-1]) == span.offset_bytes:
            start, length_bytes = found[-1]
            found[-1] = ByteSpan(start, length_bytes + span.length_bytes)
        else:
            found.append(span)
    return found


def _writing(uses: Sequence[Use], size_bytes: int, lease_s: float) -> list[tuple[int, SlotHeader]]:
    """Headers in the state "writing", for slots reserved before their block keys are known."""
    return [
        (slot, SlotHeader.writing(generation, _NO_KEY, size_bytes, lease_s))
        for slot, generation in uses
    ]


def _mark_mapped(slots: SlotMemory, headers: Sequence[tuple[int, SlotHeader]]) -> None:
    if any(slots.is_newer(slot, header.generation) for slot, header in headers):
        raise EpochPassed("the slots have another owner by now: this mark is too late")
    slots.write_headers([slot for slot, _ in headers], [header for _, header in headers])
