"""A worker whose own storage node died, before the directory has heard of it."""

from __future__ import annotations

import pytest

from mooncake_store.errors import TransferFailed
from tests.mooncake_store.client.world import BLOCK, LAYOUT, World, keys_of, put
from tests.mooncake_store.targets import TargetPool


def test_nothing_is_stored_on_a_node_that_died_before_the_directory_hears_of_it(
    targets: TargetPool, seed: int
) -> None:
    """Its memory can be written all the same: every block of it would be promised and missed."""
    world = World("mapped", targets)
    keys, (store, _) = keys_of(2, seed), world.store("s0")
    given = store.allocate(keys[:1], "writer", 60.0)
    [slot] = given.slots
    assert slot is not None
    world.nodes["s0"].kill()
    with pytest.raises(TransferFailed, match="storage node s0 has died"):
        store.commit([(keys[0], slot, [1] * LAYOUT.layers)], "writer", 60.0)
    with pytest.raises(TransferFailed, match="storage node s0 has died"):
        store.allocate(keys[1:], "writer", 60.0)
    assert store.lookup(keys, "reader", 60.0) == []
    world.start("s0")
    put(store, keys)
    world.close()


def test_every_worker_of_a_node_that_came_back_writes_into_its_new_memory(
    targets: TargetPool, seed: int
) -> None:
    """Not only the first one to notice: the directory formats the new life once, for all."""
    world = World("mapped", targets)
    (first, pool), (second, _) = world.store("s0"), world.store("s0")
    world.nodes["s0"].kill()
    world.start("s0")
    for number, store in enumerate((first, second)):
        keys = keys_of(3, seed + number)
        put(store, keys)
        copies = [places[0] for places in first.lookup(keys, "reader", 60.0)]
        assert first.read(copies, pool, [0, BLOCK, 2 * BLOCK], 10.0) == [True] * 3
    world.close()
