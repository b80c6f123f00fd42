"""Renewing the keys under running processes: at each step every member is accepted."""

from __future__ import annotations

import shutil
import socket
import threading
from pathlib import Path

import pytest
import zmq

from mooncake_store.directory.client import DirectoryClient
from mooncake_store.directory.event_feed import EventFeed
from mooncake_store.directory.server import DirectoryServer
from mooncake_store.errors import AccessRefused
from mooncake_store.keys.curve import RENEW_NOTE_S, RENEW_S_MAX, DirectoryKey, secured_server
from mooncake_store.keys.folder import VARIABLE, of_process
from tests.mooncake_store.directory_thread import ANY_PORT, DirectoryThread
from tests.mooncake_store.keys.hosts import Hosts

PATIENCE_S = 30.0


class CopiedHosts:
    """Folders as they lie on the hosts: each is as old as when it was copied last."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder

    def copy(self, host: str) -> Path:
        place = self.folder / host
        place.mkdir(exist_ok=True)
        for file in (self.hosts.ours / host).iterdir():
            beside = self.folder / f".{file.name}"
            shutil.copy2(file, beside)
            beside.replace(place / file.name)
        return place


def test_each_step_is_read_live_by_the_directory_and_by_clients_of_a_step_before(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory's host is copied first, then last; requests and events go on in any order."""
    copies = CopiedHosts(hosts, tmp_path)
    monkeypatch.setenv(VARIABLE, str(copies.copy("a")))
    running = DirectoryThread()
    server = running.server
    monkeypatch.setenv(VARIABLE, str(copies.copy("b")))
    client = DirectoryClient(server.address, PATIENCE_S)
    snapshots = threading.Semaphore(0)
    feed = EventFeed(
        server.address, server.events_address, lambda _: snapshots.release(), lambda _: None
    )
    assert feed.wait_ready(PATIENCE_S) and client.nodes() == []
    for first, second in (("a", "b"), ("b", "a")):
        for _ in range(3):
            hosts.authority.rotate()
            for host in (first, second):
                copies.copy(host)
                active = hosts.authority.state.used
                wait_for_key(server, active if host == "a" or second == "b" else None)
                assert client.nodes() == []
                with DirectoryClient(server.address, PATIENCE_S) as fresh:
                    assert fresh.nodes() == []
    assert feed.wait_ready(PATIENCE_S)
    feed.close()
    client.close()
    running.close()


def test_a_port_that_somebody_takes_while_the_key_is_renewed_is_named_until_it_is_free(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.be("a")
    caplog.set_level("INFO", logger="mooncake_store.keys.curve")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        secured_server(bound, context, ANY_PORT, is_directory=True)
        bound.bind(ANY_PORT)
        address = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        key = DirectoryKey([bound])
        for _ in range(2):  # prepare, switch
            hosts.authority.rotate()
        taker = take_port(bound, address)
        again_s = RENEW_S_MAX + RENEW_NOTE_S
        for now_s, lines in (
            (0.0, 0),
            (RENEW_S_MAX, 1),
            (again_s - 1.0, 1),
            (again_s, 2),
            (again_s + 1.0, 2),
        ):
            wait_for_folder(hosts)
            key.renew(now_s)
            said = [each for each in caplog.messages if "does not listen at" in each]
            assert len(said) == lines and all(address in each for each in said), caplog.messages
            assert key.silent == [address]
        taker.close()
        key.renew(again_s + 2.0)
        assert key.silent == [] and f"listens at {address} again" in caplog.messages[-1]


def test_a_directory_keeps_its_key_when_the_new_generation_lacks_one_for_it(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    hosts.be("a")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as bound:
        secured_server(bound, context, ANY_PORT, is_directory=True)
        bound.bind(ANY_PORT)
        key = DirectoryKey([bound])
        hosts.authority.rotate()
        hosts.authority.add_host("a", may_direct=False)
        hosts.authority.rotate()
        wait_for_folder(hosts)
        for now_s in (0.0, 1.0, RENEW_NOTE_S):
            key.renew(now_s)
            assert key.silent == [] and key._number == 1
        assert sum("no directory may run on host a" in each for each in caplog.messages) == 2
        hosts.authority.add_host("a", may_direct=True)
        wait_for_directory_key()
        key.renew(RENEW_NOTE_S + 1.0)
        assert key._number == hosts.authority.state.used


def wait_for_directory_key() -> None:
    """Until this process has read a folder with the directory's key."""
    keys = of_process()
    assert keys is not None
    for _ in range(3_000):
        if keys.curve.ordered()[0].directory_secret:
            return
        threading.Event().wait(0.01)
    pytest.fail("the folder was never read")


def take_port(bound: zmq.Socket[bytes], address: str) -> socket.socket:
    """Another process' socket, there as soon as ZeroMQ has let go of the port."""
    bound.unbind(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    for _ in range(3_000):
        taker = socket.socket()
        try:
            taker.bind((host, int(port)))
        except OSError:
            taker.close()
            threading.Event().wait(0.01)
            continue
        taker.listen()
        return taker
    pytest.fail(f"{address} was never free")


def wait_for_folder(hosts: Hosts) -> None:
    """Until this process has read what lies in its folder."""
    keys = of_process()
    assert keys is not None
    for _ in range(3_000):
        if keys.curve.active == hosts.authority.state.used:
            return
        threading.Event().wait(0.01)
    pytest.fail("the folder was never read")


def wait_for_key(server: DirectoryServer, number: int | None) -> None:
    """Until the directory has noticed what lies in its folder."""
    if number is None:
        return
    for _ in range(3_000):
        if server._key._number == number and not server._key._unbound:
            return
        threading.Event().wait(0.01)
    pytest.fail(f"the directory still uses generation {server._key._number}, not {number}")


def test_who_missed_a_whole_renewal_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    copies = CopiedHosts(hosts, tmp_path)
    stale = copies.copy("b")
    for _ in range(3):
        hosts.authority.rotate()
    hosts.be("a")
    running = DirectoryThread()
    server = running.server
    hosts._monkeypatch.setenv(VARIABLE, str(stale))
    with DirectoryClient(server.address, PATIENCE_S) as client:
        with pytest.raises(AccessRefused, match="different clusters or generations"):
            client.nodes()
        copies.copy("b")
        assert client.nodes() == [], "read again without a restart"
    running.close()
