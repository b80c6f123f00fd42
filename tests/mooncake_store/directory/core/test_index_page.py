"""What a replica of the index asks beside the events: pages of it; and what its readers tell."""

from __future__ import annotations

import random

import pytest

from mooncake_store.directory.core.config import DirectoryConfig
from mooncake_store.directory.core.directory import Directory
from mooncake_store.errors import RequestInvalid
from mooncake_store.records.blocks import Copy
from mooncake_store.records.events import BlockAdded, BlockRemoved
from tests.mooncake_store.makers import BLOCK_BYTES, chain, node_info, put


def directory_with(*node_ids: str, slots: int = 8, eviction: str = "lru") -> Directory:
    made = Directory(1, DirectoryConfig(eviction=eviction))
    for node_id in node_ids:
        made.register_node(node_info(node_id, slots=slots), 0.0)
        made.attach(node_id, "print", BLOCK_BYTES, 0.0)
    return made


def test_pages_together_are_the_index_with_each_copy_as_a_lookup_says_it() -> None:
    directory = directory_with("s0", "s1")
    keys = chain(7)
    put(directory, keys)
    put(directory, keys[:2], "s1")
    put(directory, chain(1, "e"), is_released=False, ephemeral=True)
    found: dict[bytes, tuple[Copy, ...]] = {}
    for first in range(0, 12, 3):
        page, is_last = directory.index_page(first, 3, 0.0)
        found |= dict(page)
        assert is_last == (first + 3 > 8), "seven blocks, and one that is not announced"
    assert found == dict(zip(keys, directory.lookup(keys, "", 0.0, 0.0), strict=True))
    assert directory.index_page(100, 3, 0.0) == ([], True)


def test_a_snapshot_without_blocks_says_where_the_events_go_on() -> None:
    directory = directory_with("s0")
    put(directory, chain(3))
    whole, light = directory.snapshot(0.0), directory.snapshot(0.0, with_blocks=False)
    assert len(whole.holders) == 3 and light.holders == ()
    assert (light.epoch, light.sequence, light.nodes) == (whole.epoch, whole.sequence, whole.nodes)


def test_a_replica_filled_by_pages_between_events_has_nothing_that_is_not_so(seed: int) -> None:
    """As node/index_writer.py does it, with a random turn of things."""
    chance = random.Random(seed)
    directory = directory_with("s0", slots=24)
    keys = chain(60)
    put(directory, keys[:20])
    replica: dict[bytes, Copy] = {}
    heard, first = directory.sequence, 0
    for step in range(400):
        if chance.random() < 0.3:
            directory.remove([chance.choice(keys)], 0.0)
        else:
            key = chance.choice(keys)
            if not directory.lookup([key], "", 0.0, 0.0):
                put(directory, [key])
        if chance.random() < 0.3:
            page, is_last = directory.index_page(first, 4, 0.0)
            replica |= {key: copies[0] for key, copies in page}
            first = 0 if is_last else first + 4
        if chance.random() < 0.5 or step == 399:  # they come late, and in order
            for event in directory.events_since(heard) or ():
                if isinstance(event, BlockAdded):
                    assert event.copy is not None
                    replica[event.key] = event.copy
                elif isinstance(event, BlockRemoved):
                    replica.pop(event.key, None)
            heard = directory.sequence
    true = directory.lookup(keys, "", 0.0, 0.0, prefix_only=False)
    for key, copies in zip(keys, true, strict=True):
        assert replica.get(key) in (None, *copies)


def test_what_readers_say_they_used_goes_last_and_counts_as_found() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(4)
    put(directory, keys)
    before = directory.stats(0.0)
    directory.used(keys[3] + keys[2] + b"?" * 16, 0.0)
    after = directory.stats(0.0)
    assert after.lookup_blocks == before.lookup_blocks + 3
    assert after.hit_blocks == before.hit_blocks + 2 and after.lookups == before.lookups
    put(directory, chain(2, "b"))
    assert directory.exist(b"".join(keys), 0.0) == bytes([0, 0, 1, 1])
    directory.check()
    with pytest.raises(RequestInvalid, match="no whole number of keys"):
        directory.used(b"x" * 15, 0.0)


def test_a_leased_or_pinned_block_is_used_without_harm() -> None:
    directory = directory_with("s0", slots=4)
    keys = chain(3)
    put(directory, keys)
    directory.lookup(keys[:1], "reader", 5.0, 0.0)
    directory.pin(keys[1:2], "hard", 0.0, 0.0)
    directory.used(b"".join(keys), 0.0)
    directory.check()
