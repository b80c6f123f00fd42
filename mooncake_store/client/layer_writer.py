"""Writes layers of blocks into allocated slots, and completes blocks whose layers are all written.

The writers of one block may be several processes on several hosts, each with some of its layers.
The process that allocated the slot holds its lease. The slot's header has the state WRITING and the
slot's generation. Each writer first reads the header. A writer that finds another generation or
state writes nothing. A writer returns the digests of the layers that it wrote. A process with the
digests of all layers completes the block: it writes digests, checksum and header, and then commits
the block to the directory (store.py).

Missing and corrupt layers are not served as valid. If no writer returned a layer's digest, the
block is not completed. Otherwise the bytes in the slot do not match the digest.

Not here: which writer has which layers (the pipeline), leases (the directory).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mooncake_store.client.block_reader import HeaderReader
from mooncake_store.client.fetcher import LocalSegment
from mooncake_store.errors import TransferFailed, TransferTimeout
from mooncake_store.layout import STATE_READY, STATE_WRITING, KvLayout
from mooncake_store.memory.buffers import ByteArray, copy_and_sum
from mooncake_store.memory.digests import (
    block_checksum,
    copy_and_digest,
    layer_digests,
    pack_digests,
    unpack_digests,
)
from mooncake_store.memory.registrations import Scratch
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.blocks import Copy, Slot
from mooncake_store.transports.known_nodes import KnownNodes, NodeAccess
from mooncake_store.transports.mapped_transport import MappedTransport
from mooncake_store.transports.movers import parts_of
from mooncake_store.transports.transport import ByteSpan, LocalSpan, left_to_write_s, side_by_side

# Most bytes per write call, so that the hashed bytes are sent from the CPU's cache.
PART_BYTES = 4 * 1024**2
FINISH_S_MAX = 5.0  # seconds to write headers and digests, a few KiB
WrittenBlock = tuple[bytes, Slot, Sequence[int]]  # block key, slot, digests of all layers


class LayerWrite(NamedTuple):
    """Consecutive layers of one block, and the target in its slot."""

    slot: Slot
    start_bytes: int  # offset of the first layer in the block
    source: ByteArray  # the bytes of the layers


class LayerWriter:
    """Writes layers: `copy` into mapped memory, `send` and `finish` to any node. Thread-safe."""

    def __init__(
        self, nodes: KnownNodes, headers: HeaderReader, scratch: Scratch, layout: KvLayout
    ) -> None:
        self._nodes = nodes
        self._headers = headers
        self._scratch = scratch
        self._layout = layout

    def copy(
        self, memory: SlotMemory, writes: Sequence[LayerWrite]
    ) -> list[tuple[int, ...] | None]:
        """Copy into mapped memory. Returns, per write, the digests of its layers. None: nothing was
        copied, because the slot is not WRITING in this generation."""
        view, shape, layer_bytes = memory.view, memory.shape, self._layout.layer_bytes
        found: list[tuple[int, ...] | None] = []
        for (_, number, generation, _), start_bytes, source in writes:
            if not memory.is_being_written(number, generation):
                found.append(None)
                continue
            start, length_bytes = shape.slot_offset_bytes(number) + start_bytes, source.nbytes
            target = view[start : start + length_bytes]
            # fast path: layer-wise prefill writes one layer per call
            if length_bytes == layer_bytes:
                found.append((copy_and_sum(target, source, is_read=False),))
            else:
                packed = copy_and_digest(target, source, self._layers_in(source), is_read=False)
                found.append(unpack_digests(packed))
        return found

    def _layers_in(self, source: ByteArray) -> int:
        return source.nbytes // self._layout.layer_bytes

    def send(
        self, node_id: str, writes: Sequence[LayerWrite], deadline_s: float
    ) -> list[tuple[int, ...] | None]:
        """As `copy`, into any node. After TransferFailed some layers may be written. After its
        subclasses TransferTimeout and WriteGivenUp bytes may still arrive in the slots. Copies into
        mapped memory have no deadline."""
        node, until_s = self._access(node_id), time.monotonic() + deadline_s
        try:
            if isinstance(node.transport, MappedTransport):
                with node.transport.owned(node.info) as view:
                    return self.copy(SlotMemory(view, node.shape), writes)
            begun = self._begun(node, [write.slot for write in writes])
            found: list[tuple[int, ...] | None] = [None] * len(writes)
            ours = [index for index, header in enumerate(begun) if header is not None]
            for part in parts_of(ours, lambda index: writes[index].source.nbytes, PART_BYTES):
                digests = self._send(node, [writes[index] for index in part], until_s)
                for index, of_layers in zip(part, digests, strict=True):
                    found[index] = of_layers
            return found
        except TransferTimeout:
            raise
        except TransferFailed:
            self._nodes.mark_bad(node.info)
            raise

    def _send(
        self, node: NodeAccess, part: Sequence[LayerWrite], until_s: float
    ) -> list[tuple[int, ...]]:
        digests = [
            unpack_digests(layer_digests(write.source, self._layers_in(write.source)))
            for write in part
        ]
        sources: list[LocalSpan] = [
            (write.source, ByteSpan(0, write.source.nbytes)) for write in part
        ]
        targets = [
            ByteSpan(
                node.shape.slot_offset_bytes(write.slot.slot) + write.start_bytes,
                write.source.nbytes,
            )
            for write in part
        ]
        node.transport.write(node.info, sources, targets, left_to_write_s(until_s))
        return digests

    def finish(self, node_id: str, blocks: Sequence[WrittenBlock]) -> list[bool]:
        """Write the digests and the header of each block; its layers must all be written. Returns
        False for a block whose slot is not WRITING this block in this generation."""
        node, until_s = self._access(node_id), time.monotonic() + FINISH_S_MAX
        size_bytes = self._layout.block_bytes
        try:
            if isinstance(node.transport, MappedTransport):
                with node.transport.owned(node.info) as view:
                    memory = LocalSegment(node.info, view, node.shape)
                    return [memory.finish_begun(*block, size_bytes) for block in blocks]
            begun = self._begun(node, [slot for _, slot, _ in blocks])
            pieces: list[tuple[int, bytes]] = []  # offset in the segment, bytes
            done = []
            for (key, slot, digests), header in zip(blocks, begun, strict=True):
                done.append(header is not None and header.key == key)
                if header is not None and done[-1]:
                    pieces += self._completion(node, header, slot, pack_digests(digests))
            self._write_pieces(node, pieces, until_s)
            return done
        except TransferTimeout:
            raise
        except TransferFailed:
            self._nodes.mark_bad(node.info)
            raise

    def _completion(
        self, node: NodeAccess, begun: SlotHeader, slot: Slot, packed: bytes
    ) -> list[tuple[int, bytes]]:
        """The pieces that complete the block, digests first, header last: (offset in the segment,
        bytes)."""
        size_bytes, layers = self._layout.block_bytes, self._layout.layers
        header = begun._replace(
            state=STATE_READY,
            checksum=block_checksum(packed),
            length_bytes=size_bytes,
            layers=layers,
        )
        pieces = [(node.shape.header_offset_bytes(slot.slot), header.pack())]
        cell = node.shape.digests(slot.slot, size_bytes, layers)
        if cell is not None:
            pieces.insert(0, (cell.start, packed))
        return pieces

    def _write_pieces(
        self, node: NodeAccess, pieces: Sequence[tuple[int, bytes]], until_s: float
    ) -> None:
        if not pieces:
            return
        raw = b"".join(piece for _, piece in pieces)
        with self._scratch.take(len(raw)) as buffer:
            buffer[: len(raw)] = np.frombuffer(raw, np.uint8)
            targets = [ByteSpan(start, len(piece)) for start, piece in pieces]
            sources = side_by_side(buffer, targets)
            node.transport.write(node.info, sources, targets, left_to_write_s(until_s))

    def _begun(self, node: NodeAccess, slots: Sequence[Slot]) -> list[SlotHeader | None]:
        """Per slot: its header if the slot is WRITING in this generation, else None."""
        size_bytes = self._layout.block_bytes
        copies = [Copy(node.info.node_id, s.slot, s.generation, 0, size_bytes) for s in slots]
        return [
            header
            if header is not None
            and (header.state, header.generation) == (STATE_WRITING, slot.generation)
            else None
            for header, slot in zip(self._headers.read_all(copies, raises=True), slots, strict=True)
        ]

    def _access(self, node_id: str) -> NodeAccess:
        node = self._nodes.access(node_id)
        if node is None:
            raise TransferFailed(f"storage node {node_id} cannot be written from this process now")
        return node
