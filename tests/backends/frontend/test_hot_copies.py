"""A suggestion becomes a copy, on real storage nodes."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator

import pytest

from backends.frontend.cluster_view import HotCopies
from conductor.messages import Replicate
from mooncake_store.client.client import StoreClient
from tests.e2e.server import wait_until
from tests.mooncake_store.processes import SiteProcesses

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteProcesses]:
    processes = SiteProcesses(tmp_path_factory.mktemp("hot"))
    try:
        for name in ("a", "b", "c"):
            processes.node(name, 16)
        yield processes
    finally:
        processes.close()


def test_the_target_node_pulls_the_blocks_and_a_wrong_suggestion_ends_nothing(
    site: SiteProcesses,
) -> None:
    keys = tuple(hashlib.blake2b(bytes([n]), digest_size=16).digest() for n in range(8))
    copies = HotCopies(site.address)
    with StoreClient(site.address, "a") as client:
        assert all(client.put(list(keys), [os.urandom(65_536) for _ in keys], "a"))
        copies.carry_out(Replicate(keys, "a", "nowhere", "a node that is not there"))
        copies.carry_out(Replicate(keys, "a", "b", "hot"))
        wait_until(
            lambda: all(len(places) == 2 for places in client.stat(keys)),
            "every block to be on both nodes",
            10.0,
        )
    copies.close()


def test_the_target_pulls_from_the_node_that_the_conductor_named(site: SiteProcesses) -> None:
    """The other holder, which the directory names first, is dead: nothing can come from it."""
    keys = tuple(hashlib.blake2b(bytes([n, 1]), digest_size=16).digest() for n in range(8))
    copies = HotCopies(site.address)
    with StoreClient(site.address, "b") as client:
        assert all(client.put(list(keys), [os.urandom(65_536) for _ in keys], "a"))
        assert client.change_replica(keys, add=["b"]) == [True] * 8
        assert [places[0].node_id for places in client.stat(keys)] == ["a"] * 8
        site.nodes["a"].end(signal.SIGKILL)
        copies.carry_out(Replicate(keys, "b", "c", "hot"))
        wait_until(
            lambda: all("c" in {copy.node_id for copy in places} for places in client.stat(keys)),
            "every block to be on c",
            10.0,
        )
    copies.close()
