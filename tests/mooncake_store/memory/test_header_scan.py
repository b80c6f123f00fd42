"""The inventory of a segment: every whole header, nothing else, in one pass."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_store.layout import HEADER_BYTES, STATE_READY, STATE_WRITING, geometry
from mooncake_store.memory import slot_memory
from mooncake_store.memory.buffers import ByteArray
from mooncake_store.memory.slot_memory import Block, SlotHeader, SlotMemory
from mooncake_store.native import library


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
    assert SlotMemory(view, shape).blocks() == [claim for claim in expected if claim not in torn]


def test_an_empty_segment_has_no_claims() -> None:
    view = np.zeros(2**20, np.uint8)
    assert SlotMemory(view, geometry(view.nbytes, 65_536)).blocks() == []
    assert SlotMemory(view[:100], geometry(100, 65_536)).blocks() == []


def test_headers_of_one_put_are_the_same_in_native_code_and_in_python(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.why_not():
        pytest.skip(library.why_not())
    chance = np.random.default_rng(seed)
    for count in (0, 1, 2, 17):
        state = int(chance.choice([STATE_READY, STATE_WRITING]))
        length_bytes, layers = int(chance.integers(1, 2**40)), int(chance.integers(0, 9))
        headers = [
            SlotHeader(
                state,
                int(chance.integers(2**62)),
                chance.bytes(16),
                int(chance.integers(2**64, dtype=np.uint64)),
                length_bytes,
                bool(layers % 2),
                layers,
            )
            for _ in range(count)
        ]
        zero_bytes = int(chance.integers(0, 3)) * HEADER_BYTES
        places = chance.permutation(20)[:count] * (HEADER_BYTES + zero_bytes)
        found = []
        for is_native in (True, False):
            if not is_native:
                monkeypatch.setattr(slot_memory, "_native_headers", lambda: None)
            view = np.full(20 * (HEADER_BYTES + zero_bytes), 7, np.uint8)
            slot_memory.write_headers(view, places.tolist(), headers, zero_bytes)
            found.append(view)
        monkeypatch.undo()
        assert (found[0] == found[1]).all(), f"seed {seed}"
        for place, header in zip(places.tolist(), headers, strict=True):
            assert SlotHeader.unpack(found[0][place : place + HEADER_BYTES].tobytes()) == header
            assert not found[0][place + HEADER_BYTES :][:zero_bytes].any()
