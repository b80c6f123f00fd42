"""The manifest of the SSD tier: what it says survives any end of the process, damage does not."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from mooncake_store.errors import ManifestVersion
from mooncake_store.ssd import manifest as manifest_module
from mooncake_store.ssd.entries import (
    RECORD_BYTES,
    EntryTable,
    SsdEntry,
    SsdShape,
    pack_header,
    pack_put,
    replay,
    unpack_header,
)
from mooncake_store.ssd.manifest import Manifest

SHAPE = SsdShape(4096, 64 * 4096)


def entry(slot: int, generation: int, units: int = 1) -> SsdEntry:
    return SsdEntry(
        generation.to_bytes(16, "big"), slot, generation, 7 * generation, units * 4096 - 9
    )


def put(manifest: Manifest, *entries: SsdEntry) -> None:
    """As the tier does it."""
    assert all(manifest.make_room((e.slot, e.generation, e.size_bytes) for e in entries))
    manifest.put(entries)


def reopened(path: Path, shape: SsdShape = SHAPE) -> list[SsdEntry]:
    manifest = Manifest(str(path), shape)
    manifest.check()
    manifest.close()
    return sorted(manifest.table.entries())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s0.manifest"


@pytest.fixture
def full(path: Path) -> Path:
    """A manifest of three blocks."""
    manifest = Manifest(str(path), SHAPE)
    put(manifest, entry(0, 1, 2), entry(2, 2), entry(10, 3, 4))
    manifest.close()
    manifest.close()
    return path


def test_what_was_put_is_there_again_after_it_was_opened_again(full: Path) -> None:
    assert reopened(full) == sorted([entry(0, 1, 2), entry(2, 2), entry(10, 3, 4)])


def test_a_slot_that_is_written_again_loses_all_that_lay_there(full: Path) -> None:
    manifest = Manifest(str(full), SHAPE)
    assert manifest.make_room([(1, 4, 2 * 4096)]) == [True]
    manifest.close()
    assert reopened(full) == [entry(10, 3, 4)], "both neighbours overlap units 1 and 2"


def test_an_older_use_of_a_slot_may_not_touch_a_newer_one(full: Path) -> None:
    manifest = Manifest(str(full), SHAPE)
    assert manifest.make_room([(12, 2, 4096), (11, 9, 4096), (63, 9, 2 * 4096)]) == [
        False,
        True,
        False,
    ]
    manifest.drop(2, 1)
    assert manifest.table.find(2) == entry(2, 2), "another generation was meant"
    manifest.check()
    manifest.close()


def test_a_record_that_the_disk_takes_in_small_parts_is_written_whole(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    manifest = Manifest(str(full), SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, raw: write(descriptor, raw[:7]))
        put(manifest, entry(20, 4), entry(30, 5))
    manifest.close()
    assert reopened(full)[3:] == [entry(20, 4), entry(30, 5)]


def test_a_record_of_an_absurd_generation_does_not_keep_its_slot_for_ever(path: Path) -> None:
    manifest = Manifest(str(path), SHAPE)
    damaged = SsdEntry(b"k" * 16, 2, 2**63, 0, 4096)
    manifest._append([pack_put(damaged), pack_put(entry(5, 6))])
    manifest.close()
    manifest = Manifest(str(path), SHAPE)
    assert manifest.table.entries() == [entry(5, 6)]
    put(manifest, entry(2, 7))
    manifest.check()
    manifest.close()
    assert reopened(path) == sorted([entry(5, 6), entry(2, 7)])


def test_of_two_records_that_overlap_the_later_written_one_wins_in_any_order() -> None:
    for order in ((entry(0, 1, 2), entry(1, 2)), (entry(1, 2), entry(0, 1, 2))):
        raw = pack_header(SHAPE) + b"".join(pack_put(one) for one in order)
        table = EntryTable(SHAPE)
        table.play(replay(raw).records)
        assert table.entries() == [entry(1, 2)]


def test_a_crash_at_every_byte_of_the_last_record_costs_that_record_only(
    full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = full.read_bytes()
    before = sorted([entry(0, 1, 2), entry(2, 2)])
    for cut in range(len(whole) - RECORD_BYTES, len(whole)):
        caplog.clear()
        full.write_bytes(whole[:cut])
        assert reopened(full) == before, cut
        torn_bytes = cut - (len(whole) - RECORD_BYTES)
        assert ("torn tail" in caplog.text) == (torn_bytes > 0)
        manifest = Manifest(str(full), SHAPE)
        put(manifest, entry(20, 9))
        manifest.close()
        assert reopened(full) == sorted([*before, entry(20, 9)]), "appended behind torn bytes"


def test_a_flipped_bit_costs_one_record_and_says_so(
    full: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    whole = full.read_bytes()
    chance = np.random.default_rng(seed)
    for position in range(RECORD_BYTES, 3 * RECORD_BYTES):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(chance.integers(8))
        full.write_bytes(damaged)
        caplog.clear()
        missing = entry(0, 1, 2) if position < 2 * RECORD_BYTES else entry(2, 2)
        assert missing not in (found := reopened(full)) and len(found) == 2, position
        assert "1 damaged records skipped" in caplog.text


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("empty", b""),
        ("shorter than its header", pack_header(SHAPE)[:40]),
        ("something else", b"#!/bin/sh\n" * 20),
        ("a flipped bit in the header", b"MKSM\x03" + pack_header(SHAPE)[5:]),
        ("other units", pack_header(SsdShape(8192, 64 * 4096)) + pack_put(entry(0, 1))),
    ],
)
def test_a_damaged_manifest_is_put_aside_loudly_and_the_tier_starts_empty(
    path: Path, kind: str, raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(raw)
    assert reopened(path) == [], kind
    assert Path(f"{path}.damaged").read_bytes() == raw
    assert "cannot be used" in caplog.text and caplog.records[0].levelno == logging.ERROR
    manifest = Manifest(str(path), SHAPE)
    put(manifest, entry(5, 5))
    manifest.close()
    assert reopened(path) == [entry(5, 5)]


def test_another_version_is_refused_and_left_as_it_is_unless_told_to_reset(path: Path) -> None:
    raw = pack_header(SHAPE, version=1) + pack_put(entry(0, 1))
    path.write_bytes(raw)
    with pytest.raises(ManifestVersion, match=r"version 1, this release writes 2: .*--ssd-reset"):
        Manifest(str(path), SHAPE)
    assert path.read_bytes() == raw
    Manifest(str(path), SHAPE, must_reset=True).close()
    assert reopened(path) == []


def test_another_capacity_keeps_what_still_fits(full: Path) -> None:
    larger = SsdShape(4096, 1000 * 4096)
    assert len(reopened(full, larger)) == 3
    assert unpack_header(full.read_bytes()) == larger
    assert reopened(full, SsdShape(4096, 12 * 4096)) == sorted([entry(0, 1, 2), entry(2, 2)])


def test_a_manifest_that_is_mostly_dead_is_written_anew(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "DEAD_RECORDS_MIN", 50)
    manifest = Manifest(str(full), SHAPE)
    largest = 0
    for generation in range(10, 400):
        put(manifest, entry(20, generation))
        largest = max(largest, full.stat().st_size)
    manifest.check()
    assert largest <= 110 * RECORD_BYTES, "it grew without bound"
    manifest.close()
    assert reopened(full) == sorted([entry(0, 1, 2), entry(2, 2), entry(10, 3, 4), entry(20, 399)])


def test_a_compaction_that_did_not_end_leaves_the_old_manifest(full: Path) -> None:
    Path(f"{full}.new").write_bytes(b"half")
    assert len(reopened(full)) == 3
    assert not Path(f"{full}.new").exists()


def test_a_disk_that_is_full_midway_leaves_a_manifest_that_can_go_on(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(str(full), SHAPE)
    really_write, calls = os.write, 0

    def full_after_half(descriptor: int, raw: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really_write(descriptor, raw[:100])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_after_half)
        with pytest.raises(OSError, match="No space"):
            manifest.put([entry(30, 8), entry(31, 9)])
    assert manifest.table.find(30) is None
    manifest.check()
    put(manifest, entry(30, 10))
    manifest.check()
    manifest.close()


def test_a_random_walk_with_crashes_never_finds_what_was_not_kept(path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    manifest, generation = Manifest(str(path), SHAPE), 0
    expected: dict[int, SsdEntry] = {}
    for step in range(1500):
        action = chance.random()
        if action < 0.75:
            generation += 1
            made = entry(int(chance.integers(64)), generation, int(chance.integers(1, 5)))
            [fits] = manifest.make_room([(made.slot, made.generation, made.size_bytes)])
            assert fits == SHAPE.holds(made)
            if fits:
                start, end = made.slot, made.slot + SHAPE.units_of(made.size_bytes)
                expected = {
                    slot: old
                    for slot, old in expected.items()
                    if slot >= end or slot + SHAPE.units_of(old.size_bytes) <= start
                }
                if chance.random() < 0.9:  # else it crashed between room and block
                    manifest.put([made])
                    expected[start] = made
        elif action < 0.9 and expected:
            slot = int(chance.choice(sorted(expected)))
            manifest.drop(slot, expected.pop(slot).generation)
        else:
            manifest.close()
            if chance.random() < 0.5:  # the process died while it appended
                with path.open("ab") as file:
                    file.write(pack_put(entry(0, 10**9))[: int(chance.integers(RECORD_BYTES))])
            manifest = Manifest(str(path), SHAPE)
        assert {e.slot: e for e in manifest.table.entries()} == expected, step
        if step % 50 == 0:
            manifest.check()
    manifest.close()
