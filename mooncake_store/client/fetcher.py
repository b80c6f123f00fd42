"""Copies blocks of other nodes into the local segment and commits them there as further copies.

Blocks that are only on an SSD are first restored into DRAM by the node that owns the SSD. If that
is the local node, the restored block needs no further copy. Slots whose block did not arrive
complete are freed at once, except for slots that a late transfer may still write. Such a slot stays
leased. When the lease expires, the slot is quarantined (not granted again for some time).

Not here: the choice of blocks and copies (store.py, or the client that sends the node a `fetch`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake_store.client.block_reader import BlockReader, Want
from mooncake_store.client.restorer import LeaseTerms, Restorer
from mooncake_store.directory.client import DirectoryClient
from mooncake_store.layout import DIGEST_BYTES, STATE_READY, STATE_WRITING, Geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.digests import block_checksum, pack_digests
from mooncake_store.memory.slot_memory import SlotHeader, SlotMemory
from mooncake_store.records.blocks import Allocation, Copy, Slot
from mooncake_store.records.membership import SSD_SUFFIX, NodeInfo
from mooncake_store.transports.transport import ByteSpan


class LocalSegment(SlotMemory):
    """The segment of one incarnation of the local node, writable from this process."""

    def __init__(self, info: NodeInfo, view: ByteArray, shape: Geometry) -> None:
        super().__init__(view, shape)
        self.info = info

    def begin(
        self, key: bytes, slot: Slot, size_bytes: int, lease_s: float, is_ephemeral: bool = False
    ) -> bool:
        """Write the "writing" header before the payload changes, so that no reader trusts the old
        header. Returns False and writes nothing if the slot has been granted to another writer."""
        if self.is_newer(slot.slot, slot.generation):
            return False
        header = SlotHeader.writing(slot.generation, key, size_bytes, lease_s, is_ephemeral)
        self.write_header(slot.slot, header)
        return True

    def finish_begun(self, key: bytes, slot: Slot, digests: Sequence[int], size_bytes: int) -> bool:
        """Compute the block's checksum from its layer digests, then call `finish`. Returns False
        and changes nothing if the slot's header is no longer "writing" with this block and
        generation."""
        begun = self.header(slot.slot)
        if begun is None or (begun.state, begun.generation, begun.key) != (
            STATE_WRITING,
            slot.generation,
            key,
        ):
            return False
        packed = pack_digests(digests)
        self.finish(key, slot, block_checksum(packed), size_bytes, packed)
        return True

    def finish(
        self, key: bytes, slot: Slot, digest: int, size_bytes: int, digests: bytes = b""
    ) -> None:
        """Write the digests and the "ready" header. `digest`: checksum of the block. `digests`: the
        packed layer digests; b"" for a block without layers."""
        begun = self.header(slot.slot)
        is_ephemeral = begun is not None and begun.key == key and begun.is_ephemeral
        layers = len(digests) // DIGEST_BYTES
        self.write_digests(slot.slot, size_bytes, digests)
        self.write_header(
            slot.slot,
            SlotHeader(STATE_READY, slot.generation, key, digest, size_bytes, is_ephemeral, layers),
        )


@dataclass(eq=False)
class Fetcher:
    """Thread-safe."""

    _directory: DirectoryClient
    _reader: BlockReader
    _restorer: Restorer
    # (keys, owner, lease_s, size_bytes) -> slots of the local node
    _allocate: Callable[[Sequence[bytes], str, float, int], Allocation]
    _pending_in: Callable[[ByteArray], list[ByteSpan]]  # spans that late transfers may write
    _layers: int = 0  # of every block; 0: unknown, so the reader takes it from slot headers

    def fetch(
        self,
        local_segment: Callable[[], LocalSegment | None],
        keys: Sequence[bytes],
        copies: Sequence[Copy],
        terms: LeaseTerms,
    ) -> dict[str, int]:
        """Make local copies of these blocks, except for those that are local already. A lookup
        afterwards shows which blocks have arrived. Returns the number of bytes received from each
        node. If the local node is down, `local_segment` returns None: nothing is copied, but other
        nodes may have restored blocks from their SSDs."""
        from_ssd = [i for i, copy in enumerate(copies) if copy.node_id.endswith(SSD_SUFFIX)]
        ready = {i: copy for i, copy in enumerate(copies) if i not in set(from_ssd)}
        if from_ssd:
            groups = self._restorer.restore(
                [keys[i] for i in from_ssd], [copies[i] for i in from_ssd], terms
            )
            for group in groups:
                ready.update({from_ssd[at]: copy for at, copy in group})
        local = local_segment()
        if local is None:
            return {}
        node_id = local.info.node_id
        by_size: dict[int, list[int]] = {}
        bytes_from = Counter[str]()
        for index in sorted(ready):
            if ready[index].node_id != node_id:
                by_size.setdefault(ready[index].size_bytes, []).append(index)
        for size_bytes, indices in by_size.items():
            given = self._allocate(
                [keys[i] for i in indices], terms.owner, terms.lease_s, size_bytes
            )
            wanted = [
                (keys[i], slot, ready[i])
                for i, slot in zip(indices, given.slots, strict=True)
                if slot is not None
            ]
            local = local_segment()  # another incarnation may have been attached
            if wanted and local is not None:
                bytes_from.update(self._pull(local, wanted, terms))
        return dict(bytes_from)

    def _pull(
        self, local: LocalSegment, wanted: Sequence[tuple[bytes, Slot, Copy]], terms: LeaseTerms
    ) -> Counter[str]:
        wants = []
        for key, slot, copy in wanted:
            span = ByteSpan(local.shape.slot_offset_bytes(slot.slot), copy.size_bytes)
            if copy.checksum:
                wants.append(Want(copy, 0, (local.view, span), (copy.checksum,), self._layers, []))
            else:
                # If the source slot was overwritten after its lease expired, only its header shows
                # that here. With `key`, the reader checks the header after the read.
                wants.append(Want(copy, 0, (local.view, span), (), key=key))
        arrived = self._reader.read(wants, terms.until_s - time.monotonic())
        rows, bytes_from = [], Counter[str]()
        for (key, slot, copy), want, is_here in zip(wanted, wants, arrived, strict=True):
            if is_here:
                digest = copy.checksum or local.checksum(slot.slot, copy.size_bytes)
                packed = want.digests[0] if want.digests else b""
                local.finish(key, slot, digest, copy.size_bytes, packed)
                rows.append((key, slot.slot, slot.generation, digest))
                bytes_from[copy.node_id] += copy.size_bytes
        if rows:
            self._directory.commit(
                local.info.node_id, rows, terms.owner, terms.lease_s, epoch=wanted[0][1].epoch
            )
        # slots that a late transfer may still write stay leased
        late = {span.offset_bytes for span in self._pending_in(local.view)}
        lost = [
            slot
            for (_, slot, _), want, is_here in zip(wanted, wants, arrived, strict=True)
            if not is_here and want.target[1].offset_bytes not in late
        ]
        if lost:
            self._directory.abandon(lost, terms.owner)
        return bytes_from
