"""Elected directories on three etcd members, some of which die; two that are started at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.errors import StoreUnavailable
from tests.mooncake_store.elected import PATIENCE_S, Elected, until_answered
from tests.mooncake_store.etcd_process import BINARY, HOW_TO, EtcdCluster

pytestmark = [pytest.mark.servers, pytest.mark.skipif(BINARY is None, reason=HOW_TO)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def election(cluster: EtcdCluster) -> str:
    return cluster.address


def test_any_one_member_may_die_and_the_same_directory_leads_on(
    cluster: EtcdCluster, election: str, tmp_path: Path
) -> None:
    only = Elected(tmp_path, "a", election, ttl_s=6)
    try:
        epoch = only.wait_ready()
        with DirectoryClient(election, timeout_s=10.0) as client:
            assert client.stats().epoch == epoch  # who leads is known from now on
            for number, member in enumerate(cluster.members):
                member.close()
                until_s = time.monotonic() + 5.5  # longer than it leads without renewing
                while time.monotonic() < until_s:
                    assert client.stats().epoch == epoch
                    time.sleep(0.05)  # poll
                client.set_quota("acme", number + 1)
                assert client.stats().tenants == (("acme", 0, number + 1),)
                member.start()
                member.wait_healthy()
    finally:
        only.close()


def test_without_a_quorum_nobody_leads_and_with_one_again_what_was_saved_is_there(
    cluster: EtcdCluster, election: str, start: Callable[[str], Elected]
) -> None:
    first = start("a")
    epoch = first.wait_ready()
    with (
        DirectoryClient(election, timeout_s=5.0) as client,
        DirectoryClient(first.address, timeout_s=5.0) as stubborn,
    ):
        client.set_quota("acme", 7)
        client.pin([bytes(16)], "hard")
        for member in cluster.members[1:]:
            member.close()
        until_s = time.monotonic() + PATIENCE_S
        with pytest.raises(StoreUnavailable):
            while time.monotonic() < until_s:
                stubborn.stats()
                time.sleep(0.02)  # poll
        with pytest.raises(StoreUnavailable):
            client.set_quota("acme", 8)
        second = start("b")  # waits like everybody
        assert second.process.poll() is None
        cluster.members[1].start()
        later = until_answered(client, epoch)
        assert later > epoch
        stats = client.stats()
        assert (stats.tenants, stats.pins) == ((("acme", 0, 7),), 1)


def test_of_two_that_start_at_once_one_leads(
    election: str, start: Callable[[str], Elected]
) -> None:
    both = [start("a"), start("b")]
    with DirectoryClient(election, timeout_s=5.0) as client:
        epoch = until_answered(client)
        leading = client.leader().address
        (leader,) = [one for one in both if one.address == leading]
        (other,) = [one for one in both if one is not leader]
        assert leader.wait_ready() == epoch
        leader.process.kill()
        assert other.wait_ready() > epoch
