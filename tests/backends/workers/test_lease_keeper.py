"""Leases of requests that a worker is busy with are renewed, or taken again once they are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from backends.workers.worker_process import LeaseKeeper
from tests.mooncake_store.client.world import World, keys_of, put
from tests.mooncake_store.targets import TargetPool

LEASE_S = 30.0


@pytest.fixture
def world() -> Iterator[World]:
    world = World("mapped", TargetPool())
    yield world
    world.close()


def is_leased(world: World, owner: str) -> bool:
    return owner in world.directory.directory._copies.leases


def test_a_lease_that_the_directory_has_forgotten_is_taken_again(world: World) -> None:
    store, _ = world.store("s0")
    keys = keys_of(3, 1)
    put(store, keys)
    keeper = LeaseKeeper(store, LEASE_S)
    store.lookup(keys, "r", LEASE_S)
    keeper.hold("r", 0.0, keys)
    world.directory.release("r")  # as one that has restarted
    keeper.renew_due(LEASE_S / 3 - 1.0)
    assert not is_leased(world, "r"), "it was not due"
    keeper.renew_due(LEASE_S / 3)
    assert is_leased(world, "r")
    keeper.release("r")
    keeper.renew_due(1e9)
    assert not is_leased(world, "r") and len(keeper) == 0


@pytest.mark.parametrize(
    ("ends", "stays"),
    [
        pytest.param(LeaseKeeper.release, False, id="its request is over"),
        # Prefill drops what decode is about to read: its leases must not end with that.
        pytest.param(LeaseKeeper.drop, True, id="it is kept for another"),
    ],
)
def test_a_lease_that_ends_while_it_is_taken_again_is_gone_unless_it_is_kept_for_another(
    ends: Callable[[LeaseKeeper, str], None],
    stays: bool,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, _ = world.store("s0")
    keys = keys_of(1, 1)
    put(store, keys)
    keeper = LeaseKeeper(store, LEASE_S)
    keeper.hold("r", 0.0, keys)
    renew = store.renew

    def renew_late(owner: str, lease_s: float) -> bool:
        is_held = renew(owner, lease_s)
        ends(keeper, owner)  # in another thread
        return is_held

    monkeypatch.setattr(store, "renew", renew_late)
    keeper.renew_due(LEASE_S)
    assert is_leased(world, "r") == stays
