"""The inventory of a segment: every whole header, nothing else, in one pass."""

from __future__ import annotations

import numpy as np

from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.slot_memory import Block, SlotHeader, scan


def written(view: ByteArray, slot: int, header: SlotHeader) -> Block:
    """Write it, and say what the scan must find."""
    start = slot * HEADER_BYTES
    view[start : start + HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
    return (header.key, slot, header.generation, header.checksum, header.length_bytes, header.state)


def test_a_scan_finds_every_whole_header_and_no_other(seed: int) -> None:
    chance = np.random.default_rng(seed)
    view = np.zeros(4 * 2**20, np.uint8)
    shape = geometry(view.nbytes, 4096)
    view[: shape.units * HEADER_BYTES] = chance.integers(
        0, 256, shape.units * HEADER_BYTES, np.uint8
    )
    expected = []
    for slot in range(0, shape.units, 3):
        state = STATE_READY if slot % 2 else STATE_WRITING
        length_bytes = int(chance.integers(1, 100_000))
        top = int(chance.integers(2**63))
        header = SlotHeader(state, top, chance.bytes(16), 2**64 - 1 - top, length_bytes)
        expected.append(written(view, slot, header))
    torn = [claim for claim in expected if claim[1] % 7 == 0]
    for claim in torn:
        view[claim[1] * HEADER_BYTES + int(chance.integers(64))] ^= 1 << int(chance.integers(8))
    assert scan(view, shape) == [claim for claim in expected if claim not in torn]


def test_an_empty_segment_has_no_claims() -> None:
    view = np.zeros(2**20, np.uint8)
    assert scan(view, geometry(view.nbytes, 65_536)) == []
    assert scan(view[:100], geometry(100, 65_536)) == []
