"""A store in one process for tests of workers: it knows what bytes each block must have.

KV of a token is a hash of its token and of the KV before it, which the engine reads from its own
pages: so a page that held another request's bytes for a moment shows in every block behind it.
Not here: the engine and the workers (stepped_site.py).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mooncake_store.block_keys import block_keys, chain_seed
from mooncake_store.errors import StoreError
from mooncake_store.layout import KvLayout
from mooncake_store.memory.digests import (
    block_checksum,
    checksum_of,
    copy_and_digest,
    pack_digests,
    unpack_digests,
)
from mooncake_store.records.blocks import Allocation, Copy, Slot
from mooncake_store.transports.transport import ByteSpan

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=1, dtype="float32", block_tokens=4)
TOKEN_BYTES = LAYOUT.layer_bytes // LAYOUT.block_tokens
NODE, FINGERPRINT = "s0", "print"


def token_kv(before: bytes, token_id: int, layer: int) -> bytes:
    return hashlib.blake2b(before + bytes([layer, token_id]), digest_size=TOKEN_BYTES).digest()


def expected_kv(token_ids: Sequence[int]) -> np.ndarray:
    """[layers, tokens, bytes] of a prompt or an answer."""
    kv = np.zeros((LAYOUT.layers, len(token_ids), TOKEN_BYTES), np.uint8)
    for layer in range(LAYOUT.layers):
        before = bytes(TOKEN_BYTES)
        for index, token_id in enumerate(token_ids):
            before = token_kv(before, token_id, layer)
            kv[layer, index] = np.frombuffer(before, np.uint8)
    return kv


def block_of(data: np.ndarray) -> np.ndarray:
    """The bytes of a page or slot as [layers, tokens, bytes]."""
    return data.reshape(LAYOUT.layers, LAYOUT.block_tokens, TOKEN_BYTES)


class SteppedStore:
    """Stands where a Store would. Every wrong block that is committed is in `wrong`."""

    def __init__(self, rng: random.Random, slots: int = 400) -> None:
        self.rng = rng
        self.fault_share = 0.0  # of calls that fail, as if the directory did not answer
        self.meanwhile: Callable[[], None] = lambda: None  # what others do while bytes move
        self.late_share = 0.0  # of blocks read that miss their deadline
        self.lost_share = 0.0  # of those that prove missing
        self.memory = np.zeros((slots, LAYOUT.block_bytes), np.uint8)
        self._free = list(range(slots))
        self._generation = 0
        self._writing: dict[bytes, tuple[Slot, str]] = {}
        self._ready: dict[bytes, tuple[Slot, int]] = {}
        self._ephemeral: set[bytes] = set()
        self.leases: dict[str, set[bytes]] = {}
        self.expected: dict[bytes, np.ndarray] = {}  # key -> its block; partial: fewer tokens
        self.wrong: list[str] = []
        self.commits = 0
        # Memory, where in it, and the bytes that are to come.
        self.late: list[tuple[np.ndarray, ByteSpan, np.ndarray]] = []

    def expect(self, token_ids: Sequence[int]) -> None:
        """These tokens are somebody's: what their blocks must hold."""
        kv = expected_kv(token_ids)
        tokens = LAYOUT.block_tokens
        seed = chain_seed(FINGERPRINT, cache_salt="")
        for index, key in enumerate(block_keys(np.array(token_ids), tokens, seed)):
            self.expected[key] = kv[:, index * tokens : (index + 1) * tokens]

    def expect_objects(self, token_ids: Sequence[int], names: Sequence[bytes]) -> None:
        """What the blocks must hold that travel under the name of one request."""
        kv = expected_kv(token_ids)
        tokens = LAYOUT.block_tokens
        for index, name in enumerate(names):
            self.expected[name] = kv[:, index * tokens : (index + 1) * tokens]

    def _may_fail(self) -> None:
        if self.rng.random() < self.fault_share:
            raise StoreError("the directory did not answer")

    # -- the verbs of Store

    keeps_digests = True
    node_id = NODE

    def layer_digests(self, copies: Sequence[Copy]) -> list[tuple[int, ...] | None]:
        """As a block kept them when it was committed: None where its slot has another one."""
        found: list[tuple[int, ...] | None] = []
        for copy in copies:
            packed = copy_and_digest(
                np.zeros(LAYOUT.block_bytes, np.uint8),
                self.memory[copy.slot],
                LAYOUT.layers,
                is_read=True,
            )
            found.append(
                unpack_digests(packed) if block_checksum(packed) == copy.checksum else None
            )
        return found

    def expect_threads(self, count: int) -> None: ...

    def counters(self) -> dict[str, Any]:
        return {}

    def nic_counters(self) -> dict[str, Any]:
        return {}

    @property
    def restored_blocks(self) -> int:
        return 0

    @property
    def agents_abandoned(self) -> int:
        return 0

    def allocate(
        self,
        keys: Sequence[bytes],
        owner: str,
        lease_s: float,
        ephemeral: bool = False,
        tenant: str = "",
    ) -> Allocation:
        self._may_fail()
        given: list[Slot | None] = []
        for key in keys:
            if key in self._writing or key in self._ready or not self._free:
                given.append(None)
                continue
            self._generation += 1
            slot = Slot(NODE, self._free.pop(0), self._generation)
            self._writing[key] = slot, owner
            if ephemeral:
                self._ephemeral.add(key)
            given.append(slot)
        return Allocation(tuple(given), len(given))

    def write(
        self,
        slots: Sequence[Slot],
        buffer: np.ndarray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range,
    ) -> list[tuple[int, ...] | None]:
        start, size = LAYOUT.layer_offset_bytes(layers[0]), LAYOUT.layer_bytes * len(layers)
        written: list[tuple[int, ...] | None] = []
        for slot, offset in zip(slots, offsets_bytes, strict=True):
            target = self.memory[slot.slot][start : start + size]
            source = buffer[offset + start : offset + start + size]
            written.append(
                unpack_digests(copy_and_digest(target, source, len(layers), is_read=False))
            )
        return written

    def commit(
        self, blocks: Sequence[tuple[bytes, Slot, Sequence[int]]], owner: str, lease_s: float
    ) -> list[bool]:
        self._may_fail()
        done = []
        for key, slot, digests in blocks:
            digest = block_checksum(pack_digests(digests))
            is_ours = self._writing.get(key) == (slot, owner)
            done.append(is_ours)
            if is_ours:
                del self._writing[key]
                self._ready[key] = slot, digest
                self.leases.setdefault(owner, set()).add(key)
                self._compare(key, slot, owner)
        return done

    def _compare(self, key: bytes, slot: Slot, owner: str) -> None:
        self.commits += 1
        expected = self.expected[key]
        found = block_of(self.memory[slot.slot])[:, : expected.shape[1]]
        if not np.array_equal(found, expected):
            self.wrong.append(f"{owner} committed {key.hex()[:8]} with the bytes of another")

    def abandon(self, slots: Sequence[Slot], owner: str) -> None:
        for key, (slot, writer) in list(self._writing.items()):
            if writer == owner and slot in slots:
                del self._writing[key]
                self._ephemeral.discard(key)
                self._free.append(slot.slot)

    def renew(self, owner: str, lease_s: float) -> bool:
        return True

    def release(self, owner: str) -> None:
        for key in self.leases.pop(owner, ()):
            if key in self._ephemeral and not any(key in held for held in self.leases.values()):
                self._ephemeral.discard(key)
                self._free.append(self._ready.pop(key)[0].slot)
        for key, (slot, writer) in list(self._writing.items()):
            if writer == owner:
                del self._writing[key]
                self._ephemeral.discard(key)
                self._free.append(slot.slot)

    def lookup(self, keys: Sequence[bytes], owner: str, lease_s: float) -> list[tuple[Copy, ...]]:
        self._may_fail()
        found = []
        for key in keys:
            if key not in self._ready:
                break
            slot, digest = self._ready[key]
            self.leases.setdefault(owner, set()).add(key)
            found.append((Copy(*slot[:3], digest, LAYOUT.block_bytes),))
        return found

    def read(
        self,
        copies: Sequence[Copy],
        buffer: np.ndarray,
        offsets_bytes: Sequence[int],
        deadline_s: float,
        layers: range | None = None,
        checksums: Sequence[int] | None = None,
    ) -> list[bool]:
        self._may_fail()
        here = []
        for number, (copy, offset) in enumerate(zip(copies, offsets_bytes, strict=True)):
            start = LAYOUT.layer_offset_bytes(layers[0]) if layers else 0
            size = LAYOUT.layer_bytes * len(layers) if layers else LAYOUT.block_bytes
            source = self.memory[copy.slot][start : start + size]
            digest = checksums[number] if checksums is not None else copy.checksum
            span = ByteSpan(offset + start, size)
            if self.rng.random() < self.late_share:  # what comes may be what is there by then
                self.late.append((buffer, span, self.rng.randbytes(size)))  # type: ignore[arg-type]
                here.append(False)
                continue
            self.meanwhile()
            if self.rng.random() < self.lost_share:
                here.append(False)
                continue
            buffer[span.offset_bytes : span.offset_bytes + size] = source
            here.append(checksum_of(source, 0 if layers else LAYOUT.layers) == digest)
        return here

    def arrive(self) -> None:
        """One read that missed its deadline writes after all."""
        buffer, span, data = self.late.pop(self.rng.randrange(len(self.late)))
        target = buffer[span.offset_bytes : span.offset_bytes + span.length_bytes]
        target[:] = np.frombuffer(data, np.uint8)

    def choose(self, found: Sequence[Sequence[Copy]], first: Sequence[str]) -> list[Copy | None]:
        return [None for _ in found]  # there is no other node

    def fetch(self, *_: Any) -> int:
        return 0

    def pending_offsets(self, buffer: np.ndarray) -> list[ByteSpan]:
        return [span for target, span, _ in self.late if target is buffer]

    def evict(self) -> None:
        """One block that nobody leases."""
        leased = set().union(*self.leases.values()) if self.leases else set()
        idle = [key for key in self._ready if key not in leased]
        if idle:
            self._free.append(self._ready.pop(self.rng.choice(idle))[0].slot)

    def check(self) -> None:
        used = [slot.slot for slot, _ in self._writing.values()]
        used += [slot.slot for slot, _ in self._ready.values()]
        assert sorted(used + self._free) == list(range(len(self.memory))), "a slot has two uses"
