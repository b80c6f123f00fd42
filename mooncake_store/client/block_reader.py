"""Reads blocks from any node into local memory and verifies each one; reads headers of slots.

The blocks of one call are grouped by node. Each group is cut into parts (_part_bytes). A part is
verified while it is still in the CPU's cache, which makes the checksum nearly free. Mapped memory
is copied and hashed in one pass. One corrupt block never fails other blocks; a failed node fails
only its own blocks.

A *slot* is the memory of one block in a node's segment: one or more units of fixed size. The header
of its first unit has the block key, the generation (a new number for each use of the slot), and the
number of layers. The digests (checksums of the layers) are in another region of the segment.

Not here: how bytes move (transport.py), which nodes there are (known_nodes.py), leases (the
directory), what a header is (slot_memory.py), what a checksum covers (digests.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.layout import HEADER_BYTES, Geometry
from mooncake_store.memory.digests import block_checksum, copy_blocks, layer_digests, pack_digests
from mooncake_store.memory.registrations import SCRATCH_BYTES, Scratch
from mooncake_store.memory.slot_memory import SlotHeader, ready_prefix
from mooncake_store.records.blocks import Copy, by_node
from mooncake_store.transports.known_nodes import KnownNodes, NodeAccess
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import Movers, copied_parts, parts_of
from mooncake_store.transports.transport import ByteSpan, LocalSpan, side_by_side

log = logging.getLogger("mooncake_store.store")
BATCH_BYTES = 4 * 1024**2  # largest part by default, for nodes of this host
OTHER_HOST_LONGER = 2  # factor on the size of the largest part, for nodes of other hosts
HEADERS_DEADLINE_S = 0.5  # timeout of each header transfer, in seconds
ATTEMPTS_MAX = 2  # attempts per node; the second is made only if the node has restarted


class Want(NamedTuple):
    """One span of one block: its target in local memory and the expected checksum."""

    copy: Copy
    start_bytes: int  # offset inside the block
    target: LocalSpan
    checksums: tuple[int, ...]  # of equal consecutive pieces of the span; empty: do not verify
    layers: int = 0  # > 0: the span is the whole block; its checksum covers so many layer digests
    # if given and layers > 0: receives the computed packed digests, also if they do not match
    digests: list[bytes] | None = None
    # block key that the slot must still hold after the read; empty: the header is not checked
    key: bytes = b""

    @property
    def length_bytes(self) -> int:
        return self.target[1].length_bytes

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.length_bytes

    @property
    def parts(self) -> int:
        """Number of equal pieces with a digest each; 0: one digest over the whole span."""
        return self.layers or (len(self.checksums) if len(self.checksums) > 1 else 0)

    def is_verified(self) -> bool:
        """True if the bytes in the target have the expected checksums; also True if none are
        expected."""
        buffer, (start, length_bytes) = self.target
        read = buffer[start : start + length_bytes]
        return not self.checksums or self.matches(layer_digests(read, self.parts or 1))

    def matches(self, packed: bytes) -> bool:
        """True if the packed digests match the checksums, or if there are no checksums. With
        layers > 0, stores the digests in `digests` if given."""
        if not self.layers:
            if len(self.checksums) == 1:
                return int.from_bytes(packed, "big") == self.checksums[0]
            return not self.checksums or packed == pack_digests(self.checksums)
        if self.digests is not None:
            self.digests[:] = [packed]
        return block_checksum(packed) == self.checksums[0]


class _ReadCall(NamedTuple):
    missing: dict[int, Want]  # index -> want that has not arrived
    until_s: float  # the deadline, by time.monotonic()
    is_current: bool  # whether a copy that fails verification is reported as bad


class BlockReader:
    """Reads and verifies blocks. Thread-safe."""

    def __init__(
        self,
        nodes: KnownNodes,
        on_bad_copy: Callable[[Copy], None],
        batch_bytes: int = BATCH_BYTES,
        movers: Movers | None = None,
        headers: HeaderReader | None = None,
    ) -> None:
        """`headers`: reads headers to check Want.key, and for _verify_with_header_layers. None: no
        Want may have a key, and a block that fails verification is not verified again."""
        self._nodes = nodes
        self._headers = headers
        self._movers = movers or Movers(1)
        self._batch_bytes = batch_bytes
        self._on_bad_copy = on_bad_copy

    def read(self, wants: Sequence[Want], deadline_s: float, is_current: bool = True) -> list[bool]:
        """True for each want whose bytes arrived and match the expected checksums, if there are
        any. If Want.key is set, the slot must also hold that block after the read. Raises only
        errors of the directory. After a timeout a target may still be written
        (KnownNodes.pending_targets). `is_current`: the directory listed these copies a moment ago,
        so a copy that fails verification is reported as bad."""
        until_s = time.monotonic() + deadline_s
        call = _ReadCall(dict(enumerate(wants)), until_s, is_current)
        for node_id, indices in by_node([want.copy for want in wants]).items():
            asked_bytes = sum(wants[index].length_bytes for index in indices)
            with self._nodes.traffic.moving(node_id, asked_bytes):
                for _ in range(ATTEMPTS_MAX):
                    chosen = [index for index in indices if index in call.missing]
                    if not self._read_node(node_id, chosen, call):
                        break
        return [index not in call.missing for index in range(len(wants))]

    def _read_node(self, node_id: str, indices: Sequence[int], call: _ReadCall) -> bool:
        """Read blocks of one node. Returns True if the read failed and the node has a new
        incarnation, so that another attempt makes sense."""
        missing, node = call.missing, self._nodes.access(node_id)
        if node is None:
            # the node is unknown, in cool-down or out of reach, or an SSD (see restorer.py)
            return False
        indices = [
            index
            for index in indices
            if node.shape.holds(missing[index].copy.slot, missing[index].end_bytes)
        ]

        def read_part(part: Sequence[int]) -> None:
            self._read_part(node, part, call)

        try:
            # mapped memory is copied and verified in one pass, so it is not cut into parts
            if isinstance(node.transport, MappedTransport):
                read_part(indices)
            else:
                lengths_bytes = {index: missing[index].length_bytes for index in indices}
                part_bytes = self._part_bytes(node, sum(lengths_bytes.values()))
                self._movers.each(
                    read_part, parts_of(indices, lengths_bytes.__getitem__, part_bytes)
                )
        except TransferFailed as error:
            log.warning("node_id=%s read failed: %s", node_id, error)
            self._nodes.mark_bad(node.info)
            self._nodes.refresh()
            now = self._nodes.usable(node_id)
            return now is not None and now.incarnation != node.info.incarnation
        return False

    def _part_bytes(self, node: NodeAccess, total_bytes: int) -> int:
        """Bytes per part: total / threads, so that each thread gets a part, but at most
        `batch_bytes` (twice that for another host). Parts from another host are larger, because the
        wait between two parts costs more than hashing in the CPU's cache saves."""
        longer = 1 if self._nodes.is_same_host(node.info) else OTHER_HOST_LONGER
        return min(longer * self._batch_bytes, -(-total_bytes // self._movers.threads))

    def _read_part(self, node: NodeAccess, part: Sequence[int], call: _ReadCall) -> None:
        """Read and verify these blocks. Raises TransferFailed if the node could not be read."""
        left_s = call.until_s - time.monotonic()
        # No time is left for this part. The node has not failed, so do not mark it as bad.
        if left_s <= 0:
            log.warning(
                "node_id=%s deadline passed, %d blocks missed", node.info.node_id, len(part)
            )
            return
        wants = [call.missing[index] for index in part]
        if isinstance(node.transport, MappedTransport):
            verified = _copied(node.transport, node, wants, left_s, self._movers.threads)
            unchanged = self._slots_unchanged(wants)
        else:
            unchanged = self._read_remote(node, wants, left_s)
            verified = [want.is_verified() for want in wants]
        unknown: set[int] = set()
        if self._headers is not None and not all(verified):
            unknown = self._verify_with_header_layers(self._headers, wants, verified)
        for at, (index, is_verified) in enumerate(zip(part, verified, strict=True)):
            if is_verified and unchanged[at]:
                del call.missing[index]
            elif call.is_current and not is_verified and at not in unknown:
                self._on_bad_copy(call.missing[index].copy)

    def _read_remote(self, node: NodeAccess, wants: Sequence[Want], left_s: float) -> list[bool]:
        """Read the blocks into their targets. Returns `_slots_unchanged` after the read."""
        sources = [
            ByteSpan(
                node.shape.slot_offset_bytes(want.copy.slot) + want.start_bytes, want.length_bytes
            )
            for want in wants
        ]
        targets = [want.target for want in wants]
        if self._headers is None or not all(want.key for want in wants):
            node.transport.read(node.info, sources, targets, left_s)
            return self._slots_unchanged(wants)
        keys, copies = [want.key for want in wants], [want.copy for want in wants]
        return self._headers.read_and_check(node, sources, targets, keys, copies, left_s)

    def _slots_unchanged(self, wants: Sequence[Want]) -> list[bool]:
        """True per want if its slot's headers still show the expected block, or if Want.key is
        empty. False also if the headers cannot be read."""
        looked_at = [want for want in wants if want.key]
        if not looked_at:
            return [True] * len(wants)
        assert self._headers is not None, "a HeaderReader is needed to check block keys"
        keys, copies = [want.key for want in looked_at], [want.copy for want in looked_at]
        found = iter(self._headers.still_hold(keys, copies))
        return [not want.key or next(found) for want in wants]

    def _verify_with_header_layers(
        self, headers: HeaderReader, wants: Sequence[Want], verified: list[bool]
    ) -> set[int]:
        """Verify failed whole blocks a second time, with the number of layers in their headers,
        because the checksum may cover layer digests. Updates `verified`. Returns the positions
        whose header was unreadable or invalid, so that the copy is not known to be bad."""
        unsure = [
            at
            for at, want in enumerate(wants)
            if not verified[at] and not want.layers and want.length_bytes == want.copy.size_bytes
        ]
        found = headers.read_all([wants[at].copy for at in unsure])
        for at, header in zip(unsure, found, strict=True):
            layers = header.layers if header is not None else 0
            if layers and wants[at].length_bytes % layers == 0:
                verified[at] = wants[at]._replace(layers=layers).is_verified()
        return {at for at, header in zip(unsure, found, strict=True) if header is None}


def _copied(
    transport: MappedTransport, node: NodeAccess, wants: Sequence[Want], left_s: float, threads: int
) -> list[bool]:
    """Copy from a mapped segment and hash in the same pass. True: verified, or no checksums."""
    started_s = time.monotonic()
    verified, moved_bytes, offset_of = [], 0, node.shape.slot_offset_bytes
    with transport.owned(node.info) as view:
        for (length_bytes, parts, is_hashed), group in groupby(wants, _alike):
            for part in copied_parts(list(group), length_bytes, threads):
                sources = [(view, offset_of(want.copy.slot) + want.start_bytes) for want in part]
                targets = [(want.target[0], want.target[1].offset_bytes) for want in part]
                packed = copy_blocks(
                    targets, sources, length_bytes, parts, is_hashed, threads, is_read=True
                )
                verified += [want.matches(found) for want, found in zip(part, packed, strict=True)]
                moved_bytes += len(part) * length_bytes
                if time.monotonic() - started_s > left_s:
                    raise TransferTimeout(
                        f"node {node.info.node_id}: copying {moved_bytes} bytes through shared "
                        f"memory took longer than {left_s:.3f} s: this host is short of CPU"
                    )
    transport.note(True, moved_bytes, started_s)
    return verified


def _alike(want: Want) -> tuple[int, int, bool]:
    """(length_bytes, digests per block, is hashed). Consecutive wants with equal values are copied
    by one copy_blocks call."""
    return want.length_bytes, want.parts, bool(want.checksums)


class HeaderReader:
    """Reads slot headers and stored digests. Thread-safe."""

    def __init__(self, nodes: KnownNodes, scratch: Scratch) -> None:
        self._nodes = nodes
        self._scratch = scratch

    def read(self, copy: Copy) -> SlotHeader | None:
        """The header of this copy's slot; None: it could not be read or is invalid."""
        return self.read_all([copy])[0]

    def read_all(self, copies: Sequence[Copy], raises: bool = False) -> list[SlotHeader | None]:
        """As `read`, for several copies. `raises`: a failed transfer raises TransferFailed. A
        copy on a node that cannot be accessed still gives None."""

        def first(shape: Geometry, index: int) -> ByteSpan:
            return ByteSpan(shape.header_offset_bytes(copies[index].slot), HEADER_BYTES)

        found = self._read_raw(copies, first, raises)
        return [(raw and SlotHeader.unpack(raw)) or None for raw in found]

    def digests(self, copies: Sequence[Copy], layers: Sequence[int]) -> list[bytes | None]:
        """The packed layer digests of each block, which has `layers[i]` layers. b"": the bytes
        stored there do not match the block's checksum. None: not readable, or the block's units
        have no room for digests."""

        def cell(shape: Geometry, index: int) -> ByteSpan | None:
            copy = copies[index]
            where = shape.digests(copy.slot, copy.size_bytes, layers[index])
            return where and ByteSpan(where.start, where.stop - where.start)

        return [
            raw if raw is None or block_checksum(raw) == copy.checksum else b""
            for raw, copy in zip(self._read_raw(copies, cell), copies, strict=True)
        ]

    def still_hold(self, keys: Sequence[bytes], copies: Sequence[Copy]) -> list[bool]:
        """True per slot if it still holds this block (see _holds_block). False also if its headers
        cannot be read."""
        found = self._read_raw(copies, lambda shape, index: _heads(shape, copies[index]))
        return [
            raw is not None and _holds_block(raw, key, copy)
            for raw, key, copy in zip(found, keys, copies, strict=True)
        ]

    def read_and_check(
        self,
        node: NodeAccess,
        sources: Sequence[ByteSpan],
        targets: Sequence[LocalSpan],
        keys: Sequence[bytes],
        copies: Sequence[Copy],
        left_s: float,
    ) -> list[bool]:
        """Read these spans of one node, then check the slots as `still_hold` does. Both are one
        transfer if the transport keeps the order of spans and the headers fit a scratch buffer."""
        heads = [_heads(node.shape, copy) for copy in copies]
        total_bytes = sum(span.length_bytes for span in heads)
        if total_bytes > SCRATCH_BYTES or not node.transport.keeps_order(node.info):
            node.transport.read(node.info, sources, targets, left_s)
            return self.still_hold(keys, copies)
        with self._scratch.take(total_bytes) as buffer:
            into = side_by_side(buffer, heads)
            node.transport.read(node.info, [*sources, *heads], [*targets, *into], left_s)
            return [
                _holds_block(buffer[start : start + length_bytes].tobytes(), key, copy)
                for (_, (start, length_bytes)), key, copy in zip(into, keys, copies, strict=True)
            ]

    def _read_raw(
        self,
        copies: Sequence[Copy],
        span_of: Callable[[Geometry, int], ByteSpan | None],
        raises: bool = False,
    ) -> list[bytes | None]:
        """The bytes at `span_of` for each copy; None: no such span, or it could not be read."""
        found: dict[int, bytes] = {}
        for node_id, indices in by_node(copies).items():
            node = self._nodes.access(node_id)
            if node is None:
                continue
            spans = {
                index: span
                for index in indices
                if node.shape.holds(copies[index].slot, copies[index].size_bytes)
                and (span := span_of(node.shape, index)) is not None
            }
            try:
                self._read_spans(node, spans, found)
            except TransferFailed:
                if raises:
                    raise
        return [found.get(index) for index in range(len(copies))]

    def _read_spans(
        self, node: NodeAccess, spans: dict[int, ByteSpan], found: dict[int, bytes]
    ) -> None:
        if isinstance(node.transport, MappedTransport):
            with node.transport.owned(node.info) as view:
                for index, (start, length_bytes) in spans.items():
                    found[index] = view[start : start + length_bytes].tobytes()
            return
        for part in parts_of(list(spans), lambda index: spans[index].length_bytes, SCRATCH_BYTES):
            sources = [spans[index] for index in part]
            with self._scratch.take(sum(span.length_bytes for span in sources)) as buffer:
                targets = side_by_side(buffer, sources)
                node.transport.read(node.info, sources, targets, HEADERS_DEADLINE_S)
                for index, (_, (start, length_bytes)) in zip(part, targets, strict=True):
                    found[index] = buffer[start : start + length_bytes].tobytes()


def _heads(shape: Geometry, copy: Copy) -> ByteSpan:
    """The span of the headers of all units of the copy's slot."""
    heads = shape.headers(copy.slot, copy.size_bytes)
    return ByteSpan(heads.start, heads.stop - heads.start)


def _holds_block(raw: bytes, key: bytes, copy: Copy) -> bool:
    """True if these headers of a slot show that it holds the complete block (slot_memory.py)."""
    is_ready = raw.startswith(ready_prefix(copy.generation, key))
    # The headers of the other units must be zero. A nonzero header belongs to a later block.
    return is_ready and raw.count(0, HEADER_BYTES) == len(raw) - HEADER_BYTES
