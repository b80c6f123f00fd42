"""Who leads, against a real etcd: one at a time, whatever is killed or frozen.

Not here: a directory that is elected (test_elected_directory.py).
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from mooncake_store.directory.election import (
    Leader,
    Leadership,
    NoLeader,
    boot_s,
    campaign,
    leader_at,
    parse_address,
)
from mooncake_store.directory.etcd import MISSING, EtcdClient, EtcdFailed
from mooncake_store.errors import RequestInvalid, StoreUnavailable
from mooncake_store.records.blocks import EPOCH_MAX
from tests.mooncake_store.etcd_process import EtcdProcess

TTL_S = 1
LONG_TTL_S = 5  # where a leader must not lose the lead because the machine is busy
A, B = Leader("tcp://a:1", "tcp://a:2"), Leader("tcp://b:1", "tcp://b:2")


@pytest.fixture
def client(etcd: EtcdProcess) -> EtcdClient:
    return EtcdClient([etcd.url], timeout_s=5.0)


def win(
    client: EtcdClient,
    prefix: str,
    leader: Leader = A,
    patience_s: float = 20.0,
    ttl_s: int = TTL_S,
) -> Leadership:
    until_s = time.monotonic() + patience_s
    won = campaign(client, prefix, leader, lambda: time.monotonic() > until_s, ttl_s=ttl_s)
    assert won is not None, f"nobody became leader within {patience_s} s"
    return won


def address_of(etcd: EtcdProcess, prefix: str) -> str:
    return f"etcd://127.0.0.1:{etcd.port}/{prefix}"


def leader_of(etcd: EtcdProcess, prefix: str) -> Leader:
    return leader_at(address_of(etcd, prefix), timeout_s=5.0)


def wait_until_invalid(leadership: Leadership) -> None:
    until_s = time.monotonic() + 20.0
    while leadership.may_serve():
        assert time.monotonic() < until_s, "the leader still believes in itself"
        time.sleep(0.005)  # poll


def test_the_first_leads_and_the_next_when_it_ends(etcd: EtcdProcess, client: EtcdClient) -> None:
    prefix = etcd.fresh_prefix()
    with pytest.raises(NoLeader, match="start one with --etcd"):
        leader_of(etcd, prefix)
    first = win(client, prefix, A, ttl_s=LONG_TTL_S)
    assert leader_of(etcd, prefix) == replace(A, epoch=first.epoch)
    assert campaign(client, prefix, B, _soon(0.5), ttl_s=LONG_TTL_S) is None  # while A renews
    assert first.may_serve()
    first.close()
    first.close()
    assert not first.may_serve()
    second = win(client, prefix, B, LONG_TTL_S / 2, LONG_TTL_S)  # a clean end waits for no TTL
    assert leader_of(etcd, prefix) == replace(B, epoch=second.epoch)
    assert second.epoch > first.epoch
    second.close()


def _soon(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def test_a_leader_renews_for_longer_than_its_ttl(etcd: EtcdProcess, client: EtcdClient) -> None:
    prefix = etcd.fresh_prefix()
    leader = win(client, prefix, ttl_s=LONG_TTL_S)
    until_s = time.monotonic() + 1.1 * LONG_TTL_S
    while time.monotonic() < until_s:
        assert leader.may_serve()
        assert leader_of(etcd, prefix).address == A.address
        time.sleep(0.02)  # poll
    leader.close()


def test_epochs_grow_even_when_a_clock_goes_back(etcd: EtcdProcess, client: EtcdClient) -> None:
    prefix, epochs = etcd.fresh_prefix(), []
    for now_ms in (5_000, 1_000, 9_000):
        won = campaign(client, prefix, A, lambda: False, now_ms=lambda at=now_ms: at, ttl_s=TTL_S)
        assert won is not None
        epochs.append(won.epoch)
        won.close()
    assert epochs == [5_000, 5_001, 9_000]


def test_a_hung_etcd_makes_the_leader_stop_before_its_ttl_and_nobody_else_lead(
    etcd: EtcdProcess, client: EtcdClient
) -> None:
    prefix, hasty = etcd.fresh_prefix(), EtcdClient([etcd.url], timeout_s=0.5)
    first = win(client, prefix, A)
    etcd.freeze()
    try:
        frozen_s = boot_s()
        wait_until_invalid(first)
        assert first._valid_until_s - frozen_s < TTL_S  # whenever this process got to see it
        assert campaign(hasty, prefix, B, _soon(1.0), ttl_s=TTL_S) is None
        with pytest.raises(EtcdFailed, match=f"127.0.0.1:{etcd.port}"):
            leader_at(address_of(etcd, prefix), timeout_s=0.3)
    finally:
        etcd.thaw()
    second = win(client, prefix, B, ttl_s=LONG_TTL_S)
    assert second.epoch > first.epoch and second.may_serve() and not first.may_serve()
    first.close()
    assert leader_of(etcd, prefix).address == B.address, "the first one took the lead away"
    second.close()


def test_a_lease_that_somebody_revoked_ends_the_leadership_for_good(
    etcd: EtcdProcess, client: EtcdClient
) -> None:
    leader = win(client, etcd.fresh_prefix())
    client.revoke(leader._lease)
    wait_until_invalid(leader)
    leader._thread.join(timeout=20.0)
    assert not leader._thread.is_alive() and not leader.may_serve()
    leader.close()


class PausedClock:
    """The clock of a machine that may be paused, or jump."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class GrantedLease(EtcdClient):
    """An etcd that says of every renewal how long the lease is valid; None: it does not answer."""

    def __init__(self, left_s: float | None) -> None:
        super().__init__(["http://127.0.0.1:1"])
        self.left_s, self.asked, self.revoked = left_s, threading.Event(), False

    def keep_alive(self, lease: int) -> float:
        self.asked.set()
        if self.left_s is None:
            raise EtcdFailed("silent")
        return self.left_s

    def revoke(self, lease: int) -> None:
        self.revoked = True


def test_a_machine_that_slept_over_its_ttl_leads_no_more_and_renews_nothing() -> None:
    clock, lease = PausedClock(), GrantedLease(3.0)
    leader = Leadership(lease, 1, 7, clock(), ttl_s=3.0, clock=clock)
    clock.now_s += 2.39
    assert leader.may_serve()
    clock.now_s += 0.02  # 0.8 of the TTL
    assert not leader.may_serve()
    assert lease.asked.wait(20.0), "it asks all the same: perhaps nobody has noticed"
    leader._thread.join(timeout=20.0)
    clock.now_s -= 1.0  # a clock that is set back does not bring the lead back
    assert not leader.may_serve()
    leader.close()
    assert not lease.revoked, "the lead may be somebody else's by now"


def test_a_paused_machine_whose_clock_stood_still_stops_at_its_next_renewal() -> None:
    clock, lease = PausedClock(), GrantedLease(0.0)  # etcd gave the lead away meanwhile
    leader = Leadership(lease, 1, 7, clock(), ttl_s=0.2, clock=clock)
    assert lease.asked.wait(20.0)
    leader._thread.join(timeout=20.0)
    assert not leader.may_serve()
    leader.close()


def test_a_longer_lease_than_was_asked_for_is_believed_in_no_longer() -> None:
    clock, lease = PausedClock(), GrantedLease(60.0)
    leader = Leadership(lease, 1, 7, clock(), ttl_s=0.2, clock=clock)
    assert lease.asked.wait(20.0)
    lease.asked.clear()
    assert lease.asked.wait(20.0), "it renews as often as its own TTL wants"
    assert leader.may_serve() and leader.margin_s == pytest.approx(0.04)
    lease.left_s = None  # etcd hangs
    clock.now_s += 0.2
    assert not leader.may_serve()
    leader.close()


def test_etcd_gives_a_short_lease_its_own_least_time_and_the_leader_keeps_to_the_short_one(
    etcd: EtcdProcess, client: EtcdClient, caplog: pytest.LogCaptureFixture
) -> None:
    class Generous(EtcdClient):
        def grant(self, ttl_s: int) -> tuple[int, float]:
            lease, _ = super().grant(10 * ttl_s)
            return lease, 10.0 * ttl_s

    won = win(Generous([etcd.url], timeout_s=0.5), etcd.fresh_prefix())
    assert "extends a lease of 1 s to 10 s" in caplog.text
    etcd.freeze()
    try:
        frozen_s = boot_s()
        wait_until_invalid(won)
        assert won._valid_until_s - frozen_s < TTL_S
    finally:
        etcd.thaw()
    won.close()


def test_never_two_leaders_while_etcd_freezes_and_leaders_are_cut_off_at_random(
    etcd: EtcdProcess, client: EtcdClient, seed: int
) -> None:
    prefix, chance = etcd.fresh_prefix(), random.Random(seed)
    stop = threading.Event()
    reigns: list[tuple[float, float, int]] = []  # (from, until, epoch), as the leaders saw it
    problems: list[Exception] = []

    def candidate(number: int) -> None:
        own, mood = EtcdClient([etcd.url], timeout_s=0.3), random.Random(seed + number)
        try:
            while not stop.is_set():
                leader = Leader(f"tcp://{number}:1", "")
                won = campaign(own, prefix, leader, stop.is_set, ttl_s=TTL_S)
                if won is None:
                    return
                begun_s = last_s = time.monotonic()
                until_s = begun_s + mood.uniform(0.1, 2.0)
                if is_cut_off := mood.random() < 0.5:
                    own.endpoints, until_s = ["http://127.0.0.1:1"], begun_s + 20.0
                while not stop.is_set() and last_s < until_s:
                    now_s = time.monotonic()
                    if not won.may_serve():
                        break
                    last_s = now_s
                    time.sleep(0.001)  # poll
                reigns.append((begun_s, last_s, won.epoch))
                won.close()
                if is_cut_off:
                    own.endpoints = [etcd.url]
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=candidate, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            stop.wait(chance.uniform(0.5, 2.5))
            etcd.freeze()
            stop.wait(chance.uniform(0.1, 1.2))
            etcd.thaw()
    finally:
        etcd.thaw()
        stop.set()
        for thread in threads:
            thread.join(timeout=30.0)
    assert not problems
    assert len(reigns) >= 3, "the election stood still"
    reigns.sort()
    for (_, until_s, epoch), (from_s, _, next_epoch) in itertools.pairwise(reigns):
        assert until_s <= from_s, f"two leaders for {until_s - from_s:.3f} s"
        assert epoch < next_epoch


def test_a_cluster_is_asked_at_the_endpoint_that_answers(etcd: EtcdProcess) -> None:
    client = EtcdClient(["http://127.0.0.1:1", etcd.url + "/"], timeout_s=0.5)
    assert client.get(etcd.fresh_prefix()) == MISSING
    assert client.endpoints[0] == etcd.url
    with pytest.raises(NoLeader):
        leader_at(f"etcd://127.0.0.1:1,127.0.0.1:{etcd.port}/none")


def test_a_key_that_is_no_leader_is_named(etcd: EtcdProcess, client: EtcdClient) -> None:
    prefix = etcd.fresh_prefix()
    client.write_unless_changed({}, {f"{prefix}/leader": b"{}"}, {})
    with pytest.raises(StoreUnavailable, match=f"{prefix}/leader in etcd names no directory"):
        leader_of(etcd, prefix)


@pytest.mark.parametrize("number", [EPOCH_MAX, 10**18 - 1, 2**64 - 1, 10**30])
def test_an_epoch_that_no_directory_can_have_had_counts_for_nothing(
    etcd: EtcdProcess, client: EtcdClient, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, epochs = etcd.fresh_prefix(), []
    client.write_unless_changed({}, {f"{prefix}/epoch": b"%d" % number}, {})
    for now_ms in (5_000, number, 1_000):
        won = campaign(client, prefix, A, lambda: False, now_ms=lambda at=now_ms: at, ttl_s=TTL_S)
        assert won is not None
        epochs.append(won.epoch)
        won.close()
    assert epochs == [5_000, 5_001, 5_002]
    assert f"{prefix}/epoch in etcd is damaged" in caplog.text and str(number) in caplog.text


def test_garbage_in_the_keys_of_an_election_ends_no_candidate(
    etcd: EtcdProcess, client: EtcdClient
) -> None:
    prefix = etcd.fresh_prefix()
    client.write_unless_changed({}, {f"{prefix}/leader": b"\xff{"}, {})
    client.write_unless_changed({}, {f"{prefix}/epoch": b"9" * 5_000}, {})
    assert campaign(client, prefix, A, _soon(0.5), ttl_s=TTL_S) is None
    client.write_unless_changed({}, {}, {}, [(f"{prefix}/leader", f"{prefix}/leader\0")])
    won = campaign(client, prefix, A, lambda: False, now_ms=lambda: 5_000, ttl_s=TTL_S)
    assert won is not None and won.epoch == 5_000
    won.close()


def test_a_transaction_writes_all_or_nothing(etcd: EtcdProcess, client: EtcdClient) -> None:
    prefix = etcd.fresh_prefix()
    one, two = f"{prefix}/1", f"{prefix}/2"
    assert client.write_unless_changed({one: 0, two: 0}, {one: b"x", two: b"\0\xff"}, {})
    assert (client.get(one).value, client.get(two).value) == (b"x", b"\0\xff")
    assert not client.write_unless_changed({one: 0}, {two: b"no"}, {})
    assert client.get(two).value == b"\0\xff"
    with pytest.raises(EtcdFailed, match="lease not found"):
        client.write_unless_changed({}, {one: b"y"}, {one: 4711})
    assert client.keep_alive(4711) == 0


def test_addresses_of_an_election() -> None:
    client, prefix = parse_address("etcd://h1:1,h2:2/a/b/")
    assert (client.endpoints, prefix) == (["http://h1:1", "http://h2:2"], "a/b")
    assert parse_address("etcd://h1:1")[1] == "mooncake/directory"
    for wrong in ("etcd://", "etcd:///x", "tcp://h:1"):
        with pytest.raises(RequestInvalid, match="use etcd://HOST:PORT"):
            parse_address(wrong)
    assert msgspec.json.decode(msgspec.json.encode(A), type=Leader) == A
